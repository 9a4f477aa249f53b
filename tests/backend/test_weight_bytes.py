"""The predicted bytes of weights equal the bytes that a backend allocates."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace import _native
from headrace.backend import lower_program
from headrace.backend.cpu import executable as cpu
from headrace.backend.cpu.packing import add_weight, packed_bytes
from headrace.backend.reference import executable as reference
from headrace.config import KvConfig
from headrace.errors import RequestError, UnsupportedModelError
from headrace.model import trace_model
from headrace.program.op import Value
from headrace.program.ops import GluLinear
from headrace.program.trace import Program, Tracer, trace
from headrace.quant.formats import FORMATS
from tests.backend.stored import random_stored
from tests.tiny import Tensors, tiny_model

KV = KvConfig((2,), 32, "bf16")
BITS = {  # of a packed number, scales included, where nothing is padded
    **{"F32": 32, "F16": 16, "BF16": 16, "I8_ROW": 8.0625, "I8_MIXED": 8.0625},
    **{
        "Q4_0": 4.5,
        "Q4_1": 5,
        "Q5_0": 5.5,
        "Q5_1": 6,
        "Q8_0": 8.5,
        "MXFP4": 4.25,
        "MXFP4_PAIRS": 4.25,
    },
    **{"Q2_K": 2.625, "Q3_K": 3.625, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.625},
    **{
        "IQ1_S": 1.5625,
        "IQ1_M": 1.75,
        "IQ2_XXS": 2.0625,
        "IQ2_XS": 2.3125,
        "IQ2_S": 2.5625,
        "IQ3_XXS": 3.0625,
        "IQ3_S": 3.4375,
    },
    **{"IQ4_NL": 4.5, "IQ4_XS": 4.375, "NVFP4": 5, "TQ1_0": 2.0625, "TQ2_0": 2.0625},
}
Lower = Callable[[Program, Tensors], Program]


def unread(tensors: Tensors) -> Tensors:
    return {
        name: replace(t, parts={part: data[:0] for part, data in t.parts.items()})
        for name, t in tensors.items()
    }


def odd_model(format_name: str) -> tuple[Program, Tensors]:
    """A model whose rows and columns fill no whole tile, as far as the format allows."""
    block = FORMATS[format_name].block
    heads, head_dim, ffn = {1: (2, 6, 37), 32: (2, 48, 160), 64: (2, 96, 320), 256: (2, 128, 768)}[
        block
    ]
    spec, tensors = tiny_model(
        1, dim=heads * head_dim, heads=heads, kv_heads=1, ffn=ffn, vocab=61, format=format_name
    )
    return trace_model(spec, tensors), tensors


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("lower", [cpu.lower, cpu.lower_unfused], ids=["fused", "op-by-op"])
def test_packed_bytes_equal_the_prediction(format_name: str, lower: Lower) -> None:
    program, tensors = odd_model(format_name)
    predicted = lower(program, unread(tensors))
    executable = cpu.CpuExecutable(program, tensors, KV, 1, "", lower=lower)
    assert executable.plan.weight_bytes == predicted.weight_bytes > program.weight_bytes
    assert executable.program == predicted


@pytest.mark.parametrize("format_name", FORMATS)
def test_bits_of_a_packed_number(format_name: str) -> None:
    stored = random_stored(format_name, 32, 512, 0)
    packed = packed_bytes(stored)
    assert 8 * packed / (32 * 512) == BITS[format_name]
    plan = _native.Plan("", 1)
    add_weight(plan, stored)
    assert plan.weight_bytes == packed


def test_packed_bytes_of_biases_and_of_a_paired_weight() -> None:
    shapes = {"gate": (20, 33), "up": (20, 33), "head": (61, 33)}
    tensors = {
        name: random_stored("F16", *shape, i, name)
        for i, (name, shape) in enumerate(shapes.items())
    }
    tensors |= {
        name: replace(random_stored("F32", 1, n, 7, name), shape=(n,))
        for name, n in (("gate_bias", 20), ("head_bias", 61))
    }

    def forward(g: Tracer) -> Value:
        x = g.input(33)
        gate, up = (g.weight(name, 20, 33) for name in ("gate", "up"))
        bias = g.weight("gate_bias", 1, 20)
        g.glu(g.linear(x, gate, bias), g.linear(x, up, bias))
        g.glu(g.linear(x, up), g.linear(x, gate))
        g.activate(g.linear(x, up), "silu")
        q = g.linear(x, gate)
        g.kv_write(q, q, 0)
        g.attention(q, 0, 1, 20)
        return g.linear(x, g.weight("head", 61, 33), g.weight("head_bias", 1, 61))

    executable = cpu.CpuExecutable(trace(forward, tensors), tensors, KV, 1, "")
    assert sum(isinstance(op, GluLinear) for op in executable.program.ops) == 2
    assert executable.plan.weight_bytes == executable.program.weight_bytes


def test_packed_bytes_of_a_shared_weight() -> None:
    program, tensors = odd_model("Q4_0")
    whole = cpu.CpuExecutable(program, tensors, KV, 1, "")
    before = whole.plan.weight_bytes
    extra = random_stored("Q5_0", 61, 96, 3, "extra")

    def head(g: Tracer) -> Value:
        x = g.input(96)
        return g.add(g.linear(x, g.weight("head", 61, 96)), g.linear(x, g.weight("extra", 61, 96)))

    attach = whole.attach(trace(head, tensors | {"extra": extra}), {"extra": extra})
    assert whole.plan.weight_bytes - before == attach.program.weights["extra"].nbytes


def test_reference_bytes_are_float64() -> None:
    program, tensors = odd_model("Q4_0")
    executable = reference.compile(program, tensors, KV, 1)
    assert lower_program("reference", program, unread(tensors)) == executable.program
    assert executable.program.weight_bytes == sum(
        array.nbytes for array in executable.weights.values()
    )


def test_formats_without_a_kernel_are_refused_before_reading() -> None:
    program, tensors = odd_model("F32")
    tensors = unread(tensors) | {
        "layers.1.up": replace(
            unread(tensors)["layers.1.up"], format=replace(FORMATS["Q2_K"], name="Q8_1")
        )
    }
    with pytest.raises(
        UnsupportedModelError, match=r"tensor layers.1.up: no kernel reads weights stored as Q8_1"
    ):
        lower_program("cpu", program, tensors)
    with pytest.raises(
        RequestError, match="unknown backend 'tpu'; choose from: cpu, cuda, reference"
    ):
        lower_program("tpu", program, tensors)


LOAD = """
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.backend import lower_program
from headrace.config import KvConfig
from headrace.model import tensor_shapes, trace_model
from headrace.quant.formats import FORMATS, StoredTensor
from tests.tiny import tiny_executable, tiny_model

