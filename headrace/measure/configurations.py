"""Configurations of a model on machines, with the speed and cost that the plan predicts for each.

`planner/steady_state.py` turns step times into latencies of users.
"""

from collections.abc import Iterator
from dataclasses import field, replace
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

from headrace.backend_traits import BackendName, KvDtype, traits_of
from headrace.checkpoint.dummy import is_config_only
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig
from headrace.errors import RequestError, UnsupportedModelError
from headrace.loader.activation_sparsity import check_activation_sparsity
from headrace.loader.backend_choice import with_kv_dtype
from headrace.loader.drafts import model_program
from headrace.loader.early_exit import check_early_exit
from headrace.loader.options import engine_config
from headrace.measure.describe import key_kind
from headrace.measure.goal import METRICS, Goal, Metric
from headrace.measure.options import ModeOptions
from headrace.measure.place import THIS, Place, find_place
from headrace.measure.placed_model import largest_fit, main_format, open_model, stage_programs
from headrace.parallel.mesh import Mesh
from headrace.planner.fit import Fit
from headrace.planner.machine_files import machine_names, read_machine
from headrace.planner.money import per_million
from headrace.planner.quality import NO_LOSS, Loss, format_loss, kv_rank
from headrace.planner.steady_state import Batching, Load, SteadyState, steady_state
from headrace.planner.step_time import StepTimer
from headrace.program.kv import number_bytes
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS
from headrace.record import frozen

MESHES = tuple(
    Mesh(tensor=tensor, pipeline=pipeline)
    for tensor in (1, 2, 4, 8)
    for pipeline in (1, 2, 4, 8)
    if tensor * pipeline <= 8
)
"""Up to the devices of one host."""
_FORMATS = (("Q8_0",), ("Q4_K", "Q4_0"))
"""Formats to try besides the model's own: of each group the first that divides its matrices."""
_ALIKE = 1.4
"""Ratio of bits up to which the measured speed of attention serves another format."""
_CHUNK_FACTORS = (0.25, 1, 4, 16)


@frozen(kw_only=True)
class SearchSpace:
    """What a search may choose from; None: anything."""

    on: tuple[str, ...] | None = None
    """Names of machines."""
    budget: float | None = None
    """Max dollars an hour of all devices."""
    price: float | None = None
    """Dollars an hour of a device, in place of the machine files'."""
    formats: tuple[str, ...] | None = None
    """GGUF types of all matrices; the model's own name means its file."""
    kv_dtypes: tuple[KvDtype, ...] | None = None
    meshes: tuple[Mesh, ...] | None = None
    batches: tuple[int, ...] | None = None
    """Values of `max_num_seqs`."""
    chunks: tuple[int, ...] | None = None
    """Values of `chunked_prefill_size`."""
    draft_depth: int = 0
    """Max draft tokens in a step."""
    draft_acceptance: float = 0.0
    modes: ModeOptions = field(default_factory=ModeOptions)
    """Lossy options of all configurations."""


class Setup(NamedTuple):
    """The choices that memory depends on."""

    place: Place
    """Devices of a replica."""
    format: str
    kv_dtype: KvDtype

    @property
    def key(self) -> tuple[str, Mesh, str, KvDtype]:
        return self.place.name, self.place.mesh, self.format, self.kv_dtype


class Engine(NamedTuple):
    """Options of an engine."""

    max_num_seqs: int
    chunk: int
    """`chunked_prefill_size`."""
    draft_depth: int


