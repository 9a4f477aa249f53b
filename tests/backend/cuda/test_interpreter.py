"""The interpreter's short ways have the types and bits of Triton's own functions."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import triton.language as tl

from headrace.backend.cuda import interpreter_speed
from headrace.backend.cuda.interpreter import is_interpreting, patch_interpreter

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="GPUs run no interpreter")

KINDS = [
    *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64),
    *(tl.float16, tl.float32, tl.float64, tl.bfloat16, tl.float8e4nv),
]
NUMBERS = [0, 1, -1, 3, 300, 2**31, 2**40, True, False, 0.0, -0.0, 1.5, -2.0, 1e300]
OPERATIONS: dict[str, tuple[Any, ...]] = {
    **{name: (True,) for name in ("add", "sub", "mul")},
    **{name: () for name in ("truediv", "floordiv", "mod", "and_", "xor_", "shl", "ashr", "lshr")},
    **{name: () for name in ("less_than", "greater_equal", "equal", "not_equal")},
    "minimum": (tl.PropagateNan.NONE,),
}


@pytest.fixture(autouse=True)
def patched() -> None:
    """The short ways, in a process that has not defined a kernel, too."""
    patch_interpreter()


def tensor(kind: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """A tensor of small numbers; no shape: a scalar."""
    from triton.runtime.interpreter import TensorHandle, interpreter_semantic

    data = np.random.default_rng(seed).integers(1, 5, shape or 1).astype(np.int32)
    type_ = tl.block_type(tl.int32, list(shape)) if shape else tl.int32
    numbers = tl.tensor(TensorHandle(data, tl.int32), type_)
    floats = interpreter_semantic.cast(numbers, tl.float32) if kind.is_fp8() else numbers
    return interpreter_semantic.cast(floats, kind)


def outcome(operation: str, one: Any, other: Any) -> tuple[Any, ...]:
    """Type, shape and bytes of a result, or the error."""
    from triton.runtime.interpreter import interpreter_semantic

    try:
        with np.errstate(all="ignore"):
            result = getattr(interpreter_semantic, operation)(one, other, *OPERATIONS[operation])
    except Exception as error:
        return type(error), str(error)
    data = result.handle.data
    return str(result.type), str(result.dtype), data.shape, data.dtype, data.tobytes()


def both_outcomes(
    operation: str, one: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """With the short ways, twice, and with Triton's own functions."""
    outcome(operation, one, other)
    mine = outcome(operation, one, other)
    with monkeypatch.context() as patch:
        semantic = interpreter_speed.TritonSemantic
        for name, own in interpreter_speed.REPLACED.items():
            patch.setattr(semantic, name, own)
        return mine, outcome(operation, one, other)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_on_tensors(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [((), (4,)), ((4,), (4,)), ((2, 1), (4,))]
    for left, right in product(KINDS, KINDS):
        for first, second in shapes:
            pair = tensor(left, first), tensor(right, second, 1)
            mine, own = both_outcomes(operation, *pair, monkeypatch)
            assert mine == own, (left, right, first, second)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_with_numbers(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, number, shape in product(KINDS, NUMBERS, [(), (4,)]):
        one = tensor(kind, shape)
        for pair in ((one, number), (number, one)):
            mine, own = both_outcomes(operation, *pair, monkeypatch)
            assert mine == own, (kind, number, shape)


def test_shapes_that_do_not_fit_are_refused() -> None:
    found = outcome("add", tensor(tl.int32, (4,)), tensor(tl.int32, (2,)))
    assert found[0] is ValueError and "Cannot make_shape_compatible" in found[1]


def test_pointers_take_offsets_of_all_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import TensorHandle

    kind = tl.pointer_type(tl.float32)
    pointer = tl.tensor(TensorHandle(np.array([4096], np.uint64), kind), kind)
    for other in KINDS:
        mine, own = both_outcomes("add", pointer, tensor(other, (4,)), monkeypatch)
        assert mine == own, other