PAGE = 2 << 20

def anonymous_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return 1024 * int(dict(line.split(":") for line in lines)["Anonymous"].split()[0])

def filled(name, shape):
    # Not zeros: Linux may take back pages of a process that hold nothing else.
    kind = FORMATS[sys.argv[1] if len(shape) == 2 else "F32"]
    nbytes = int(np.prod(shape)) // kind.block * kind.nbytes
    sizes = {"row_scales": shape[:1], "block_scales": (shape[0], shape[-1] // kind.block)}
    scales = {part: np.full(sizes[part], 60, content.dtype) for part, content in kind.parts.items() if part in sizes}
    return StoredTensor.from_bytes(name, kind, shape, np.full(nbytes, 60, np.uint8), **scales)

def tensors_of(spec):
    return {name: filled(name, shape) for name, shape in tensor_shapes(spec).items()}

spec = tiny_model(0)[0]
spec = replace(spec, dim=1024, num_heads=8, num_kv_heads=4, head_dim=128, ffn_dim=2816, vocab_size=4096)
sizes = {}
for layers in range(2, 48):
    spec = replace(spec, num_layers=layers)
    tensors = tensors_of(spec)
    size = lower_program("cpu", trace_model(spec, tensors), tensors).weight_bytes
    if size > 260e6:
        break
    if size > 100e6:
        sizes[-size % PAGE] = spec
spec = sizes[min(sizes)]  # the last page is as full as can be
tensors = tensors_of(spec)
tiny_executable(tiny_model(0), "cpu", KvConfig((1,)), 2).close()  # what is imported and allocated once
before = anonymous_bytes()
executable = tiny_executable((spec, tensors), "cpu", KvConfig((1,)), 2)
executable.prepare(1, 1)
print(anonymous_bytes() - before, executable.program.weight_bytes, executable.plan.weight_bytes)
"""  # noqa: E501


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="reads what Linux says of the process"
)
@pytest.mark.parametrize(
    "format_name",
    [*(name for name, form in FORMATS.items() if not form.table_rows), "IQ4_NL", "TQ1_0"],
)
def test_resident_bytes_equal_the_prediction(format_name: str) -> None:
    """Within 1 %, for models of 100 to 260 MB whose weights nearly fill their last huge page."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run(
        [sys.executable, "-c", LOAD, format_name], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr
    resident, predicted, packed = map(int, child.stdout.split())
    assert predicted == packed
    np.testing.assert_allclose(resident, predicted, rtol=0.01)
