import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig
from headrace.distil import prompt_forms
from headrace.distil.prompts import PromptMaker, PromptStart
from headrace.distil.record import record_answers
from headrace.distil.teacher import Recording
from headrace.errors import RequestError
from headrace.loader.load import open_model, open_prompt_reader


def maker_of(folder: Path) -> Iterator[tuple[PromptMaker, Tokenizer]]:
    checkpoint = open_model(str(folder), EngineConfig())
    tokenizer = checkpoint.load_tokenizer()
    reader = open_prompt_reader(str(folder), checkpoint, tokenizer)
    yield PromptMaker(reader, tokenizer), tokenizer
    reader.close()


@pytest.fixture
def maker(teacher: Path) -> Iterator[tuple[PromptMaker, Tokenizer]]:
    yield from maker_of(teacher)


@pytest.fixture
def base_maker(base_teacher: Path) -> Iterator[tuple[PromptMaker, Tokenizer]]:
    yield from maker_of(base_teacher)


CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
HI = {"role": "user", "content": "Hi"}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "Hi\n\n  Hi  \n"),
        ("p.jsonl", '"Hi"\n{"prompt": "Hi"}'),
        ("p.jsonl", json.dumps([HI]) + "\n\n" + json.dumps({"messages": [HI]})),
        ("p.json", json.dumps(["Hi", {"conversations": SHAREGPT}])),
    ],
)
def test_prompts_of_a_file(
    maker: tuple[PromptMaker, Tokenizer], tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    prompts = maker[0].from_file(tmp_path / name)
    texts = [maker[1].decode(prompt.tokens, skip_special=False) for prompt in prompts]
    assert texts == [CHAT, CHAT]
    assert all(prompt.asked == prompt.tokens for prompt in prompts)


def test_control_tokens_of_a_file_stay_text(
    maker: tuple[PromptMaker, Tokenizer],
    base_maker: tuple[PromptMaker, Tokenizer],
    tmp_path: Path,
) -> None:
    (tmp_path / "p.txt").write_text("<|im_end|>")
    (prompt,) = maker[0].from_file(tmp_path / "p.txt")
    assert prompt.tokens.count(2) == 1
    (prompt,) = base_maker[0].from_file(tmp_path / "p.txt")
    assert 2 not in prompt.tokens


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "\n", "no prompts"),
        ("p.jsonl", '"a"\n{"prompt"', "line 2 is not valid JSON"),
        ("p.jsonl", "3", "line 1: a prompt must be"),
        ("p.json", "{}", "not a list"),
        ("p.json", '[[{"role": "assistant", "content": "a"}]]', "entry 1: .* no user message"),
        ("p.json", '[[{"role": "user"}]]', "entry 1: a message must have"),
        ("p.txt", b"\xff", "UTF-8"),
    ],
)
def test_wrong_files_are_refused(
    maker: tuple[PromptMaker, Tokenizer],
    tmp_path: Path,
    name: str,
    text: str | bytes,
    message: str,
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RequestError, match=message):
        maker[0].from_file(tmp_path / name)
    with pytest.raises(RequestError, match="No such file"):
        maker[0].from_file(tmp_path / "none.txt")


def starts(maker: PromptMaker) -> list[tuple[str, PromptStart]]:
    """Starts of prompts, with their first message about the letters ab cd."""
    found = [maker.start(index % 16, index) for index in range(160)]
    return [(start.conversation("ab cd")[0]["content"], start) for start in found]


def test_starts_are_of_all_kinds(maker: tuple[PromptMaker, Tokenizer]) -> None:
    prompts, tokenizer = maker
    found = starts(prompts)
    heads = [tokenizer.decode(start.tokens, skip_special=False) for _, start in found]
    assert "<|im_start|>user\n" in heads
    assert any(head.startswith("<|im_start|>system\n") for head in heads)
    asked = [head for head in heads if head.endswith("<|im_start|>assistant\n")]
    assert any("news report" in head for head in asked) and any(
        "Only the" in head for head in asked
    )
    assert any(len(start.conversation("ab cd")) == 3 for _, start in found)
    whole = [text for text, start in found if not start.max_tokens]
    assert len(set(whole)) > 20 and "{" not in "".join(whole)
    article = next(text for text, _ in found if text.startswith("Summarize the following article"))
    assert article.endswith("\n\nTheab cd")


def test_the_lists_have_nothing_of_the_benchmark() -> None:
    """Prompts of the speculation benchmark stay unseen."""
    path = Path(__file__).parents[2] / "benchmarks/speculation_texts.py"
    facts = runpy.run_path(str(path))
    texts = " ".join(
        text.lower()
        for name, value in vars(prompt_forms).items()
        if name.isupper()
        for text in value
    )
    names = ("_NAMES", "_RIVERS", "_PLACES", "_SUBJECTS", "_PEOPLE")
    words = [word.lower() for name in names for word in facts[name]]
    assert len(words) > 40
    assert [word for word in words if re.search(rf"\b{word}\b", texts)] == []


def test_written_messages_are_filtered(maker: tuple[PromptMaker, Tokenizer]) -> None:
    prompts, tokenizer = maker
    start = next(start for text, start in starts(prompts) if text == "ab cd")

    def written(text: str, *, ended: bool = True) -> str | None:
        output = [*tokenizer.encode(text, add_special=False), 2]
        prompt = prompts.written(start, output, ended=ended)
        return prompt and tokenizer.decode(prompt.tokens, skip_special=False)

    assert written("  Name a river. ") == CHAT.replace("Hi", "Name a river.")
    assert written("Name a river.", ended=False) is None
    assert written("Hi") is None
    assert written("word " * 20) is None
    assert written("Name <|im_start|> rivers.") is None


def test_a_text_of_the_model_becomes_a_part_of_a_prompt(
    maker: tuple[PromptMaker, Tokenizer],
) -> None:
    prompts, tokenizer = maker
    output = tokenizer.encode(" A river rose.", add_special=False)

    def written(start: PromptStart) -> str:
        prompt = prompts.written(start, output, ended=False)
        assert prompt
        return tokenizer.decode(prompt.tokens, skip_special=False)

    found = [start for _, start in starts(prompts) if start.ends is None and start.max_tokens]
    turns = [start for start in found if len(start.conversation("")) == 3]
    tasks = [start for start in found if len(start.conversation("")) == 1]
    assert written(tasks[0]).startswith("<|im_start|>user\n")
    assert "\n\n A river rose.<|im_end|>" in written(tasks[0])
    assert "<|im_start|>assistant\nA river rose.<|im_end|>\n<|im_start|>user" in written(turns[0])


def test_written_prompts_differ(teacher: Path, base_teacher: Path, tmp_path: Path) -> None:
    wanted = Recording(num_tokens=600, max_tokens=16)
    for name, folder in (("chat", teacher), ("base", base_teacher)):
        answers = record_answers(str(folder), None, tmp_path / name, wanted, threads=1)
        prompts = [
            answers.tokens(i)[: answers.answer_start(i)].tolist() for i in range(len(answers))
        ]
        assert len(set(map(tuple, prompts))) == len(prompts) > 20
        first = {prompt[0] for prompt in prompts}
        assert first == ({1} if name == "chat" else {0})
        rounds = sorted((tmp_path / name).glob("prompts-*.json"))
        kept = [tokens for path in rounds for tokens, _ in json.loads(path.read_text())]
        assert kept[: len(prompts)] == prompts
