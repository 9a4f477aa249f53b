"""Measurements on a GPU, each with its target."""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from costs import Context, by_kernel
from programs import (
    decoding,
    draws,
    executable_of,
    plan_of,
    sequences_of,
    step_of,
    weight_bytes,
)

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.timing import seconds, synchronise
from headrace.backend_traits import KvDtype
from headrace.batch import RaggedBatch
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.logit_ops import ShiftedSampleOps
from headrace.model.spec import ModelSpec
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import make_proposers
from tests.backend.cuda.hollow import SPECS
from tests.tiny import TinyVocabulary

FORMATS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
FLOORS = {
    ("8b", "bf16", "share of copy bandwidth"): 0.82,
    ("8b", "int8", "share of copy bandwidth"): 0.60,
    ("8b", "int4", "share of copy bandwidth"): 0.55,
    ("1b", "bf16", "share of copy bandwidth"): 0.65,
    ("8b", "bf16", "prefill"): 350.0,
}


@dataclass(frozen=True)
class Figure:
    """A median with its spread and its target: a minimum, or a maximum with `less_is_better`."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    floor: float | None = None
    less_is_better: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        values: Iterable[float],
        floor: float | None = None,
        less_is_better: bool = False,
    ) -> "Figure":
        found = list(values)
        return cls(
            name, unit, statistics.median(found), min(found), max(found), floor, less_is_better
        )

    @property
    def is_reached(self) -> bool | None:
        """Whether the figure reaches its target; None: it has no target."""
        if self.floor is None:
            return None
        return self.value <= self.floor if self.less_is_better else self.value >= self.floor

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"is_reached": self.is_reached}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements, for a GPU or small enough for the interpreter."""

    specs: tuple[str, ...] = ("135m", "1b", "8b")
    copied: int = 2 << 30
    rounds: int = 11
    latency_rows: tuple[int, ...] = (1, 16)
    batches: tuple[int, ...] = (1, 8, 64)
    chunk: int = 2048
    context: int = 512
    long_context: int = 32_768
    long_contexts: tuple[int, ...] = (1, 4)
    tokens: int = 256
    host_steps: int = 200
    compared_rows: tuple[int, ...] = (1, 64, 512)


SMOKE = Sizes(("tiny",), 1 << 16, 1, (1, 2), (2,), 6, 5, 20, (1,), 4, 2, (2,))


