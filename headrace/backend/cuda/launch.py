"""What a kernel is launched with: the binding of a Triton kernel to tensors, which can be launched
again and again, or captured.
"""

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel with its grid and its arguments. The tensors stay those that they are: what changes
    from step to step lies in them.
    """

    kernel: Any  # of `triton.jit`
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # tensors and numbers, by position
    constants: dict[str, Any]  # constexpr arguments, `num_warps` and `num_stages`

    def __call__(self) -> None:
        # A product and a sum are rounded each: fused or not, as a compiler chooses for one shape of
        # a tile and not for another, they would give a row other bits in another batch.
        self.kernel[self.grid](*self.args, **self.constants, enable_fp_fusion=False)

    @property
    def name(self) -> str:
        """What profiles call the kernel."""
        return str(self.kernel.fn.__name__)


def blocks(size: int, block: int) -> int:
    """Blocks of a size that so many things fill, the last of them perhaps in part."""
    return -(-size // block)


def power_of_2(size: int, least: int = 1) -> int:
    """The least power of two that is not below a size: tiles of Triton have no others."""
    return max(least, 1 << (size - 1).bit_length())
