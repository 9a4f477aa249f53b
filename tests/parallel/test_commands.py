"""Commands for ranks as bytes: nothing is lost on the way, and what is no command is one clear
error.
"""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from headrace.errors import FormatError
from headrace.parallel.commands import (
    HEAD,
    Array,
    Command,
    Kind,
    adapter_arrays,
    adapter_of,
    batch_arrays,
    batch_of,
    body_size,
    decode,
    encode,
)
from headrace.program.adapter import LowRank
from tests.backend.batches import Sequence
from tests.backend.batches import batch_of as some_batch

shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = st.one_of(
    st.none(),
    *(arrays_of.arrays(dtype, shapes) for dtype in (np.int32, np.uint64, np.float32, np.uint8)),
)
commands = st.builds(
    Command, st.sampled_from(Kind), st.integers(-5, 1 << 20), st.lists(arrays, max_size=5)
)


def read(data: bytes) -> Command:
    head, body = data[: HEAD.size], data[HEAD.size :]
    if body_size(head) != len(body):
        raise FormatError("cut off")  # which a rank waits for
    return decode(head, body)


def same(a: Array | None, b: Array | None) -> bool:
    return a is b or (
        a is not None
        and b is not None
        and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    )


@given(commands)
def test_round_trip(command: Command) -> None:
    found = read(encode(command))
    assert (found.kind, found.program) == (command.kind, command.program)
    assert len(found.arrays) == len(command.arrays) and all(map(same, found.arrays, command.arrays))


@given(commands, st.data())
def test_changed_bytes(command: Command, data: st.DataObject) -> None:
    """A changed byte makes another command of the same size, or a FormatError."""
    changed = bytearray(encode(command))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(bytes(changed))
    except FormatError:
        return
    assert len(encode(found)) == len(changed)


@given(st.binary(min_size=HEAD.size, max_size=200))
def test_any_bytes(data: bytes) -> None:
    with suppress(FormatError):
        assert len(encode(read(data))) == len(data)


def test_an_array_that_is_larger_than_can_be() -> None:
    data = bytearray(encode(Command(Kind.RUN, 0, [np.zeros((1, 1, 1), np.int32)])))
    for at in (2, 3, 4):
        data[HEAD.size + 4 * at : HEAD.size + 4 * at + 4] = (0x7FFFFFFF).to_bytes(4, "little")
    with pytest.raises(FormatError, match="cut off"):
        read(bytes(data))


def test_batches_and_adapters() -> None:
    batch = some_batch(
        [Sequence([1, 3], 16), Sequence([2, 0], 16)],
        [[1, 2], [3]],
        [([5, 6], [-1, 0]), ([], [])],
        True,
        2,
    )
    found = batch_of(read(encode(Command(Kind.RUN, 0, batch_arrays(batch)))).arrays)
    for name, before in batch._asdict().items():
        if name == "kv":
            assert all(
                same(a, b)
                for x, y in zip(before, found.kv, strict=True)
                for a, b in zip(x, y, strict=True)
            )
        else:
            assert same(before, getattr(found, name)), name
    adapter = {
        "layers.0.q": LowRank(np.ones((2, 3), np.float32), np.zeros((5, 2), np.float32), 0.5)
    }
    again = adapter_of(read(encode(Command(Kind.ADD_ADAPTER, 0, adapter_arrays(adapter)))).arrays)
    ((name, (down, up, scale)),) = again.items()
    assert (
        (name, scale) == ("layers.0.q", 0.5)
        and same(down, adapter[name].down)
        and same(up, adapter[name].up)
    )
