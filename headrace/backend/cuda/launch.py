"""Launches: Triton kernels bound to their arguments, to run repeatedly or to capture."""

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel with its grid and arguments. Only the contents of its tensors change
    between steps.
    """

    kernel: Any  # of `triton.jit`
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # tensors and numbers, by position
    constants: dict[str, Any]  # constexpr arguments, `num_warps` and `num_stages`

    def __call__(self) -> None:
        # Products and sums are rounded separately. The compiler would fuse them for some tile
        # shapes only, so a row would have other bits in another batch.
        self.kernel[self.grid](*self.args, **self.constants, enable_fp_fusion=False)

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


def blocks(size: int, block: int) -> int:
    """Number of blocks that cover `size` items; the last one may be partial."""
    return -(-size // block)


def power_of_2(size: int, min_size: int = 1) -> int:
    """Smallest power of two that is not below either argument. Triton tiles have no other
    sizes.
    """
    return max(min_size, 1 << (size - 1).bit_length())
