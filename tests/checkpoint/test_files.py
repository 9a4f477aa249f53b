"""Hostile files of a checkpoint: pipes, devices, folders, circular links, and endless
files.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import files
from headrace.checkpoint.folder import chat_template, open_folder
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.safetensors import read_folder
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder
from headrace.errors import FormatError, ModelError, ModelNotFoundError

READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": open_folder,
    "chat_template.jinja": chat_template,
    "tokenizer_config.json": chat_template,
    "tokenizer.json": tokenizer_from_folder,
    "model.safetensors": read_folder,
    "model.safetensors.index.json": read_folder,
}


def circle(path: Path) -> None:
    path.symlink_to(path.name + "2")
    path.with_name(path.name + "2").symlink_to(path.name)


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 2 << 30)


class TestIrregularFiles:
    @pytest.mark.parametrize("name", READERS)
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (os.mkfifo, "not a regular file"),
            (os.mkdir, "not a regular file"),
            (lambda path: path.symlink_to("/dev/zero"), "leaves the folder"),
            (circle, "circular link"),
            (lambda path: path.symlink_to("nothing"), "No such file"),
        ],
    )
    def test_refused(
        self, tmp_path: Path, name: str, make: Callable[[Path], None], message: str
    ) -> None:
        make(tmp_path / name)
        with pytest.raises(ModelError, match=message) as error:
            READERS[name](tmp_path)
        assert name in str(error.value)

    @pytest.mark.parametrize("name", [name for name in READERS if name != "model.safetensors"])
    def test_more_bytes_than_any_real_one(
        self, tmp_path: Path, name: str, within_memory: Callable[[int], Any]
    ) -> None:
        endless(tmp_path / name)
        with (
            within_memory(0),
            pytest.raises(FormatError, match=f"{name}: 2,147,483,648 bytes, more than"),
        ):
            READERS[name](tmp_path)

    def test_more_values_than_any_real_one(
        self, tmp_path: Path, within_memory: Callable[[int], Any]
    ) -> None:
        (tmp_path / "config.json").write_bytes(b'{"a":[' + b"[],{}," * 2_000_000 + b"0]}")
        with (
            within_memory(0),
            pytest.raises(FormatError, match="more than the limit of 2,000,000 values"),
        ):
            open_folder(tmp_path)

    def test_paths_that_cannot_be_opened(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").symlink_to("x.gguf")
        for model in (
            tmp_path / "x.gguf",
            tmp_path / "x.gguf/y",
            tmp_path / ("x" * 5000),
            "~no-such-user/x",
            "a\0b",
        ):
            with pytest.raises(ModelNotFoundError) as error:
                resolve(str(model))
            assert len(str(error.value)) < 400
        circle(tmp_path / "folder")
        with pytest.raises(ModelError, match="Too many levels of symbolic links"):
            open_checkpoint(tmp_path / "folder")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
ALL_READERS = READERS | {
    "model.gguf": lambda folder: open_checkpoint(folder / "model.gguf"),
    "model-00002-of-00002.gguf": open_checkpoint,
    "consolidated.safetensors": read_folder,
}


@pytest.mark.parametrize("name", ALL_READERS)
def test_files_that_are_not_the_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(FormatError, match=rf"{name}: a pointer of Git LFS .*git lfs pull"):
        ALL_READERS[name](tmp_path)
    (tmp_path / name).write_bytes(b"\n<!DOCTYPE html><html><head>Sign in</head></html>")
    if name not in ("chat_template.jinja", "tokenizer.json"):
        with pytest.raises(FormatError, match=rf"{name}: a web page, not the file"):
            ALL_READERS[name](tmp_path)


def test_a_file_that_grows_is_read_to_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    fstat = os.fstat

    def then_append(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        with path.open("a") as file:
            file.write(" and more")
        return status

    monkeypatch.setattr(os, "fstat", then_append)
    assert files.read_file(path, 2) == b"{}"


class TestSeveralTemplates:
    """Named templates as in transformers: the last one of a name counts, and `default`
    is used.
    """

    @pytest.mark.parametrize(
        ("given", "template"),
        [
            ([], None),
            ([{"name": "tool_use", "template": "a"}], None),
            ([{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}], "a"),
            ([{"name": "default", "template": "a"}, {"name": "default", "template": "b"}], "b"),
            (
                [
                    {"name": ["x"], "template": "a"},
                    {"name": {"y": 1}},
                    5,
                    None,
                    {"name": "default", "template": "c"},
                ],
                "c",
            ),
        ],
    )
    def test_the_default_one(self, tmp_path: Path, given: Any, template: str | None) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
        assert chat_template(tmp_path) == template

    @pytest.mark.parametrize(
        "given",
        [
            5,
            {"default": "x"},
            [{"name": "default", "template": 5}],
            [{"name": "default", "template": ["a"]}],
        ],
    )
    def test_what_is_no_template(self, tmp_path: Path, given: Any) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
        with pytest.raises(FormatError, match="chat_template is not"):
            chat_template(tmp_path)


def test_a_gguf_file_whose_template_has_no_end(
    write_gguf: Any, within_memory: Callable[[int], Any]
) -> None:
    path = write_gguf({"tokenizer.chat_template": "x" * (8 << 20)})
    with (
        within_memory(0),
        pytest.raises(FormatError, match="a string of 8,388,608 bytes, more than"),
    ):
        open_checkpoint(path)
