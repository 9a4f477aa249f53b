"""Plan of a model on a machine that need not be at hand: what fits, how long a step takes and why.

The program is traced and lowered as for a run, and no weight is read. `planner/step_time.py`
predicts times.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self, Unpack

from headrace.backend_traits import KvDtype, check_kv_dtype, traits_of
from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.source import resolve
from headrace.errors import MemoryLimitError, RequestError
from headrace.loader.options import engine_config
from headrace.measure.options import ModeOptions
from headrace.measure.place import THIS, Place, find_place
from headrace.measure.placed_model import (
    largest_fit,
    longest_context,
    main_format,
    open_model,
    stage_programs,
    with_adapter,
)
from headrace.measure.run_memory import run_memory, this_process
from headrace.parallel.mesh import Mesh
from headrace.planner.draft_gain import Costs, Gain, gain
from headrace.planner.fit import Fit
from headrace.planner.memory import RunMemory
from headrace.planner.money import per_million
from headrace.planner.step_time import ClassTime, StepTimer
from headrace.planner.steps import decode_step, prompt_steps, round_seconds
from headrace.program.adapter import Adapter
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.program.trace import Program
from headrace.record import frozen


@frozen(kw_only=True)
class Workload:
    """What the machine is asked to do; the fields are those of `plan`."""

    prompt: int
    output: int
    batch: int
    draft_depth: int
    draft_acceptance: float

    @property
    def depth(self) -> int:
        """Tokens of context half way through the output."""
        return self.prompt + self.output // 2


@frozen(kw_only=True)
class Times:
    """Predicted seconds of a step of all stages."""

    parts: tuple[ClassTime, ...]
    """Of the slowest stage."""
    stages: tuple[float, ...]

    @classmethod
    def of(cls, timer: StepTimer, step: StepSize) -> Self:
        return cls(parts=tuple(timer.class_times(step)), stages=timer.stage_seconds(step))

    @property
    def slowest(self) -> float:
        return max(self.stages)

    @property
    def total(self) -> float:
        return sum(self.stages)


@frozen(kw_only=True)
class Plan:
    """Facts of a model on a machine, in bytes and seconds."""

    model: str
    lossy: str
    """Description of the lossy options; empty: the full model."""
    format: str
    kv_dtype: KvDtype
    place: Place
    workload: Workload
    fit: Fit
    """Of the rank that needs most memory."""
    run_memory: RunMemory | None
    """Resident bytes of a run of the batch on a CPU."""
    prefill: Times
    decode: Times
    first_token: float
    """Seconds from the start of a prompt to its first token, alone on the machine."""
    per_token: float
    """Seconds between two tokens of a sequence."""
    draft: Gain | None
    longest: int
    """Tokens of context that each sequence of the batch can have; 0: the batch does not fit."""
    stages: tuple[Program, ...]
    """The program of a rank of each stage."""
    timer: StepTimer
    """Of the stages."""
    kv_bytes: float
    """Bytes of a stored number of KV."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all sequences."""
        return self.workload.batch / self.per_token

    def cost(self, price: float | None = None) -> tuple[float, float] | None:
        """Dollars for a million prompt tokens and for a million output tokens; `price`: dollars
        an hour of a device, in place of the machine file's.
        """
        hourly = price if price is not None else self.place.price
        if hourly is None:
            return None
        price, work = hourly * self.place.mesh.ranks, self.workload
        return (
            per_million(price, self.first_token, work.prompt),
            per_million(price, self.per_token, work.batch),
        )


