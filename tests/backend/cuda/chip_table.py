"""The table of kernels in docs/internals/gpu-others.md: what each needs on each kind of GPU.

TRITON_INTERPRET=0 python -m tests.backend.cuda.compiling --table
"""

from pathlib import Path
from typing import Any

from headrace.backend.cuda.launch import Launch
from tests.backend.cuda.compiling import CHIPS, Case, launches_of, line_of, pretend

PAGE = Path(__file__).parents[3] / "docs/internals/gpu-others.md"
BEGIN, END = "<!-- kernels -->\n", "<!-- end of kernels -->\n"
CASES = (
    Case("8b", "BF16", rows=(1, 512)),
    Case("8b", "Q8_0", "int8", rows=(1, 512)),
    Case("8b", "Q4_0", "fp8", rows=(1, 512)),
    Case("8b", "e4m3", rows=(1,)),
)
KERNELS = ("linear_kernel", "attention_kernel")


def cell(kernel: dict[str, Any]) -> str:
    """Registers, spills in the main loop, shared KB, instructions a weight, KB in flight."""
    if "error" in kernel:
        return "fails"
    loop, weight = kernel["loop"], "-"
    if loop["weights"]:
        weight = f"{32 * kernel['warps'] * loop['instructions'] / loop['weights']:.1f}"
    sizes = (round(kernel["shared"] / 1024), round(kernel["in_flight"] / 1024))
    return f"{kernel['reg']}, {loop['local']}, {sizes[0]}, {weight}, {sizes[1]}"


def title(case: Case, rows: int, launch: Launch) -> str:
    name = launch.name.removesuffix("_kernel")
    gate = ", gate and up" if launch.constants.get("GATE") else ""
    return f"{case.name}: {name}{gate}, {'1 row' if rows == 1 else f'{rows} rows'}"


def cells_of(chip: str) -> dict[str, str]:
    """The first product of each kind and the attention of each program on a chip."""
    gpu, found = CHIPS[chip], dict[str, str]()
    pretend(gpu)
    for case in CASES:
        if case.has_fp8 and not gpu.has_fp8:
            continue
        for rows, launch in launches_of(case):
            name = title(case, rows, launch)
            if launch.name in KERNELS and name not in found:
                found[name] = cell(line_of(chip, case, rows, launch))
    return found


def table() -> str:
    """The table in Markdown, with a column for each chip."""
    by_chip = {chip: cells_of(chip) for chip, gpu in CHIPS.items() if gpu.has_ptx}
    lines = [["program: kernel, rows of the step", *by_chip], ["---"] * (1 + len(by_chip))]
    names = dict.fromkeys(name for cells in by_chip.values() for name in cells)
    lines += [[name, *(cells.get(name, "refused") for cells in by_chip.values())] for name in names]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
