"""SVG picture of a pipeline: a line for each rank, a bar for each step."""

from collections.abc import Iterator, Sequence

from headrace.planner.svg import COLOURS, FAINT, GRID, document, line, text
from headrace.stats import StageStep

_LEFT, _RIGHT, _TOP, _WIDTH = 76, 976, 84, 1000
_HEIGHT = 34
_TICKS = 6


def idle_share(stage_steps: Sequence[StageStep]) -> float:
    """The bubble: the share of all ranks' time without work.

    With p equal stages and m steps it is (p - 1) / (m + p - 1) (GPipe, Huang et al. 2018).
    """
    ranks = {step.rank for step in stage_steps}
    begin, end = min(step.begin for step in stage_steps), max(step.end for step in stage_steps)
    return 1 - sum(step.end - step.begin for step in stage_steps) / (len(ranks) * (end - begin))


def pipeline_svg(title: str, stage_steps: Sequence[StageStep]) -> str:
    ranks = sorted({step.rank for step in stage_steps})
    begin, end = min(step.begin for step in stage_steps), max(step.end for step in stage_steps)
    scale, bottom = (_RIGHT - _LEFT) / (end - begin), _TOP + len(ranks) * _HEIGHT
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(
            _LEFT,
            56,
            f"{100 * idle_share(stage_steps):.0f} % of the ranks' time is idle",
            fill=FAINT,
        ),
        *(bar for step in stage_steps for bar in _bar(step, ranks.index(step.rank), begin, scale)),
        *(
            text(_LEFT - 8, _TOP + (i + 0.5) * _HEIGHT + 4, f"rank {rank}", anchor="end")
            for i, rank in enumerate(ranks)
        ),
        *_axis(end - begin, bottom),
    ]
    return document(title, _WIDTH, bottom + 56, body)


def _bar(step: StageStep, row: int, begin: float, scale: float) -> Iterator[str]:
    seconds = step.end - step.begin
    x, y, width = _LEFT + (step.begin - begin) * scale, _TOP + row * _HEIGHT + 4, seconds * scale
    label = f"<title>step {step.number} on rank {step.rank}: {1000 * seconds:.1f} ms</title>"
    colour = COLOURS[step.number % len(COLOURS)]
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" '
        f'height="{_HEIGHT - 8}" fill="{colour}">{label}</rect>'
    )
    if width > 18:
        middle = x + width / 2
        yield text(middle, y + _HEIGHT / 2, f"{step.number}", anchor="middle", fill="#ffffff")


def _axis(seconds: float, bottom: float) -> Iterator[str]:
    yield line([(_LEFT, _TOP), (_LEFT, bottom), (_RIGHT, bottom)], GRID, 1)
    for tick in range(_TICKS + 1):
        yield text(
            _LEFT + (_RIGHT - _LEFT) * tick / _TICKS,
            bottom + 18,
            f"{1000 * seconds * tick / _TICKS:.3g}",
            anchor="middle",
        )
    yield text((_LEFT + _RIGHT) / 2, bottom + 42, "milliseconds", anchor="middle", size=13)
