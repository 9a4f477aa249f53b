"""Benchmark kernels do the work that they are timed for."""

import pytest
import torch

from headrace.backend.cuda import measure
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels.speed import multiply, multiply_add, read


def test_read_kernel_reads_all_memory() -> None:
    x, out = torch.rand(2 * 4 * 64, device=DEVICE), torch.zeros(2, device=DEVICE)
    read(x, out, 64)()
    torch.testing.assert_close(out, x.reshape(2, -1).sum(1))


@pytest.mark.parametrize("kind", ["int8", "fp8", "bf16"])
def test_multiply_kernel(kind: measure.Kind) -> None:
    a, b = torch.randint(-4, 5, (2, 16, 32), device=DEVICE).to(measure._TYPES[kind])
    out = torch.zeros(2 * 16, dtype=torch.int32 if kind == "int8" else torch.float32, device=DEVICE)
    multiply(a, b, out, 3, 2)()
    products = 3 * (a.float() @ b.float().T).sum(0)
    torch.testing.assert_close(out.float(), products.repeat(2))


def test_multiply_add_kernel() -> None:
    x = torch.full((64,), 0.5, device=DEVICE)
    multiply_add(x, 3, 32)()
    assert x.tolist() == [((0.5 * 0.5 + 0.5) * 0.5 + 0.5) * 0.5 + 0.5] * 64


def test_measured_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_MAX_BYTES", 1 << 18), ("_REPEATS", 1), ("_SECONDS", 1e-9)):
        monkeypatch.setattr(measure, name, value)
    rates = [measure.rate(kind, 16, 64, 2) for kind in ("int8", "fp8", "bf16", "f32")]
    launches = measure.launch_seconds(2)
    assert (
        min(
            measure.read_bandwidth(),
            measure.copy_bandwidth(),
            *rates,
            launches.eager,
            launches.graph,
        )
        > 0
    )
