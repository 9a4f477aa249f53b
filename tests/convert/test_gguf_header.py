from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.gguf import RawValue, read_gguf
from headrace.checkpoint.source import resolve
from headrace.convert.gguf.header import (
    f32,
    flag,
    gguf_file_layout,
    numbers,
    raw,
    string,
    strings,
    u32,
)
from headrace.convert.tensor_writer import FileLayout, PlannedTensor, TensorWriter
from headrace.errors import FormatError
from headrace.quant.formats import FORMATS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER_TYPES = ["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", ">i4", ">f4"]
VALUES = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda value: (u32(value), value)),
    st.floats(width=32, allow_nan=False).map(lambda value: (f32(value), value)),
    st.booleans().map(lambda value: (flag(value), value)),
    TEXT.map(lambda value: (string(value), value)),
    st.lists(TEXT, max_size=4).map(lambda value: (strings(value), value)),
    st.tuples(st.sampled_from(NUMBER_TYPES), st.lists(st.integers(0, 127), max_size=4)).map(
        lambda drawn: (numbers(np.array(drawn[1], drawn[0])), drawn[1])
    ),
)
KEYS = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=20).filter(
    lambda key: key != "general.alignment"
)
SHAPES = st.lists(st.integers(1, 4), max_size=3).flatmap(
    lambda rows: st.tuples(st.sampled_from(["F32", "F16", "Q4_0", "Q6_K"]), st.integers(1, 2)).map(
        lambda drawn: (drawn[0], (*rows, drawn[1] * FORMATS[drawn[0]].block))
    )
)
NAMES = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=63)


def planned(name: str, form: str, shape: tuple[int, ...]) -> PlannedTensor:
    stored = FORMATS[form]
    return PlannedTensor(name, form, shape, int(np.prod(shape)) // stored.block * stored.nbytes)


def write(path: Path, plan: FileLayout, tensors: dict[str, Any]) -> None:
    path.unlink(missing_ok=True)
    file = TensorWriter(path, plan)
    for name in reversed(tensors):
        file.write(name, [tensors[name]])
    file.close()


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "made.gguf"


@given(
    values=st.dictionaries(KEYS, VALUES, max_size=6),
    shapes=st.dictionaries(NAMES, SHAPES, max_size=4),
    alignment=st.sampled_from([None, 8, 32, 256]),
)
def test_gguf_header_round_trip(
    made: Path, values: dict[str, Any], shapes: dict[str, Any], alignment: int | None
) -> None:
    metadata = {key: raw for key, (raw, _) in values.items()}
    if alignment:
        metadata["general.alignment"] = u32(alignment)
    tensors = [planned(name, *shape) for name, shape in shapes.items()]
    data = {
        tensor.name: np.random.default_rng(i).integers(0, 256, tensor.nbytes, np.uint8)
        for i, tensor in enumerate(tensors)
    }
    plan = gguf_file_layout(metadata, tensors)
    write(made, plan, data)
    assert made.stat().st_size == plan.size
    assert all(start % (alignment or 32) == 0 for start, _ in plan.places.values())
    found = read_gguf(made)
    assert list(found.metadata) == list(metadata)
    assert {key: found.metadata.raw(key) for key in metadata} == metadata
    assert {key: plain(found.metadata[key]) for key in values} == {
        key: value for key, (_, value) in values.items()
    }
    assert found.tensors.keys() == data.keys()
    for tensor in tensors:
        stored = found.tensors[tensor.name]
        assert (stored.shape, stored.format.name) == (tensor.shape, tensor.format)
        np.testing.assert_array_equal(stored.parts["codes"].reshape(-1), data[tensor.name])


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": string("llama"),
        "n": u32(4_000_000_000),
        "x": f32(0.1),
        "yes": flag(True),
        "tokens": strings(["día", "", "b"]),
        "kinds": numbers(np.array([1, -3], np.int32)),
        "scores": numbers(np.array([0.5, -1.5], np.float32)),
    }
    tensors = [
        planned("a.weight", "Q8_0", (3, 2, 64)),
        planned("b", "F32", (5,)),
        planned("c.weight", "Q4_K", (2, 256)),
    ]
    data = {
        tensor.name: np.random.default_rng(1).integers(0, 256, tensor.nbytes, np.uint8)
        for tensor in tensors
    }
    write(tmp_path / "made.gguf", gguf_file_layout(metadata, tensors), data)
    ours, oracle = read_gguf(tmp_path / "made.gguf"), gguf.GGUFReader(tmp_path / "made.gguf")
    assert [key for key in oracle.fields if not key.startswith("GGUF.")] == list(metadata)
    assert {key: oracle.fields[key].contents() for key in metadata} == {
        key: plain(ours.metadata[key]) for key in metadata
    }
    assert [record.name for record in oracle.tensors] == [tensor.name for tensor in tensors]
    for record, tensor in zip(oracle.tensors, tensors, strict=True):
        assert (record.tensor_type.name, tuple(reversed(record.shape.tolist()))) == (
            tensor.format,
            tensor.shape,
        )
        np.testing.assert_array_equal(record.data.reshape(-1).view(np.uint8), data[tensor.name])


