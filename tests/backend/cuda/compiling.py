"""Compiles the launches of whole programs for GPUs, on a machine that needs none: nothing is
launched, and tensors have no memory.

    TRITON_INTERPRET=0 python -m tests.backend.cuda.compiling                  a few programs
    TRITON_INTERPRET=0 python -m tests.backend.cuda.compiling --all            all of them
    TRITON_INTERPRET=0 python -m tests.backend.cuda.compiling 8b-BF16 --rows 1 16 --chips sm_80
    TRITON_INTERPRET=0 python -m tests.backend.cuda.compiling --table

Prints a line of JSON for each kernel as it is compiled: its program, rows, constants, what it needs
and which instructions it has. `--table` writes the table of docs/internals/gpu-others.md
instead.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from headrace.backend.cuda.architecture import (
    A100,
    B200,
    H100,
    L4,
    RTX_5090,
    Architecture,
    set_architecture,
)
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.kernels.gather import gather_rows, scatter_rows, spread_columns
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.sampling_layout import SampleLayout
from headrace.backend.cuda.step_shape import StepShape
from headrace.backend.cuda.stream import CudaStream
from headrace.backend_traits import KvDtype
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.program.fuse import fuse
from tests.backend.cuda.hollow import SPECS, hollow_tensors, make_weights_in_place

META = torch.device("meta")
MI300X = Architecture((9, 4), 304, 64 << 10, has_ptx=False)
CHIPS = {
    **{"sm_80": A100, "sm_89": L4, "sm_90": H100, "sm_100": B200, "sm_120": RTX_5090},
    "gfx942": MI300X,
}
ROWS = (1, 16, 64, 512, 2048)
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"


class Case(NamedTuple):
    """A program to compile: a model of `SPECS`, its formats, KV dtype and rows of steps."""

    spec: str
    format: str
    kv: KvDtype = "bf16"
    rows: tuple[int, ...] = ROWS
    experts: str = ""
    activations: torch.dtype = torch.bfloat16

    @property
    def has_fp8(self) -> bool:
        """Whether weights or KV are fp8, which older GPUs refuse."""
        return "e4m3" in self.format or self.kv == "fp8"

    @property
    def name(self) -> str:
        wide = "" if self.activations == torch.bfloat16 else "f32"
        return "-".join(
            word
            for word in (self.spec, self.format, self.experts, self.kv, wide)
            if word not in ("", "bf16")
        )


FEW = [
    Case("8b", "BF16", rows=(1, 512)),
    Case("8b", "Q4_0", "int8", rows=(1,)),
]
ON_ALL_CHIPS = [
    Case("8b", "BF16"),
    Case("8b", "Q8_0", "int8"),
    Case("8b", "Q4_0", "fp8"),
    Case("1b", "e4m3", rows=(1, 128)),
]
ALL = [
    *ON_ALL_CHIPS,
    Case("135m", "BF16"),
    Case("135m", "Q8_0", rows=(1, 512)),
    *(Case("1b", name) for name in ("BF16", "Q8_0", "Q4_0")),
    *(
        Case("1b", name, rows=(1, 512))
        for name in (
            "Q4_1",
            "Q4_K",
            "Q6_K",
            "F16",
            "I8_ROW",
            "I8_MIXED",
            "NVFP4",
            "IQ4_NL",
            "e5m2-row",
        )
    ),
    *(Case("1b", name, rows=(1, 512)) for name in ("int8-row-2:4", "int4-2:4", "bf16-2:4")),
    Case("1b", "F32", "f32", activations=torch.float32),
    Case("biased", "BF16", "f16", rows=(1, 512)),
    Case("biased", "BF16", "int8", rows=(1, 512)),
    Case("experts", "BF16", experts="MXFP4_PAIRS"),
    Case("latent", "BF16"),
    Case("latent", "Q4_0", "int8", rows=(1, 512)),
    Case("latent", "Q8_0", "fp8", rows=(1, 512)),
]


class Driver(triton.backends.driver.DriverBase):  # type: ignore[misc]
    """Stands for a GPU. Triton keeps kernels by device, so each chip is a device of its own."""

    def __init__(self, gpu: Architecture) -> None:
        self._gpu = gpu

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        if not self._gpu.has_ptx:
            return GPUTarget("hip", "gfx942", 64)
        return GPUTarget("cuda", self.get_current_device(), 32)

    def get_current_device(self) -> int:
        major, minor = self._gpu.capability
        return 10 * major + minor

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return META

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any: ...


def pretend(gpu: Architecture) -> None:
    """Give later tensors no memory, and let Triton compile for a GPU."""
    for name, module in list(sys.modules.items()):
        if name.startswith("headrace.backend.cuda") and hasattr(module, "DEVICE"):
            setattr(module, "DEVICE", META)  # noqa: B010
    set_architecture(gpu)
    triton.runtime.driver.set_active(Driver(gpu))
    make_weights_in_place(META)


def executable_of(case: Case, layers: int = 2) -> CudaExecutable:
    """The program of a case, with its first layers, which include every kind of layer."""
    spec = SPECS[case.spec].with_layers(range(min(layers, SPECS[case.spec].num_layers)))
    if spec.experts and case.spec == "latent":
        spec = replace(spec, experts=replace(spec.experts, num_experts=8))
    tensors = hollow_tensors(spec, case.format, case.experts)
    program = trace_model(spec, tensors)
    kv = KvConfig((1024,) * len(fuse(program).kv_groups), 64, case.kv)
    return CudaExecutable(program, tensors, kv, case.activations, CudaStream())


def launches_of(case: Case) -> Iterator[tuple[int, Launch]]:
    """Rows of the steps and the launches; the first step includes sampling."""
    executable = executable_of(case)
    for rows in case.rows:
        shape = StepShape(rows, min(rows, 64), 0, False)
        plan = executable._plan(shape)
        for launch in plan.launches:
            yield rows, launch
        if rows == case.rows[0]:
            sampler = executable._sampler
            layout = SampleLayout(8, 4, 8, 8, 8, 8, len(sampler._samplers.state), True, True, True)
            ints = torch.empty(layout.num_ints, dtype=torch.int32, device=META)
            masks = torch.empty(8, sampler.mask_words, dtype=torch.int32, device=META)
            results = torch.empty(layout.num_results, dtype=torch.int32, device=META)
            for launch in sampler.launches(
                layout, plan.value(executable._logits), ints, masks, results
            ):
                yield rows, launch
            for launch in draft_launches(rows):
                yield rows, launch


def draft_launches(rows: int) -> Iterator[Launch]:
    """Kernels that move rows and logits for a drafter."""
    store, taps = torch.empty(64, 96, device=META), torch.empty(rows, 96, device=META)
    index = torch.empty(rows, dtype=torch.int32, device=META)
    yield scatter_rows(store, taps, index)
    for kind in (torch.bfloat16, torch.float32):
        yield gather_rows(torch.empty(rows, 96, dtype=kind, device=META), store, index)
    columns = torch.empty(100, dtype=torch.int32, device=META)
    logits = torch.empty(rows, 32, device=META)
    yield spread_columns(torch.empty(rows, 100, device=META), logits, columns, -inf)


def kind_of(launch: Launch) -> str:
    """The key of a compiled kernel."""

    def of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{value.data_ptr() % 16 == 0}"
        return (
            f"{value == 1}{value % 16 == 0}{abs(value) >= 2**31}"
            if isinstance(value, int)
            else type(value).__name__
        )

    unspecialised = {p.name for p in launch.kernel.params if p.do_not_specialize}
    args = [
        of(a)
        for p, a in zip(launch.kernel.arg_names, launch.args, strict=False)
        if p not in unspecialised
    ]
    return f"{launch.name} {args} {launch.constants}"


INSTRUCTIONS = {
    "mma": r"\bHMMA|\bIMMA",
    "wgmma": r"\bHGMMA|\bIGMMA",
    "fma": r"\bFFMA|\bFMUL",
    "load128": r"\bLDG\.\S*128|\bLDGSTS\S*128",
    "load64": r"\bLDG\.\S*64(?!.*desc.*128)|\bLDGSTS\S*\.64",
    "load32": r"\bLDG\.E(?:\.\w+)*(?<!64)(?<!128)(?<!U16)(?<!U8)(?<!S8)(?<!S16) "
    r"|\bLDGSTS\.E(?:\.LTC128B)? ",
    "load16": r"\bLDG\.\S*[US]16",
    "load8": r"\bLDG\.\S*[US]8",
    "async": r"\bLDGSTS|\bUBLKCP|\bUTMALDG",
    "local": r"\bLDL|\bSTL",
    "barrier": r"\bBAR\.SYNC",
    "call": r"\bCALL\.",
}
"""Machine instructions, by their name in reports."""


def compile_launch(launch: Launch) -> dict[str, Any]:
    """Resources of a kernel, and its instructions by kind."""
    kernel = launch.kernel.run(
        *launch.args, grid=launch.grid, warmup=True, **launch.constants, enable_fp_fusion=False
    )
    about = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
    if "amdgcn" in kernel.asm:
        counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", kernel.asm["amdgcn"]))
        loop = {"instructions": 0, "local": int(counts["vgpr_spill_count"])}
        empty = {"stages": 1, "stack": 0, "instructions": {}, "dots": []}
        return about | empty | {"reg": int(counts["vgpr_count"]), "loop": loop}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    found = {name.lower(): int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}
    return {
        **about,
        "stages": kernel.metadata.num_stages,
        **found,
        "instructions": {name: n for name, n in counts.items() if n},
        "loop": main_loop(code),
        "dots": dots(kernel.asm["ttgir"]),
        "prefetched": prefetched(kernel.asm["ttgir"]),
    }


def main_loop(code: str) -> dict[str, int]:
    """Instructions of the main loop, and those of all loops on tensor cores that move spilled
    registers.

    The main loop is an innermost one: the longest that multiplies on tensor cores and loads
    asynchronously, or that multiplies, or of any kind. Attention has another one for draft trees.
    """
    loops = innermost_loops(code)
    multiplies = re.compile(f"{INSTRUCTIONS['mma']}|{INSTRUCTIONS['wgmma']}").search
    loads, moves = (re.compile(INSTRUCTIONS[name]).search for name in ("async", "local"))
    products = [loop for loop in loops if any(map(multiplies, loop))]
    main = max(
        loops,
        key=lambda loop: (loop in products, loop in products and any(map(loads, loop)), len(loop)),
        default=[],
    )
    spills = sum(bool(moves(one)) for loop in products or [main] for one in loop)
    return {"instructions": len(main), "local": spills}


def innermost_loops(code: str) -> list[list[str]]:
    """The instructions of each loop without loops in it."""
    instructions, labels, loops = list[str](), dict[str, int](), list[tuple[int, int]]()
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    for last, instruction in enumerate(instructions):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", instruction)
        first = labels.get(target[1], last + 1) if target else last + 1
        if first < last and not any(first <= inner for inner, _ in loops):
            loops.append((first, last))
    return [instructions[first : last + 1] for first, last in loops]


_DOT = re.compile(
    r"(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) .* : "
    r"(?:tensor|!ttg\.memdesc)<\w+x(\w+?)[,>](.*)"
)
_BITS = {"bf16": 16, "f16": 16, "f32": 32, "i8": 8, "f8E4M3FN": 8, "f8E5M2": 8}


def dots(ttgir: str) -> list[str]:
    """Kinds of products on tensor cores, each with the order of the columns that one instruction
    sums.

    Columns are in order if they come from shared memory, or if a register holds neighbours alone:
    a thread with `kWidth` numbers of 16 bits has kWidth / 2 registers, each for another
    instruction.
    """
    found = set()
    for name, kind, rest in _DOT.findall(ttgir):
        width = re.search(r"kWidth = (\d+)", rest)
        is_wide = name == "tt.dot" and width and int(width[1]) * _BITS[kind] > 32
        order = f"by {int(width[1]) * _BITS[kind] // 32}" if width and is_wide else "in order"
        found.add(f"{name.rpartition('.')[2]} {kind} {order}")
    return sorted(found)


def prefetched(ttgir: str) -> int:
    """Groups of asynchronous loads that are under way while a loop works on earlier ones."""
    return max(map(int, re.findall(r"ttg\.async_wait .*num = (\d+)", ttgir)), default=0)


def loop_weights(launch: Launch) -> int:
    """Weights that a program multiplies in a round of its loop; 0: the kernel has no weights."""
    constants = launch.constants
    if "UNROLL" not in constants:
        return 0
    return int(constants["BLOCK_N"] * constants["FORMAT"].tile * constants["UNROLL"])


def weight_of(launch: Launch) -> str:
    """How the kernel multiplies its weight: the same in launches that must have the same bits."""
    constants = launch.constants
    if "UNROLL" not in constants:
        return ""
    return str(constants["FORMAT"])


def bytes_in_flight(kernel: dict[str, Any], gpu: Architecture, programs: int) -> int:
    """Bytes that all programs of a multiprocessor wait for, if each fills its pipeline."""
    shared, stages = kernel["shared"], kernel["stages"]
    if stages < 2 or not shared:
        return 0
    return resident(kernel, gpu, programs) * shared * (stages - 1) // stages


def resident(kernel: dict[str, Any], gpu: Architecture, programs: int) -> int:
    """Programs of a launch that a multiprocessor runs at once."""
    return max(
        1,
        min(
            (gpu.shared_bytes + 1024) // (kernel["shared"] + 1024),
            65_536 // (32 * kernel["warps"] * max(1, kernel["reg"])),
            64 // kernel["warps"],
            -(-programs // gpu.multiprocessors),
        ),
    )


def _output(tool: str, *words: str) -> str:
    return subprocess.run(
        [str(BINARIES / tool), *words], capture_output=True, text=True, check=True
    ).stdout


def lines_of(
    cases: list[Case], chips: list[str], names: tuple[str, ...] = ("",)
) -> Iterator[dict[str, Any]]:
    """Compile each distinct kernel once for each chip; `names`: those whose names begin so."""
    for chip in chips:
        gpu, seen = CHIPS[chip], set[str]()
        pretend(gpu)
        for case in (one for one in cases if gpu.has_fp8 or not one.has_fp8):
            for rows, launch in launches_of(case):
                if launch.name.startswith(names) and (kind := kind_of(launch)) not in seen:
                    seen.add(kind)
                    yield line_of(chip, case, rows, launch)


def line_of(chip: str, case: Case, rows: int, launch: Launch) -> dict[str, Any]:
    """Compile a kernel and describe it."""
    gpu = CHIPS[chip]
    constants = {
        name: value if isinstance(value, int | float | bool) else str(value)
        for name, value in launch.constants.items()
    }
    try:
        needs = compile_launch(launch)
        needs["loop"]["weights"] = loop_weights(launch)
        needs["in_flight"] = bytes_in_flight(needs, gpu, prod(launch.grid))
    except Exception as error:
        needs = {"error": f"{type(error).__name__}: {error}"[-2000:]}
    about = {"chip": chip, "case": case.name, "rows": rows, "kernel": launch.name}
    about |= {"shared_limit": gpu.shared_bytes, "weight": weight_of(launch)}
    return about | {"grid": launch.grid, **needs, "constants": constants}


def main() -> None:
    """Compile each distinct kernel once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {[case.name for case in ALL]}; none: a few")
    parser.add_argument("--all", action="store_true", help="all programs")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of steps, in place of their own")
    parser.add_argument(
        "--kernel", nargs="+", default=[""], help="kernels whose names begin so alone"
    )
    parser.add_argument(
        "--chips", nargs="+", choices=CHIPS, default=["sm_90"], help="GPUs (default: sm_90)"
    )
    parser.add_argument("--table", action="store_true", help="write docs/internals/gpu-others.md")
    args = parser.parse_args()
    if unknown := set(args.names) - {case.name for case in ALL}:
        parser.error(f"there is no {', '.join(unknown)}")
    if args.table:
        from tests.backend.cuda.chip_table import write

        write()
        return
    cases = ALL if args.all else [case for case in ALL if case.name in args.names] or FEW
    if args.rows:
        cases = [case._replace(rows=tuple(args.rows)) for case in cases]
    for line in lines_of(cases, args.chips, tuple(args.kernel)):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