def copy_bandwidth(sizes: Sizes) -> Figure:
    """Bytes read and written per second by copies within the memory of the GPU, in GB/s."""
    source, to = (torch.zeros(sizes.copied, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return Figure.of(
        "copy",
        "GB/s",
        (2e-9 * sizes.copied / t for t in seconds(lambda: to.copy_(source), sizes.rounds, 5)),
    )


def model_figures(name: str, number: str, copied: float, sizes: Sizes) -> Iterator[Figure]:
    """Figures of a model with weights in a number format."""
    spec = SPECS[name]
    max_batch = max(sizes.batches)
    slots = max_batch * (sizes.context + sizes.tokens + 2) + sizes.chunk
    executable = executable_of(spec, FORMATS[number], slots=slots + max_batch * 64)
    own = f"{name} {number}"
    for rows in sizes.latency_rows:
        floor = FLOORS.get((name, number, "share of copy bandwidth")) if rows == 1 else None
        yield from latency(executable, own, rows, copied, floor, sizes)
    yield from prefill(executable, spec, own, FLOORS.get((name, number, "prefill")), sizes)
    if number == "int4":
        yield host_work(executable, spec, f"{own}: work of the host", False, sizes)
        yield host_work(executable, spec, f"{own}: work of the host, further launches", True, sizes)
    for seqs in sizes.batches:
        plan_of(executable, decoding(executable, seqs, 1))
        yield Figure.of(
            f"{own}: {seqs} sequences", "tokens/s", serve(executable, spec, seqs, sizes)
        )
    if number == "bf16":
        yield from invariance(executable, own, sizes)


def latency(
    executable: CudaExecutable,
    own: str,
    rows: int,
    copied: float,
    floor: float | None,
    sizes: Sizes,
) -> Iterator[Figure]:
    """Time of a decoding step, its share of the copy bandwidth, and that of each kernel."""
    plan = plan_of(executable, decoding(executable, rows, sizes.context))
    assert plan.graph
    took = seconds(plan.graph, sizes.rounds, 5)
    context = Context(rows * sizes.context, token_bytes(executable))
    read = weight_bytes(executable) + rows * kv_bytes(executable, sizes.context)
    name = "one row" if rows == 1 else f"{rows} rows"
    shares = Figure.of(
        f"{own}: share of copy bandwidth at {name}", "", (read / t / copied for t in took), floor
    )
    kernels = by_kernel(plan, kernel_seconds(executable, plan.launches), context)
    yield replace(
        shares,
        more={
            "kernels": [
                {
                    **{"kernel": each.name, "launches": each.launches, "bytes": each.bytes},
                    **{"ms": 1e3 * each.seconds, "share": each.share(copied)},
                }
                for each in kernels
            ]
        },
    )
    yield Figure.of(f"{own}: step of {name}", "ms", (1e3 * t for t in took))


def kv_bytes(executable: CudaExecutable, context: int) -> int:
    return sum(
        store.bytes // (store.keys.shape[1] * store.block_size) * context
        for store in executable._stores
    )


def token_bytes(executable: CudaExecutable) -> int:
    """Bytes of a token in a layer."""
    return kv_bytes(executable, 1) // sum(len(store.group.layers) for store in executable._stores)


def kernel_seconds(executable: CudaExecutable, launches: list[Launch]) -> list[float]:
    """Seconds of each launch of a step, as the GPU itself counts them."""
    if is_interpreting():
        return executable._stream.times(launches)
    executable._stream.run(launches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        executable._stream.run(launches)
        synchronise()
    names = {launch.name for launch in launches}
    events = [event for event in profile.events() if event.name in names]
    events.sort(key=lambda event: event.time_range.start)
    assert [event.name for event in events] == [launch.name for launch in launches]
    return [1e-6 * event.self_device_time_total for event in events]


def prefill(
    executable: CudaExecutable, spec: ModelSpec, own: str, floor: float | None, sizes: Sizes
) -> Iterator[Figure]:
    """Arithmetic of all products of a prompt chunk, in TFLOPS."""
    rows = sizes.chunk
    batch = step_of(
        executable,
        sequences_of(1, rows),
        [(np.arange(rows) % spec.vocab_size).tolist()],
        all_logits=False,
    )
    plan = plan_of(executable, batch, captured=False)
    layer = (
        spec.dim * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
        + 3 * spec.dim * spec.ffn_dim
    )
    products = 2 * spec.num_layers * (rows * layer + rows * rows * spec.num_heads * spec.head_dim)
    took = seconds(lambda: executable._stream.run(plan.launches), max(2, sizes.rounds // 2))
    yield Figure.of(
        f"{own}: prefill of {rows} rows", "TFLOPS", (1e-12 * products / t for t in took), floor
    )


def invariance(executable: CudaExecutable, own: str, sizes: Sizes) -> Iterator[Figure]:
    """Extra time of steps compared with products by cuBLAS, as a share of the time with cuBLAS.

    Results of cuBLAS depend on the batch. The comparison leaves out the element-wise work of our
    kernels.
    """
    for rows in sizes.compared_rows:
        batch = step_of(executable, sequences_of(1, rows), [[5] * rows], all_logits=False)
        plan = plan_of(executable, batch)
        assert plan.graph
        capture = executable._stream.capture
        others = [
            _by_cublas(launch) if launch.name == "linear_kernel" else launch
            for launch in plan.launches
        ]
        executable._stream.run(others)
        theirs = capture(others)
        pairs = [
            (seconds(plan.graph, 1, 3)[0], seconds(theirs, 1, 3)[0]) for _ in range(sizes.rounds)
        ]
        yield Figure.of(
            f"{own}: over cuBLAS at {rows} rows",
            "",
            (a / b - 1 for a, b in pairs),
            0.05,
            less_is_better=True,
        )


def _by_cublas(launch: Launch) -> Any:
    x, codes = launch.args[1:3]
    rows = torch.randn(len(x), codes.shape[1], device=DEVICE).to(codes.dtype)
    product, weight = torch.empty(len(x), len(codes), dtype=codes.dtype, device=DEVICE), codes.T
    return lambda: torch.mm(rows, weight, out=product)


def host_work(
    executable: CudaExecutable, spec: ModelSpec, name: str, later: bool, sizes: Sizes
) -> Figure:
    """Host seconds of a decode launch whose tokens stay on the device: launching, reading results.

    `later`: for a launch of multi-step decoding after the first one.
    """
    number = max(sizes.batches)
    batch = decoding(executable, number, sizes.context)
    plan_of(executable, batch)
    ops = draws(batch, spec.vocab_size)
    pending = batch._replace(token_source=np.arange(number, dtype=np.int32))
    tickets, took = deque([executable.launch(batch, ops)]), []
    for _ in range(sizes.host_steps):
        begun = time.perf_counter()
        tickets.append(executable.launch(pending, ShiftedSampleOps(ops, 1) if later else ops))
        launched = time.perf_counter()
        while not tickets[0].ready:
            time.sleep(0)
        ready = time.perf_counter()
        tickets.popleft().wait()
        took.append(1e6 * (launched - begun + time.perf_counter() - ready))
    tickets.popleft().wait()
    return Figure.of(
        f"{name} at {number} sequences", "us", took[len(took) // 4 :], 30.0, less_is_better=True
    )


def serve(executable: CudaExecutable, spec: ModelSpec, number: int, sizes: Sizes) -> list[float]:
    """Tokens per second of an engine in steps in which all requests decode."""
    blocks = tuple(store.keys.shape[1] - 1 for store in executable._stores)
    config = EngineConfig(
        backend="cuda", proposer="off", prefix_cache=False, chunked_prefill_size=512
    )
    limits = EngineLimits(
        spec.vocab_size, spec.max_context, KvConfig(blocks, 64, "bf16"), executable.kv_groups
    )
    engine = Engine(
        executable, TinyVocabulary(spec.vocab_size), limits, config, make_proposers(config)
    )
    for i in range(number):
        engine.add_request(
            [3 + i] * 8, SamplingParams(temperature=0, max_tokens=sizes.tokens, ignore_eos=True)
        )
    took = []
    while engine.has_work:
        begun = time.perf_counter()
        tokens = sum(len(update.token_ids) for update in engine.step())
        if tokens and tokens % number == 0:
            took.append(tokens / (time.perf_counter() - begun))
    return took[len(took) // 4 : -2] or took


def long_contexts(copied: float, sizes: Sizes) -> Iterator[Figure]:
    """Share of the copy bandwidth at which attention reads a long context, with the sizes of the 8B
    model.
    """
    spec = replace(SPECS["8b" if "8b" in sizes.specs else "tiny"], num_layers=4, vocab_size=4096)
    kinds: tuple[KvDtype, ...] = ("bf16", "fp8", "int8")
    for kind in kinds:
        for number in sizes.long_contexts:
            executable = executable_of(spec, "Q4_0", kind, slots=number * (sizes.long_context + 64))
            batch: RaggedBatch = decoding(executable, number, sizes.long_context)
            plan = plan_of(executable, batch)
            launches = [launch for launch in plan.launches if launch.name.startswith("attention")]
            run = executable._stream.capture(launches)
            read = number * kv_bytes(executable, sizes.long_context)
            name = f"KV in {kind}: {number} x {sizes.long_context} tokens"
            shares = (read / t / copied for t in seconds(run, sizes.rounds, 5))
            yield Figure.of(name, "", shares, 0.75 if kind == "bf16" else None)