@frozen(kw_only=True)
class Candidate:
    """A configuration, with the means over all requests that it is predicted to have."""

    setup: Setup
    engine: Engine
    replicas: int
    fit: Fit
    loss: Loss
    """Of the weights' format."""
    steady: SteadyState
    """Of a replica."""
    throughput: float
    """Output tokens/s of all replicas."""
    price: float | None
    """Dollars an hour of all devices."""

    @property
    def devices(self) -> int:
        return self.replicas * self.setup.place.mesh.ranks

    def value(self, metric: Metric) -> float:
        """A cost without a price is infinite."""
        match metric:
            case "ttft":
                return self.steady.ttft
            case "tpot":
                return self.steady.tpot
            case "throughput":
                return self.throughput
        return inf if self.price is None else per_million(self.price, 1.0, self.throughput)

    def excess(self, goal: Goal, metric: Metric) -> float:
        """Value over bound, or bound over value of a lower bound; 1 or less meets it."""
        bound, value = goal.bound(metric), self.value(metric)
        if bound is None:
            return 0.0
        return bound / value if metric == "throughput" else value / bound

    def misses(self, goal: Goal, budget: float | None) -> dict[str, float]:
        """Factors by which bounds are missed."""
        factors: dict[str, float] = {metric: self.excess(goal, metric) for metric in METRICS}
        if budget is not None:
            factors["budget"] = inf if self.price is None else self.price / budget
        return {name: factor for name, factor in factors.items() if factor > 1}

    def rank(self, goal: Goal) -> tuple[float, ...]:
        """Order of candidates that meet the goal: the least is the best.

        By default the cheapest comes first, then the least loss, then the most tokens/s.
        """
        price = inf if self.price is None else self.price
        loss = self.loss.high + kv_rank(self.setup.kv_dtype)
        others = (price, self.devices, loss, -self.throughput)
        if goal.best is None:
            return others
        value = self.value(goal.best)
        return (-value if goal.best == "throughput" else value, *others)


