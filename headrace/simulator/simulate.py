"""Simulates a model under load on devices that need not be at hand.

The real scheduler, KV manager, prefix cache, draft policy and router run; only the time of a step
is predicted (`planner/step_time.py`).
"""

from collections.abc import Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from headrace.backend_traits import KvDtype, check_kv_dtype
from headrace.checkpoint.dummy import is_config_only
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import EngineLimits
from headrace.errors import RequestError
from headrace.loader.kv_size import KvUse, Memory, size_kv
from headrace.loader.memory import default_logit_rows
from headrace.loader.options import engine_config
from headrace.measure.place import THIS, Place, find_place
from headrace.measure.placed_model import largest_fit, open_model, stage_programs
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.parallel.mesh import Mesh
from headrace.planner.step_time import StepTimer
from headrace.program.kv import number_bytes
from headrace.program.trace import Program
from headrace.record import frozen
from headrace.simulator.events import Simulation
from headrace.simulator.readers import Tokenize, read_trace
from headrace.simulator.replica import Replica, ReplicaSetup
from headrace.simulator.report import Report, report_of
from headrace.simulator.routers import ByPrefix, RoundRobin, Router, RouterName, TwoChoices
from headrace.simulator.synthetic import WORKLOADS, draw_trace, parse_workload, with_fields
from headrace.simulator.trace import Trace, at_rate, num_requests
from headrace.simulator.vocabulary import VOCAB_SIZE

if TYPE_CHECKING:
    from headrace.checkpoint.tokenizer import Tokenizer

MAX_REPLICAS = 10_000


class SimulatedOptions(TypedDict, total=False):
    """Fields of `EngineConfig` that change the schedule; each keeps its default there."""

    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    chunked_prefill_size: int | None
    max_model_len: int
    kv_blocks: int
    prefix_cache: bool
    multi_step_ms: float
    target_token_ms: float
    adaptive_speculation: bool


class PlannedCosts:
    """Step times of the plan."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self.request_seconds = timer.request_seconds
        self.schedule_seconds = timer.schedule_seconds
        self.stage_seconds = timer.launch_stages
        self.host_seconds = timer.engine_seconds


@frozen(kw_only=True)
class Deployment:
    """A model on equal replicas."""

    checkpoint: Checkpoint
    place: Place
    setup: ReplicaSetup
    replicas: int = 1
    router: RouterName = "prefix"

    @property
    def devices(self) -> int:
        return self.replicas * self.place.mesh.ranks

    def price(self, price: float | None = None) -> float | None:
        """Dollars an hour of all devices, by the machine file or by the `price` of a device."""
        hourly = price if price is not None else self.place.price
        return None if hourly is None else hourly * self.devices

    def run(self, trace: Trace, on_progress: ProgressCallback = ignore_progress) -> Report:
        """Serve a trace, and report on it."""
        total = num_requests(trace)
        step = f"simulating {total:,} requests"
        on_progress(step, 0.0)
        is_routed = self.replicas > 1 and self.router == "prefix"
        replicas = [
            Replica(self.setup, number, tells_first_tokens=is_routed)
            for number in range(self.replicas)
        ]
        simulation = Simulation(
            router=self._router(),
            replicas=replicas,
            trace=trace,
            on_end=lambda count: on_progress(step, count / total),
        )
        return report_of(simulation.run(), replicas)

    def _router(self) -> Router:
        match self.router:
            case "prefix":
                kv = self.setup.limits.kv
                return ByPrefix(
                    self.replicas,
                    block_size=kv.block_size,
                    num_blocks=max(kv.num_blocks),
                    speed=self.setup.speed(),
                )
            case "two-choices":
                return TwoChoices(self.replicas, self.setup.seed)
            case "round-robin":
                return RoundRobin(self.replicas)


def simulate(
    trace: str,
    model: str = "smollm2",
    *,
    on: str = THIS,
    replicas: int = 1,
    router: RouterName = "prefix",
    tensor: int = 1,
    pipeline: int = 1,
    format: str | None = None,
    kv_dtype: KvDtype = "bf16",
    draft_depth: int = 0,
    draft_acceptance: float = 0.0,
    rate: float | None = None,
    duration: float | None = None,
    seed: int = 0,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[SimulatedOptions],
) -> Report:
    """Simulate the requests of a trace.

    Args:
        trace: a file, or a workload such as `chat` or `lognormal:prompt=512,rate=4`.
        model: as for `LLM`, or a `config.json`.
        on: name of a machine file, or `this`.
        replicas: engines, each on `tensor` x `pipeline` devices.
        router: `prefix` (the router of fleets), `two-choices` or `round-robin`.
        tensor, pipeline, format, kv_dtype: as for `plan`.
        draft_depth: draft tokens of each sequence in a step. Finding them counts as free.
        draft_acceptance: probability that a draft token is accepted.
        rate: conversations that start per second; by default the trace's.
        duration: seconds after which no conversation starts.
        seed: seed of traces and of acceptance.
        options: fields of `EngineConfig`.

    Raises RequestError for an invalid trace, machine or option, MemoryLimitError if the model
    does not fit, and the errors of `plan`.
    """
    deployment = deploy(
        model,
        on=on,
        replicas=replicas,
        router=router,
        tensor=tensor,
        pipeline=pipeline,
        format=format,
        kv_dtype=kv_dtype,
        draft_depth=draft_depth,
        draft_acceptance=draft_acceptance,
        seed=seed,
        **options,
    )
    requests = load_trace(trace, seed, deployment.checkpoint, rate=rate, duration=duration)
    return deployment.run(requests, on_progress)


def deploy(
    model: str,
    *,
    on: str = THIS,
    replicas: int = 1,
    router: RouterName = "prefix",
    tensor: int = 1,
    pipeline: int = 1,
    format: str | None = None,
    kv_dtype: KvDtype = "bf16",
    draft_depth: int = 0,
    draft_acceptance: float = 0.0,
    seed: int = 0,
    **options: Unpack[SimulatedOptions],
) -> Deployment:
    """Put a model on replicas. The arguments and errors are those of `simulate`."""
    return deploy_at(
        find_place(on, Mesh(tensor=tensor, pipeline=pipeline)),
        open_model(model, format),
        replicas=replicas,
        router=router,
        kv_dtype=kv_dtype,
        draft_depth=draft_depth,
        draft_acceptance=draft_acceptance,
        seed=seed,
        **options,
    )


def deploy_at(
    place: Place,
    checkpoint: Checkpoint,
    *,
    replicas: int = 1,
    router: RouterName = "prefix",
    kv_dtype: KvDtype = "bf16",
    draft_depth: int = 0,
    draft_acceptance: float = 0.0,
    seed: int = 0,
    **options: Unpack[SimulatedOptions],
) -> Deployment:
    """Put an opened model on replicas of known devices. Raises as `simulate`."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise RequestError(
            f"replicas must be a number from 1 to {MAX_REPLICAS:,}, not {replicas:,}"
        )
    mesh = place.mesh
    check_kv_dtype(place.backend, kv_dtype)
    config = engine_config(
        {
            **options,
            "backend": place.backend,
            "kv_dtype": kv_dtype,
            "tensor_parallel_size": mesh.tensor,
            "pipeline_parallel_size": mesh.pipeline,
            "max_draft_tokens": draft_depth or EngineConfig.max_draft_tokens,
            "max_logit_rows": default_logit_rows(checkpoint.spec.vocab_size),
        }
    )
    programs = stage_programs(checkpoint, place.backend, mesh)
    whole = programs[0]
    if mesh.ranks > 1:
        (whole,) = stage_programs(checkpoint, place.backend, Mesh())
    timer = StepTimer(programs, place.machine, place.reaches, place.link)
    limits = _limits(checkpoint, place, config, whole, programs)
    setup = ReplicaSetup(
        limits=limits,
        config=config,
        costs=PlannedCosts(timer),
        kv_bytes=number_bytes(whole.kv_groups, kv_dtype),
        max_in_flight=max(config.traits.max_in_flight, mesh.pipeline),
        draft_depth=draft_depth,
        draft_acceptance=draft_acceptance,
        seed=seed,
    )
    return Deployment(
        checkpoint=checkpoint, place=place, setup=setup, replicas=replicas, router=router
    )


