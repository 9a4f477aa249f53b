"""Prompts of all forms become token ids; invalid prompts raise equal messages everywhere."""

import asyncio
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from headrace import LLM, AsyncLLM, RequestOutput, SamplingParams
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.templates import Renderer
from headrace.cli.session import Session
from headrace.config import INTERACTIVE
from headrace.errors import RequestError
from headrace.loader.options import engine_config
from headrace.prompts import PromptReader, TokenizedPrompt, is_conversation
from headrace.request import RequestOptions
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

CONTEXT = 64
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {"backend": "reference", "max_model_len": CONTEXT, "kv_blocks": 8}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


@pytest.fixture
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def session(model: str) -> Iterator[Session]:
    with Session(model, engine_config(OPTIONS, INTERACTIVE)) as session:
        yield session


class Counted:
    """A tokenizer that counts its calls of `encode`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        self.texts += 1
        ids: list[int] = self.tokenizer.encode(text, add_special, parse_special)
        return ids


class Untouchable:
    """A trillion token ids that fail the test when read."""

    def __len__(self) -> int:
        return 10**12

    def __iter__(self) -> Any:
        raise AssertionError("a token was looked at")


class Endless:
    """Token ids without a length and without an end."""

    def __iter__(self) -> Iterator[int]:
        return repeat(1)


class TestRead:
    def test_read_text_and_dictionary_prompts(self, llm: LLM) -> None:
        reader, encode = llm._prompts, llm.get_tokenizer().encode
        ids = encode("hello")
        assert (
            reader.read("hello")
            == reader.read({"prompt": "hello"})
            == reader.read_prompt("hello")
            == TokenizedPrompt(ids, "hello")
        )
        assert reader.read({"prompt_token_ids": ids}) == TokenizedPrompt(ids, None)
        assert reader.read({"prompt_token_ids": ids, "prompt": "as I say"}) == TokenizedPrompt(
            ids, "as I say"
        )

    def test_chat_template_writes_the_special_tokens(self, llm: LLM) -> None:
        tokenizer = llm.get_tokenizer()
        reader = PromptReader(
            "m", tokenizer, "{{ bos_token }}{{ messages[0].content }}", Renderer(), CONTEXT
        )
        rendered = reader.read(MESSAGES)
        assert rendered == reader.read_chat(MESSAGES)
        assert rendered.text == f"{tokenizer.bos_token}hello"
        hello = tokenizer.encode("hello", add_special=False)
        assert rendered.token_ids == [tokenizer.bos_id, *hello]

        # The rendered text is a prompt with the same tokens, unless control tokens are text.
        assert reader.read(rendered.text) == rendered
        spelt = reader.read_prompt(rendered.text, parse_special=False)
        assert tokenizer.bos_id not in spelt.token_ids[1:]
        assert len(spelt.token_ids) > len(rendered.token_ids)

    @pytest.mark.parametrize(
        ("adds_bos", "text", "num_bos"),
        [
            (True, "hello", 1),
            (True, "<|im_start|>hello", 1),
            (True, "<|im_start|><|im_start|>hello", 2),
            (False, "<|im_start|>hello", 1),
            (False, "<|im_start|><|im_start|>hello", 2),
        ],
    )
    def test_a_text_that_begins_with_bos_gets_no_second_one(
        self,
        write_gguf: Any,  # noqa: F811
        adds_bos: bool,
        text: str,
        num_bos: int,
    ) -> None:
        change = {"tokenizer.ggml.add_bos_token": adds_bos}
        tokenizer = open_checkpoint(write_gguf(change)).load_tokenizer()
        reader = PromptReader("m", tokenizer, None, Renderer(), CONTEXT)
        ids = list(reader.read_prompt(text).token_ids)
        assert ids == [tokenizer.bos_id] * num_bos + tokenizer.encode("hello", add_special=False)
        plain = reader.read_prompt(text, add_special_tokens=False)
        assert plain.token_ids == tokenizer.encode(text, add_special=False)

    def test_is_conversation(self) -> None:
        assert is_conversation(MESSAGES) and is_conversation(tuple(MESSAGES))
        assert not any(
            map(
                is_conversation,
                ([], [MESSAGES], "hello", MESSAGES[0], [*MESSAGES, "x"], iter(MESSAGES)),
            )
        )


class TestInvalidPrompts:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the prompt is empty"),
            ({}, "the prompt is empty"),
            ({"prompt_token_ids": []}, "the prompt is empty"),
            ({"prompt": 3}, "a prompt must be text, not int"),
            ({"prompt_token_ids": [1], "prompt": b"x"}, "a prompt must be text, not bytes"),
            ({5: "hello"}, "unknown key of a prompt 5; choose from: prompt, prompt_token_ids"),
            ({"promt": "hello"}, "unknown key of a prompt 'promt'; did you mean prompt"),
            ({"prompt_token_ids": None}, "prompt_token_ids must be a list of token ids, not None"),
            ({"prompt_token_ids": "12"}, "prompt_token_ids must be a list of token ids, not '12'"),
            (
                {"prompt_token_ids": np.array(5)},
                "prompt_token_ids must be a list of token ids, not array(5)",
            ),
            (
                {"prompt_token_ids": [1, 2.0]},
                "prompt_token_ids must be a whole number from 0 to 2,147,483,647, not 2.0",
            ),
            (
                {"prompt_token_ids": [1, True]},
                "prompt_token_ids must be a whole number from 0 to 2,147,483,647, not True",
            ),
            ({"prompt_token_ids": [-1]}, "prompt_token_ids must be a whole number from 0"),
            ({"prompt_token_ids": [2**31]}, "prompt_token_ids must be a whole number from 0"),
            (
                {"prompt_token_ids": [100_000]},
                "prompt_token_ids has token 100,000, but the vocabulary ends at",
            ),
            (
                {"prompt_token_ids": [1] * CONTEXT},
                "the prompt has 64 tokens, but max_model_len 64 allows 63; shorten the prompt",
            ),
            (
                {"prompt_token_ids": Untouchable()},
                "the prompt has 1,000,000,000,000 tokens, but max_model_len 64 allows 63",
            ),
            (
                {"prompt_token_ids": Endless()},
                "the prompt has more than 63 tokens, but max_model_len 64 allows 63",
            ),
            ("x" * CONTEXT, "but max_model_len 64 allows 63"),
            (
                "x" * 2_000_000,
                "the prompt has 2,000,000 bytes, more than a context of 64 tokens can hold",
            ),
            ("\ud800", "the text is not valid Unicode: it has lone surrogates"),
            ([], "a conversation must be a list of messages, each with a role and content"),
            (
                [*MESSAGES, "hello"],
                "a conversation must be a list of messages, each with a role and content",
            ),
            (7, "a conversation must be a list of messages, each with a role and content"),
        ],
    )
    def test_llm_and_session_raise_equal_messages(
        self, llm: LLM, session: Session, prompt: Any, message: str
    ) -> None:
        said = []
        for use in (
            lambda: llm.stream(prompt, GREEDY),
            lambda: list(session.generate(prompt, GREEDY, Event())),
        ):
            with pytest.raises(RequestError) as error:
                use()
            said.append(str(error.value))
        assert said[0] == said[1] and message in said[0] and len(said[0]) < 200
        assert llm.stats().steps == 0 and not llm._engine.has_work and not session._engine.has_work

    def test_model_without_a_chat_template(self, write_gguf: Any) -> None:  # noqa: F811
        model = str(write_gguf({"tokenizer.chat_template": None}))
        said = (
            f"{model} has no chat template, so it cannot read a conversation; use plain text, "
            "with LLM.generate or headrace run --raw"
        )
        with (
            LLM(model, **OPTIONS) as llm,
            Session(model, engine_config(OPTIONS, INTERACTIVE)) as session,
        ):
            for use in (
                lambda: llm.chat(MESSAGES),
                lambda: llm.stream(MESSAGES),
                lambda: list(session.generate(MESSAGES, GREEDY, Event())),
            ):
                with pytest.raises(RequestError) as error:
                    use()
                assert str(error.value) == said

    def test_text_too_long_for_the_context_is_not_tokenised(self, llm: LLM) -> None:
        tokenizer: Any = Counted(llm.get_tokenizer())
        reader = PromptReader("m", tokenizer, "{{ messages[0].content }}", Renderer(), CONTEXT)
        for prompt in ("é" * 1_000_000, [{"role": "user", "content": "é" * 1_000_000}]):
            with pytest.raises(RequestError, match="the prompt has 2,000,000 bytes"):
                reader.read(prompt)
        assert tokenizer.texts == 0
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        reader.read("x" * (CONTEXT * longest))
        with pytest.raises(RequestError, match="bytes, more than"):
            reader.read("x" * (CONTEXT * longest + 1))
        assert tokenizer.texts == 1


class TestTokenIds:
    def test_prompt_token_ids_are_iterated_once(self, llm: LLM) -> None:
        looked = []

        class Ids(list[int]):
            def __iter__(self) -> Iterator[int]:
                looked.append(1)
                return super().__iter__()

        llm.generate([{"prompt_token_ids": Ids([1, 2, 3])}] * 3, GREEDY)
        assert len(looked) == 3

    def test_checked_request_is_added_unchanged(self, llm: LLM) -> None:
        engine = llm._engine
        checked = engine.check(
            np.array([1, 2, 3]),
            GREEDY,
            prompt="text",
            options=RequestOptions(priority=np.int64(2), timeout=9, cache_salt="a"),
        )  # type: ignore[arg-type]
        options = RequestOptions(priority=2, timeout=9.0, cache_salt="a")
        assert (
            checked == ([1, 2, 3], GREEDY, "text", options, None, None, ())
            and type(checked.prompt_token_ids[0]) is int
        )
        assert not engine.has_work
        request = engine._requests[engine.add(checked, "mine")]
        assert request.prompt_token_ids is checked.prompt_token_ids
        assert (
            request.id,
            request.prompt,
            request.options,
        ) == ("mine", "text", options)
        with pytest.raises(RequestError, match="request_id 'mine' is in use; choose another id"):
            engine.add(checked, "mine")
        engine.abort("mine")


MARKED = "<|im_start|>hello<|im_end|>"
TEXT_OPTIONS: list[tuple[dict[str, bool], int]] = [
    ({}, 3),
    ({"parse_special": True, "add_special_tokens": True}, 3),
    ({"add_special_tokens": False}, 3),
    ({"parse_special": False}, 24),
    ({"parse_special": False, "add_special_tokens": False}, 23),
]
"""Options, and the tokens of `MARKED` with a tokenizer that adds BOS."""


@pytest.mark.parametrize(("options", "num_tokens"), TEXT_OPTIONS)
def test_text_options_of_each_call(
    write_gguf: Any,  # noqa: F811
    options: Any,
    num_tokens: int,
) -> None:
    """LLM, AsyncLLM and `headrace run --raw` make the same tokens of a text prompt."""
    model = str(write_gguf({"tokenizer.ggml.add_bos_token": True}))
    params = SamplingParams(max_tokens=1, temperature=0)

    with LLM(model, **OPTIONS) as llm:
        (result,) = llm.generate([MARKED], params, **options)
        last = [update.result for update in llm.stream(MARKED, params, **options)][-1]
        assert last is not None
        assert last.prompt_token_ids == result.prompt_token_ids
        vectors = llm.embed([MARKED, {"prompt_token_ids": result.prompt_token_ids}], **options)
        assert np.array_equal(vectors[0], vectors[1])
        assert "".join(llm.stream_text(MARKED, params, **options)) == result.outputs[0].text
    assert len(result.prompt_token_ids) == num_tokens

    async def asked() -> RequestOutput:
        async with AsyncLLM(model, **OPTIONS) as asynchronous:
            vector = await asynchronous.embed(MARKED, **options)
            assert np.array_equal(vector, vectors[0])
            return await asynchronous.generate(MARKED, params, **options)

    assert asyncio.run(asked()).prompt_token_ids == result.prompt_token_ids
    with Session(model, engine_config(OPTIONS, INTERACTIVE), **options) as session:
        for _ in session.generate(MARKED, params, Event()):
            pass
        assert session.result and session.result.prompt_token_ids == result.prompt_token_ids


def test_text_options_that_are_no_options_of_a_text(llm: LLM) -> None:
    with pytest.raises(RequestError, match="parse_special must be true or false, not 'no'"):
        llm.generate("hello", parse_special="no")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="parse_special: only for text prompts"):
        next(llm.stream(MESSAGES, parse_special=False))
    with pytest.raises(RequestError, match="tools: only for conversations"):
        next(llm.stream("hello", tools=[]))


def test_a_rendered_conversation_is_a_prompt(write_gguf: Any) -> None:  # noqa: F811
    template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    change = {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": True}
    with LLM(str(write_gguf(change)), **OPTIONS) as llm:
        text = llm.apply_chat_template(MESSAGES, tokenize=False)
        (from_text,), (from_chat,) = llm.generate([text], GREEDY), llm.chat(MESSAGES, GREEDY)
        assert from_text.prompt_token_ids == from_chat.prompt_token_ids == [1, 1, 262, 2]
        assert from_text.outputs == from_chat.outputs
