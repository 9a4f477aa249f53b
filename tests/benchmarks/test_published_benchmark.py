"""The list of published speeds, and the page that compares it with predictions."""

import re

import pytest

from benchmarks import published
from headrace.planner.machine_files import machine_names

ROWS = published.read_rows()
PAGE = published.PAGE.read_text()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_published_figures_have_sources() -> None:
    assert len(ROWS) >= 24
    entries = published._list()
    for source in entries["source"]:
        assert source["title"] and source["url"].startswith("https://")
        assert re.fullmatch(r"20\d\d-[01]\d", source["date"])
    for row in ROWS:
        assert row.published > 0 and row.model in entries["models"]
        assert row.machine in machine_names() or entries["machines"][row.machine]["sources"]


def test_half_of_the_published_figures_are_held_out() -> None:
    assert sum(row.is_held_out for row in ROWS) == len(ROWS) // 2
    for engine in published.read_shares():
        halves = {row.is_held_out for row in ROWS if row.engine == engine}
        assert halves == {True, False}


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3-8b", "mistral-7b"])
def test_the_page_has_the_errors_of_published_figures(model: str) -> None:
    """Larger models take seconds to trace; `benchmarks/published.py --write` writes all rows."""
    rows = [row for row in ROWS if row.model == model]
    for line in published.table(rows):
        assert f"| {' | '.join(line)} |" in PAGE


def test_median_error_of_published_figures_that_are_held_out() -> None:
    """Below 20 % with shares that the other half chose. The page says how our own shares do."""
    line = next(line for line in PAGE.splitlines() if line.startswith("| held out |"))
    assert int(cells(line)[-1].rstrip("%")) < 20
    held_out = [cells(line) for line in PAGE.splitlines() if re.match(r"\| \d+\* ", line)]
    sizes = sorted(abs(int(row[-1].rstrip("%"))) for row in held_out)
    assert len(sizes) == len(ROWS) // 2 and sizes[len(sizes) // 2] < 20


def test_our_kernels_predict_published_tokens_of_lone_sequences() -> None:
    """No published figure chose our shares; small dense models in 16 bits, outside llama.cpp of
    2023, which launches each kernel from the host.
    """
    errors = sorted(
        abs(published.error(row))
        for row in ROWS
        if row.kind == "decode" and row.batch == row.devices == 1 and row.format == "BF16"
        if row.output < 1024
    )
    assert len(errors) > 8 and errors[len(errors) // 2] < 0.15
