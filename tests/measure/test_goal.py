"""The grammar of goals, and the one error of each malformed term."""

import pytest

from headrace.errors import RequestError
from headrace.measure.goal import Goal, parse_dollars_per_hour, parse_goal


def goal(**fields: object) -> Goal:
    defaults: dict[str, object] = {
        "users": 1,
        "prompt": 512,
        "output": 128,
        "context": 640,
        "ttft": None,
        "tpot": None,
        "throughput": None,
        "cost": None,
        "best": None,
    }
    return Goal(**(defaults | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "ttft<1s tpot<30ms users=40 context=8k",
            goal(ttft=1.0, tpot=0.03, users=40, prompt=8192 - 128, context=8192),
        ),
        ("TTFT<=250ms,users=2k", goal(ttft=0.25, users=2000)),
        ("throughput>1.5k", goal(throughput=1500.0)),
        ("throughput>=80tok/s cost<$0.5", goal(throughput=80.0, cost=0.5)),
        ("cost<.5$ prompt=2k output=100", goal(cost=0.5, prompt=2048, output=100, context=2148)),
        ("throughput users=16", goal(best="throughput", users=16)),
        ("tpot<9000us ttft", goal(tpot=0.009, best="ttft")),
        ("users=1 prompt=10 output=6 context=64", goal(prompt=10, output=6, context=64)),
    ],
)
def test_goals(text: str, expected: Goal) -> None:
    assert parse_goal(text) == expected
    assert parse_goal(expected.text) == expected


def test_options_hold_for_terms_that_are_left_out() -> None:
    found = parse_goal("ttft<1s output=8", prompt=100, output=50, context=400)
    assert (found.prompt, found.output, found.context) == (100, 8, 400)
    assert parse_goal("ttft<1s prompt=7", prompt=100, output=50).context == 57


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "goal is empty; write terms such as ttft<1s"),
        ("latency<1s", "goal term 'latency<1s' is unknown; known are: ttft, tpot"),
        ("5=users", "goal term '5=users' is unknown"),
        ("ttft<1", "goal term 'ttft<1' is malformed; write it as ttft<1s"),
        ("ttft>1s", "goal term 'ttft>1s' is malformed; write it as ttft<1s"),
        ("ttft<1m", "goal term 'ttft<1m' is malformed"),
        ("ttft<$1s", "malformed; write it as ttft<1s"),
        ("tpot<", "goal term 'tpot<' is malformed; write it as tpot<30ms"),
        ("tpot<-3ms", "goal term 'tpot<-3ms' is malformed"),
        ("throughput<9", "goal term 'throughput<9' is malformed; write it as throughput>500"),
        ("users<40", "goal term 'users<40' is malformed; write it as users=40"),
        ("users=1.5", "goal term 'users=1.5' must be a whole number"),
        ("users=0", "goal term 'users=0' must be a whole number"),
        ("users", "goal term 'users' has no size; write it as users=40"),
        ("context=99999k", "goal term 'context=99999k' must be a whole number up to"),
        ("cost<0", "goal term 'cost<0' must be above zero"),
        ("ttft<1s ttft<2s", "goal names 'ttft' twice"),
        ("ttft ttft<2s", "goal names 'ttft' twice"),
        ("ttft tpot", "goal has 'ttft' and 'tpot' without a bound"),
        ("context=100 prompt=90 output=20", "context=100, less than 90 tokens of prompt and 20"),
        ("context=100 users=2", "context=100, less than 1 tokens of prompt and 128 of output"),
    ],
)
def test_a_malformed_goal_names_the_term(text: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_goal(text)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["2$/h", "$2/h", "2", "2.0$"])
def test_budgets(text: str) -> None:
    assert parse_dollars_per_hour(text) == 2


@pytest.mark.parametrize("text", ["", "0", "2 EUR", "-2", "2$/day", "two"])
def test_a_malformed_budget(text: str) -> None:
    with pytest.raises(RequestError, match="is not a price; write dollars per hour"):
        parse_dollars_per_hour(text)
