"""Triton's interpreter, mended: kernels run in NumPy where there is no GPU, and give what a GPU
would, up to the order of sums.

In Triton 3.6 and 3.7 numbers in bf16 are 16 bits that nothing but a conversion understands:
products of them (`tl.dot`) multiply the bits, and conversions to bf16 and to floats of 8 bits
truncate. Bounds of loops that are known at run time alone raise with NumPy 2.4. Sums and products
of bf16 numbers are left alone: kernels convert them first, and tests hold that.
"""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl


def is_interpreting() -> bool:
    """Whether kernels run in the interpreter: Triton decides when a kernel is defined, by
    TRITON_INTERPRET.
    """
    return bool(triton.knobs.runtime.interpret)


def mend() -> None:
    """Mend the interpreter of this process; once is enough."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if builder.cast_impl is not _cast:
        builder.cast_impl = _cast
        builder.create_fp_to_fp = _convert
        builder.create_dot = _dot
        options = interpreter.interpreter_builder.options
        interpreter.interpreter_builder.options = replace(
            options, sanitize_overflow=False
        )  # a third of the time
        patch = interpreter._patch_lang_tensor
        interpreter._patch_lang_tensor = lambda tensor, scope: _patch_tensor(patch, tensor, scope)
        # Triton changes its language for every kernel, and for every function that one calls, and
        # changes it back: a third of the time.
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: _AsItIs()


def interpret() -> None:
    """Let kernels that are defined from here on run in the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    mend()


_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
}
"""Types whose numbers are rounded by torch: to nearest, ties to even, as a GPU does it."""
_OPAQUE = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
"""Those that NumPy has not: integers of their bits stand for them."""


def _floats(handle: Any) -> Any:
    """The numbers of a handle, as NumPy knows them."""
    kind = handle.dtype.scalar
    if kind not in _OPAQUE:
        return handle.data
    bits = torch.from_numpy(
        np.ascontiguousarray(handle.data).view(f"i{handle.data.dtype.itemsize}")
    )
    return bits.view(_TORCH[kind]).float().numpy()


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    kind, data = dst_type.scalar, _floats(src)
    if kind in _OPAQUE:
        numbers = torch.from_numpy(np.ascontiguousarray(data, np.float32))
        if kind == tl.float8e4nv:  # hardware gives the largest number for one that is beyond it
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
    """The sum of products, rounded once: whatever order NumPy sums in, and it has another for every
    shape, the bits are the same.
    """
    from triton.runtime.interpreter import TensorHandle

    wide = np.float64 if d.dtype.scalar.is_floating() else np.int32
    with np.errstate(invalid="ignore", over="ignore"):
        products = np.matmul(_floats(a).astype(wide), _floats(b).astype(wide))
        return TensorHandle((products + d.data.astype(wide)).astype(d.data.dtype), d.dtype.scalar)


class _AsItIs:
    def restore(self) -> None:
        """Leave the language as it is."""


def _patch_tensor(patch: Any, tensor: Any, scope: Any) -> None:
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
