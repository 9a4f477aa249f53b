"""Measures a frontier: bytes, speed and loss of all forms of a model, each also as a draft."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Unpack, get_args

from headrace.checkpoint.fingerprint import fingerprint
from headrace.convert.spill_file import SpillFile
from headrace.errors import HeadraceError, RequestError
from headrace.measure.draft_meter import DraftMeter
from headrace.measure.evaluate import MAX_TOKENS, Evaluator
from headrace.measure.frontier_meter import FormMeter, drafted_tokens
from headrace.measure.frontier_points import Frontier, Point
from headrace.measure.frontier_results import FrontierResults
from headrace.measure.frontier_rungs import Rung, Workshop, rungs_of
from headrace.measure.options import ModelOptions
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.validation import integer

Aspect = Literal["quality", "speed"]
PARTS: tuple[Aspect, ...] = get_args(Aspect)
_RESULTS = "frontier.json"


def measure_frontier(
    model: str,
    *,
    formats: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    text: Path | str | None = None,
    tokens: int = 4096,
    depth: int = 1024,
    quick: bool = False,
    keep: Path | None = None,
    parts: Sequence[Aspect] = PARTS,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[ModelOptions],
) -> Frontier:
    """Measure all forms of a model: number formats and modes, each also as an exact draft.

    Args:
        formats: in place of the usual formats with fewer bits than the model's.
        files: further forms of the model by name, such as results of `headrace convert`. The name
            of a usual form, such as `2:4 int4-g32` or `40% zeros`, saves its conversion or its
            calibration.
        text: path of a text; by default a part of Python's language reference.
        tokens: number of evaluated tokens.
        depth: tokens of a piece of the text, and of context before the timed tokens.
        quick: fewer forms, and fewer steps of each.
        keep: folder for results and converted files. A later run measures what lacks there.
        parts: what to measure. Quality can be measured on a busy machine, speed cannot.
        options: fields of `EngineConfig`.

    Forms that the model cannot have are left out by name. Raises RequestError for an unknown
    format, a lossy option, a model without a head, or a folder with results of other options.
    """
    integer("depth", depth, 2, MAX_TOKENS)
    integer("tokens", tokens, 2, MAX_TOKENS)
    spare = DraftMeter.spare(drafted_tokens(is_quick=quick))
    evaluator = Evaluator(model, options, text, tokens, depth, on_progress, spare)
    if evaluator.mode.lossy:
        raise RequestError(
            f"a frontier measures all modes; leave out this one: {evaluator.mode.lossy}"
        )
    with _folder(keep) as folder:
        workshop = Workshop(
            evaluator=evaluator,
            folder=folder,
            formats=formats,
            files=files or {},
            is_quick=quick,
            on_progress=on_progress,
        )
        results = FrontierResults()
        if keep:
            conditions = _conditions(evaluator, text, quick=quick)
            results = FrontierResults.open(folder / _RESULTS, conditions)
        name = Path(model).name.removesuffix(".gguf")
        rungs = [Rung(name, "full", lambda: workshop.full), *rungs_of(workshop)]
        _measure(workshop, rungs, results, parts)
    seconds = [speed.full_seconds for speed in results.speeds.values()]
    points = [
        Point(
            name=rung.name,
            kind=rung.kind,
            score=results.scores.get(rung.name),
            speed=results.speeds.get(rung.name),
            full_seconds=statistics.median(seconds) if seconds else 0.0,
        )
        for rung in rungs
        if rung.name not in results.left_out
    ]
    return Frontier(
        model=name,
        depth=len(evaluator.pieces[0]),
        tokens=sum(map(len, evaluator.pieces)),
        points=tuple(points),
        left_out=results.left_out,
    )


def _measure(
    workshop: Workshop,
    rungs: Sequence[Rung],
    results: FrontierResults,
    parts: Sequence[Aspect],
) -> None:
    """Measure what the results lack, and save them after each form."""
    found: dict[Aspect, Mapping[str, object]] = {"quality": results.scores, "speed": results.speeds}
    lacking = {
        rung.name: [part for part in parts if rung.name not in found[part]]
        for rung in rungs
        if rung.name not in results.left_out
    }
    if not any(lacking.values()):
        return
    workshop.on_progress("the text of the drafts", 0.0)
    meter = FormMeter(workshop)
    with SpillFile() as reference:
        if any("quality" in aspects for aspects in lacking.values()):
            workshop.evaluator.score_reference(None, reference)
        for number, rung in enumerate(rungs):
            if not lacking.get(rung.name):
                continue
            workshop.on_progress(f"form {number} of {len(rungs) - 1}: {rung.name}", 0.0)
            try:
                form = rung.make()
                if "quality" in lacking[rung.name]:
                    results.scores[rung.name] = meter.score(rung.name, form, reference)
                if "speed" in lacking[rung.name]:
                    results.speeds[rung.name] = meter.speed(form)
            except HeadraceError as error:
                results.left_out[rung.name] = str(error)
            results.save()


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder to keep, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{keep}: {error.strerror}; choose a folder that you may write to"
        raise RequestError(reason) from None
    yield keep


def _conditions(evaluator: Evaluator, text: Path | str | None, *, quick: bool) -> dict[str, object]:
    """What the results of a folder depend on."""
    config, checkpoint = evaluator.config, evaluator.checkpoint
    return {
        "model": fingerprint(checkpoint, checkpoint.load_tokenizer()),
        "text": str(text) if text else "",
        "depth": len(evaluator.pieces[0]),
        "tokens": sum(map(len, evaluator.pieces)),
        "quick": quick,
        "backend": config.backend,
        "kv_dtype": config.kv_format,
        "activations": config.activations,
    }