def plan(
    model: str,
    *,
    on: str = THIS,
    tensor: int = 1,
    pipeline: int = 1,
    network: str | None = None,
    format: str | None = None,
    kv_dtype: KvDtype = "bf16",
    prompt: int = 512,
    output: int = 128,
    batch: int = 1,
    context: int | None = None,
    draft_depth: int = 0,
    draft_acceptance: float = 0.0,
    adapter: str | None = None,
    **modes: Unpack[ModeOptions],
) -> Plan:
    """Plan a model on a machine.

    Args:
        model: as for `LLM`, or a `config.json`.
        on: name of a machine file, or `this`.
        tensor: devices that share each weight matrix.
        pipeline: stages.
        network: network between the stages, each on a host of its own, such as `ethernet-25`.
        format: GGUF type of all matrices; by default the file's.
        kv_dtype: number format of KV.
        prompt: tokens of a prompt.
        output: tokens of an output.
        batch: sequences that decode together.
        context: tokens that each sequence has room for; by default prompt and output.
        draft_depth: draft tokens of each sequence in a step. Finding them counts as free.
        draft_acceptance: probability that the target accepts a draft token.
        adapter: a folder of PEFT or mlx-lm, a GGUF file, or `hf:ORG/NAME`, with low-rank matrices.
            All sequences use it.
        modes: lossy options, as in `EngineConfig`.

    Raises RequestError for an unknown machine or format, MemoryLimitError if weights do not fit,
    and the errors of `open_checkpoint`.
    """
    workload = Workload(
        prompt=prompt,
        output=output,
        batch=batch,
        draft_depth=draft_depth,
        draft_acceptance=draft_acceptance,
    )
    checkpoint = open_model(model, format)
    place = find_place(on, Mesh(tensor=tensor, pipeline=pipeline), network)
    check_kv_dtype(place.backend, kv_dtype)
    length = context or workload.prompt + workload.output
    if length > checkpoint.spec.max_context:
        raise RequestError(
            f"context {length:,} exceeds the model's {checkpoint.spec.max_context:,} tokens; use "
            "a shorter --context, --prompt or --output"
        )
    config = engine_config({**modes, "backend": place.backend})
    stages = stage_programs(checkpoint, place.backend, place.mesh, config)
    kv_bytes = number_bytes(stages[0].kv_groups, kv_dtype)
    fit = largest_fit(stages, place, kv_dtype, length)
    matrices = None if adapter is None else read_adapter(resolve(adapter), checkpoint.spec)
    base = stages
    if matrices:
        stages, adapter_bytes = with_adapter(stages, place.backend, matrices)
        fit = replace(fit, adapter=adapter_bytes)
    _check_fit(fit, place)

    timer = StepTimer(stages, place.machine, place.reaches, place.link)
    chunk = min(workload.prompt, traits_of(place.backend).max_num_batched_tokens)
    prefill = Times.of(timer, StepSize(((0, chunk),), 1, kv_bytes))
    first_token = sum(map(timer.seconds, prompt_steps(workload.prompt, chunk, kv_bytes)))
    first_token += timer.request_seconds

    decode = Times.of(timer, _decode_step(workload, place, kv_bytes))
    draft = _draft_gain(timer, workload, place, kv_bytes) if draft_depth else None
    per_token = round_seconds(decode.stages, batch) / (draft.speedup if draft else 1.0)
    return Plan(
        model=checkpoint.spec.name,
        lossy=config.lossy,
        format=format or main_format(checkpoint).name,
        kv_dtype=kv_dtype,
        place=place,
        workload=workload,
        fit=fit,
        run_memory=_run_memory(checkpoint, base[0], place, workload, kv_dtype, matrices),
        prefill=prefill,
        decode=decode,
        first_token=first_token,
        per_token=per_token,
        draft=draft,
        longest=longest_context(stages, fit, place, kv_dtype, batch, checkpoint.spec.max_context),
        stages=tuple(stages),
        timer=timer,
        kv_bytes=kv_bytes,
    )


def _decode_step(work: Workload, place: Place, kv_bytes: float, rows: int = 1) -> StepSize:
    return decode_step(work.depth, work.batch, kv_bytes, rows, place.mesh.pipeline)


def _draft_gain(timer: StepTimer, work: Workload, place: Place, kv_bytes: float) -> Gain:
    targets = [
        round_seconds(timer.stage_seconds(_decode_step(work, place, kv_bytes, rows)), work.batch)
        for rows in range(1, work.draft_depth + 2)
    ]
    return gain(work.draft_acceptance, work.draft_depth, Costs(targets, 0.0))


def _check_fit(fit: Fit, place: Place) -> None:
    """Raise MemoryLimitError if weights and runtime leave no memory for KV."""
    if not fit.kv_budget:
        raise MemoryLimitError(
            f"{fit.weights:,} bytes of weights and {fit.to_run:,} of runtime do not fit in the "
            f"{place.memory:,} bytes of {place.title}; use more devices (-tp, -pp) or a smaller "
            "--format"
        )


def _run_memory(
    checkpoint: Checkpoint,
    program: Program,
    place: Place,
    workload: Workload,
    kv_dtype: KvDtype,
    adapter: Adapter | None,
) -> RunMemory | None:
    """Resident bytes of the requests on one CPU; None for GPUs and ranks."""
    if traits_of(place.backend).on_gpu or place.mesh.ranks > 1:
        return None
    return run_memory(
        checkpoint,
        program,
        this_process(),
        kv_dtype=kv_dtype,
        prompt=workload.prompt,
        output=workload.output,
        batch=workload.batch,
        memory=place.memory,
        adapter=adapter,
    )


def plan_facts(found: Plan, price: float | None = None) -> dict[str, Any]:
    """A plan as JSON, in bytes, seconds, tokens/s and dollars."""
    fit, place, costs = found.fit, found.place, found.cost(price)
    return {
        "model": found.model,
        "lossy": found.lossy,
        "format": found.format,
        "kv_dtype": found.kv_dtype,
        "machine": place.name,
        "backend": place.backend,
        "tensor_parallel_size": place.mesh.tensor,
        "pipeline_parallel_size": place.mesh.pipeline,
        "memory": fit.memory,
        "weights": fit.weights,
        "adapter": fit.adapter,
        "runtime": fit.to_run,
        "kv_per_sequence": fit.kv_per_sequence,
        "context": fit.context,
        "sequences": fit.sequences,
        "run_memory": found.run_memory
        and vars(found.run_memory) | {"kv": found.run_memory.kv, "peak": found.run_memory.peak},
        "longest_context": found.longest,
        "prefill": _facts(found.prefill),
        "decode": _facts(found.decode),
        "first_token": found.first_token,
        "per_token": found.per_token,
        "tokens_per_second": found.tokens_per_second,
        "draft": found.draft._asdict() if found.draft else None,
        "dollars_per_million": dict(zip(("prompt", "output"), costs, strict=True))
        if costs
        else None,
        "reach": place.reaches.source,
        "sources": list(place.sources),
    }


def _facts(times: Times) -> Mapping[str, Any]:
    parts = [vars(part) | {"bound": part.bound} for part in times.parts]
    return {"seconds": times.total, "stages": list(times.stages), "parts": parts}
