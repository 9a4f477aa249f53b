import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.simulator.synthetic import WORKLOADS, draw_trace, parse_workload
from headrace.simulator.trace import num_requests


def test_lengths_and_arrivals_follow_their_distributions() -> None:
    workload = parse_workload("lognormal:prompt=400,output=50,rate=8,requests=4000")
    trace = draw_trace(workload, 0)
    prompts = [len(c.turns[0].tokens) for c in trace]
    outputs = [c.turns[0].num_tokens for c in trace]
    assert np.median(prompts) == pytest.approx(400, rel=0.05)
    assert np.std(np.log(outputs)) == pytest.approx(0.6, rel=0.05)
    gaps = np.diff([c.start for c in trace])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.1)  # Poisson
    assert len({bytes(c.turns[0].tokens)[:8] for c in trace}) > 3990


def test_bursts_have_uneven_gaps() -> None:
    trace = draw_trace(parse_workload("lognormal:burstiness=0.25,requests=4000"), 1)
    gaps = np.diff([c.start for c in trace])
    assert gaps.mean() == pytest.approx(1.0, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.1)  # 1 / sqrt(0.25)


def test_prefixes_are_shared_by_zipfs_law() -> None:
    trace = draw_trace(parse_workload("rag:requests=3000,prefix=64,prefixes=4,spread=0"), 2)
    counts = np.bincount([c.prefix for c in trace])
    assert counts[0] / counts[3] == pytest.approx(4.0, rel=0.2)
    first = {c.prefix: bytes(c.turns[0].tokens)[:64] for c in trace}
    assert all(bytes(c.turns[0].tokens)[:64] == first[c.prefix] for c in trace)
    assert len(set(first.values())) == 4
    assert {len(c.turns[0].tokens) for c in trace} == {128}


def test_chats_have_turns() -> None:
    trace = draw_trace(parse_workload("chat:requests=402,turns=4,pause=2"), 3)
    assert num_requests(trace) == 402
    assert [len(c.turns) for c in trace] == [4] * 100 + [2]
    assert all(c.turns[0].pause == 0 for c in trace)
    pauses = [turn.pause for c in trace for turn in c.turns[1:]]
    assert np.mean(pauses) == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_determines_a_trace(name: str) -> None:
    workload = parse_workload(f"{name}:requests=20")
    assert draw_trace(workload, 5) == draw_trace(workload, 5) != draw_trace(workload, 6)


@pytest.mark.parametrize(
    "text, part",
    [
        ("chats", "did you mean chat"),
        ("chat:turn=4", "did you mean turns"),
        ("chat:turns", "no value"),
        ("chat:turns=many", "turns must be a number"),
        ("chat:turns=0", "turns must be a whole number from 1 to"),
        ("chat:rate=nan", "rate must be a number from"),
    ],
)
def test_errors_name_the_field(text: str, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        parse_workload(text)
