"""Fixes for Triton's interpreter, which runs kernels in NumPy.

Triton 3.6 and 3.7 represent bf16 as 16-bit integers, so `tl.dot` and conversions to bf16
and float8 are wrong. Loop bounds known only at run time raise with NumPy 2.4. Sums and
products of bf16 stay wrong: kernels convert to float32 first, and tests enforce it.
"""

import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton._utils import validate_block_shape


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
        # Patch Triton's language once, not for every kernel and function: a third of the time.
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: _Unpatched()
        _make_types_once()


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


def _make_types_once() -> None:
    """Make equal shapes and types of tensors once, not for each value: two fifths of the time."""
    from triton.runtime import interpreter

    make_np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = make_np_dtype(kind)
        return np_dtypes[name]

    interpreter._get_np_dtype = np_dtype
    tl.core.block_type.__init__ = _init_block_type
    tl.core.tensor.__init__ = _init_tensor
    tl.core.tuple.__init__ = _init_tuple
    tl.core.tuple.type = _TupleType()


class _Shape:
    """The shape of a tensor in the forms that Triton asks for."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = tl.tuple(list(sizes))
        self.numbers = tl.tuple([tl.constexpr(size) for size in sizes])
        self.numel = validate_block_shape(self.sizes)
        self.num_numbers = tl.constexpr(self.numel)


_shape_of = cache(_Shape)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.made = element_ty, _shape_of(sizes)
    self.shape, self.numel = self.made.sizes, self.made.numel
    self.name = f"<{sizes}, {element_ty.name}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    made = type.made if type.is_block() else _shape_of(())
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = made.numbers, made.num_numbers


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


class _TupleType:
    """The type of a tuple, made when asked for."""

    def __get__(self, owner: Any, _: Any) -> Any:
        owner.__dict__["type"] = kind = tl.core._type_for_tuple_values(owner.values)
        return kind


class _Unpatched:
    def restore(self) -> None: ...


def _patch_tensor(patch: Any, tensor: Any, scope: Any) -> None:
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
