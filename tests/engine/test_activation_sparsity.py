"""Activation sparsity: skipped zeros change no bit; thresholds are a model of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backend import compile_program
from headrace.config import EngineConfig, KvConfig
from headrace.errors import FormatError, ModelNotFoundError
from headrace.loader.activation_sparsity import read_thresholds, whole_matrices
from headrace.loader.calibration_file import write_calibration
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.parallel.tensor import TensorParallel
from headrace.program.fuse import fuse
from headrace.program.ops import GluLinear, Threshold
from headrace.program.sparsity import sparse_inputs, with_skipped_zeros, with_thresholds
from headrace.quant.formats import StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.engine.test_promise import REQUESTS, same, truth
from tests.parallel.test_tensor import assert_equal_bits
from tests.random_trees import RandomTrees
from tests.tiny import Tensors, run_all, tiny_engine, tiny_model

FEW = [0, 1, 3, 5]
GATED: dict[str, Any] = {"activation": "relu", "mlp_bias": True}
UNGATED: dict[str, Any] = {
    "architecture": "opt",
    "activation": "relu",
    "rope": None,
    "learned_positions": 128,
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "gated_mlp": False,
}
SQUARED: dict[str, Any] = {
    "architecture": "nemotron",
    "activation": "relu",
    "squares_activation": True,
    "norm": "layer",
    "norm_bias": True,
    "gated_mlp": False,
}
KINDS = {"gated": GATED, "ungated": UNGATED, "squared": SQUARED}
FORMATS = {"Q4_0": 64, "Q4_1": 64, "Q8_0": 96, "Q4_K": 256, "F32": 32}
"""Widths of the models by the format of their matrices."""


def relu_model(kind: str, format: str, vocab: int = 61) -> tuple[ModelSpec, Tensors]:
    return tiny_model(3, dim=FORMATS[format], ffn=256, format=format, vocab=vocab, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_skipped_zeros_change_no_bit(kind: str, format: str) -> None:
    """With any batch, chunks and drafts: the reads differ from step to step."""
    model = relu_model(kind, format)
    plain = tiny_engine(model, "cpu", prefix_cache=False)
    alone = {which: run_all(plain, [REQUESTS[which]])[0] for which in FEW}
    expected = truth([alone.get(i, alone[0]) for i in range(len(REQUESTS))], FEW)
    for options in (
        {"threads": 2, "max_num_batched_tokens": 5},
        {"proposer": RandomTrees(0, 61, expected, 9), "slots": 800},
    ):
        engine = tiny_engine(model, "cpu", skip_zeros=True, **options)
        for result, which in zip(
            run_all(engine, [REQUESTS[which] for which in FEW]), FEW, strict=True
        ):
            same(result, alone[which], exact=True)


def logits(program: Any, tensors: Tensors, rows: int, backend: str = "cpu") -> Any:
    executable = compile_program(backend, program, tensors, KvConfig((4,), 32, "f32"), 1)
    tokens = np.random.default_rng(0).integers(0, 61, rows).tolist()
    batch = batch_of([Sequence([0, 1], 32)], [tokens], [([], [])], False, 1)
    return executable.launch(batch, logits=True).wait().logits


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_rows_and_columns_of_zeros_stay_unread(format: str, rows: int) -> None:
    """Their weights are infinite, so a product with them would not be finite."""
    spec, tensors = relu_model("gated", format)
    closed = np.arange(spec.ffn_dim) >= 32
    for layer in range(spec.num_layers):
        bias = np.where(closed, -1e9, 0).astype(np.float32)
        name = f"layers.{layer}.gate_bias"
        tensors[name] = StoredTensor.from_floats(name, bias)
    program = trace_model(spec, tensors)
    want = logits(program, tensors, rows)
    for layer in range(spec.num_layers):
        name = f"layers.{layer}.up_bias"
        bias = tensors[name].dequantise().reshape(-1).copy()
        bias[closed] = np.inf
        tensors[name] = StoredTensor.from_floats(name, bias)
    got = logits(with_skipped_zeros(program), tensors, rows)
    whole = logits(program, tensors, rows)
    assert not np.isfinite(whole).all()
    assert np.array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_computes_the_same_equations(kind: str) -> None:
    spec, tensors = relu_model(kind, "F32")
    program = trace_model(spec, tensors)
    fused = fuse(with_skipped_zeros(program)).ops
    assert any(isinstance(op, GluLinear) and op.density < 1 for op in fused) == (kind == "gated")
    for changed in (with_skipped_zeros(program), thinned(program)):
        want = logits(changed, tensors, 3, "reference")
        np.testing.assert_allclose(logits(changed, tensors, 3), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        logits(with_skipped_zeros(program), tensors, 3, "reference"),
        logits(program, tensors, 3, "reference"),
        rtol=1e-9,
    )


def thinned(program: Any, least: float = 0.3) -> Any:
    return with_thresholds(program, dict.fromkeys(sparse_inputs(program), least), 0.5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_split_sparse_ops(kind: str, ranks: int) -> None:
    spec, tensors = relu_model(kind, "Q8_0", vocab=101)
    traced = trace_model(spec, tensors)
    for program in (with_skipped_zeros(traced), thinned(traced)):
        programs = [TensorParallel(program, rank, ranks).rewritten() for rank in range(ranks)]
        assert_equal_bits(program, [programs], tensors)


def thresholds_file(path: Path, model: str, **changes: Any) -> str:
    names = sparse_inputs(trace_model(*tiny_model(0)))
    facts = {"sparsity": 0.5, "thresholds": dict.fromkeys(names, 0.3)} | changes
    write_calibration(path, changes.pop("kind", "activation_sparsity"), model, facts)
    return str(path)


@pytest.mark.parametrize("format", ["Q4_1", "F32"])
def test_thresholds_keep_promise_1(format: str, tmp_path: Path) -> None:
    """Within the mode the batch, chunks, drafts and the KV format change no bit."""
    model = tiny_model(2, dim=64, ffn=128, format=format)
    file = thresholds_file(tmp_path / "t.json", "")
    for kv_dtype in ("bf16", "int8"):
        plain = tiny_engine(
            model, "cpu", activation_sparsity=file, kv_dtype=kv_dtype, prefix_cache=False
        )
        alone = {which: run_all(plain, [REQUESTS[which]])[0] for which in FEW}
        full = run_all(tiny_engine(model, "cpu"), [REQUESTS[0]])[0]
        assert full.outputs[0].token_ids != alone[0].outputs[0].token_ids
        expected = truth([alone.get(i, alone[0]) for i in range(len(REQUESTS))], FEW)
        engine = tiny_engine(
            model,
            "cpu",
            activation_sparsity=file,
            kv_dtype=kv_dtype,
            threads=2,
            max_num_batched_tokens=7,
            proposer=RandomTrees(0, 61, expected, 9),
            slots=800,
        )
        for result, which in zip(
            run_all(engine, [REQUESTS[which] for which in FEW]), FEW, strict=True
        ):
            same(result, alone[which], exact=True)


def test_thresholds_keep_what_is_not_a_number() -> None:
    spec, tensors = tiny_model(0)
    program = thinned(trace_model(spec, tensors))
    assert sum(isinstance(op, Threshold) for op in program.ops) == 4 * spec.num_layers
    name = "layers.0.attn_norm"
    tensors[name] = StoredTensor.from_floats(name, np.full(spec.dim, np.nan, np.float32))
    assert not np.isfinite(logits(program, tensors, 1)).any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": "early_exit"}, FormatError, "kind 'early_exit'"),
        ({"sparsity": 1.5}, FormatError, "sparsity 1.5"),
        ({"thresholds": {"layers.0.q": -1}}, FormatError, "no numbers from 0 on"),
        ({"thresholds": [1]}, FormatError, "no numbers from 0 on"),
    ],
)
def test_malformed_thresholds_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    kind = changes.get("kind", "activation_sparsity")
    facts = {"sparsity": 0.5, "thresholds": {}} | changes
    write_calibration(tmp_path / "t.json", kind, "", facts)
    with pytest.raises(error, match=message):
        read_thresholds("activation_sparsity", str(tmp_path / "t.json"))


def test_other_models_and_backends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="No such file"):
        read_thresholds("activation_sparsity", str(tmp_path / "none.json"))


@pytest.mark.parametrize(("format", "whole"), [("Q4_1", 0), ("F32", 14)])
def test_matrices_that_are_read_whole_are_named(format: str, whole: int) -> None:
    spec, tensors = tiny_model(2, dim=64, ffn=128, format=format)
    note = whole_matrices(EngineConfig(backend="cpu"), thinned(trace_model(spec, tensors)), tensors)
    assert note == "" if not whole else f"{whole} of {whole} matrices" in note and format in note
