"""Launches: Triton kernels bound to their arguments, to run repeatedly or to capture."""

from collections.abc import Callable
from typing import Any

import torch
import triton

from headrace.backend.cuda.interpreter import is_interpreting


class Launch:
    """A kernel with its grid and arguments. Only the contents of its tensors change
    between steps.
    """

    __slots__ = ("_run", "args", "constants", "grid", "kernel")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        self.kernel = kernel  # of `triton.jit`
        self.grid = grid
        self.args = args  # tensors and numbers, by position
        self.constants = constants  # constexpr arguments, `num_warps` and `num_stages`
        self._run: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._run:
            self._run()
            return
        compiled = self.kernel[self.grid](*self.args, **self._options)
        if not is_interpreting():
            self._run = self._bound(compiled)

    def compile(self) -> None:
        """Compile the kernel for these arguments, without a launch."""
        self.kernel.run(*self.args, grid=self.grid, warmup=True, **self._options)

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def _options(self) -> dict[str, Any]:
        # Products and sums are rounded separately. The compiler would fuse them for some tile
        # shapes only, so a row would have other bits in another batch.
        return {**self.constants, "enable_fp_fusion": False}

    def _bound(self, compiled: Any) -> Callable[[], None]:
        """Return the launch of a compiled kernel, without Triton's search for it.

        Triton's own call looks at each argument again: 14 to 34 us of the host's time, and 5 to
        7 us without.
        """
        arguments = [
            self.args[i] if i < len(self.args) else self.constants.get(param.name, param.default)
            for i, param in enumerate(self.kernel.params)
        ]
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        x, y, z = (*self.grid, 1, 1)[:3]
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        device, stream_of = (
            torch.cuda.current_device(),
            triton.runtime.driver.active.get_current_stream,
        )
        return lambda: run(
            x, y, z, stream_of(device), function, metadata, None, None, None, *values
        )


def blocks(size: int, block: int) -> int:
    """Number of blocks that cover `size` items; the last one may be partial."""
    return -(-size // block)


def power_of_2(size: int, min_size: int = 1) -> int:
    """Smallest power of two that is not below either argument. Triton tiles have no other
    sizes.
    """
    return max(min_size, 1 << (size - 1).bit_length())
