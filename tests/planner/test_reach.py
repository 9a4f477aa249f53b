from math import inf

import pytest

from headrace.planner.reach import (
    Reach,
    class_of,
    known_reaches,
    parse_reaches,
    rows_of_product,
    stored_bits,
    written_numbers,
)
from headrace.program.moe import Experts
from headrace.program.op import StepSize, Value, Weight
from headrace.program.ops import Embed, Linear, Norm

ROWS = StepSize(((0, 24),), 3, 2.0)


def weight(rows: int, cols: int, bits: float) -> Weight:
    return Weight("w", rows, cols, int(rows * cols * bits / 8))


def value(width: int, rows: str = "step") -> Value:
    return Value(0, width, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap, expected", [(inf, 4.0), (1.0, 7.0), (2.0, 5.0)])
def test_roofs_overlap(overlap: float, expected: float) -> None:
    reach = Reach(seconds=0.0, bandwidth=1.0, rate=1.0, overlap=overlap)
    assert reach.roof(3.0, 4.0) == reach.roof(4.0, 3.0) == pytest.approx(expected)
    assert reach.roof(0.0, 0.0) == 0.0


def test_classes_of_ops() -> None:
    matrix = weight(8, 16, 4.5)
    assert class_of(Linear(value(8), value(16), matrix)) == "linear"
    assert class_of(Linear(value(8, "logit"), value(16, "logit"), matrix)) == "head"
    assert class_of(Embed(value(16), matrix)) == "rows"
    norm = Norm(out=value(16), x=value(16), weight=weight(1, 16, 32), eps=0, kind="rms", size=16)
    assert class_of(norm) == "rows"
    assert stored_bits(Linear(value(8), value(16), matrix), ROWS) == 4.5


def test_rows_of_experts_go_to_some_of_them() -> None:
    matrices = (weight(8, 16, 16),) * 4
    op = Experts(
        out=value(16),
        x=value(16),
        routing=value(4),
        gate=matrices,
        up=matrices,
        down=matrices,
        activation="silu",
    )
    assert rows_of_product(op, ROWS) == pytest.approx(24 * 2 / op.distinct_experts(24))
    assert written_numbers(op, ROWS) == 24 * 2 * 3 * 8


def test_the_nearest_entry_serves_an_unknown_format() -> None:
    reach = {"seconds": 0.0, "bandwidth": 1.0, "rate": 1.0}
    entry = {
        "source": "here",
        "block_rows": 16,
        "classes": {
            "linear": {"4.5": reach, "16": reach | {"unpack": 3.0}},
            "rows": {"32": reach},
        },
    }
    found = parse_reaches(entry)
    q6 = Linear(value(8), value(16), weight(8, 16, 6.5))
    f32 = Linear(value(8, "logit"), value(16, "logit"), weight(8, 16, 32))
    assert found.of(q6, ROWS).unpack == 0 and found.of(f32, ROWS).unpack == 3
    assert [found.num_blocks(rows) for rows in (1, 16, 17)] == [1, 1, 2]
    assert not found.host.launch
    with pytest.raises(TypeError):
        parse_reaches(entry | {"host": {"hours": 1}})


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_shipped_tables_have_all_classes(backend: str) -> None:
    found = known_reaches(backend)
    assert found and {"linear", "attention", "rows"} <= found.table.keys()
    for by_bits in found.table.values():
        for reach in by_bits.values():
            assert reach.seconds >= 0 and reach.bandwidth > 0 and reach.rate > 0
