"""A climb from naive inference to all techniques: one run of the same work for each rung.

Each rung runs in a process of its own. Slow rungs do an evenly spread part of the work.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from headrace.backend import lower_program
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KvConfig
from headrace.convert.texts import read_text, text_pieces
from headrace.errors import HeadraceError, RequestError
from headrace.loader.backend_choice import with_kv_dtype
from headrace.loader.options import engine_config
from headrace.measure.climb_files import climb_folder, convert, own_weights
from headrace.measure.climb_process import run_apart
from headrace.measure.climb_results import Climb, Step, advise
from headrace.measure.climb_run import Measured, Task, Text
from headrace.measure.climb_rungs import (
    CACHE,
    Rung,
    WeightFile,
    Weights,
    float_rungs,
    format_rungs,
    lossy_rungs,
    rungs_of,
)
from headrace.measure.climb_work import Work, make_work
from headrace.measure.placed_model import main_format
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.model import trace_model
from headrace.planner import hardware
from headrace.planner.hardware import Machine
from headrace.planner.reach import Reach, Reaches
from headrace.planner.step_time import StepTimer
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize

_SECONDS, _QUICK_SECONDS = 18.0, 3.0
"""Seconds of a rung that may do a part of the work."""
_RUNS, _QUICK_RUNS = 3, 2
"""Runs of a batch that takes less."""
_TEXT_TOKENS, _QUICK_TEXT_TOKENS = 2048, 256
_TEXT_LENGTH = 256
_MAX_REFERENCE_BYTES = 1 << 29
_MAX_CONTEXTS = 512
_PERFECT = {8.0: Reach(seconds=0.0, bandwidth=1.0, rate=1.0)}
_ROOFS = Reaches(source="the roofs of the machine", table={"linear": _PERFECT, "rows": _PERFECT})

StepCallback = Callable[[Step], None]


def climb(
    model: str,
    *,
    quick: bool = False,
    threads: int = EngineConfig.threads,
    on_progress: ProgressCallback = ignore_progress,
    on_step: StepCallback = lambda step: None,
) -> Climb:
    """Measure a model on this machine's CPU, from naive inference to all techniques.

    Args:
        quick: a sixth of the output tokens, and shorter parts and texts.
        threads: of all rungs but the first two, which have one; 0: one for each usable core.
        on_step: receives each rung when it is measured.

    A rung that cannot run is left out by name. Raises RequestError for a model without a head,
    the errors of `open_checkpoint`, and HeadraceError if no rung runs.
    """
    checkpoint = open_checkpoint(resolve(model))
    if not checkpoint.spec.has_head:
        raise RequestError(f"{model} has no head, so it generates nothing; name another model")
    on_progress("measuring this machine", 0.0)
    machine = hardware.this_machine(threads)
    tokenizer = checkpoint.load_tokenizer()
    work = make_work(model, checkpoint, tokenizer, quick=quick)
    with climb_folder() as folder:
        climber = _Climber(checkpoint, tokenizer, work, folder, quick=quick, threads=threads)
        climber.run(on_progress, on_step)
        if not climber.steps:
            name, reason = next(iter(climber.left_out.items()))
            raise HeadraceError(f"no rung could run; {name}: {reason}")
        steps = tuple(climber.steps[name] for name in climber.order if name in climber.steps)
        exact = [step for step in steps if not step.rung.is_lossy] or steps
        limit = _limit(work, exact[-1], machine)
    return Climb(
        model=model,
        name=checkpoint.spec.name,
        format=main_format(checkpoint).name,
        quick=quick,
        machine=machine,
        requests=len(work.items),
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.tokens,
        slots=climber.slots,
        steps=steps,
        left_out=climber.left_out,
        limit=limit,
        advice=advise(model, checkpoint.path, steps, limit, threads),
    )


class _Climber:
    """Measures rungs one by one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        work: Work,
        folder: Path,
        *,
        quick: bool,
        threads: int,
    ) -> None:
        self.order: list[str] = []
        """Names of all rungs, from the first to the last."""
        self.steps: dict[str, Step] = {}
        self.left_out: dict[str, str] = {}
        self._checkpoint, self._tokenizer, self._work = checkpoint, tokenizer, work
        self._folder, self._threads = folder, threads
        self._reference = folder / "reference"
        self._quick = quick
        self._seconds = _QUICK_SECONDS if quick else _SECONDS
        self._text_tokens = _QUICK_TEXT_TOKENS if quick else _TEXT_TOKENS
        self._firsts: dict[object, Step] = {}
        """The first rung of each kind of kernels and formats."""
        self._known: dict[object, dict[int, list[int]]] = {}
        """Its tokens by request; rungs after it add the requests that no rung had served."""
        longest = -(-work.longest // KvConfig.block_size)
        self.slots = _paged_blocks(work) // longest + 1
        self._kv_blocks = self.slots * longest

    def run(self, on_progress: ProgressCallback, on_step: StepCallback) -> None:
        files = self._convert(on_progress)
        floats = float_rungs()
        rungs = floats + format_rungs(list(files), floats[-1].name)
        rungs += lossy_rungs(list(files), -(-self._work.longest // KvConfig.block_size))
        self.order = [rung.name for rung in rungs]

        # The loop that recomputes needs the tokens of the loop that does not.
        ordered = [rungs[1], rungs[0], *rungs[2:]]
        for rung in ordered:
            if rung.weights not in files:
                continue
            label = f"rung {rungs.index(rung) + 1} of {len(rungs)}: {rung.name}"
            on_progress(label, 0.0)
            try:
                step = self._measure(rung, files[rung.weights], partial(on_progress, label))
            except HeadraceError as error:
                self.left_out[rung.name] = str(error)
                continue
            self.steps[rung.name] = step
            on_step(step)

    def _convert(self, on_progress: ProgressCallback) -> dict[Weights, WeightFile]:
        """Make the files of all weights, and leave out the rungs of the others."""
        files: dict[Weights, WeightFile] = {}
        kinds: list[Weights] = ["f32", "int8", "w8a8", "int4", own_weights(self._checkpoint)]
        if not self._quick:
            kinds.append("sparse")
        for kind in dict.fromkeys(kinds):
            on_progress(f"preparing {kind} weights", 0.0)
            try:
                files[kind] = convert(self._checkpoint, kind, self._folder)
            except HeadraceError as error:
                for name in rungs_of(kind):
                    self.left_out[name] = str(error)
        return files

    def _measure(self, rung: Rung, file: WeightFile, on_share: Callable[[float], None]) -> Step:
        contexts: list[_Context] = []
        if rung.mode == "recompute":
            contexts = self._contexts()
        is_first = rung.mode in ("sequential", "batch") and rung.kernels not in self._firsts
        measured = run_apart(
            Task(
                mode=rung.mode,
                path=file.path,
                options=self._options(rung),
                items=[(context.tokens, 1) for context in contexts]
                or [(list(item.prompt), item.output) for item in self._work.items],
                probes=[list(probe) for probe in self._work.probes],
                length=self._work.longest,
                seconds=self._seconds,
                runs=_QUICK_RUNS if self._quick else _RUNS,
                text=self._text(writes=rung.weights == "f32") if is_first else None,
            ),
            on_share,
        )
        step = self._step(rung, file, measured, contexts)
        self._firsts.setdefault(rung.kernels, step)
        return step

    def _options(self, rung: Rung) -> dict[str, Any]:
        options = {"threads": self._threads, "kv_blocks": self._kv_blocks, **rung.options}
        return options | ({"max_num_seqs": self.slots} if rung.has_slots else {})

    def _contexts(self) -> "list[_Context]":
        """Contexts of the tokens of the loop with KV, from the shortest to the longest."""
        if CACHE not in self.steps:
            raise HeadraceError(f"it repeats tokens of the rung {CACHE}, which is left out")
        measured = self.steps[CACHE].measured
        contexts = [
            _Context([*self._work.items[number].prompt, *output[:i]], number, i)
            for number, output in zip(measured.done, measured.outputs, strict=True)
            for i in range(len(output))
        ]
        contexts.sort(key=lambda context: len(context.tokens))
        return contexts[:: -(-len(contexts) // _MAX_CONTEXTS)]

    def _text(self, *, writes: bool) -> Text | None:
        if not self._pieces:
            return None
        return Text(
            pieces=self._pieces,
            prefix=len(self._tokenizer.prefix_ids),
            reference=str(self._reference),
            writes=writes,
        )

    @cached_property
    def _pieces(self) -> list[list[int]]:
        """A text that no format was made for, in token ids; empty if Python has no such text."""
        spec = self._checkpoint.spec
        length = min(_TEXT_LENGTH, spec.max_context)
        most = _MAX_REFERENCE_BYTES // (4 * spec.vocab_size)
        try:
            text = read_text(None, "evaluation")
        except RequestError:
            return []
        tokens = max(length, min(self._text_tokens, most))
        return text_pieces(self._tokenizer, text, length, tokens, "the text")

    def _step(
        self, rung: Rung, file: WeightFile, measured: Measured, contexts: "list[_Context]"
    ) -> Step:
        total = self._work.tokens
        computed = sum(map(len, measured.outputs))
        seconds = measured.seconds * total / computed
        first = self._firsts.get(rung.kernels)
        # A first token has no KV to begin with, so both loops compute it alike.
        known = first.first_token if first and rung.mode == "recompute" else None
        first_token = measured.first_token if known is None else known
        if rung.mode == "batch":
            of_all = median(measured.first_tokens)
        else:  # the median request waits for half of the others
            of_all = seconds / 2 + first_token

        known_outputs = self._known.setdefault(rung.kernels, {})
        difference = first_difference(_outputs(measured, contexts), known_outputs)
        if rung.mode != "recompute":
            done = zip(measured.done, measured.outputs, strict=True)
            self._known[rung.kernels] = dict(done) | known_outputs
        quality = measured.quality or (first.quality if first else {})
        exact = self._firsts.get(float_rungs()[-1].kernels)
        floats = quality if rung.weights == "f32" else exact.quality if exact else {}
        has_rise = "nll" in quality and "nll" in floats
        return Step(
            rung=rung,
            weights=file,
            measured=measured,
            share=computed / total,
            seconds=seconds,
            tokens_per_second=total / seconds,
            first_token=first_token,
            first_token_of_all=of_all,
            same_as=first.rung.name if first else "",
            difference=difference,
            quality=quality,
            nll_rise=quality["nll"] - floats["nll"] if has_rise else None,
        )


class _Context(NamedTuple):
    tokens: list[int]
    item: int
    place: int
    """Index of the next token in the item's output."""


def _outputs(measured: Measured, contexts: Sequence[_Context]) -> dict[int, dict[int, int]]:
    """Tokens by item and place."""
    found: dict[int, dict[int, int]] = {}
    for number, output in zip(measured.done, measured.outputs, strict=True):
        if contexts:
            _, item, place = contexts[number]
            found.setdefault(item, {})[place] = output[0]
        else:
            found[number] = dict(enumerate(output))
    return found


def first_difference(
    found: Mapping[int, Mapping[int, int]], expected: Mapping[int, Sequence[int]]
) -> str:
    """Describe the first token that differs, of the requests that both have; empty: none."""
    for item in sorted(found.keys() & expected.keys()):
        for index, token in sorted(found[item].items()):
            other = expected[item][index] if index < len(expected[item]) else None
            if token != other:
                return f"request {item}, token {index}: {token} and not {other}"
        if len(found[item]) > len(expected[item]):
            return f"request {item}: {len(found[item])} tokens"
    return ""


def _paged_blocks(work: Work) -> int:
    """KV blocks of all requests, with the blocks that they share once."""
    size = KvConfig.block_size
    shared = work.shared // size
    return shared + sum(
        -(-(len(item.prompt) + item.output) // size) - shared for item in work.items
    )


def _limit(work: Work, step: Step, machine: Machine) -> float:
    """Output tokens/s at the roofs of the machine: one step for all prompts, then one for each
    further token, without drafts.
    """
    checkpoint = open_checkpoint(Path(step.weights.path))
    config = with_kv_dtype(engine_config({"kv_dtype": step.rung.options["kv_dtype"]}), checkpoint)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    lowered = lower_program("cpu", program, checkpoint.tensors)
    kv_bytes = number_bytes(lowered.kv_groups, config.kv_format)
    timer = StepTimer([lowered], machine, _ROOFS)

    prompts = [
        (work.shared if i else 0, len(item.prompt) - (work.shared if i else 0))
        for i, item in enumerate(work.items)
    ]
    seconds = timer.seconds(StepSize(tuple(prompts), len(prompts), kv_bytes))
    for count in range(1, max(item.output for item in work.items)):
        running = [item for item in work.items if item.output > count]
        depths = tuple((len(item.prompt) + count - 1, 1) for item in running)
        seconds += timer.seconds(StepSize(depths, len(running), kv_bytes))
    return work.tokens / seconds
