import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.simulator.readers import read_trace
from headrace.simulator.trace import Trace, at_rate, mean_rate, num_requests

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "x" * 40},
            {"from": "gpt", "value": "y" * 20},
            {"from": "gpt", "value": "and more"},
            {"from": "human", "value": "z" * 8},
            {"from": "gpt", "value": "w" * 4},
        ],
    },
    {"id": "without an answer", "conversations": [{"from": "human", "value": "x"}]},
]


def read(folder: Path, ending: str, text: str) -> Trace:
    file = folder / f"trace{ending}"
    file.write_text(text)
    return read_trace(file, seed=0, rate=1.0)


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_azure(tmp_path: Path) -> None:
    first, second = read(tmp_path, ".csv", AZURE)
    assert (first.start, len(first.turns[0].tokens), first.turns[0].num_tokens) == (0.0, 374, 44)
    assert second.start == pytest.approx(4.314579)


def test_sharegpt(tmp_path: Path) -> None:
    """Four characters are a token; a person's text without a response is no request."""
    (found,) = read(tmp_path, ".json", json.dumps(SHAREGPT))
    assert [(len(turn.tokens), turn.num_tokens) for turn in found.turns] == [(10, 5), (2, 1)]
    assert found.turns[0].tokens == b"x" * 10


def test_sharegpt_by_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(SHAREGPT))
    (found,) = read_trace(file, 0, 1.0, lambda text: [1000 + ord(letter) for letter in text])
    assert [(len(turn.tokens), turn.num_tokens) for turn in found.turns] == [(40, 20), (8, 4)]


def test_lines(tmp_path: Path) -> None:
    shared = {"prompt_tokens": 10, "output_tokens": 5, "prefix": "guide"}
    found = read(
        tmp_path,
        ".jsonl",
        lines(
            {"arrival": 2.5, **shared, "prefix_tokens": 30, "cache_salt": "tenant"},
            {"arrival": 1, **shared, "prefix_tokens": 20, "conversation": "c"},
            {"conversation": "c", "prompt_tokens": 7, "output_tokens": 3, "pause": 4},
        ),
    )
    chat, other = found  # in the order of their starts
    assert (chat.start, other.start) == (1.0, 2.5)
    assert [(len(turn.tokens), turn.num_tokens, turn.pause) for turn in chat.turns] == [
        (30, 5, 0.0),
        (7, 3, 4.0),
    ]
    assert bytes(chat.turns[0].tokens)[:20] == bytes(other.turns[0].tokens)[:20]
    assert bytes(chat.turns[0].tokens)[20:] != bytes(other.turns[0].tokens)[20:30]
    assert (chat.scope, other.scope) == ((None, None), ("tenant", None))
    assert num_requests(found) == 3


GOOD = {"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}


@pytest.mark.parametrize(
    "ending, text, line, field",
    [
        (".jsonl", lines(GOOD) + "{", 2, ""),
        (".jsonl", lines(GOOD, [1]), 2, ""),
        (".jsonl", lines(GOOD | {"promt": 1}), 1, "promt"),
        (".jsonl", lines(GOOD, GOOD | {"prompt_tokens": 0}), 2, "prompt_tokens"),
        (".jsonl", lines(GOOD | {"output_tokens": 1.5}), 1, "output_tokens"),
        (".jsonl", lines(GOOD | {"output_tokens": True}), 1, "output_tokens"),
        (".jsonl", lines(GOOD | {"arrival": -1}), 1, "arrival"),
        (".jsonl", lines(GOOD | {"arrival": float("nan")}), 1, "arrival"),
        (".jsonl", lines({"prompt_tokens": 1, "output_tokens": 1}), 1, "arrival"),
        (".jsonl", lines(GOOD | {"prefix": "a"}), 1, "prefix_tokens"),
        (".jsonl", lines(GOOD | {"pause": 1}), 1, "pause"),
        (".jsonl", lines(GOOD | {"conversation": 3}), 1, "conversation"),
        (".jsonl", lines(GOOD | {"conversation": "a"}, GOOD | {"conversation": "a"}), 2, "arrival"),
        (".csv", "a,b\n1,2\n", 1, "TIMESTAMP"),
        (".csv", AZURE + "yesterday,1,2\n", 4, "TIMESTAMP"),
        (".csv", AZURE + "2023-11-16 18:17:03,1\n", 4, "GeneratedTokens"),
        (".csv", AZURE + "2023-11-16 18:17:03,1,many\n", 4, "GeneratedTokens"),
        (".json", '[\n{"conversations"', 2, ""),
        (".json", "{}", 1, ""),
    ],
)
def test_errors_name_line_and_field(
    tmp_path: Path, ending: str, text: str, line: int, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read(tmp_path, ending, text)
    place = f"trace{ending}, line {line}"
    assert place in str(caught.value) and (f"field '{field}'" if field else "") in str(caught.value)


@pytest.mark.parametrize(
    "ending, text, part",
    [
        (".json", '[{"conversations": 1}]', "conversation 1, field 'conversations'"),
        (".json", '[{"conversations": [{"from": "x"}]}]', "message 1, field 'from': 'x'"),
        (".json", '[{"conversations": [{"from": "gpt"}]}]', "message 1, field 'value': None"),
        (".json", "[]", "no request"),
        (".txt", "", "'.txt'"),
    ],
)
def test_other_errors(tmp_path: Path, ending: str, text: str, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        read(tmp_path, ending, text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "arrival",
        "prompt_tokens",
        "output_tokens",
        "prefix",
        "conversation",
        "pause",
        "from",
        "value",
    ]
)
TEXTS = (
    st.lists(st.dictionaries(FIELDS, VALUES, max_size=5), max_size=4).map(lambda r: lines(*r))
    | st.lists(st.fixed_dictionaries({"conversations": VALUES}), max_size=3).map(json.dumps)
    | st.text(max_size=60)
    | st.text("0123456789,:- \n\"'", max_size=60).map(lambda text: AZURE + text)
)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXTS, ending=st.sampled_from([".jsonl", ".json", ".csv"]))
def test_any_text_is_read_or_refused(tmp_path: Path, text: str, ending: str) -> None:
    file = tmp_path / f"trace{ending}"
    file.write_bytes(text.encode("utf-8", "replace"))
    try:
        found = read_trace(file, seed=0, rate=1.0)
    except RequestError as error:
        assert str(file) in str(error)
    else:
        assert found and all(turn.tokens and turn.num_tokens for c in found for turn in c.turns)


def test_rates_scale_the_arrivals(tmp_path: Path) -> None:
    found = read(tmp_path, ".csv", AZURE)
    assert mean_rate(found) == pytest.approx(1 / 4.314579)
    assert [c.start for c in at_rate(found, 2.0)] == pytest.approx([0.0, 0.5])
    assert [c.start for c in at_rate(found, float("inf"))] == [0.0, 0.0]
    together = at_rate(found, float("inf"))
    assert [c.start for c in at_rate(together, 4.0)] == [0.0, 0.25]
