"""A thinking budget ends the reasoning at the same token in any batch and with speculation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams, StructuredOutputs, ThinkingBudget
from headrace.errors import RequestError
from tests.checkpoint.conftest import write_tiny_gguf

PROMPT = "hello world <think>"
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 3, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = write_tiny_gguf(tmp_path_factory.mktemp("thinking") / "tiny.gguf", {})
    return str(path)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, threads=1, kv_blocks=64) as llm:
        yield llm


def tokens(llm: LLM, prompt: str = PROMPT, **options: Any) -> list[int]:
    (result,) = llm.generate(prompt, SamplingParams(**SAMPLED | options))
    return result.outputs[0].token_ids


def budget(max_tokens: int) -> dict[str, Any]:
    return {"thinking_budget": ThinkingBudget(max_tokens=max_tokens)}


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_reasoning_ends_after_the_budget(llm: LLM, max_tokens: int) -> None:
    end = llm.get_tokenizer().encode("</think>", add_special=False)
    free, limited = tokens(llm), tokens(llm, **budget(max_tokens))
    assert limited[:max_tokens] == free[:max_tokens]
    assert limited[max_tokens : max_tokens + len(end)] == end
    assert len(limited) == 40


def test_reasoning_that_ends_itself_is_left_alone(llm: LLM) -> None:
    grammar = {"structured_outputs": StructuredOutputs(regex="ab</think>[a-z]{20}")}
    options: dict[str, Any] = grammar | {"ignore_eos": False}
    assert tokens(llm, **options) == tokens(llm, **options, **budget(9))


def test_budget_with_a_grammar_of_the_answer(llm: LLM) -> None:
    options = {"structured_outputs": StructuredOutputs(regex="[a-z]*</think>yes")}
    (result,) = llm.generate(PROMPT, SamplingParams(max_tokens=60, **options, **budget(5)))
    text = result.outputs[0].text
    assert text.endswith("</think>yes") and len(text.partition("<")[0]) >= 5


@pytest.mark.parametrize(
    ("outputs", "is_cut"),
    [
        ("<think>[a-z]{30}</think>", True),
        ("\n<think>[a-z]{30}</think>", True),
        ("[a-z]{30}", False),
    ],
)
def test_reasoning_that_the_output_begins(llm: LLM, outputs: str, is_cut: bool) -> None:
    regex = outputs.replace("{30}", "{30}" if not is_cut else "{3,30}")
    options = {"structured_outputs": StructuredOutputs(regex=regex)}
    params = SamplingParams(max_tokens=80, temperature=0, **options, **budget(4))
    (result,) = llm.generate("hello world", params)
    text = result.outputs[0].text
    assert ("</think>" in text) == is_cut
    assert len(llm.get_tokenizer().encode(text.strip(), add_special=False)) <= 31


def test_same_tokens_in_a_batch_and_with_speculation(llm: LLM, model: str) -> None:
    prompts = [PROMPT, "w w w w <think>", "hello world"]
    params = [SamplingParams(**SAMPLED | {"n": 2} | budget(size)) for size in (3, 11, 5)]
    alone = [llm.generate(*pair)[0] for pair in zip(prompts, params, strict=True)]
    expected = [[output.token_ids for output in result.outputs] for result in alone]
    together = llm.generate(prompts, params)
    assert [[output.token_ids for output in result.outputs] for result in together] == expected
    options: dict[str, Any] = {"proposer": "suffix", "adaptive_speculation": False}
    with LLM(model, threads=1, kv_blocks=64, **options) as drafting:
        drafted = drafting.generate(prompts, params)
    assert [[output.token_ids for output in result.outputs] for result in drafted] == expected


def test_beam_search(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, beam_width=3, n=3, **budget(4))
    (result,) = llm.generate(PROMPT, params)
    end = llm.get_tokenizer().encode("</think>", add_special=False)
    assert {tuple(output.token_ids[4 : 4 + len(end)]) for output in result.outputs} == {(*end,)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -1}, "thinking_budget.max_tokens"),
        ({"max_tokens": 1, "end": ""}, "thinking_budget.end must be text"),
    ],
)
def test_invalid_budgets(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ThinkingBudget(**options)
