"""Plan of a model on a machine that need not be at hand: what fits, how long a step takes and why.

The program is traced and lowered as for a run, and no weight is read. `planner/step_time.py`
predicts times.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from headrace.backend import lower_program
from headrace.backend_traits import BackendName, KvDtype, check_kv_dtype, traits_of
from headrace.checkpoint.dummy import dummy_tensors, is_config_only, open_dummy_checkpoint
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.errors import MemoryLimitError, RequestError
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh, weights_of
from headrace.planner import hardware, host
from headrace.planner.draft_gain import Costs, Gain, gain
from headrace.planner.fit import RUNTIME_BYTES, Fit
from headrace.planner.hardware import Machine
from headrace.planner.machine_files import MachineFile, read_machine
from headrace.planner.money import per_million
from headrace.planner.step_time import ClassTime, Link, Reaches, StepTimer, known_reaches
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS
from headrace.record import frozen

THIS = "this"
"""Name of the machine that runs the command."""
GPU_RUNTIME_BYTES = 1 << 30
"""Reserved on a GPU for the context of CUDA, kernels, values and scratch of a step."""
_EXCHANGE_SECONDS = 8e-6
"""Fixed time of an exchange on one host: an estimate."""
_LINK_SHARE = 0.8
"""Share of a link's bandwidth that exchanges reach: an estimate."""


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
class Place:
    """The devices of a plan."""

    name: str
    title: str
    backend: BackendName
    machine: Machine
    memory: int
    """Bytes of a device."""
    mesh: Mesh
    link: Link | None
    reaches: Reaches
    price: float | None
    """Dollars an hour of a device."""
    sources: tuple[str, ...]


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
    format: str
    kv_dtype: KvDtype
    place: Place
    workload: Workload
    fit: Fit
    """Of the rank that needs most memory."""
    prefill: Times
    decode: Times
    first_token: float
    """Seconds from the start of a prompt to its first token, alone on the machine."""
    per_token: float
    """Seconds between two tokens of a sequence."""
    draft: Gain | None

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
    format: str | None = None,
    kv_dtype: KvDtype = "bf16",
    prompt: int = 512,
    output: int = 128,
    batch: int = 1,
    context: int | None = None,
    draft_depth: int = 0,
    draft_acceptance: float = 0.0,
) -> Plan:
    """Plan a model on a machine.

    Args:
        model: as for `LLM`, or a `config.json`.
        on: name of a machine file, or `this`.
        tensor: devices that share each weight matrix.
        pipeline: stages.
        format: GGUF type of all matrices; by default the file's.
        kv_dtype: number format of KV.
        prompt: tokens of a prompt.
        output: tokens of an output.
        batch: sequences that decode together.
        context: tokens that each sequence has room for; by default prompt and output.
        draft_depth: draft tokens of each sequence in a step. Finding them counts as free.
        draft_acceptance: probability that the target accepts a draft token.

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
    checkpoint = _open(model, format)
    place = find_place(on, Mesh(tensor=tensor, pipeline=pipeline))
    check_kv_dtype(place.backend, kv_dtype)
    length = context or workload.prompt + workload.output
    if length > checkpoint.spec.max_context:
        raise RequestError(
            f"context {length:,} exceeds the model's {checkpoint.spec.max_context:,} tokens; use "
            "a shorter --context, --prompt or --output"
        )
    programs = _programs(checkpoint, place)
    kv_bytes = number_bytes(programs[0].kv_groups, kv_dtype)
    fit = max((_fit(program, place, kv_dtype, length) for program in programs), key=_need)
    if not fit.kv_budget:
        raise MemoryLimitError(
            f"{fit.weights:,} bytes of weights and {fit.to_run:,} of runtime do not fit in the "
            f"{place.memory:,} bytes of {place.title}; use more devices (-tp, -pp) or a smaller "
            "--format"
        )

    timer = StepTimer(programs[:: place.mesh.tensor], place.machine, place.reaches, place.link)
    chunk = min(workload.prompt, traits_of(place.backend).max_num_batched_tokens)
    prefill = Times.of(timer, StepSize(((0, chunk),), 1, kv_bytes))
    prompt_steps = [
        StepSize(((start, min(chunk, workload.prompt - start)),), 1, kv_bytes)
        for start in range(0, workload.prompt, chunk)
    ]
    first_token = sum(map(timer.seconds, prompt_steps))

    decode = Times.of(timer, _decode_step(workload, place, 1, kv_bytes))
    per_token, draft = _per_token(decode.stages, workload, place), None
    if workload.draft_depth:
        targets = [
            _per_token(
                timer.stage_seconds(_decode_step(workload, place, rows, kv_bytes)),
                workload,
                place,
            )
            for rows in range(1, workload.draft_depth + 2)
        ]
        draft = gain(workload.draft_acceptance, workload.draft_depth, Costs(targets, 0.0))
        per_token /= draft.speedup
    return Plan(
        model=checkpoint.spec.name,
        format=format or _main_format(checkpoint),
        kv_dtype=kv_dtype,
        place=place,
        workload=workload,
        fit=fit,
        prefill=prefill,
        decode=decode,
        first_token=first_token,
        per_token=per_token,
        draft=draft,
    )


def find_place(on: str, mesh: Mesh) -> Place:
    """Return the devices with this name. Raises RequestError."""
    if on == THIS:
        return _this(mesh)
    found = read_machine(on)
    reaches = known_reaches(found.backend)
    assert reaches
    return Place(
        name=on,
        title=found.name,
        backend=found.backend,
        machine=found.machine(),
        memory=int(found.memory.value),
        mesh=mesh,
        link=_link(found, mesh),
        reaches=reaches,
        price=found.price.value if found.price else None,
        sources=tuple(f"{s.title}, {s.date}, {s.url}" for s in found.sources()),
    )


def _this(mesh: Mesh) -> Place:
    if mesh.ranks > 1:
        raise RequestError("machine 'this' is one device: leave out -tp and -pp, or name another")
    machine, reaches = hardware.this_machine(), known_reaches("cpu")
    assert reaches
    return Place(
        name=THIS,
        title=f"this machine ({machine.cpu}, {machine.at_work})",
        backend="cpu",
        machine=machine,
        memory=host.available_memory(),
        mesh=mesh,
        link=None,
        reaches=reaches,
        price=None,
        sources=("measured by headrace doctor",),
    )


def _link(found: MachineFile, mesh: Mesh) -> Link | None:
    if mesh.ranks == 1:
        return None
    if found.link is None:
        raise RequestError(
            f"machine '{found.key}' has no link to another; use -tp 1 -pp 1, or name a machine "
            "with links"
        )
    return Link(found.link.value * _LINK_SHARE, _EXCHANGE_SECONDS)


def _open(model: str, format: str | None) -> Checkpoint:
    path = resolve(model)
    checkpoint = open_dummy_checkpoint(path) if is_config_only(path) else open_checkpoint(path)
    if format is None:
        return checkpoint
    if format.upper() not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise RequestError(f"format '{format}' is unknown; choose from: {known}")
    return replace(checkpoint, tensors=dummy_tensors(checkpoint.spec, FORMATS[format.upper()]))


def _main_format(checkpoint: Checkpoint) -> str:
    """The format of most bytes."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.format.name] = sizes.get(tensor.format.name, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__)