def _limits(
    checkpoint: Checkpoint,
    place: Place,
    config: EngineConfig,
    whole: Program,
    programs: Sequence[Program],
) -> EngineLimits:
    """Limits of an engine, with the KV blocks that its loader would make.

    Raises MemoryLimitError, or RequestError if `max_model_len` exceeds the model's context.
    """
    max_context = checkpoint.spec.max_context
    length = config.max_model_len or max_context
    if length > max_context:
        raise RequestError(
            f"max_model_len is {length:,}, but the model's context has {max_context:,} tokens; "
            f"set max_model_len to {max_context:,} or less"
        )
    block_size = config.traits.kv_block_size
    sizes: list[KvConfig] = []
    for program in programs:
        runtime = largest_fit([program], place, config.kv_format, length).to_run
        memory = Memory(place.memory, runtime, on_gpu=config.traits.on_gpu)
        use = KvUse(program.kv_groups, config.max_rows)
        sizes += size_kv([use], config, length, program.weight_bytes, memory, block_size)
    fewest = map(min, zip(*(size.num_blocks for size in sizes), strict=True))
    return EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=length,
        kv=KvConfig(tuple(fewest), block_size, config.kv_format),
        kv_groups=whole.kv_groups,
        attention_crossover=whole.attention_crossover,
    )


def load_trace(
    trace: str,
    seed: int,
    checkpoint: Checkpoint | None = None,
    *,
    rate: float | None = None,
    duration: float | None = None,
) -> Trace:
    """Read or draw a trace. Raises RequestError.

    The tokenizer of `checkpoint`, if it has one, counts the tokens of texts.
    """
    if trace.partition(":")[0] in WORKLOADS:
        workload = parse_workload(trace)
        if rate is not None:
            workload = with_fields(workload, {"rate": rate})
        found = draw_trace(workload, seed)
    else:
        path = Path(trace)
        if not path.is_file():
            raise RequestError(
                f"trace {trace[:80]!r} is neither a file nor a workload; choose from "
                f"{', '.join(WORKLOADS)}, or name a .jsonl, .json or .csv file"
            )
        found = read_trace(path, seed, rate or 1.0, _tokenizer_of(checkpoint))
        if rate is not None:
            found = at_rate(found, rate)
    limit = inf if duration is None else found[0].start + duration
    return [conversation for conversation in found if conversation.start <= limit]


def _tokenizer_of(checkpoint: Checkpoint | None) -> Tokenize | None:
    """The tokenizer of a model; None if it has no files for one."""
    if checkpoint is None or is_config_only(checkpoint.path):
        return None

    @cache
    def tokenizer() -> "Tokenizer":
        return checkpoint.load_tokenizer()

    return lambda text: tokenizer().encode(text)
