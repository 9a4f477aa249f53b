"""A check of the addresses that interpreted kernels access, as a GPU's memory check does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from headrace.backend.cuda.launch import Launch

BAD_INT = 0x7F7F7F7F
"""A token, row or slot that no tensor has."""


class WrongAddressError(Exception):
    """A kernel reads or writes outside of its arguments."""


@contextmanager
def checked_addresses() -> Iterator[None]:
    """Check kernels that run in the interpreter, with bad numbers in new memory without zeros.

    A kernel may access only the elements of its arguments: the number after a tensor is wrong even
    if it belongs to another tensor of the same memory. The first wrong access fails, and the block
    fails at its end even if the code in it has handled this error.
    """
    checker = _Checker()
    with (
        patch.object(Launch, "__call__", checker.launch(Launch.__call__)),
        patch.object(torch, "empty", _with_bad_numbers(torch.empty)),
        patch.object(torch.Tensor, "new_empty", _with_bad_numbers(torch.Tensor.new_empty)),
    ):
        names = {"create_masked_load": (0, 1), "create_masked_store": (0, 2)}
        names["create_atomic_rmw"] = (1, 3)
        with _patched(InterpreterBuilder, names, checker):
            yield
    if checker.fault:
        raise WrongAddressError(checker.fault)


@contextmanager
def _patched(owner: Any, names: dict[str, tuple[int, int]], checker: "_Checker") -> Iterator[None]:
    """Check calls of methods whose pointers and mask are the arguments of these numbers."""
    methods = {name: getattr(owner, name) for name in names}
    for name, (pointers, mask) in names.items():
        setattr(owner, name, checker.access(methods[name], pointers, mask))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(owner, name, method)


class _Checker:
    def __init__(self) -> None:
        self.fault = ""
        self._kernel = ""
        self._firsts = self._ends = np.zeros(0, np.uint64)  # bytes of the arguments, ascending

    def launch(self, run: Callable[[Launch], None]) -> Callable[[Launch], None]:
        def checked(launch: Launch) -> None:
            spans = sorted(_span(each) for each in launch.args if isinstance(each, torch.Tensor))
            self._kernel = launch.name
            self._firsts, self._ends = np.array(spans, np.uint64).reshape(-1, 2).T
            # Views of one memory may overlap: the furthest end so far
            self._ends = np.maximum.accumulate(self._ends)
            run(launch)

        return checked

    def access(self, run: Callable[..., Any], pointers: int, mask: int) -> Callable[..., Any]:
        def checked(builder: Any, *args: Any) -> Any:
            self._check(args[pointers], args[mask])
            return run(builder, *args)

        return checked

    def _check(self, pointers: Any, mask: Any) -> None:
        addresses, chosen = np.broadcast_arrays(pointers.data, mask.data)
        accessed = addresses[chosen.astype(bool)]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        argument = np.searchsorted(self._firsts, accessed, side="right") - 1
        is_wrong = (argument < 0) | (accessed + np.uint64(size) > self._ends[argument])
        if is_wrong.any():
            self.fault = f"{self._kernel}: {int(is_wrong.sum())} of {len(accessed)} addresses"
            raise WrongAddressError(self.fault)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the byte after its last one."""
    first = tensor.data_ptr()
    if not tensor.numel():
        return first, first
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return first, first + (last + 1) * tensor.element_size()


def _with_bad_numbers(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        tensor = make(*args, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else BAD_INT)

    return made
