"""The Pareto frontier of formats, the best format within a budget, and the picture."""

from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.measure.frontier import best_within, pareto_frontier, parse_budget
from headrace.measure.frontier_picture import frontier_svg


class Way(NamedTuple):
    name: str
    weight_bytes: int
    decode: float
    loss: float


WAYS = [
    Way("whole", 270_000_000, 40.0, 0.0),
    Way("int8", 140_000_000, 70.0, 0.001),
    Way("slow", 140_000_000, 30.0, 0.01),
    Way("int4", 80_000_000, 100.0, 0.2),
    Way("worse", 80_000_000, 100.0, 0.3),
    Way("int2", 50_000_000, 130.0, 4.0),
]


def test_the_frontier() -> None:
    assert pareto_frontier(WAYS) == ["int2", "int4", "int8", "whole"]


numbers = st.integers(1, 6)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=12))
def test_frontier_is_pareto_optimal(rows: list[tuple[int, int, int]]) -> None:
    ways = [Way(str(i), *row) for i, row in enumerate(rows)]
    best = pareto_frontier(ways)
    for way in ways:
        better = [
            o
            for o in ways
            if o.decode >= way.decode
            and o.loss <= way.loss
            and (o.decode, o.loss) != (way.decode, way.loss)
        ]
        twins = [o.name for o in ways if (o.decode, o.loss) == (way.decode, way.loss)]
        assert (len(set(twins) & set(best)) == 1) == (not better)


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("1GB", "whole"),
        ("150 MB", "int8"),
        ("80MB", "int4"),
        ("90tok/s", "int4"),
        ("0.5tok/s", "whole"),
    ],
)
def test_best_within_a_budget(text: str, best: str) -> None:
    assert best_within(WAYS, parse_budget(text)) == best


@pytest.mark.parametrize(
    ("text", "message"),
    [("10MB", "smallest, int2, takes 50 MB"), ("500tok/s", r"fastest, int2, decodes 130\.0")],
)
def test_budget_that_no_format_meets(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        best_within(WAYS, parse_budget(text))


@pytest.mark.parametrize("text", ["", "2", "2KB", "0GB", "-1GB", "1e3MB", "GB", "nan tok/s"])
def test_budget_that_cannot_be_parsed(text: str) -> None:
    with pytest.raises(RequestError, match="neither a size nor a speed"):
        parse_budget(text)


@pytest.mark.parametrize(
    "ways", [WAYS, WAYS[:1], [way._replace(loss=0.0, decode=5.0) for way in WAYS]]
)
def test_frontier_picture_has_every_name_within_its_frame(ways: list[Way]) -> None:
    root = ElementTree.fromstring(frontier_svg("Formats <of> a model", ways, "KL, nats"))
    texts = {element.text: element for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {way.name for way in ways} < texts.keys()
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == len(ways)
    assert all(
        76 <= float(circle.attrib["cx"]) <= 860 and 84 <= float(circle.attrib["cy"]) <= 530
        for circle in circles
    )
