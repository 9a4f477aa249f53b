"""Frames between the two processes: what is written is read, however the bytes come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.remote import frames
from headrace.request import Logprob, PoolingParams, RequestOptions, SamplingParams

PARAMS = SamplingParams(
    stop=["a", "b"],
    logit_bias={3: 1.5},
    stop_token_ids=[4],
    seed=2**64 - 1,
    max_tokens=None,
    beam_width=None,
)
COMMANDS: list[frames.Command] = [
    frames.Add(
        id="7",
        prompt_token_ids=[1, 2, 3],
        params=PARAMS,
        options=RequestOptions(priority=-3, timeout=1.5, cache_salt="salt", adapter="adapter"),
    ),
    frames.Add(id="8", prompt_token_ids=[0], pooling=PoolingParams(pooling="mean", normalise=True)),
    frames.Abort("7"),
    frames.LoadAdapter("9", "name", "/path"),
    frames.UnloadAdapter("10", "name"),
]
EVENTS: list[frames.Event] = [
    frames.Accepted("7"),
    frames.Refused("8", "request", "why"),
    frames.StepOutput(
        "7",
        1,
        "text \N{SNOWMAN}",
        [5, 6],
        [{5: Logprob(-0.25, 1, "a"), 9: Logprob(float("-inf"), 7, "\ufffd")}],
        "stop",
        5,
    ),
    frames.Ended(
        "7",
        3,
        2,
        0.1,
        0.2,
        0.3,
        frames.Refused("7", "internal", "x"),
        [None, {1: Logprob(-1.0, 2, "b")}],
        b"\0\1",
    ),
    frames.Report({"running": 1.0}, {"adapter": 2}, {"ngram": [1.0, 2.0, 3.0]}),
]


@given(st.lists(st.sampled_from([*COMMANDS, *EVENTS]), max_size=6), st.data())
def test_all_cuts(sent: list[frames.Command | frames.Event], data: st.DataObject) -> None:
    whole = frames.encode(*sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    buffer, read = bytearray(), []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        buffer += whole[begin:end]
        for body in frames.bodies(buffer):
            read.append(
                frames.read_command(body)
                if len(read) < len(sent) and sent[len(read)] in COMMANDS
                else frames.read_event(body)
            )
    assert read == sent and not buffer


def test_an_endless_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="67,108,865 bytes"):
        list(frames.bodies(bytearray((frames.MAX_FRAME + 1).to_bytes(frames.HEAD, "little"))))
