import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.checkpoint.gguf import GgufFile, read_gguf
from headrace.checkpoint.load import open_checkpoint
from headrace.errors import FormatError, ModelError, ModelNotFoundError, UnsupportedModelError
from headrace.quant.formats import FORMATS

KINDS = [
    "u8",
    "i8",
    "u16",
    "i16",
    "u32",
    "i32",
    "f32",
    "bool",
    "string",
    "array",
    "u64",
    "i64",
    "f64",
]
FORMS = ["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<B", "", "", "<Q", "<q", "<d"]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def array(kind: int, count: int, body: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + body


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: str,
    dims: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int = 0,
    num_dims: int | None = None,
) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def build(
    *records: bytes,
    pairs: tuple[bytes, ...] = (),
    data: int = 256,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    align: int = 32,
) -> bytes:
    num_tensors, num_pairs = counts or (len(records), len(pairs))
    head = (
        b"GGUF"
        + struct.pack("<IQQ", version, num_tensors, num_pairs)
        + b"".join(pairs)
        + b"".join(records)
    )
    return head + bytes(-len(head) % align) + bytes(data)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], GgufFile]:
    def read_bytes(content: bytes) -> GgufFile:
        path = tmp_path / "made.gguf"
        path.write_bytes(content)
        return read_gguf(path)

    return read_bytes


class TestAgainstTheGgufPackage:
    @pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q5_1"])
    def test_a_model(self, write_gguf: Any, kind: str) -> None:
        path = write_gguf(kind=kind)
        ours, oracle = read_gguf(path), gguf.GGUFReader(path)
        assert ours.version == 3
        assert set(ours.metadata) == {key for key in oracle.fields if not key.startswith("GGUF.")}
        for key in ours.metadata:
            found = ours.metadata[key]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == oracle.fields[
                key
            ].contents()
        assert set(ours.tensors) == {record.name for record in oracle.tensors}
        for record in oracle.tensors:
            found = ours.tensors[record.name]
            assert found.shape == tuple(reversed(record.shape.tolist()))
            assert found.format.name == record.tensor_type.name
            np.testing.assert_array_equal(
                found.parts["codes"].reshape(-1), record.data.reshape(-1).view(np.uint8)
            )

    def test_the_default_model(self, smollm2: Path) -> None:
        ours = read_gguf(smollm2)
        assert len(ours.tensors) == 272
        assert len(ours.metadata.strings("tokenizer.ggml.tokens")) == 49152
        assert {found.format.name for found in ours.tensors.values()} == {"F32", "Q4_1", "Q8_0"}
        row = ours.tensors["blk.3.attn_k.weight"]
        expected = gguf.quants.dequantize(
            row.parts["codes"].reshape(192, -1), gguf.GGMLQuantizationType.Q4_1
        )
        np.testing.assert_array_equal(row.dequantise(), expected)


class TestMetadata:
    @pytest.mark.parametrize("version", [2, 3])
    def test_every_type(self, read: Callable[[bytes], GgufFile], version: int) -> None:
        values: list[Any] = [
            200,
            -100,
            60000,
            -30000,
            4 * 10**9,
            -2 * 10**9,
            1.5,
            1,
            "día",
            None,
            2**63,
            -(2**62),
            0.1,
        ]
        scalars = [
            pair(name, kind, text(value) if form == "" else struct.pack(form, value))
            for kind, (name, form, value) in enumerate(zip(KINDS, FORMS, values, strict=True))
            if name != "array"
        ]
        arrays = [
            pair(f"{name}s", 9, array(kind, 3, struct.pack(form, value) * 3))
            for kind, (name, form, value) in enumerate(zip(KINDS, FORMS, values, strict=True))
            if form
        ]
        nested = pair(
            "nested", 9, array(9, 2, array(4, 2, struct.pack("<II", 1, 2)) + array(8, 1, text("x")))
        )
        strings = pair("strings", 9, array(8, 3, text("") + text("é") + text("abc")))
        found = read(build(pairs=(*scalars, *arrays, nested, strings), version=version)).metadata
        for name, value in zip(KINDS, values, strict=True):
            if name != "array":
                assert found[name] == value
        assert found["bool"] is True
        assert found["u64s"].tolist() == [2**63] * 3
        assert found["f32s"].tolist() == [1.5] * 3
        assert [
            part.tolist() if isinstance(part, np.ndarray) else part for part in found["nested"]
        ] == [[1, 2], ["x"]]
        assert found.strings("strings") == ["", "é", "abc"]
        assert len(found) == len(list(found)) == len(scalars) + len(arrays) + 2

    def test_getters_name_the_key(self, read: Callable[[bytes], GgufFile]) -> None:
        pairs = (
            pair("a.s", 8, text("x")),
            pair("a.b", 7, b"\1"),
            pair("a.n", 6, struct.pack("<f", float("nan"))),
        )
        found = read(
            build(
                pairs=(*pairs, pair("a.l", 9, array(4, 1, bytes(4))), pair("a.u", 8, text(b"\xff")))
            )
        ).metadata
        assert found.integer("none", 3) == 3
        for get, key in (
            (found.integer, "a.s"), (found.integer, "a.b"), (found.number, "a.n"),
            (found.flag, "a.s"), (found.string, "a.b"),
            (found.strings, "a.l"), (found.numbers, "a.s"), (found.integer, "a.missing"),
            (found.string, "a.u"),
        ):  # fmt: skip
            with pytest.raises(FormatError, match=key):
                get(key)


