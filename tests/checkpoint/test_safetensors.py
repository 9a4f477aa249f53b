import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from headrace.checkpoint.safetensors import read_folder, read_safetensors
from headrace.errors import FormatError, ModelError, ModelNotFoundError, UnsupportedModelError


def build(header: Any, data: int = 16, size: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if size is None else size) + raw + bytes(data)


def entry(shape: list[Any], start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def shards(folder: Path, weight_map: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


class TestReading:
    def test_equals_the_library(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        arrays = {
            f"t{i}": rng.normal(size=(3 + i, 5)).astype([np.float32, np.float16][i % 2])
            for i in range(7)
        }
        save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "pt", "note": "{"})
        found = read_safetensors(tmp_path / "a.safetensors")
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            assert found[name].shape == array.shape
            np.testing.assert_array_equal(found[name].dequantise(), array.astype(np.float32))

    def test_bfloat16(self, tmp_path: Path) -> None:
        weights = torch.randn(4, 6).to(torch.bfloat16)
        save_torch_file({"w": weights}, tmp_path / "a.safetensors")
        found = read_safetensors(tmp_path / "a.safetensors")["w"]
        assert found.format.name == "BF16"
        np.testing.assert_array_equal(found.dequantise(), weights.float().numpy())

    def test_shards(self, tmp_path: Path) -> None:
        save_file({"a": np.ones((2, 2), np.float32)}, tmp_path / "m-1.safetensors")
        save_file(
            {"b": np.zeros((2, 2), np.float32), "c": np.zeros(3, np.float32)},
            tmp_path / "m-2.safetensors",
        )
        # Tensors outside the index are read, as transformers does; `b` is in another shard.
        folder = shards(
            tmp_path, {"a": "m-1.safetensors", "b": "m-1.safetensors", "d": "m-2.safetensors"}
        )
        assert set(read_folder(folder)) == {"a", "b", "c"}

    def test_a_tensor_in_two_shards(self, tmp_path: Path) -> None:
        for i in (1, 2):
            arrays = {"a": np.full(2, i, np.float32), "b": np.ones(2, np.float32)}
            save_file(arrays, tmp_path / f"m-{i}.safetensors")
        shards(tmp_path, {"a": "m-2.safetensors", "c": "m-1.safetensors"})
        np.testing.assert_array_equal(read_folder(tmp_path)["a"].dequantise(), [2, 2])
        shards(tmp_path, {"b": "m-2.safetensors", "c": "m-1.safetensors"})
        with pytest.raises(FormatError, match=r"tensor a is in m-1\.safetensors and in m-2\.safe"):
            read_folder(tmp_path)

    def test_shards_without_an_index(self, tmp_path: Path) -> None:
        for i in (1, 3):
            save_file(
                {f"t{i}": np.ones(2, np.float32)},
                tmp_path / f"model-0000{i}-of-00003.safetensors",
            )
        with pytest.raises(
            ModelNotFoundError, match=r"1 of 3 files .* missing: model-00002-of-00003\.safetensors"
        ):
            read_folder(tmp_path)
        save_file({"t2": np.ones(2, np.float32)}, tmp_path / "model-00002-of-00003.safetensors")
        assert set(read_folder(tmp_path)) == {"t1", "t2", "t3"}
        (tmp_path / "consolidated.safetensors").write_bytes(b"Mistral's own layout")
        assert set(read_folder(tmp_path)) == {"t1", "t2", "t3"}
        save_file({"t4": np.ones(2, np.float32)}, tmp_path / "other-1-of-2.safetensors")
        with pytest.raises(FormatError, match="several safetensors files"):
            read_folder(tmp_path)

    def test_a_single_file_next_to_an_index(self, tmp_path: Path) -> None:
        """Quantised repositories keep the index of the original."""
        folder = shards(tmp_path, {"a": "model-00001-of-00002.safetensors"})
        save_file({"b": np.ones(2, np.float32)}, folder / "model.safetensors")
        assert set(read_folder(folder)) == {"b"}

    @pytest.mark.parametrize("name", ["consolidated.safetensors", "model.safetensors"])
    def test_the_layout_of_mistral_is_refused(self, tmp_path: Path, name: str) -> None:
        save_file({"tok_embeddings.weight": np.ones(2, np.float32)}, tmp_path / name)
        with pytest.raises(UnsupportedModelError, match=rf"{name} has the tensor names of Mistral"):
            read_folder(tmp_path)

    def test_one_file_of_any_name(self, tmp_path: Path) -> None:
        save_file({"a": np.ones(2, np.float32)}, tmp_path / "weights.safetensors")
        assert set(read_folder(tmp_path)) == {"a"}
        save_file({"b": np.ones(2, np.float32)}, tmp_path / "more.safetensors")
        with pytest.raises(FormatError, match=r"several safetensors files"):
            read_folder(tmp_path)
        save_file({"c": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
        assert set(read_folder(tmp_path)) == {"c"}


F = 2**63
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "seven bytes": (bytes(7), "does not fit"),
    "length beyond the file": (build({}, size=2**64 - 1), "does not fit"),
    "header too long": (build(b"{}" + b" " * (7 << 20)), "more than"),
    "not JSON": (build(b"{]"), "not valid"),
    "not UTF-8": (build(b'{"\xff": 1}'), "not valid"),
    "a list": (build([1, 2]), "not a JSON object"),
    "nested deep": (build(b"[" * 100_000), "not valid"),
    "a number of many digits": (build(b'{"a":' + b"9" * 5000 + b"}"), "not valid"),
    "twice": (
        build(
            b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
        ),
        "twice",
    ),
    "too many": (build(b'{"a":' + b"{}," * 70_000 + b"}"), "more than the limit of 65,536"),
    "numbers without end": (build(b'{"a":[' + b"0," * (2 << 20)), "more than the limit of 65,536"),
    "no entry": (build({"a": 1}), "tensor a"),
    "an extra field": (build({"a": entry([4], 0, 16) | {"x": 1}}), "tensor a"),
    "negative": (build({"a": entry([-4], 0, 16)}), "tensor a"),
    "truth for a number": (build({"a": entry([True], 0, 4)}), "tensor a"),
    "a float": (build({"a": entry([4.0], 0, 16)}), "tensor a"),
    "huge": (build({"a": entry([F, F], 0, 16)}), "tensor a"),
    "overflowing": (build({"a": entry([2**62, 8], 0, 16)}), "tensor a"),
    "backwards": (build({"a": entry([4], 16, 0)}), "tensor a"),
    "too short": (build({"a": entry([5], 0, 16)}), "tensor a"),
    "nothing, and much of it": (
        build({"a": entry([4], 0, 16), "b": entry([2**62, 0, 2**62], 16, 16)}),
        "tensor b",
    ),
    "a gap": (build({"a": entry([3], 4, 16)}), "expected from 0"),
    "overlap": (build({"a": entry([3], 0, 12), "b": entry([2], 8, 16)}), "tensor b"),
    "of ZeRO-3": (build({"a": entry([0], 0, 0)}), "is empty; if DeepSpeed ZeRO-3 trained"),
    "beyond the file": (build({"a": entry([5], 0, 20)}), "is truncated"),
    "bytes left over": (build({"a": entry([3], 0, 12)}), "the tensors end"),
}


class TestHostileFiles:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_refused(self, case: str, tmp_path: Path, within_memory: Callable[[int], Any]) -> None:
        content, message = HOSTILE[case]
        path = tmp_path / "made.safetensors"
        path.write_bytes(content)
        with within_memory(len(content)), pytest.raises(FormatError, match=message) as caught:
            read_safetensors(path)
        assert "made.safetensors" in str(caught.value)

    @pytest.mark.parametrize("dtype", ["F64", "F4", "C64", "nonsense"])
    def test_unsupported_dtype_names_tensor_and_dtype(self, tmp_path: Path, dtype: str) -> None:
        (tmp_path / "a.safetensors").write_bytes(build({"layer.w": entry([2], 0, 16, dtype)}))
        with pytest.raises(UnsupportedModelError, match=rf"layer\.w has dtype {dtype}"):
            read_safetensors(tmp_path / "a.safetensors")

    def test_many_small_things_stay_small(
        self, tmp_path: Path, within_memory: Callable[[int], Any]
    ) -> None:
        many = {f"{i:x}": entry([1], 4 * i, 4 * i + 4) for i in range(65_000)}
        long = {"\U0001f600" + "a" * (5 << 20): entry([4], 0, 16)}
        for header, data in ((many, 4 * 65_000), (long, 16)):
            content = build(
                json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(), data
            )
            (tmp_path / "a.safetensors").write_bytes(content)
            with within_memory(len(content)):
                assert len(read_safetensors(tmp_path / "a.safetensors")) == len(header)


class TestFolders:
    @pytest.mark.parametrize(
        "name",
        [
            "../secret.safetensors",
            "/etc/passwd",
            "a/b.safetensors",
            "..",
            ".",
            "",
            "a\\b",
            "x\0y",
            "\ud800",
            "x" * 256,
        ],
    )
    def test_shards_are_plain_names(self, tmp_path: Path, name: str) -> None:
        save_file({"a": np.ones(2, np.float32)}, tmp_path / "secret.safetensors")
        with pytest.raises(FormatError, match="plain name"):
            read_folder(shards(tmp_path / "model", {"a": name}))

    def test_links_stay_inside(self, tmp_path: Path) -> None:
        save_file({"a": np.ones(2, np.float32)}, tmp_path / "secret.safetensors")
        folder = shards(tmp_path / "model", {"a": "a.safetensors"})
        (folder / "a.safetensors").symlink_to(tmp_path / "secret.safetensors")
        with pytest.raises(FormatError, match="leaves the folder"):
            read_folder(folder)

    def test_the_layout_of_the_hub_cache(self, tmp_path: Path) -> None:
        folder, blobs = tmp_path / "models--o--m/snapshots/abc", tmp_path / "models--o--m/blobs"
        folder.mkdir(parents=True)
        blobs.mkdir()
        save_file({"a": np.ones(2, np.float32)}, blobs / "0f0f")
        (folder / "model.safetensors").symlink_to("../../blobs/0f0f")
        assert set(read_folder(folder)) == {"a"}

    @pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": ["x"]}, "x"])
    def test_malformed_index(self, tmp_path: Path, weight_map: Any) -> None:
        with pytest.raises(FormatError, match="weight_map"):
            read_folder(shards(tmp_path, weight_map))

    def test_index_and_shards_disagree(self, tmp_path: Path) -> None:
        save_file({"a": np.ones(2, np.float32)}, tmp_path / "m.safetensors")
        assert set(read_folder(shards(tmp_path, {"b": "m.safetensors"}))) == {"a"}
        with pytest.raises(ModelNotFoundError, match=r"1 of 1 files .* missing: none\.safetensors"):
            read_folder(shards(tmp_path, {"a": "none.safetensors"}))

    def test_a_pipe_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "m.safetensors")
        with pytest.raises(FormatError, match="regular"):
            read_folder(shards(tmp_path, {"a": "m.safetensors"}))

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickles_are_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
        with pytest.raises(UnsupportedModelError, match=r"pickle.*safetensors"):
            read_folder(tmp_path)
        assert not Path("canary").exists()

    def test_no_weights(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="no safetensors file"):
            read_folder(tmp_path)


class TestDamage:
    @pytest.fixture
    def content(self, tmp_path: Path) -> bytes:
        rng = np.random.default_rng(0)
        save_file(
            {f"layer.{i}.weight": rng.normal(size=(4, 8)).astype(np.float16) for i in range(6)},
            tmp_path / "a.safetensors",
        )
        return (tmp_path / "a.safetensors").read_bytes()

    def test_truncated_anywhere(
        self, content: bytes, tmp_path: Path, within_memory: Callable[[int], Any]
    ) -> None:
        path = tmp_path / "cut.safetensors"
        with within_memory(len(content)):
            for cut in range(len(content)):
                path.write_bytes(content[:cut])
                with pytest.raises(FormatError):
                    read_safetensors(path)

    def test_mutations(
        self, content: bytes, tmp_path: Path, within_memory: Callable[[int], Any]
    ) -> None:
        path, rng = tmp_path / "mutated.safetensors", random.Random(0)
        header = 8 + int.from_bytes(content[:8], "little")
        refused = 0
        with within_memory(len(content)):
            for _ in range(2000):
                damaged = bytearray(content)
                for _ in range(rng.randint(1, 3)):
                    at = rng.randrange(header if rng.random() < 0.9 else len(content))
                    damaged[at] = rng.choice(
                        [
                            0,
                            0x22,
                            0x2C,
                            0x39,
                            0x5D,
                            0xFF,
                            rng.randrange(256),
                            damaged[at] ^ (1 << rng.randrange(8)),
                        ]
                    )
                path.write_bytes(damaged)
                try:
                    for found in read_safetensors(path).values():
                        found.dequantise()
                except ModelError:
                    refused += 1
        assert refused > 1000
