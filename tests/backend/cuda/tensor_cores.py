"""Tensor cores of real GPUs for Triton's interpreter, which by itself sums in float64.

The sums are those of mmasim, a model with the bits of the hardware (Xie et al. 2025,
arXiv 2511.10909): an instruction cuts its products and the sum before them to a few digits more
than float32 has, adds them, and cuts the result.
"""

import sys
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from headrace.backend.cuda.interpreter import floats_of

MMA_NAMES = {
    "sm_80": "Ampere",
    "sm_89": "Ada Lovelace",
    "sm_90": "Hopper",
    "sm_100": "Blackwell",
    "sm_120": "RTX Blackwell",
}
_SHAPES = {"bf16": "m16n8k16.f32.bf16.bf16.f32", "tf32": "m16n8k8.f32.tf32.tf32.f32"}
_WARP_GROUP_SHAPES = {"bf16": "m64n16k16.f32.bf16.bf16", "tf32": "m64n16k8.f32.tf32.tf32"}
_TCGEN5_SHAPES = {
    "bf16": "m128n16k16.kind::f16.f32.bf16.bf16",
    "tf32": "m128n16k8.kind::tf32.f32.tf32.tf32",
}
_COLUMNS = {"bf16": 16, "tf32": 8}
"""Columns of an instruction, one half of which comes from each of two groups of registers."""

DOTS = ("dot", "warp_group_dot", "tc_gen5_mma")
"""Names of instructions in Triton's code: of any chip, of Hopper, and of a B200."""


class TensorCores(NamedTuple):
    """An instruction of a GPU: its name in Triton's code, and the neighbouring registers of a
    thread that go to different instructions (`by` in `compiling.dots`).
    """

    chip: str
    dot: str = "dot"
    by: int = 1

    def multiply(self, kind: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        """Compute a @ b + c, [rows, columns], as the instructions of a loop over columns do."""
        order = columns_of(a.shape[1], kind, self.by)
        return _instruction(self.chip, self.dot, kind)(a[:, order], b[order], c)


def cores_of(chip: str, name: str) -> TensorCores:
    """The instruction of products with a stored format, which `test_compiles.py` reads from the
    compiler's output.
    """
    if chip == "sm_90":
        return TensorCores(chip, "warp_group_dot")
    if chip == "sm_100":
        return TensorCores(chip, "tc_gen5_mma")
    return TensorCores(chip, "dot", 1 if name == "BF16" else 2)


def columns_of(number: int, kind: str, by: int) -> torch.Tensor:
    """Columns in the order in which instructions take them.

    A thread of four has `by` registers of neighbouring columns from each of the two halves of `by`
    instructions, and an instruction takes one register of each half.
    """
    each = _COLUMNS[kind] // 8  # Numbers in a register
    columns = torch.arange(number).reshape(-1, 2, 4, by, each)
    return columns.permute(0, 3, 1, 2, 4).reshape(-1)


@cache
def _instruction(chip: str, dot: str, kind: str) -> Any:
    # Its float64 sums compile C++ when imported. They are not used here.
    sys.modules.setdefault("mmasim.arithmetic.fma", ModuleType("mmasim.arithmetic.fma"))
    import mmasim.arithmetic

    mmasim.arithmetic.fma = sys.modules["mmasim.arithmetic.fma"]  # type: ignore[attr-defined]
    from mmasim.nv_ptx.sim import MMA, WGMMA, TCGen05MMA

    name = MMA_NAMES[chip]
    if dot == "warp_group_dot":
        return WGMMA(name, _WARP_GROUP_SHAPES[kind])
    if dot == "tc_gen5_mma":
        return TCGen05MMA(name, _TCGEN5_SHAPES[kind])
    return MMA(name, _SHAPES[kind])


def dot_of(cores: TensorCores) -> Any:
    """A replacement for `InterpreterBuilder.create_dot`. Sums of integers, and of float32 without
    tensor cores, stay as they are.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    whole = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            kind, dtype = "bf16", torch.bfloat16
        elif a.dtype.scalar == tl.float32 and "TF32" in str(precision):
            kind, dtype = "tf32", torch.float32
        else:
            return whole(self, a, b, d, precision, imprecise)
        first, second = (
            torch.from_numpy(np.ascontiguousarray(floats_of(one), np.float32)).to(dtype)
            for one in (a, b)
        )
        sums = torch.from_numpy(np.ascontiguousarray(d.data, np.float32))
        return TensorHandle(cores.multiply(kind, first, second, sums).numpy(), d.dtype.scalar)

    return create_dot
