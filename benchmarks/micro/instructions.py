"""Instructions per weight of the kernels for one row, by format, from the built extension.

    python benchmarks/micro/instructions.py build/*/CMakeFiles/kernels_avx2_1.dir/csrc/isa.cpp.o

It counts the instructions of the innermost loop with products, per weight. Instructions outside of
it run once for many groups. A processor that issues n instructions per cycle cannot process more
than n / count weights per cycle.

It needs objdump and the object file for AVX2. There a byte product, `vpmaddubsw`, takes 32 weights,
or half of the bits of 32 codes of 8 bits.
"""

import argparse
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from harness import print_table

FORMATS = Path(__file__).parents[2] / "csrc" / "format.h"
_KERNEL = re.compile(r"matmul_\w+<\(headrace::Format\)(\d+), 1, false>")


class Instruction(NamedTuple):
    """One line of a listing."""

    address: int
    name: str
    operands: str


def functions(file: str) -> dict[str, list[Instruction]]:
    """The code of each function of an object file."""
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", file],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    for line in listing.splitlines():
        if begin := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            code = found.setdefault(begin[1], [])
        elif instruction := re.match(r"\s+([0-9a-f]+):\s+(\S+)\s*(.*)$", line):
            code.append(Instruction(int(instruction[1], 16), instruction[2], instruction[3]))
    return found


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """The bodies of all jumps back, shortest first."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    bodies = []
    for i, instruction in enumerate(code):
        to = (
            re.match(r"[0-9a-f]+", instruction.operands)
            if instruction.name.startswith("j")
            else None
        )
        first = at.get(int(to[0], 16)) if to else None
        if first is not None and first <= i:
            bodies.append(code[first : i + 1])
    return sorted(bodies, key=len)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("object", help="object file of the AVX2 integer kernels")
    args = parser.parse_args()
    listed = FORMATS.read_text().partition("enum class Format : int {")[2].partition("}")[0]
    names = re.findall(r"^\s*(k\w+),", listed, re.MULTILINE)
    eight_bits = {"kQ8", "kTable8", "kLookup4", "kLookup4Super"}
    rows = []
    for function, code in functions(args.object).items():
        kernel = _KERNEL.search(function)
        multiplies = [
            body for body in loops(code) if any(each.name == "vpmaddubsw" for each in body)
        ]
        if not kernel or not multiplies:
            continue
        name, body = names[int(kernel[1])], multiplies[0]
        products = sum(each.name == "vpmaddubsw" for each in body)
        weights = 32 * products // (2 if name in eight_bits else 1)
        rows.append([name, f"{len(body):,}", f"{weights:,}", f"{len(body) / weights:.3f}"])
    print_table(
        ["format", ">instructions", ">weights", ">per weight"],
        sorted(rows, key=lambda row: row[-1]),
        "one row, int8 activations",
    )


if __name__ == "__main__":
    main()