NEAR_END = 2**64 - 32
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not GGUF": (b"GGML" + bytes(100), "not a GGUF file"),
    "version 1": (build(version=1), "version 1"),
    "version 4": (build(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (build(counts=(2**63, 0)), "tensors"),
    "tensor count beyond the file": (build(counts=(60_000, 0)), "remain|dimensions"),
    "key count": (build(counts=(0, 2**64 - 1)), "key-values"),
    "key length": (build(pairs=(struct.pack("<Q", 2**64 - 1),)), "a key of"),
    "key beyond the file": (build(pairs=(struct.pack("<Q", 60_000),), data=0), "remain"),
    "key not ASCII": (build(pairs=(pair("clé", 4, bytes(4)),)), "not valid ASCII"),
    "value type": (build(pairs=(pair("a", 13, b""),)), "unknown value type 13"),
    "string length": (build(pairs=(pair("a", 8, struct.pack("<Q", 2**64 - 1)),)), "remain"),
    "array length": (build(pairs=(pair("a", 9, array(4, 2**62, b"")),)), "remain"),
    "array of strings": (build(pairs=(pair("a", 9, array(8, 2**61, b"")),)), "does not fit"),
    "array of long strings": (
        build(pairs=(pair("a", 9, array(8, 2, struct.pack("<QQ", 2**63, 1))),)),
        "past the end",
    ),
    "array type": (build(pairs=(pair("a", 9, array(77, 1, bytes(64))),)), "unknown value type 77"),
    "arrays nested deep": (build(pairs=(pair("a", 9, array(9, 1, b"") * 5000),)), "nested"),
    "key twice": (build(pairs=(pair("a", 4, bytes(4)), pair("a", 5, bytes(4)))), "a appears twice"),
    "name twice": (build(tensor("t"), tensor("t", offset=128)), "same name"),
    "name too long": (build(tensor("t" * 65)), "65 bytes"),
    "dimension count": (build(tensor("t", num_dims=2**32 - 1)), "4,294,967,295 dimensions"),
    "five dimensions": (build(tensor("t", (1, 1, 1, 1, 1))), "5 dimensions"),
    "no dimensions": (build(tensor("t", ())), "0 dimensions"),
    "a dimension of zero": (build(tensor("t", (32, 0))), "empty"),
    "dimensions that overflow": (build(tensor("t", (2**32, 2**32))), "too large"),
    "dimensions that wrap to 32": (build(tensor("t", (2**63, 2, 32))), "too large"),
    "columns": (build(tensor("t", (48,), kind=2)), "multiple of the block size 32"),
    "beyond the file": (build(tensor("t", (1024,))), "ends at"),
    "offset near 2^64": (build(tensor("t", offset=NEAR_END)), "ends at"),
    "offset unaligned": (build(tensor("t", offset=8)), "alignment"),
    "overlap": (build(tensor("a", (32,)), tensor("b", offset=96)), "b overlaps a"),
    "same place": (build(tensor("a"), tensor("b")), "overlaps"),
    "alignment 2^31": (
        build(pairs=(pair("general.alignment", 4, struct.pack("<I", 2**31)),)),
        "alignment",
    ),
    "alignment 0": (build(pairs=(pair("general.alignment", 4, bytes(4)),)), "alignment"),
    "alignment 24": (
        build(pairs=(pair("general.alignment", 4, struct.pack("<I", 24)),)),
        "alignment",
    ),
    "alignment is text": (
        build(pairs=(pair("general.alignment", 8, text("32")),)),
        "general.alignment",
    ),
}


class TestHostileFiles:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_refused(
        self, case: str, read: Callable[[bytes], GgufFile], within_memory: Any
    ) -> None:
        content, message = HOSTILE[case]
        with within_memory(len(content)), pytest.raises(FormatError, match=message) as caught:
            read(content)
        assert "made.gguf" in str(caught.value)

    @pytest.mark.parametrize(
        ("kind", "name"), [(15, "Q8_K"), (9, "Q8_1"), (26, "I32"), (4, "-"), (1234, "unknown")]
    )
    def test_unsupported_type_names_tensor_and_type(
        self, kind: int, name: str, read: Callable[[bytes], GgufFile]
    ) -> None:
        with pytest.raises(UnsupportedModelError, match=rf"blk\.0\.x has type {kind} \({name}\)"):
            read(build(tensor("blk.0.x", (256,), kind=kind)))

    def test_alignment_is_used(self, read: Callable[[bytes], GgufFile]) -> None:
        pairs = (pair("general.alignment", 4, struct.pack("<I", 4096)),)
        found = read(build(tensor("t", offset=4096), pairs=pairs, data=4096 + 128, align=4096))
        assert found.tensors["t"].nbytes == 128

    def test_many_small_things_stay_small(
        self, read: Callable[[bytes], GgufFile], within_memory: Any
    ) -> None:
        packed = pair("general.alignment", 4, struct.pack("<I", 8))
        files = [
            build(pairs=(pair("a", 9, array(9, 100_000, array(4, 0, b"") * 100_000)),)),
            build(pairs=(pair("a", 9, array(8, 300_000, bytes(8) * 300_000)),)),
            build(pairs=(pair("a", 8, text("\U0001f600" + "a" * (24 << 20))),)),
            build(pairs=tuple(pair(f"{i:x}", 0, b"\0") for i in range(65_000))),
            build(
                *(tensor(f"{i:x}", (1,), offset=8 * i) for i in range(65_000)),
                pairs=(packed,),
                data=8 * 65_000,
            ),
        ]
        for content in files:
            with within_memory(len(content)):
                found = read(content)
                assert len(found.metadata) + len(found.tensors) in (1, 65_000, 65_001)

    def test_only_regular_files(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(FormatError, match="regular"):
            read_gguf(tmp_path / "pipe.gguf")
        with pytest.raises(FormatError, match="regular"):
            read_gguf(tmp_path)
        with pytest.raises(ModelNotFoundError, match="No such file"):
            read_gguf(tmp_path / "none.gguf")


def load(path: Path) -> None:
    """Do everything that a run does with a file before its first step."""
    checkpoint = open_checkpoint(path)
    checkpoint.load_tokenizer().encode("hello world")
    checkpoint.tensors["layers.0.q"].dequantise()


class TestDamage:
    def test_truncated_anywhere(self, write_gguf: Any, tmp_path: Path, within_memory: Any) -> None:
        content = write_gguf(kind="Q4_0").read_bytes()
        path = tmp_path / "cut.gguf"
        header = content.index(b"output_norm.weight") + 2000
        cuts = [*range(0, header, 3), *range(header, len(content), 997), len(content) - 1]
        with within_memory(len(content)):
            for cut in cuts:
                path.write_bytes(content[:cut])
                with pytest.raises(ModelError):
                    load(path)

    @pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
    def test_mutations(
        self,
        kind: str,
        write_gguf: Any,
        sentencepiece_model: dict[str, Any],
        tmp_path: Path,
        within_memory: Any,
    ) -> None:
        made = (
            write_gguf(kind="Q8_0") if kind == "byte-level" else write_gguf(**sentencepiece_model)
        )
        content = made.read_bytes()
        path = tmp_path / "mutated.gguf"
        header = content.index(b"blk.1.ffn_down.weight") + 100
        rng = random.Random(0)
        refused = 0
        with within_memory(len(content)):
            for _ in range(1000):
                damaged = bytearray(content)
                for _ in range(rng.randint(1, 3)):
                    at = rng.randrange(header if rng.random() < 0.9 else len(content))
                    damaged[at] = rng.choice(
                        [
                            0,
                            1,
                            0x7F,
                            0xFF,
                            rng.randrange(256),
                            damaged[at] ^ (1 << rng.randrange(8)),
                        ]
                    )
                path.write_bytes(damaged)
                try:
                    load(path)
                except ModelError:
                    refused += 1
        assert refused > 200


@pytest.mark.parametrize(
    "name", [name for name, stored in FORMATS.items() if len(stored.parts) == 1]
)
def test_every_format_has_its_number(name: str, read: Callable[[bytes], GgufFile]) -> None:
    content = build(tensor("t", (256,), kind=int(gguf.GGMLQuantizationType[name])), data=1024)
    assert read(content).tensors["t"].format == FORMATS[name]
