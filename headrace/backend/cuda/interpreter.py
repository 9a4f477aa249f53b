"""Fixes for Triton's interpreter, which runs kernels in NumPy.

Triton 3.6 and 3.7 represent bf16 as 16-bit integers, so `tl.dot` and conversions to bf16
and float8 are wrong. Loop bounds known only at run time raise with NumPy 2.4. Sums and
products of bf16 stay wrong: kernels convert to float32 first, and tests enforce it.
"""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.backend.cuda.interpreter_speed import make_fast, remember_types


def is_interpreting() -> bool:
    """Whether kernels run in the interpreter. Triton reads TRITON_INTERPRET when a kernel
    is defined.
    """
    return bool(triton.knobs.runtime.interpret)


def patch_interpreter() -> None:
    """Patch the interpreter of this process, once."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if builder.cast_impl is not _cast:
        builder.cast_impl = _cast
        builder.create_fp_to_fp = _convert
        builder.create_dot = _dot
        options = interpreter.interpreter_builder.options
        # Overflow checks take a third of the time.
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
        patch = interpreter._patch_lang_tensor
        interpreter._patch_lang_tensor = lambda tensor, scope: _patch_tensor(patch, tensor, scope)
        make_fast(interpreter)
        # Patch Triton's language once, not for every kernel and function: a third of the time.
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: _Unpatched()
        remember_types()


def interpret() -> None:
    """Run kernels that are defined after this call in the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    patch_interpreter()


# Types that torch rounds: to nearest, ties to even, as a GPU does
_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
}
# Types that NumPy lacks; the interpreter holds their bits as integers
_OPAQUE = (tl.bfloat16, tl.float8e4nv, tl.float8e5)


def floats_of(handle: Any) -> Any:
    kind = handle.dtype.scalar
    if kind not in _OPAQUE:
        return handle.data
    bits = torch.from_numpy(
        np.ascontiguousarray(handle.data).view(f"i{handle.data.dtype.itemsize}")
    )
    return bits.view(_TORCH[kind]).float().numpy()


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    kind, data = dst_type.scalar, floats_of(src)
    if kind in _OPAQUE:
        numbers = torch.from_numpy(np.ascontiguousarray(data, np.float32))
        if kind == tl.float8e4nv:  # hardware saturates
            numbers = numbers.clamp(-448, 448)
        bits = (
            numbers.to(_TORCH[kind])
            .view(torch.int16 if kind == tl.bfloat16 else torch.int8)
            .numpy()
        )
        return TensorHandle(bits.view(_get_np_dtype(kind)), kind)
    return TensorHandle(data.astype(_get_np_dtype(dst_type)), kind)


def _convert(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    return _cast(self, src, dst_type)


def _dot(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    # Sums in float64, rounded once, so the bits do not depend on NumPy's order.
    from triton.runtime.interpreter import TensorHandle

    wide = np.float64 if d.dtype.scalar.is_floating() else np.int32
    with np.errstate(invalid="ignore", over="ignore"):
        products = np.matmul(floats_of(a).astype(wide), floats_of(b).astype(wide))
        return TensorHandle((products + d.data.astype(wide)).astype(d.data.dtype), d.dtype.scalar)


class _Unpatched:
    def restore(self) -> None: ...


def _patch_tensor(patch: Any, tensor: Any, scope: Any) -> None:
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
