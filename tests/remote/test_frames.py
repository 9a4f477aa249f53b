"""Frames between an engine process and its client: decoding gives back the encoded frames, however
the bytes are cut.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.outputs import Logprob
from headrace.remote import frames
from headrace.request import PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams

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
    frames.Finish("7"),
    frames.LoadAdapter("9", "name", "/path"),
    frames.UnloadAdapter("10", "name"),
]
EVENTS: list[frames.Event] = [
    frames.Accepted("7"),
    frames.Refused("8", "request", "why"),
    frames.StepOutput(
        id="7",
        index=1,
        text="text \N{SNOWMAN}",
        token_ids=[5, 6],
        logprobs=[{5: Logprob(-0.25, 1, "a"), 9: Logprob(float("-inf"), 7, "\ufffd")}],
        finish_reason="stop",
        stop_reason=5,
    ),
    frames.Ended(
        id="7",
        prompt_tokens=3,
        cached_tokens=2,
        queue=0.1,
        prefill=0.2,
        decode=0.3,
        error=frames.Refused("7", "internal", "x"),
        prompt_logprobs=[None, {1: Logprob(-1.0, 2, "b")}],
        embedding=b"\0\1",
    ),
    frames.Report({"running": 1.0}, {"adapter": 2}, {"suffix": [1.0, 2.0, 3.0]}),
]


@given(st.lists(st.sampled_from([*COMMANDS, *EVENTS]), max_size=6), st.data())
def test_frames_are_read_however_the_bytes_are_cut(
    sent: list[frames.Command | frames.Event], data: st.DataObject
) -> None:
    encoded = frames.encode(*sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=5)))
    buffer, read = bytearray(), []
    for begin, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True):
        buffer += encoded[begin:end]
        for body in frames.bodies(buffer):
            is_command = len(read) < len(sent) and sent[len(read)] in COMMANDS
            read.append(frames.read_command(body) if is_command else frames.read_event(body))
    assert read == sent and not buffer


def test_frame_above_the_maximum_size_is_refused() -> None:
    length = (frames.MAX_FRAME_BYTES + 1).to_bytes(frames.LENGTH_BYTES, "little")
    with pytest.raises(ValueError, match="67,108,865 bytes"):
        list(frames.bodies(bytearray(length)))
