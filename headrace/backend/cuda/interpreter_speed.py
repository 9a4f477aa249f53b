"""Less work for each operation in Triton's interpreter, with the same results.

The interpreter checks types, makes types and fills arrays anew for each operation on a tile. Most
of its time goes there, and little to NumPy. The functions here remember the outcome by types,
shapes and numbers; what they do not know goes to Triton's own functions.
"""

from copy import copy
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic

_Tensor = tl.core.tensor
_KEPT = frozenset(
    ("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
_KEPT |= {"fp32", "fp64"}
"""Types of which two operands have a result of the same type, in all operations."""
_HALF = frozenset(("fp16", "bf16"))
"""The same, except in divisions."""
_INTEGERS = frozenset(name for name in _KEPT if "int" in name)
_MAX_NUMBERS = 4000


REPLACED: dict[str, Any] = {
    name: getattr(TritonSemantic, name)
    for name in ("binary_op_type_checking_impl", "to_tensor", "cast")
}
"""Triton's own functions, by their names."""
_any_operands, _make_tensor, _any_cast = REPLACED.values()


def make_fast(interpreter: Any) -> None:
    """Replace functions of Triton's interpreter; call this before its language is patched."""
    make_np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = make_np_dtype(kind)
        return np_dtypes[name]

    interpreter._get_np_dtype = np_dtype
    interpreter._patch_attr = _patch_attr
    interpreter.TensorHandle.__init__ = _init_handle
    shift = interpreter.InterpreterBuilder.create_ashr

    def create_ashr(self: Any, lhs: Any, rhs: Any) -> Any:
        return shift(self, copy(lhs), copy(rhs))  # it changes both, and one may be remembered

    interpreter.InterpreterBuilder.create_ashr = create_ashr
    tl.core.block_type.__init__ = _init_block_type
    tl.core.tensor.__init__ = _init_tensor
    tl.core.tuple.__init__ = _init_tuple
    tl.core.tuple.type = _TupleType()
    tl.core.dtype.__eq__ = _equal_types
    tl.core._unwrap_if_constexpr = _unwrapped
    for name, function in zip(REPLACED, (_operands, _to_tensor, _cast), strict=True):
        setattr(TritonSemantic, name, function)


def remember_types() -> None:
    """Remember the types that the patched language makes; call this after it is patched."""
    make = tl.core.dtype.to_ir
    made: dict[str, Any] = {}

    def to_ir(self: Any, builder: Any) -> Any:
        if self.name not in made:
            made[self.name] = make(self, builder)
        return made[self.name]

    tl.core.dtype.to_ir = to_ir


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Call a function of the language with the interpreter's semantics, and without the wrapper
    that only asks for them.
    """
    from triton.runtime.interpreter import interpreter_semantic

    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, _semantic=interpreter_semantic, **kwargs)

    scope.set_attr(obj, name, call)


class _Shape:
    """The shape of a tensor in the forms that Triton asks for."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.plain = sizes
        self.sizes = tl.tuple(list(sizes))
        self.numbers = tl.tuple([tl.constexpr(size) for size in sizes])
        self.numel = validate_block_shape(self.sizes)
        self.num_numbers = tl.constexpr(self.numel)


_shape_of = cache(_Shape)
_SCALAR = _shape_of(())


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.made = element_ty, _shape_of(sizes)
    self.shape, self.numel = self.made.sizes, self.made.numel
    self.name = f"<{sizes}, {element_ty.name}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    made = type.made if type.is_block() else _SCALAR
    self.handle, self.type, self.dtype, self.made = handle, type, type.scalar, made
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


_FITTING: set[tuple[Any, str]] = set()
"""Types of arrays and of tensors that may hold them."""


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    pair = data.dtype, dtype.name
    if pair not in _FITTING:
        self.__post_init__()
        _FITTING.add(pair)


def _equal_types(self: Any, other: Any) -> bool:
    if self is other:
        return True
    other = _unwrapped(other)
    return isinstance(other, tl.core.dtype) and self.name == other.name


_unwrap = tl.core._unwrap_if_constexpr
_WRAPPED = (tl.constexpr, list, tuple, tl.core.tuple)


def _unwrapped(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return _unwrap(value) if issubclass(kind, _WRAPPED) else value


_constants: dict[tuple[type, Any], Any] = {}


def _to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
    kind = type(x)
    if kind is _Tensor:
        return x
    if not _is_number(x):
        return _make_tensor(self, x, check_type)
    found = _constants.get((kind, x))
    if found is None:
        found = _make_tensor(self, x)
        _remember(_constants, (kind, x), found)
    return found


def _cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
    if input.dtype.name == dst_ty.scalar.name:
        return input
    return _any_cast(self, input, dst_ty, fp_downcast_rounding)


def _operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Both operands in the type of the result, as NumPy broadcasts them."""
    left, right = type(lhs) is _Tensor, type(rhs) is _Tensor
    rules = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    if left and right:
        name, other = lhs.dtype.name, rhs.dtype.name
        if name == other:
            if name == "int1" and lhs.made is not rhs.made:
                pass  # Triton makes integers of a truth value when it broadcasts it
            elif name in _KEPT or (name in _HALF and not div_or_mod):
                return _broadcast(lhs, rhs)
        elif allow_lhs_ptr and lhs.dtype.is_ptr() and other in _INTEGERS:
            return _broadcast(lhs, rhs)
        elif name in _KEPT and other in _KEPT:
            one, two = _kinds(self, lhs.dtype, rhs.dtype, rules)
            return _broadcast(_cast(self, lhs, one), _cast(self, rhs, two))
    elif left and _is_number(rhs):
        kind, number = _with_number(self, lhs.dtype, rhs, False, rules)
        return _broadcast(_cast(self, lhs, kind), number)
    elif right and _is_number(lhs):
        kind, number = _with_number(self, rhs.dtype, lhs, True, rules)
        return _broadcast(number, _cast(self, rhs, kind))
    return _any_operands(self, lhs, rhs, *rules)


def _remember(found: dict[Any, Any], key: Any, value: Any) -> None:
    if len(found) == _MAX_NUMBERS:
        found.clear()
    found[key] = value


def _is_number(x: Any) -> bool:
    """Whether equal numbers are the same number, of one type: 0.0 and -0.0 are not, and integers
    from 2**31 on have more types.
    """
    kind = type(x)
    if kind is int:
        return bool(-(1 << 31) <= x < 1 << 31)
    return kind is bool or (kind is float and bool(x))


def _example(kind: Any) -> Any:
    """A scalar of a type."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    return _Tensor(TensorHandle(np.zeros(1, _get_np_dtype(kind)), kind), kind)


_Rules = tuple[bool, bool, bool, bool]
_kinds_of: dict[tuple[str, str, _Rules], tuple[Any, Any]] = {}
_numbers: dict[tuple[str, type, Any, bool, _Rules], tuple[Any, Any]] = {}
_block_types: dict[tuple[str, "_Shape"], Any] = {}


def _kinds(semantic: Any, left: Any, right: Any, rules: _Rules) -> tuple[Any, Any]:
    """The types that Triton gives two operands."""
    key = left.name, right.name, rules
    if key not in _kinds_of:
        one, other = _any_operands(semantic, _example(left), _example(right), *rules)
        _kinds_of[key] = one.dtype, other.dtype
    return _kinds_of[key]


def _with_number(
    semantic: Any, kind: Any, number: Any, is_left: bool, rules: _Rules
) -> tuple[Any, Any]:
    """The type that Triton gives an operand next to a number, and the number as a scalar."""
    key = kind.name, type(number), number, is_left, rules
    found = _numbers.get(key)
    if found is None:
        pair = (number, _example(kind)) if is_left else (_example(kind), number)
        one, other = _any_operands(semantic, *pair, *rules)
        found = (other.dtype, one) if is_left else (one.dtype, other)
        _remember(_numbers, key, found)
    return found


def _broadcast(lhs: Any, rhs: Any) -> Any:
    """Operands with the shape of the result as their type. NumPy broadcasts their arrays."""
    one, other = lhs.made, rhs.made
    if one is other:
        return lhs, rhs
    made = _broadcast_shape(one, other)
    return lhs if one is made else _as(lhs, made), rhs if other is made else _as(rhs, made)


@cache
def _broadcast_shape(one: _Shape, other: _Shape) -> _Shape:
    try:
        return _shape_of(np.broadcast_shapes(one.plain, other.plain))
    except ValueError as error:
        raise ValueError(f"Cannot make_shape_compatible: {error}") from None


def _as(tensor: Any, made: _Shape) -> Any:
    return _Tensor(tensor.handle, _block_type(tensor.dtype, made))


def _block_type(kind: Any, made: _Shape) -> Any:
    key = kind.name, made
    if key not in _block_types:
        _block_types[key] = tl.core.block_type(kind, list(made.plain))
    return _block_types[key]
