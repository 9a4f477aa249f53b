"""The defaults of each face are those that the architecture page gives."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main as cli
from headrace.cli import run
from headrace.config import INTERACTIVE, OFFLINE, SERVING, EngineConfig, FaceDefaults
from headrace.loader.options import engine_config
from headrace.request import SamplingParams

FACES = {"serving": SERVING, "offline": OFFLINE, "interactive": INTERACTIVE}


def documented() -> dict[str, dict[str, str]]:
    """The table: face -> option -> the first word of its cell."""
    text = (
        (Path(__file__).parents[1] / "docs/scheduling.md")
        .read_text()
        .partition("## Faces and their defaults")[2]
    )
    heading, _, *rows = re.findall(r"^\|(.*)\|$", text.partition("\n## ")[0], re.MULTILINE)
    faces = [cell.split()[0] for cell in heading.split("|")[1:]]
    cells = [
        [re.split(r"[\s,](?!\d)", cell.strip())[0].strip("`") for cell in row.split("|")]
        for row in rows
    ]
    return {face: {row[0]: row[1 + i] for row in cells} for i, face in enumerate(faces)}


def value(text: str) -> Any:
    return None if text == "none" else float(text.replace(",", "")) if text[0].isdigit() else text


def defaults_of(face: FaceDefaults) -> Mapping[str, Any]:
    return vars(engine_config({}, face)) | vars(SamplingParams(**face.sampling))


def test_rows_are_those_of_the_backend() -> None:
    """What docs/scheduling.md says of chunks."""
    for face, backend, most in (
        (SERVING, "cpu", (64, 512, 16)),
        (SERVING, "cuda", (256, 2048, 256)),
        (OFFLINE, "cuda", (256, 2048, 2048)),
    ):
        config = engine_config({"backend": backend}, face)
        assert (config.max_seqs, config.max_rows, config.max_chunk_rows) == most
    small = engine_config({"backend": "cuda", "max_num_batched_tokens": 100})
    assert (small.max_rows, small.max_chunk_rows) == (100, 100)


@pytest.mark.parametrize("face", FACES)
def test_as_documented(face: str) -> None:
    found, table = defaults_of(FACES[face]), documented()[face]
    assert {name: found[name] for name in table if name != "seed"} == {
        name: value(text) for name, text in table.items() if name != "seed"
    }
    assert SamplingParams(**FACES[face].sampling).seed == value(table["seed"])


def test_the_table_has_every_difference() -> None:
    differing = {
        name
        for face in FACES.values()
        for record in (face.engine, face.sampling)
        for name in record
    }
    assert differing == documented()["serving"].keys()
    assert defaults_of(SERVING) == vars(EngineConfig()) | vars(SamplingParams())


def test_the_command_line_starts_from_them() -> None:
    parser = cli._Parser("headrace run")
    run.configure(parser)
    args = vars(parser.parse(["m", "p"]))
    expected = defaults_of(INTERACTIVE) | {"seed": 0, "threads": 0}
    shared = args.keys() & expected.keys() - {"model"}
    assert {"temperature", "proposer", "kv_dtype", "draft_depth", "seed"} <= shared
    assert {name: args[name] for name in shared} == {name: expected[name] for name in shared}