def test_the_default_model_is_written_unchanged(tmp_path: Path) -> None:
    theirs = read_gguf(resolve("smollm2", progress=False))
    tensors = [
        PlannedTensor(each.name, each.format.name, each.shape, each.nbytes)
        for each in theirs.tensors.values()
    ]
    plan = gguf_file_layout({key: theirs.metadata.raw(key) for key in theirs.metadata}, tensors)
    write(
        tmp_path / "again.gguf",
        plan,
        {name: tensor.parts["codes"] for name, tensor in theirs.tensors.items()},
    )
    ours = read_gguf(tmp_path / "again.gguf")
    assert list(ours.metadata) == list(theirs.metadata)
    assert all(ours.metadata.raw(key) == theirs.metadata.raw(key) for key in theirs.metadata)
    assert list(ours.tensors) == list(theirs.tensors)
    for name, tensor in theirs.tensors.items():
        assert (ours.tensors[name].shape, ours.tensors[name].format) == (
            tensor.shape,
            tensor.format,
        )
        assert np.array_equal(ours.tensors[name].parts["codes"], tensor.parts["codes"])


def test_replaced_values_keep_their_order(tmp_path: Path) -> None:
    kept = {
        "general.file_type": u32(7),
        "nested": RawValue(9, np.array([9, 0, 0], "<u4").tobytes()),
    }
    write(tmp_path / "a.gguf", gguf_file_layout(kept, []), {})
    found = read_gguf(tmp_path / "a.gguf").metadata
    write(
        tmp_path / "b.gguf",
        gguf_file_layout(
            {key: found.raw(key) for key in found} | {"general.file_type": u32(15)}, []
        ),
        {},
    )
    again = read_gguf(tmp_path / "b.gguf").metadata
    assert list(again.items()) == [("general.file_type", 15), ("nested", [])]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (PlannedTensor("w", "F8_E4M3", (2, 32), 64), "w: GGUF has no format F8_E4M3"),
        (PlannedTensor("w", "-", (2, 32), 64), "w: GGUF has no format -"),
        (PlannedTensor("w", "F32", (), 4), r"w: .* shape \[\]"),
        (PlannedTensor("w", "F32", (2, 0), 0), r"w: .* shape \[2, 0\]"),
        (PlannedTensor("w", "F32", (1, 1, 1, 1, 1), 4), r"w: .* shape \[1, 1, 1, 1, 1\]"),
        (PlannedTensor("é" * 32, "F32", (1,), 4), "more than 63 bytes"),
    ],
)
def test_invalid_tensors(tensor: PlannedTensor, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        gguf_file_layout({}, [tensor])


def test_duplicate_tensor_names() -> None:
    with pytest.raises(FormatError, match=r"tensor w: the name occurs twice"):
        gguf_file_layout({}, [planned("w", "F32", (1,)), planned("w", "F16", (2,))])


def test_types_of_values() -> None:
    array = np.array([1, -2], np.int32)
    made = [raw(value) for value in (True, 7, 0.5, "é", ["a", ""], array)]
    assert made == [flag(True), u32(7), f32(0.5), string("é"), strings(["a", ""]), numbers(array)]
    with pytest.raises(TypeError, match="the value None"):
        raw(None)


@pytest.mark.parametrize("alignment", [0, 4, 48, 1 << 17])
def test_invalid_alignments(alignment: int) -> None:
    with pytest.raises(FormatError, match=r"general\.alignment"):
        gguf_file_layout({"general.alignment": u32(alignment)}, [])