def _programs(checkpoint: Checkpoint, place: Place) -> list[Program]:
    traced, mesh = trace_model(checkpoint.spec, checkpoint.tensors), place.mesh
    shares = [mesh.program(traced, rank) for rank in range(mesh.ranks)]
    return [
        lower_program(place.backend, share, weights_of(share, checkpoint.tensors))
        for share in shares
    ]


def _fit(program: Program, place: Place, kv_dtype: KvDtype, length: int) -> Fit:
    traits = traits_of(place.backend)
    block, rows = traits.kv_block_size, traits.max_num_batched_tokens
    return Fit(
        memory=place.memory,
        weights=program.weight_bytes,
        kv_per_sequence=sum(
            group.num_blocks(length, rows, block) * group.block_bytes(kv_dtype, block)
            for group in program.kv_groups
        ),
        context=length,
        to_run=GPU_RUNTIME_BYTES if traits.on_gpu else RUNTIME_BYTES,
    )


def _need(fit: Fit) -> int:
    return fit.weights + fit.kv_per_sequence


def _decode_step(workload: Workload, place: Place, rows: int, kv_bytes: float) -> StepSize:
    """A step of the sequences that are in one stage at a time."""
    seqs = -(-workload.batch // place.mesh.pipeline)
    return StepSize(((workload.depth, rows),) * seqs, seqs * rows, kv_bytes)


def _per_token(stages: tuple[float, ...], workload: Workload, place: Place) -> float:
    """Seconds between two tokens of a sequence: all stages, or the slowest one for each step in
    flight.
    """
    in_flight = min(workload.batch, place.mesh.pipeline)
    return max(sum(stages), in_flight * max(stages))


def plan_facts(found: Plan, price: float | None = None) -> dict[str, Any]:
    """A plan as JSON, in bytes, seconds, tokens/s and dollars."""
    fit, place, costs = found.fit, found.place, found.cost(price)
    return {
        "model": found.model,
        "format": found.format,
        "kv_dtype": found.kv_dtype,
        "machine": place.name,
        "backend": place.backend,
        "tensor_parallel_size": place.mesh.tensor,
        "pipeline_parallel_size": place.mesh.pipeline,
        "memory": fit.memory,
        "weights": fit.weights,
        "runtime": fit.to_run,
        "kv_per_sequence": fit.kv_per_sequence,
        "context": fit.context,
        "sequences": fit.sequences,
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
