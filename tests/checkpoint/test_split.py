"""GGUF models in several files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.load import open_checkpoint
from headrace.errors import ModelError, ModelNotFoundError
from tests.checkpoint.conftest import element_type, metadata, tensors, value_type
from tests.convert.conversion import to_gguf

COUNT = 3
VALUES = metadata("llama")
TENSORS = tensors(len(VALUES["tokenizer.ggml.tokens"]))


def part(number: int, count: int = COUNT, stem: str = "tiny") -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def write_part(
    path: Path, values: dict[str, Any], names: list[str], split: tuple[int, int, int]
) -> None:
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    for key, value in values.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, value_type(value), *element_type(value))
    writer.add_uint16("split.no", split[0])
    writer.add_uint16("split.count", split[1])
    writer.add_int32("split.tensors.count", split[2])
    for name in names:
        writer.add_tensor(name, TENSORS[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_parts(folder: Path, stem: str = "tiny") -> list[Path]:
    """The tiny model in three parts; the first has the metadata."""
    folder.mkdir(exist_ok=True)
    names, paths = sorted(TENSORS), []
    for i in range(COUNT):
        path = folder / part(i + 1, stem=stem)
        write_part(path, VALUES if i == 0 else {}, names[i::COUNT], (i, COUNT, len(names)))
        paths.append(path)
    return paths


def test_any_part_and_the_folder(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    (tmp_path / "mmproj-model-f16.gguf").write_bytes(b"a vision tower")
    (tmp_path / "README.md").write_text("text")
    for path in (*paths, tmp_path):
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == paths[0] and checkpoint.stored.keys() == TENSORS.keys()
        embedding = checkpoint.tensors["embed"].dequantise()
        np.testing.assert_array_equal(embedding, TENSORS["token_embd.weight"])
        assert checkpoint.load_tokenizer().vocab_size == len(VALUES["tokenizer.ggml.tokens"])


def test_conversion_joins_the_parts(tmp_path: Path) -> None:
    made = read_gguf(to_gguf(write_parts(tmp_path)[1], tmp_path / "one.gguf"))
    assert made.tensors.keys() == TENSORS.keys()
    assert not any(key.startswith("split.") for key in made.metadata)


def incomplete(paths: list[Path]) -> None:
    paths[0].unlink()
    paths[2].unlink()


def renamed(paths: list[Path]) -> None:
    for path in paths:
        path.rename(path.with_name(path.name.replace("of-00003", "of-3")))


def swapped(paths: list[Path]) -> None:
    other = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    paths[2].write_bytes(other)


def of_another_model(paths: list[Path]) -> None:
    write_part(paths[2], {}, sorted(TENSORS)[2::COUNT][:-1], (2, COUNT, len(TENSORS)))


def double(paths: list[Path]) -> None:
    write_part(paths[2], {}, sorted(TENSORS)[1::COUNT], (2, COUNT, len(TENSORS)))


def more_parts(paths: list[Path]) -> None:
    write_part(paths[1], {}, sorted(TENSORS)[1::COUNT], (1, 9, len(TENSORS)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            incomplete,
            r"2 of 3 parts of the model are missing: tiny-00001-of-00003\.gguf, tiny-00003",
        ),
        (renamed, r"its name must end in -00001-of-00003\.gguf"),
        (swapped, r"the file is part 2 \(from 0\) of 3, but its name says part 1 of 3"),
        (of_another_model, r"the model has 20 tensors, but its parts have 19"),
        (double, r"is in another part, too"),
        (more_parts, r"a part of a model with 9 parts"),
    ],
)
def test_damage(damage: Callable[[list[Path]], None], message: str, tmp_path: Path) -> None:
    damage(write_parts(tmp_path))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(sorted(tmp_path.iterdir())[len(list(tmp_path.iterdir())) // 2])


def test_folders_with_several_models(tmp_path: Path) -> None:
    write_parts(tmp_path)
    write_parts(tmp_path, "other")
    with pytest.raises(
        ModelNotFoundError, match=r"2 GGUF models; name the file of one.*other-00001.*tiny-00001"
    ):
        open_checkpoint(tmp_path)


def test_a_configuration_next_to_the_file(tmp_path: Path) -> None:
    write_parts(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).tensors
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="architecture"):
        open_checkpoint(tmp_path)
