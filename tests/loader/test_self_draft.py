"""The model as its own draft model: any of its layers, or its weights in fewer bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.backend import compile_program, forward
from headrace.checkpoint.load import open_checkpoint
from headrace.config import KvConfig
from headrace.errors import RequestError
from headrace.loader.drafts import open_draft_checkpoints
from headrace.loader.layers import layer_choice, layers_text
from headrace.loader.options import engine_config
from headrace.loader.self_draft import shortened_program
from headrace.model import trace_model
from headrace.program.ops import Attention
from tests.backend.test_cpu_program import BLOCKS, random_steps
from tests.checkpoint.conftest import (
    SHAPE,
    SPECIAL,
    metadata,
    write_tiny_gguf,
)
from tests.tiny import tiny_model

OPTIONS = {"max_model_len": 128, "kv_blocks": 8, "adaptive_speculation": False}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        (0, 0),
        (7, 7),
        ("7", 7),
        ("0-3,5,7-8", (0, 1, 2, 3, 5, 7, 8)),
        (" 1, 2 ", (1, 2)),
        ("4-4", (4,)),
        ([0, 2], (0, 2)),
        ((3,), (3,)),
    ],
)
def test_layers_are_a_number_or_a_list(value: Any, layers: int | tuple[int, ...]) -> None:
    assert engine_config({"proposer": "self_draft", "draft_layers": value}).draft_layers == layers
    if isinstance(layers, tuple):
        assert layer_choice("draft_layers", layers_text(layers)) == layers


@pytest.mark.parametrize(
    "value",
    ["", "x", "3-", "-3", "5-3", "1,1", "2,1", "1;2", [], [1, 0], [True], [1.5], 1.5, -1, 1e9],
)
def test_malformed_layers_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="draft_layers must be"):
        engine_config({"proposer": "self_draft", "draft_layers": value})


def test_a_subset_of_layers_reads_the_kv_of_these_layers() -> None:
    """Layers 1 and 3 continue from the KV that the whole program wrote, on each backend."""
    kv = KvConfig((BLOCKS, BLOCKS), 32, "f32")
    spec, weights = tiny_model(7, layers=4, window=(0, 9))
    program, short = (trace_model(s, weights) for s in (spec, spec.with_layers((1, 3))))
    wholes = [compile_program(backend, program, weights, kv, 1) for backend in ("cpu", "reference")]
    attached = [whole.attach(short, weights) for whole in wholes]
    rng = np.random.default_rng(0)
    for batch in random_steps(rng, spec.vocab_size, trees=True, num_groups=2):
        found, expected = (forward(executable, batch).logits.copy() for executable in attached)
        assert np.linalg.norm(found - expected) <= 1e-3 * np.linalg.norm(expected)
        before = forward(wholes[0], batch).logits.copy()
        forward(attached[0], batch)
        assert np.array_equal(forward(wholes[0], batch).logits, before)
        forward(wholes[1], batch)


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 2)])
def test_shortened_programs_have_the_layers_alone(layers: tuple[int, ...]) -> None:
    spec, weights = tiny_model(7, layers=3)
    program = trace_model(spec.with_layers(layers), weights)
    assert tuple(op.layer for op in program.ops if isinstance(op, Attention)) == layers
    assert {name.split(".")[1] for name in program.weights if name.startswith("layers.")} == set(
        map(str, layers)
    )
    last = [op for op in program.ops if op.name == "gather_rows"]
    assert len(last) == 2  # attended rows, and the residual stream, of the last layer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "target.gguf")


def tokens_of(llm: LLM) -> list[Any]:
    prompts = ["hello", "hell w", "he"]
    return [
        result.outputs
        for params in (GREEDY, SamplingParams(seed=3, max_tokens=20))
        for result in llm.generate(prompts, params)
    ]


@pytest.mark.parametrize(
    "options",
    [{"draft_layers": "1-1"}, {"draft_weights": "q8"}, {"draft_weights": "q8", "draft_layers": 1}],
)
def test_shortened_models_draft_and_change_no_token(model: Path, options: dict[str, Any]) -> None:
    if "draft_weights" in options:
        short = write_tiny_gguf(model.with_name("q8.gguf"), kind="Q8_0")
        options = options | {"draft_weights": str(short)}
    with (
        LLM(str(model), **OPTIONS) as plain,
        LLM(str(model), proposer="self_draft", **OPTIONS, **options) as llm,
    ):
        assert tokens_of(llm) == tokens_of(plain)
        stats = llm.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0
    if "draft_layers" not in options:
        assert stats.accepted > stats.drafted / 2  # 8 bits draft almost like 32


def test_draft_weights_share_equal_tensors(model: Path) -> None:
    """Only a changed matrix takes memory, and the same model takes none and is always right."""
    up = np.random.default_rng(1).normal(size=(SHAPE["ffn"], SHAPE["dim"])).astype(np.float32)
    changed = write_tiny_gguf(model.with_name("up.gguf"), weights={"blk.1.ffn_up.weight": up})
    target = open_checkpoint(model)
    for weights, own in ((model, {}), (changed, {"draft.layers.1.up"})):
        options = {"proposer": "self_draft", "draft_weights": str(weights)}
        config = engine_config(options | {"backend": "cpu"})
        drafts = open_draft_checkpoints(config, target, target.load_tokenizer)
        assert drafts.self_draft and drafts.self_draft.own.keys() == set(own)
        program = shortened_program(config, target, drafts.self_draft)
        assert {name for name in program.weights if name.startswith("draft.")} == set(own)
        assert (drafts.weight_bytes("cpu", target) >= up.nbytes) == bool(own)
        with LLM(str(model), **options, **OPTIONS) as llm:
            tokens_of(llm)
            stats = llm.stats()
        assert (stats.accepted == stats.drafted > 0) == (not own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_layers": [0, 2]}, "draft_layers has 2 layers up to 2, but this model has layers"),
        ({"draft_layers": "0-1"}, "at most 1 of them draft"),
        ({"draft_layers": 2}, "draft_layers is 2, but must be 1 to 1 for this model"),
        ({"draft_weights": "other.gguf"}, "has KV of another shape than the model"),
        ({"draft_weights": "words.gguf"}, "has another vocabulary: its token 3 is"),
        ({}, "proposer 'self_draft' needs one of draft_layers, draft_weights"),
    ],
)
def test_unsuited_self_drafts_are_refused(
    model: Path, options: dict[str, Any], message: str
) -> None:
    if name := options.get("draft_weights"):
        words = list(metadata("llama")["tokenizer.ggml.tokens"])
        first = len(SPECIAL)
        words[first], words[first + 1] = words[first + 1], words[first]
        change = {
            "other.gguf": {"llama.attention.key_length": 32, "llama.attention.value_length": 32},
            "words.gguf": {"tokenizer.ggml.tokens": words},
        }[name]
        dim, wide = SHAPE["dim"], {"q": 128, "k": 64, "v": 64, "output": 64}
        weights = {
            f"blk.{layer}.attn_{part}.weight": np.zeros(
                (rows, 2 * dim if part == "output" else dim), np.float32
            )
            for layer in range(SHAPE["layers"])
            for part, rows in wide.items()
            if name == "other.gguf"
        }
        options = {"draft_weights": str(write_tiny_gguf(model.with_name(name), change, weights))}
    with pytest.raises(RequestError) as error:
        LLM(str(model), proposer="self_draft", **OPTIONS, **options)
    assert message in str(error.value)
