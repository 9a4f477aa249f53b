"""`LLM` over a tiny model on disk, from file to text."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import LLM, SamplingParams
from headrace.config import INTERACTIVE
from headrace.errors import ClosedError, NonFiniteLogitsError, RequestError, RequestFailedError
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


@pytest.fixture
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, backend="reference", max_model_len=64, kv_blocks=8) as llm:
        yield llm


def clean(llm: LLM) -> bool:
    """Return whether past requests have left nothing in the engine."""
    stats = llm.stats()
    return stats.blocks_free == stats.blocks_total and not (
        stats.running or stats.waiting or llm._thread._receivers or llm._engine.has_work
    )


def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns true; fail after some seconds."""
    end = time.monotonic() + 150
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


class TestGenerate:
    def test_generate_one_prompt(self, llm: LLM) -> None:
        (result,) = llm.generate("hello w", GREEDY)
        tokenizer = llm.get_tokenizer()
        assert result.prompt == "hello w"
        assert result.prompt_token_ids == tokenizer.encode("hello w")
        assert result.prompt_logprobs is None and result.finished and result.error is None
        (output,) = result.outputs
        assert (output.index, len(output.token_ids), output.finish_reason, output.stop_reason) == (
            0,
            8,
            "length",
            None,
        )
        assert output.text == tokenizer.decode(output.token_ids)
        assert (output.logprobs, output.cumulative_logprob) == (None, None)
        assert clean(llm)

    def test_beam_search_orders_results_and_streams_at_its_end(self, llm: LLM) -> None:
        params = SamplingParams(beam_width=3, n=3, max_tokens=6, ignore_eos=True)
        searched, plain = llm.generate(["hello w", "hello w"], [params, GREEDY])
        totals = [output.cumulative_logprob or 0.0 for output in searched.outputs]
        assert len({tuple(output.token_ids) for output in searched.outputs}) == 3
        assert totals == sorted(totals, reverse=True) and len(plain.outputs) == 1
        assert list(llm.stream_text("hello w", replace(params, n=1))) == [searched.outputs[0].text]
        updates = list(llm.stream("hello w", params))
        assert [(update.index, update.text) for update in updates] == [
            (i, output.text) for i, output in enumerate(searched.outputs)
        ]
        assert clean(llm)

    def test_generate_accepts_every_prompt_form(self, llm: LLM) -> None:
        ids = llm.get_tokenizer().encode("hello")
        prompts = [
            "hello",
            {"prompt_token_ids": ids},
            {"prompt": "hello"},
            {"prompt": "as I say", "prompt_token_ids": ids},
        ]
        results = llm.generate(prompts, GREEDY)
        assert [result.prompt for result in results] == ["hello", None, "hello", "as I say"]
        assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
        assert llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs == results[0].outputs

    def test_generate_with_params_per_prompt(self, llm: LLM) -> None:
        prompts = [f"hello {i}" for i in range(20)]
        params = [replace(GREEDY, max_tokens=1 + i % 5) for i in range(20)]
        results = llm.generate(prompts, params)
        assert [result.prompt for result in results] == prompts
        assert [len(result.outputs[0].token_ids) for result in results] == [
            1 + i % 5 for i in range(20)
        ]
        alone = [
            llm.generate(prompt, p)[0].outputs for prompt, p in zip(prompts, params, strict=True)
        ]
        assert alone == [result.outputs for result in results]

    def test_generate_default_params(self, llm: LLM) -> None:
        (result,) = llm.generate("hello")
        assert len(result.outputs[0].token_ids) <= 16
        assert llm.generate([]) == []

    def test_logprobs(self, llm: LLM) -> None:
        (result,) = llm.generate("hello w", replace(GREEDY, logprobs=2, prompt_logprobs=1))
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
        (output,) = result.outputs
        assert output.logprobs is not None
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert next(iter(entry)) == token and entry[token].rank == 1 and len(entry) == 2
        assert output.cumulative_logprob == pytest.approx(
            sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
        )

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ("", "the prompt is empty"),
            ({"prompt_token_ids": []}, "the prompt is empty"),
            ({}, "the prompt is empty"),
            ({"prompt": 3}, "a prompt must be text, not int"),
            (7, "prompts must be text, a dictionary, or a list of texts and dictionaries, not int"),
            ([["hello"]], "a prompt must be text or a dictionary, not list"),
            ({"promt": "hello"}, "unknown key of a prompt 'promt'; did you mean prompt"),
            ({"prompt_token_ids": [100_000]}, "the vocabulary ends at"),
            ("x" * 64, "the prompt has 6[45] tokens, but max_model_len 64 allows 63"),
            (
                "x" * 2_000_000,
                "the prompt has 2,000,000 bytes, more than a context of 64 tokens can hold",
            ),
            ("\ud800", "surrogates"),
        ],
    )
    def test_one_invalid_prompt_rejects_the_call(
        self, llm: LLM, prompts: Any, message: str
    ) -> None:
        bad = (
            [] if isinstance(prompts, int) else prompts if isinstance(prompts, list) else [prompts]
        )
        with pytest.raises(RequestError, match=message):
            llm.generate(["hello", *bad] if bad else prompts, GREEDY)
        assert llm.stats().steps == 0
        assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 8

    def test_request_options_per_prompt_or_for_all(self, llm: LLM) -> None:
        text = "hello " * 20
        first, late = llm.generate(
            [text, text], replace(GREEDY, max_tokens=2), cache_salt=["a", "b"], timeout=[None, 0.0]
        )
        assert (first.cached_tokens, first.outputs[0].finish_reason) == (0, "length")
        assert (late.outputs[0].finish_reason, late.outputs[0].token_ids) == ("timeout", [])
        assert not llm.generate(text, GREEDY, cache_salt="b")[0].cached_tokens
        again = llm.generate(text, GREEDY, cache_salt="a")[0]
        assert again.cached_tokens == (len(again.prompt_token_ids) - 1) // 32 * 32 > 0
        assert "".join(llm.stream_text(text, GREEDY, cache_salt="a")) == again.outputs[0].text
        assert clean(llm)

    def test_priorities_reach_the_engine(self, model: str) -> None:
        with LLM(model, backend="reference", max_model_len=64, max_num_seqs=1) as llm:
            add, seen = llm._engine.add, []
            llm._engine.add = lambda request, *ids, **how: (
                seen.append(request.options.priority) or add(request, *ids, **how)
            )  # type: ignore[method-assign,func-returns-value]
            llm.generate(["hello", "w"], GREEDY, priority=[3, -2])
            llm.chat([MESSAGES, MESSAGES], GREEDY, priority=5)
            "".join(llm.stream_text("hello", GREEDY, priority=-1))
            assert seen == [3, -2, 5, 5, -1]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"params": [GREEDY]},
                "params has 1 values for 2 prompts; give one value, or one per prompt",
            ),
            ({"params": []}, "params has 0 values for 2 prompts"),
            ({"params": "greedy"}, "params must be SamplingParams, not str"),
            ({"params": [GREEDY, {"n": 1}]}, "params must be SamplingParams, not dict"),
            ({"priority": [1, 2, 3]}, "priority has 3 values for 2 prompts"),
            (
                {"priority": [0, 1001]},
                "priority must be a whole number from -1,000 to 1,000, not 1001",
            ),
            ({"priority": None}, "priority must be a whole number"),
            ({"timeout": (1.0,)}, "timeout has 1 values for 2 prompts"),
            ({"timeout": [None, -1]}, "timeout must be a number from 0"),
            ({"cache_salt": ["a"]}, "cache_salt has 1 values for 2 prompts"),
            ({"cache_salt": 7}, "cache_salt must be text of at most 1,024 characters, not 7"),
        ],
    )
    def test_invalid_params_and_request_options_raise(
        self, llm: LLM, options: dict[str, Any], message: str
    ) -> None:
        for use, prompts in ((llm.generate, ["hello", "w"]), (llm.chat, [MESSAGES, MESSAGES])):
            with pytest.raises(RequestError) as error:
                use(prompts, **options)  # type: ignore[operator]
            assert message in str(error.value)
        assert llm.stats().steps == 0 and clean(llm)

    def test_params_may_be_none_for_some_prompts(self, llm: LLM) -> None:
        results = llm.generate(["hello", "hello"], [None, GREEDY])  # type: ignore[list-item]
        assert [
            len(result.outputs[0].token_ids) <= n
            for result, n in zip(results, (16, 8), strict=True)
        ] == [True, True]

    def test_request_failed_error_has_all_results(self, model: str, write_gguf: Any) -> None:  # noqa: F811
        with LLM(model, backend="reference", max_model_len=64, multi_step_ms=0) as whole:
            expected = whole.generate("hello w", GREEDY)[0].outputs
            launch = whole._engine._loop.executable.launch
            steps = iter(range(100))

            def spoiled(*args: Any, **options: Any) -> Any:
                ticket = launch(*args, **options)
                if next(steps) == 3:
                    ticket.wait().values[-1] = None  # as where the last row is not finite
                return ticket

            whole._engine._loop.executable.launch = spoiled  # type: ignore[method-assign]
            with pytest.raises(
                RequestFailedError, match="1 of 2 requests failed; prompt 1: the model produced"
            ) as error:
                whole.generate(["hello w", "hello"], GREEDY)
            good, bad = error.value.outputs
            assert good.outputs == expected
            assert (
                isinstance(bad.error, NonFiniteLogitsError)
                and bad.outputs[0].finish_reason == "error"
            )
            assert whole.generate("hello w", GREEDY)[0].outputs == expected
            assert clean(whole)

    def test_progress_bar(self, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            llm.generate("hello", GREEDY, progress=True)[0].outputs
            == llm.generate("hello", GREEDY)[0].outputs
        )


