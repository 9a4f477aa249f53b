"""The layouts of published models: each loads and runs, or is refused with advice.

`tests/data/layouts` has the facts, with their sources.
"""

import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backend import forward
from headrace.backend.cpu import executable as cpu
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.templates import Renderer
from headrace.config import KvConfig
from headrace.errors import HeadraceError
from headrace.model import trace_model
from headrace.prompts import PromptReader
from tests.backend.batches import Sequence, batch_of
from tests.checkpoint.conftest import write_tiny_gguf
from tests.layouts import read, write_gguf_layout, write_layout, write_quantised, write_stub

pytestmark = pytest.mark.filterwarnings("error")


def named(layouts: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(layout, id=layout["repositories"][0]) for layout in layouts]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


def run_one_token(checkpoint: Checkpoint) -> None:
    """Compute the logits of a prompt of 3 tokens on the CPU."""
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    groups = max(len(set(checkpoint.spec.windows)), 1)
    kv = KvConfig((2,) * groups, 32, "f32")
    executable = cpu.CpuExecutable(program, checkpoint.tensors, kv, 1, "")
    sequence = Sequence([0, 1], 32)
    batch = batch_of([sequence], [[1, 2, 3]], [([], [])], False, groups)
    logits = forward(executable, batch).logits
    assert np.isfinite(logits).all() and logits.std() > 0


def check_spec(checkpoint: Checkpoint, expect: dict[str, Any]) -> None:
    for field, value in expect.items():
        found = attrgetter(field)(checkpoint.spec)
        if isinstance(value, float):
            assert math.isclose(found, value), (field, found)
        else:
            assert (list(found) if isinstance(value, list) else found) == value, (field, found)


@pytest.mark.parametrize("layout", named(read("loaded")["layout"]))
def test_a_folder_loads(layout: dict[str, Any], tmp_path: Path, renderer: Renderer) -> None:
    facts = write_layout(tmp_path, layout)
    checkpoint = open_checkpoint(tmp_path)
    check_spec(checkpoint, layout.get("expect", {}))
    notes = " ".join(checkpoint.notes)
    assert layout["notes"] in notes if "notes" in layout else not notes
    if checkpoint.spec.has_head:
        run_one_token(checkpoint)

    tokenizer = checkpoint.load_tokenizer()
    ends = {tokenizer.token_bytes(token).decode() for token in tokenizer.eos_ids}
    assert ends == set(facts["ends"])
    begins = [facts["begins"]] if "begins" in facts else []
    assert [tokenizer.token_bytes(token).decode() for token in tokenizer.prefix_ids] == begins
    assert tokenizer.decode(tokenizer.encode("hi, hi")) == "hi, hi"
    if "prompt" not in facts:
        assert checkpoint.chat_template is None
        return
    prompts = PromptReader(
        "a",
        tokenizer,
        checkpoint.chat_template,
        renderer,
        checkpoint.spec.max_context,
        named_tokens=checkpoint.named_tokens(tokenizer),
    )
    read_prompt = prompts.read_chat([{"role": "user", "content": "hi"}])
    assert read_prompt.text == facts["prompt"]
    ids = list(read_prompt.token_ids)
    controls = [token for token in ids if token in tokenizer.special_ids]
    text = "".join([tokenizer.token_bytes(token).decode() for token in ids])
    assert text.split() == facts["prompt"].split() or "▁" in str(tokenizer.to_json())
    assert len(controls) == sum(
        facts["prompt"].count(name)
        for name in {*facts.get("control", []), "<s>", "</s>"}
        if name not in facts.get("text", [])
    )


@pytest.mark.parametrize("layout", named(read("quantised")["layout"]))
def test_a_quantised_folder_loads(layout: dict[str, Any], tmp_path: Path) -> None:
    write_quantised(tmp_path, layout)
    checkpoint = open_checkpoint(tmp_path)
    attention = checkpoint.tensors["layers.0.o"]
    assert attention.format.name not in ("F16", "F32")
    run_one_token(checkpoint)


def test_biases_that_are_not_zero_are_refused(tmp_path: Path) -> None:
    write_quantised(tmp_path, read("quantised")["layout"][0] | {"biases": 1.0})
    with pytest.raises(HeadraceError, match=r"_proj\.bias is not a tensor of a llama model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("layout", named(read("refused")["layout"]))
def test_a_folder_is_refused_with_advice(layout: dict[str, Any], tmp_path: Path) -> None:
    write_stub(tmp_path, layout)
    with pytest.raises(HeadraceError, match=layout["error"]):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("layout", named(read("gguf")["layout"]))
def test_a_gguf_file_loads(layout: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf_layout(tmp_path / "a.gguf", layout))
    run_one_token(checkpoint)
    tokenizer = checkpoint.load_tokenizer()
    ends = {tokenizer.token_bytes(token).decode() for token in tokenizer.eos_ids}
    assert ends == set(layout["ends"])
    begins = [tokenizer.token_bytes(token).decode() for token in tokenizer.prefix_ids]
    assert begins == layout["begins"]


@pytest.mark.parametrize("layout", named(read("gguf")["refused"]))
def test_a_gguf_file_is_refused_with_advice(layout: dict[str, Any], tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", architecture=layout["architecture"])
    with pytest.raises(HeadraceError, match=layout["error"]):
        open_checkpoint(path)
