"""The published figures of models whose shapes are known: see docs/architecture.md for the
formulas.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from headrace.backend import lower_program
from headrace.model import tensor_shapes, trace_model
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.planner import roofline
from headrace.planner.fit import RUNTIME_BYTES, Fit
from headrace.planner.hardware import Machine
from headrace.program.fuse import fuse
from headrace.program.op import StepSize, Value, Weight
from headrace.program.ops import Attention, GatherRows, GluLinear, Linear, Norm
from headrace.program.trace import Program, trace
from headrace.quant.formats import FORMATS
from tests.backend.stored import random_stored

GIB = 1 << 30
HERE = Machine("Zen 4", "avx512", 2, 36e9, {"int8": 940e9, "bf16": 470e9, "f32": 235e9})
A100 = Machine("A100", "sm80", 1, 2.04e12, {"int8": 624e12, "bf16": 312e12, "f32": 19.5e12})


def model(
    layers: int, dim: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool = False
) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        name="test",
        num_layers=layers,
        dim=dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim // heads,
        ffn_dim=ffn,
        vocab_size=vocab,
        max_context=4096,
        norm_eps=1e-5,
        rope=RopeSpec(dim // heads),
        tied_embeddings=tied,
    )


LLAMA2_7B = model(32, 4096, 32, 32, 11008, 32000)
LLAMA2_70B = model(80, 8192, 64, 8, 28672, 32000)
SMOLLM2 = model(30, 576, 9, 3, 1536, 49152, tied=True)


def tensors(spec: ModelSpec, bytes_per_weight: float) -> dict[str, object]:
    """Everything of a tensor but its data; vectors are in float32."""
    found = {}
    for name, shape in tensor_shapes(spec).items():
        rows, cols = (1, *shape)[-2:]
        nbytes = int(rows * cols * (4 if len(shape) == 1 else bytes_per_weight))
        stored = FORMATS["F32" if len(shape) == 1 else "BF16" if bytes_per_weight == 2 else "Q4_1"]
        found[name] = SimpleNamespace(
            rows=rows, cols=cols, shape=shape, nbytes=nbytes, format=stored
        )
    return found


def program(spec: ModelSpec, bytes_per_weight: float) -> Program:
    return fuse(trace_model(spec, tensors(spec, bytes_per_weight)))


def kv_bytes(spec: ModelSpec, bytes_per_number: int = 2) -> int:
    """Of one token, without scales and padding."""
    return bytes_per_number * sum(group.numbers for group in program(spec, 2).kv_groups)


class TestKvBytes:
    def test_llama2_7b(self) -> None:
        assert kv_bytes(LLAMA2_7B) == 524_288
        assert kv_bytes(LLAMA2_7B) * 4096 == 2 * GIB

    def test_llama2_70b_shares_kv_heads(self) -> None:
        per_token = kv_bytes(LLAMA2_70B)
        assert per_token / (1 << 20) == 0.3125
        assert [per_token * k * 1024 / GIB for k in (2, 32, 128)] == [0.625, 10, 40]

    def test_gpt3(self) -> None:
        gpt3 = model(96, 12288, 96, 96, 49152, 50257)
        assert kv_bytes(gpt3, 1) == 2_359_296
        assert kv_bytes(gpt3) * 2048 == pytest.approx(9.7e9, rel=0.01)


class TestFit:
    def test_sequences_of_full_length(self) -> None:
        fit = Fit(24 * GIB, 14_000_000_000, 524_288 * 4096, 4096)
        assert fit.kv_budget == 24 * GIB - 14_000_000_000 - RUNTIME_BYTES
        assert fit.tokens == fit.kv_budget // 524_288
        assert fit.sequences == 5

    def test_weights_beyond_memory(self) -> None:
        fit = Fit(GIB, 14_000_000_000, 524_288 * 4096, 4096)
        assert (fit.kv_budget, fit.tokens, fit.sequences) == (0, 0, 0)


class TestOpSeconds:
    x = Value(0, 64, "step")
    step = StepSize(((0, 1),), 1, 2)

    @pytest.mark.parametrize(
        ("format_name", "kind"),
        [
            ("Q4_0", "int8"),
            ("Q2_K", "int8"),
            ("I8_ROW", "int8"),
            ("BF16", "bf16"),
            ("F16", "f32"),
            ("F32", "f32"),
        ],
    )
    def test_op_kind_of_a_weight(self, format_name: str, kind: str) -> None:
        """However much padding its few columns bring in memory."""
        tensors = {"w": random_stored(format_name, 3, 256, 0)}
        op = lower_program(
            "cpu", trace(lambda g: g.linear(g.input(256), g.weight("w", 3, 256)), tensors), tensors
        ).ops[-1]
        assert roofline.op_kind(op, self.step) == kind
        assert (
            roofline.op_kind(
                lower_program("reference", Program((op,), op.out), tensors).ops[0], self.step
            )
            == "f32"
        )

    def test_op_kind_of_the_narrowest_weight(self) -> None:
        gate, up = Weight("gate", 32, 64, 1, "bf16"), Weight("up", 32, 64, 1, "int8")
        assert (
            roofline.op_kind(GluLinear(Value(1, 32, "step"), self.x, gate, up, "silu"), self.step)
            == "int8"
        )

    def test_op_kind_of_attention(self) -> None:
        op = Attention(Value(1, 64, "step"), self.x, 0, 4, 2, 16, 16, 0.25)
        assert roofline.op_kind(op, self.step) == "bf16"
        assert roofline.op_kind(op, self.step._replace(kv_bytes=4)) == "f32"

    def test_op_kind_without_weights(self) -> None:
        assert (
            roofline.op_kind(
                Norm(Value(1, 64, "step"), self.x, Weight("n", 1, 64, 256), 1e-5, "rms", 64),
                self.step,
            )
            == "f32"
        )

    def test_one_row_is_bound_by_memory_and_many_by_arithmetic(self) -> None:
        op = Linear(
            Value(1, 4096, "step"),
            Value(0, 4096, "step"),
            Weight("w", 4096, 4096, 4096 * 4096 // 2, "int8"),
        )
        assert roofline.op_seconds(op, self.step, HERE) == pytest.approx(4096 * 4096 / 2 / 36e9)
        many = StepSize(((0, 512),), 1, 2)
        assert roofline.op_seconds(op, many, HERE) == pytest.approx(2 * 512 * 4096 * 4096 / 940e9)

    def test_an_op_without_cost_takes_no_time(self) -> None:
        assert roofline.op_seconds(GatherRows(Value(1, 64, "logit"), self.x), self.step, HERE) == 0


class TestRooflineLimits:
    def test_weights_of_7b_in_fp16(self) -> None:
        assert program(LLAMA2_7B, 2).weight_bytes == pytest.approx(13.5e9, rel=0.01)

    def test_decode_reads_every_weight_once(self) -> None:
        p = program(LLAMA2_7B, 2)
        read = p.weight_bytes - 32000 * 4096 * 2  # of the untied embedding one row is read
        limit = roofline.decode_limit(p, A100, depth=0, kv_bytes=2)
        assert limit == pytest.approx(2.04e12 / read, rel=0.005)

    def test_decode_at_depth_also_reads_the_kv(self) -> None:
        p = program(LLAMA2_7B, 2)
        seconds = [1 / roofline.decode_limit(p, A100, depth, 2) for depth in (0, 4096)]
        assert seconds[1] - seconds[0] == pytest.approx(2 * GIB / 2.04e12, rel=0.01)

    def test_batching_shares_the_weights(self) -> None:
        p = program(LLAMA2_7B, 2)
        one, eight = (roofline.decode_limit(p, A100, 0, 2, seqs) for seqs in (1, 8))
        assert 7.9 * one < eight <= 8 * one

    def test_a_step_is_the_sum_of_its_ops(self) -> None:
        p = program(SMOLLM2, 0.625)
        step = StepSize(((100, 1), (0, 30)), 2, 2)
        assert roofline.step_seconds(p, step, HERE) == pytest.approx(
            sum(roofline.op_seconds(op, step, HERE) for op in p.ops)
        )

    def test_smollm2_on_a_two_core_machine(self) -> None:
        """Ceilings worked out by hand for 36 GB/s and 940 G int8 operations per second."""
        p = program(SMOLLM2, 0.625)
        assert 360 < roofline.decode_limit(p, HERE, 0, 2) < 430
        assert 3400 < roofline.prefill_limit(p, HERE, 512, 2) < 4200

    def test_prefill_in_chunks_reads_the_weights_once_for_each(self) -> None:
        p = program(SMOLLM2, 0.625)
        chunks = [
            StepSize(((start, rows),), 1, 2) for start, rows in ((0, 512), (512, 512), (1024, 6))
        ]
        for machine in (
            HERE,
            replace(HERE, rates={kind: rate / 1000 for kind, rate in HERE.rates.items()}),
        ):
            seconds = sum(roofline.step_seconds(p, chunk, machine) for chunk in chunks)
            assert roofline.prefill_limit(p, machine, 1030, 2) == pytest.approx(1030 / seconds)