class Search:
    """Predicts configurations of a model. Traces and step times are kept between goals."""

    def __init__(self, model: str, space: SearchSpace) -> None:
        self.space = space
        self.tried = 0
        own = open_model(model)
        self.model, self.own_format = own.spec.name, main_format(own).name
        self._model = model
        self.max_context = own.spec.max_context
        self.mode = engine_config(dict(space.modes))
        """The configuration, with the lossy options."""
        whole = model_program(self.mode, own)
        self._kv_groups, self._crossover = whole.kv_groups, whole.attention_crossover
        has_weights = not is_config_only(resolve(model))
        if has_weights:
            check_early_exit(self.mode, own)
            check_activation_sparsity(self.mode, own)
        self.key_kind = key_kind(own.spec, own.tensors if has_weights else None)
        self._own_kv_dtype = with_kv_dtype(EngineConfig(), own).kv_format
        self._checkpoints: dict[str, Checkpoint] = {self.own_format: own}
        self._programs: dict[tuple[str, BackendName, Mesh], list[Program]] = {}
        self._timers: dict[tuple[str, str, Mesh], StepTimer] = {}
        self._fits: dict[tuple[str, BackendName, Mesh, KvDtype, int], Fit] = {}

    @cached_property
    def places(self) -> list[Place]:
        """Devices of a replica, the cheapest first.

        Raises RequestError for an unknown machine, and if no machine has a price.
        """
        space = self.space
        names = space.on or tuple(name for name in machine_names() if read_machine(name).price)
        places = []
        for name in names:
            for mesh in space.meshes or MESHES:
                try:
                    place = find_place(name, mesh)
                except RequestError:
                    if mesh.ranks == 1 or (space.meshes and len(names) == 1):
                        raise
                    continue
                if space.price is not None:
                    place = replace(place, price=space.price)
                elif name == THIS:
                    place = replace(place, price=0.0)
                elif place.price is None and space.budget is not None:
                    raise RequestError(
                        f"machine '{name}' has no known price; add --price, or leave out --budget"
                    )
                places.append(place)
        return sorted(places, key=lambda place: (_price(place), place.mesh.ranks))

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The formats to try. Raises RequestError for an unknown one."""
        if self.space.formats:
            return tuple(format.upper() for format in self.space.formats)
        own_bits = FORMATS[self.own_format].bits
        found = [self.own_format]
        for group in _FORMATS:
            for format in group:
                if (
                    FORMATS[format].bits < own_bits
                    and main_format(self._checkpoint(format)).name == format
                ):
                    found.append(format)
                    break
        return tuple(found)

    def setups(self) -> Iterator[Setup]:
        """All choices that memory depends on, the cheapest devices first."""
        for place in self.places:
            for format in self.formats:
                for dtype in self._kv_dtypes(place.backend):
                    yield Setup(place, format, dtype)

    def candidates(
        self, goal: Goal, setup: Setup, replicas: int, *, only_first: bool = False
    ) -> Iterator[Candidate]:
        """All engines of a setup that fit in memory; or one, with the most sequences."""
        fit = self.fit(setup, goal.context)
        if fit is None or not fit.sequences:
            return
        users = ceil(goal.users / replicas)
        load = Load(users=users, prompt=goal.prompt, output=goal.output)
        backend = setup.place.backend
        for depth in range(self.space.draft_depth + 1):
            for batch in self._batches(users, fit):
                for chunk in self.space.chunks or _chunks(backend):
                    engine = Engine(batch, chunk, depth)
                    yield self._candidate(goal, setup, replicas, load, fit, engine)
                    if only_first:
                        return

    def _candidate(
        self, goal: Goal, setup: Setup, replicas: int, load: Load, fit: Fit, engine: Engine
    ) -> Candidate:
        self.tried += 1
        place = setup.place
        batching = Batching(
            max_num_seqs=engine.max_num_seqs,
            chunk=engine.chunk,
            max_rows=traits_of(place.backend).max_num_batched_tokens,
            crossover=self._crossover,
            kv_bytes=self._timed_kv_bytes(setup),
            pipeline=place.mesh.pipeline,
            draft_depth=engine.draft_depth,
            draft_acceptance=self.space.draft_acceptance,
        )
        steady = steady_state(self._timer(setup), load, batching)
        each = goal.users / load.users
        return Candidate(
            setup=setup,
            engine=engine,
            replicas=replicas,
            fit=fit,
            loss=self._loss(setup.format),
            steady=steady,
            throughput=steady.requests_per_second * goal.output * each,
            price=None if place.price is None else place.price * place.mesh.ranks * replicas,
        )

    def _timed_kv_bytes(self, setup: Setup) -> float:
        """Bytes of a number of KV for predictions of time.

        A format counts as the model's own if no attention over such small numbers was measured.
        """
        kv_bytes = number_bytes(self._kv_groups, setup.kv_dtype)
        known = min(setup.place.reaches.table.get("attention", {16: None}))
        if 8 * kv_bytes * _ALIKE >= known:
            return kv_bytes
        return max(kv_bytes, number_bytes(self._kv_groups, self._own_kv_dtype))

    def fit(self, setup: Setup, context: int) -> Fit | None:
        """Memory of the rank that needs most; None if the mesh cannot split the model."""
        place = setup.place
        key = setup.format, place.backend, place.mesh, setup.kv_dtype, context
        if key not in self._fits:
            programs = self._programs_of(setup)
            if not programs:
                return None
            self._fits[key] = largest_fit(programs, place, setup.kv_dtype, context)
        return replace(self._fits[key], memory=place.memory)

    def _batches(self, users: int, fit: Fit) -> list[int]:
        most = min(users, fit.sequences)
        if self.space.batches:
            return sorted({min(batch, most) for batch in self.space.batches}, reverse=True)
        return sorted({max(1, most * quarters // 4) for quarters in (1, 2, 3, 4)}, reverse=True)

    def _kv_dtypes(self, backend: BackendName) -> tuple[KvDtype, ...]:
        known = traits_of(backend).kv_dtypes
        if self.space.kv_dtypes:
            return tuple(dtype for dtype in self.space.kv_dtypes if dtype in known)
        return (self._own_kv_dtype, "int8")

    def _loss(self, format: str) -> Loss:
        if format == self.own_format:
            return NO_LOSS
        return format_loss(self.model, format, FORMATS[format].bits)

    def _checkpoint(self, format: str) -> Checkpoint:
        if format not in self._checkpoints:
            self._checkpoints[format] = open_model(self._model, format)
        return self._checkpoints[format]

    def _programs_of(self, setup: Setup) -> list[Program]:
        """A program of each stage; none if the mesh cannot split the model."""
        key = setup.format, setup.place.backend, setup.place.mesh
        if key not in self._programs:
            try:
                checkpoint = self._checkpoint(setup.format)
                config = engine_config({**self.space.modes, "backend": key[1]})
                self._programs[key] = stage_programs(checkpoint, key[1], key[2], config)
            except UnsupportedModelError:
                if setup.place.mesh.ranks == 1:
                    raise
                self._programs[key] = []
        return self._programs[key]

    def _timer(self, setup: Setup) -> StepTimer:
        place = setup.place
        key = setup.format, place.name, place.mesh
        if key not in self._timers:
            stages = self._programs_of(setup)
            self._timers[key] = StepTimer(stages, place.machine, place.reaches, place.link)
        return self._timers[key]


def _price(place: Place) -> float:
    return inf if place.price is None else place.price * place.mesh.ranks


def _chunks(backend: BackendName) -> tuple[int, ...]:
    traits = traits_of(backend)
    sizes = (int(traits.chunked_prefill_size * factor) for factor in _CHUNK_FACTORS)
    return tuple(sorted({min(size, traits.max_num_batched_tokens) for size in sizes}))