class TestChat:
    def test_chat_renders_the_template(self, llm: LLM) -> None:
        (result,) = llm.chat(MESSAGES, GREEDY)
        assert result.prompt == "hello"
        assert result.prompt_token_ids == llm.get_tokenizer().encode("hello", add_special=False)

    def test_chat_with_several_conversations(self, llm: LLM) -> None:
        results = llm.chat([MESSAGES, [*MESSAGES, {"role": "assistant", "content": " w"}]], GREEDY)
        assert [result.prompt for result in results] == ["hello", "hello w"]

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([[]], "a conversation must be a list of messages, each with a role and content"),
            (["hello"], "a conversation must be a list of messages"),
            ([{"role": "user"}, 3], "a conversation must be a list of messages"),
            ("hello", "messages must be a list of messages, or a list of such lists, not str"),
            (MESSAGES[0], "messages must be a list of messages, or a list of such lists, not dict"),
            (7, "messages must be a list of messages, or a list of such lists, not int"),
        ],
    )
    def test_invalid_conversations_raise(self, llm: LLM, messages: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            llm.chat(messages, GREEDY)

    def test_chat_with_an_empty_list(self, llm: LLM) -> None:
        assert llm.chat([], GREEDY) == []

    def test_chat_default_params_equal_headrace_run(self, llm: LLM) -> None:
        """The response fills the context, because the random model writes no end token."""
        expected = llm.chat(MESSAGES, SamplingParams(**INTERACTIVE.sampling))[0]
        (result,) = llm.chat(MESSAGES)
        assert result.outputs == expected.outputs and len(result.outputs[0].token_ids) > 16
        *_, last = llm.stream(MESSAGES)
        assert last.result is not None and last.result.outputs == expected.outputs

    def test_chat_template_options(self, write_gguf: Any) -> None:  # noqa: F811
        path = write_gguf(
            {
                "tokenizer.chat_template": "{{ messages[0].content }}{{ tools | length if tools }}{{ "  # noqa: E501
                "add_generation_prompt }}{{ mood }}"
            }
        )
        with LLM(str(path), backend="reference", max_model_len=64) as llm:
            options = {
                "tools": [{}, {}],
                "add_generation_prompt": False,
                "chat_template_kwargs": {"mood": "dry"},
            }
            assert llm.chat(MESSAGES, GREEDY, **options)[0].prompt == "hello2Falsedry"
            assert llm.chat([MESSAGES], GREEDY)[0].prompt == "helloTrue"
            with pytest.raises(RequestError, match="chat_template_kwargs may not replace messages"):
                llm.chat(MESSAGES, chat_template_kwargs={"messages": []})
            with pytest.raises(TypeError, match="mood"):
                llm.chat(MESSAGES, mood="dry")  # type: ignore[call-arg]


class TestStream:
    def test_streamed_text_joins_to_the_result(self, llm: LLM) -> None:
        expected = llm.generate("hello", GREEDY)[0].outputs[0].text
        assert "".join(llm.stream_text("hello", GREEDY)) == expected
        assert (
            "".join(llm.stream_text(MESSAGES, GREEDY))
            == llm.chat(MESSAGES, GREEDY)[0].outputs[0].text
        )

    @pytest.mark.parametrize("n", [1, 3])
    def test_stream_updates_contain_the_whole_result(self, llm: LLM, n: int) -> None:
        params = replace(GREEDY, n=n, temperature=1.0, seed=5, logprobs=1, prompt_logprobs=0)
        *_, last = updates = list(llm.stream("hello w", params))
        (expected,) = llm.generate("hello w", params)
        assert (
            last.result is not None
            and last.result.outputs == expected.outputs
            and last.result.prompt_logprobs == expected.prompt_logprobs
        )
        assert [update.result for update in updates[:-1]] == [None] * (len(updates) - 1)
        assert last.result.finished and last.result.timing.decode > 0
        for output in expected.outputs:
            own = [update for update in updates if update.index == output.index]
            assert "".join(update.text for update in own) == output.text
            assert [token for update in own for token in update.token_ids] == output.token_ids
            assert [logprobs for update in own for logprobs in update.logprobs] == output.logprobs
            assert [update.finish_reason for update in own] == [None] * (len(own) - 1) + ["length"]
        assert clean(llm)

    def test_stream_takes_chat_template_options(self, write_gguf: Any) -> None:  # noqa: F811
        path = write_gguf(
            {
                "tokenizer.chat_template": "{{ messages[0].content }}{{ tools | length if tools }}{{ "  # noqa: E501
                "add_generation_prompt }}"
            }
        )
        with LLM(str(path), backend="reference", max_model_len=64) as llm:
            options: Any = {"tools": [{}, {}], "add_generation_prompt": False}
            *_, last = llm.stream(MESSAGES, GREEDY, **options)
            assert last.result is not None and last.result.prompt == "hello2False"
            assert llm.apply_chat_template(MESSAGES, tools=[{}], tokenize=False) == "hello1False"
            ids = llm.apply_chat_template(MESSAGES, add_generation_prompt=True)
            assert ids == llm.get_tokenizer().encode("helloTrue", add_special=False)
            with pytest.raises(
                RequestError, match="tools, add_generation_prompt: only for conversations"
            ):
                llm.stream("hello", GREEDY, **options)

    def test_failed_request_ends_the_stream(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(llm._engine._loop.executable, "launch", lambda *args, **options: 1 / 0)
        with pytest.raises(
            RequestFailedError, match="the request failed: division by zero"
        ) as error:
            list(llm.stream("hello", GREEDY))
        assert error.value.outputs[0].outputs[0].finish_reason == "error" and clean(llm)

    def test_stream_closed_early_ends_the_request(self, llm: LLM) -> None:
        pieces = llm.stream("hello", replace(GREEDY, max_tokens=240, ignore_eos=True))
        next(pieces)
        assert llm.stats().running == 1
        pieces.close()  # type: ignore[attr-defined]
        assert llm.stats().aborted == 1
        assert clean(llm)

    def test_dropped_stream_ends_the_request(self, llm: LLM) -> None:
        next(llm.stream("hello", replace(GREEDY, max_tokens=50)))
        gc.collect()
        assert clean(llm)

    def test_stream_that_is_never_read(self, llm: LLM) -> None:
        llm.stream("hello", GREEDY)
        assert clean(llm)

    def test_several_streams_at_once(self, llm: LLM) -> None:
        expected = [
            llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in ("hello", "w", "ll")
        ]
        first, second = llm.stream("hello", GREEDY), llm.stream("w", GREEDY)
        texts = [next(first).text, next(second).text]
        texts.append(llm.generate("ll", GREEDY)[0].outputs[0].text)
        texts[0] += "".join(update.text for update in first)
        texts[1] += "".join(update.text for update in second)
        assert texts == expected
        assert clean(llm)

    def test_stream_rejects_invalid_input_at_once(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.stream("", GREEDY)
        with pytest.raises(RequestError, match="n is 2, and stream_text yields one continuation"):
            llm.stream_text("hello", replace(GREEDY, n=2))


def test_llm_shared_by_several_threads(llm: LLM) -> None:
    prompts = ["hello", "w", "ll", "hell"]
    expected = [result.outputs for result in llm.generate(prompts, GREEDY)]
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = llm.generate(prompts[i], GREEDY)[0].outputs

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(4)] == expected
    assert clean(llm)


class TestLifetime:
    def test_model_argument_is_a_name_or_a_path(self, model: str) -> None:
        with LLM(Path(model), backend="reference") as llm:
            assert repr(llm).startswith(f"LLM({model!r}: llama")
        with pytest.raises(RequestError, match="model must be a name or a path, not int"):
            LLM(5)  # type: ignore[arg-type]

    def test_closed_llm_raises_closed_error(self, model: str) -> None:
        llm = LLM(model, backend="reference")
        assert "context 256" in repr(llm) and "llama, 2 layers of width 64" in repr(llm)
        llm.close()
        llm.close()
        assert repr(llm).endswith("closed)")
        for use in (
            lambda: llm.generate("hello"),
            lambda: llm.chat(MESSAGES),
            lambda: llm.stream("hello"),
            llm.stats,
        ):
            with pytest.raises(ClosedError):
                use()

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"proposer": "auto", "draft_layers": 1},
            {"proposer": "draft_model"},
            {"batching": "static"},
        ],
    )
    def test_close_frees_memory_at_once(self, model: str, options: dict[str, Any]) -> None:
        """A compute thread lives as long as the packed weights, a file descriptor as long as the
        file's mapped pages.
        """
        if options.get("proposer") == "draft_model":
            options = options | {"draft_model": model}

        def held() -> list[int]:
            return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]

        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(3):
                with LLM(model, threads=2, max_model_len=64, **options) as llm:
                    llm.generate(["hello", "w"], GREEDY)
                    assert held() > before
                until(
                    lambda: held() == before
                )  # a thread that has ended is listed for a moment more
        finally:
            gc.enable()

    def test_close_during_a_stream(self, model: str) -> None:
        llm = LLM(model, backend="reference")
        pieces = llm.stream(
            "hello", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        )  # the engine goes on meanwhile
        next(pieces)
        llm.close()
        with pytest.raises(ClosedError):
            list(pieces)

    def test_names_of_the_package(self) -> None:
        assert set(headrace.__all__) <= set(dir(headrace))
        with pytest.raises(AttributeError, match="no attribute 'Llm'"):
            _ = headrace.Llm
