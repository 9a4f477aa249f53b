"""Conversions keep each tensor of a published layout, or name it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.cli.main import main
from tests.checkpoint.test_names import EMBED, HEAD, arrays, with_tokenizer, write

Arrays = dict[str, Any]
TEXT = "model.language_model."


def converted(
    source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Checkpoint, str]:
    """Convert with F16 weights, and return the result and the messages."""
    assert main(["convert", str(source), str(out), "--to", "f16"]) == 0
    return open_checkpoint(out), capsys.readouterr().err


def multimodal(folder: Path, stored: Arrays) -> Path:
    stored = {name.replace("model.", TEXT): values for name, values in stored.items()}
    stored["model.visual.blocks.0.norm.weight"] = stored["model.visual.blocks.1.norm.weight"] = (
        np.ones(4, np.float16)
    )
    write(folder, stored)
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": config}))
    return folder


def with_only_a_head(folder: Path, stored: Arrays) -> Path:
    stored = {HEAD if name == EMBED else name: values for name, values in stored.items()}
    return write(folder, stored, tie_word_embeddings=True)


SOURCES = {
    "two matrices": lambda folder: write(folder, arrays(head=True), tie_word_embeddings=True),
    "equal matrices": lambda folder: write(
        folder, arrays() | {HEAD: arrays()[EMBED]}, tie_word_embeddings=True
    ),
    "only a head": lambda folder: with_only_a_head(folder, arrays()),
    "no head": lambda folder: write(folder, arrays(), tie_word_embeddings=False),
    "no prefix": lambda folder: write(
        folder, {name.removeprefix("model."): values for name, values in arrays().items()}
    ),
    "multimodal": lambda folder: multimodal(folder, arrays()),
    "frequencies": lambda folder: write(
        folder,
        arrays() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float16)},
    ),
}
UNWRITTEN = {
    "equal matrices": "not written: lm_head.weight\n",
    "multimodal": "not written: model.visual.blocks.{}.norm.weight (2)\n",
    "frequencies": "not written: model.layers.{}.self_attn.rotary_emb.inv_freq\n",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_round_trip(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = with_tokenizer(SOURCES[kind](tmp_path / "model"))
    want = open_checkpoint(source)
    for out in (tmp_path / "out", tmp_path / "out.gguf"):
        made, messages = converted(source, out, capsys)
        assert made.tensors.keys() == want.tensors.keys()
        for name, tensor in want.tensors.items():
            np.testing.assert_array_equal(made.tensors[name].dequantise(), tensor.dequantise())
        assert made.spec.tied_embeddings == want.spec.tied_embeddings
        assert messages.endswith(UNWRITTEN.get(kind, messages))
        assert ("not written" in messages) == (kind in UNWRITTEN)
        assert all(note in messages for note in want.notes)

    made = open_checkpoint(tmp_path / "out")
    assert made.spec.has_head == want.spec.has_head
    assert not made.left_out and (not made.notes or kind == "no head")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] == (kind not in ("two matrices", "no head"))
