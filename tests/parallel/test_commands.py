"""Commands for ranks as bytes: a round trip changes no command, and invalid bytes are an error."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from headrace.errors import FormatError
from headrace.parallel.commands import (
    HEADER,
    Array,
    Command,
    CommandKind,
    adapter_from_arrays,
    adapter_to_arrays,
    batch_from_arrays,
    batch_to_arrays,
    body_size,
    decode,
    encode,
)
from headrace.program.adapter import LowRank, OwnWeight, TokenRows
from headrace.quant.formats import FORMATS, StoredTensor
from tests.backend.batches import Sequence, batch_of

shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = st.one_of(
    st.none(),
    *(arrays_of.arrays(dtype, shapes) for dtype in (np.int32, np.uint64, np.float32, np.uint8)),
)
commands = st.builds(
    Command, st.sampled_from(CommandKind), st.integers(-5, 1 << 20), st.lists(arrays, max_size=5)
)


def read(data: bytes) -> Command:
    header, body = data[: HEADER.size], data[HEADER.size :]
    if body_size(header) != len(body):
        raise FormatError("cut off")  # a rank would wait for the rest
    return decode(header, body)


def equal(a: Array | None, b: Array | None) -> bool:
    return a is b or (
        a is not None
        and b is not None
        and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    )


@given(commands)
def test_command_round_trip(command: Command) -> None:
    decoded = read(encode(command))
    assert (decoded.kind, decoded.program) == (command.kind, command.program)
    assert len(decoded.arrays) == len(command.arrays)
    assert all(map(equal, decoded.arrays, command.arrays))


@given(commands, st.data())
def test_changed_bytes_of_a_command(command: Command, data: st.DataObject) -> None:
    """The result is another command of the same size, or a FormatError."""
    changed = bytearray(encode(command))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = read(bytes(changed))
    except FormatError:
        return
    assert len(encode(decoded)) == len(changed)


@given(st.binary(min_size=HEADER.size, max_size=200))
def test_random_bytes_of_a_command(data: bytes) -> None:
    with suppress(FormatError):
        assert len(encode(read(data))) == len(data)


def test_array_with_impossible_shape() -> None:
    data = bytearray(encode(Command(CommandKind.RUN, 0, [np.zeros((1, 1, 1), np.int32)])))
    for field in (2, 3, 4):
        offset = HEADER.size + 4 * field
        data[offset : offset + 4] = (0x7FFFFFFF).to_bytes(4, "little")
    with pytest.raises(FormatError, match="cut off"):
        read(bytes(data))


def test_batch_and_adapter_round_trip() -> None:
    batch = batch_of(
        [Sequence([1, 3], 16), Sequence([2, 0], 16)],
        [[1, 2], [3]],
        [([5, 6], [-1, 0]), ([], [])],
        True,
        2,
    )
    decoded = batch_from_arrays(
        read(encode(Command(CommandKind.RUN, 0, batch_to_arrays(batch)))).arrays
    )
    for name, before in batch._asdict().items():
        if name == "kv":
            assert all(
                equal(a, b)
                for x, y in zip(before, decoded.kv, strict=True)
                for a, b in zip(x, y, strict=True)
            )
        else:
            assert equal(before, getattr(decoded, name)), name
    words = np.arange(12, dtype=np.uint16).view(np.uint8)
    adapter: dict[str, LowRank | OwnWeight] = {
        "layers.0.q": LowRank(np.ones((2, 3), np.float32), np.zeros((5, 2), np.float32), 0.5),
        "norm": OwnWeight(added=np.ones(3, np.float32)),
        "embed": OwnWeight(
            values=StoredTensor.from_bytes("a", FORMATS["BF16"], (3, 4), words).transposed(),
            rows=TokenRows(np.array([3, 7]), np.ones((2, 3), np.float32)),
            delta=LowRank(np.ones((1, 3), np.float32), np.ones((4, 1), np.float32), 2.0),
            row_norms=np.ones(4, np.float32),
            col_norms=np.ones(3, np.float32),
        ),
    }
    again = adapter_from_arrays(
        read(encode(Command(CommandKind.ADD_ADAPTER, 0, adapter_to_arrays(adapter)))).arrays
    )
    assert again.keys() == adapter.keys()
    for name, change in adapter.items():
        for before, after in zip(parts(change), parts(again[name]), strict=True):
            assert equal(before, after), name


def parts(change: LowRank | OwnWeight) -> list[Array | None]:
    if isinstance(change, LowRank):
        return [change.down, change.up, np.array(change.scale)]
    own = [change.values and change.values.dequantise(), change.added]
    rows = change.rows or (None, None)
    return [
        *own,
        *rows,
        *(parts(change.delta) if change.delta else ()),
        change.row_norms,
        change.col_norms,
    ]


def test_adapter_with_a_missing_array() -> None:
    low_rank = LowRank(np.ones((1, 3), np.float32), np.ones((4, 1), np.float32), 2.0)
    arrays = adapter_to_arrays({"layers.0.q": low_rank})
    up = next(i for i, array in enumerate(arrays) if array is low_rank.up)
    with pytest.raises(FormatError, match="missing array"):
        adapter_from_arrays([*arrays[:up], None, *arrays[up + 1 :]])
