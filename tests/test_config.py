"""The presets have the defaults that docs/internals/scheduling.md documents."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main as cli
from headrace.cli import run
from headrace.config import INTERACTIVE, OFFLINE, SERVING, EngineConfig, Preset
from headrace.loader.options import engine_config
from headrace.sampling_params import SamplingParams

PRESETS = {"serving": SERVING, "offline": OFFLINE, "interactive": INTERACTIVE}


def documented() -> dict[str, dict[str, str]]:
    """Return the page's table: preset -> option -> first word of its cell."""
    text = (
        (Path(__file__).parents[1] / "docs/internals/scheduling.md")
        .read_text()
        .partition("## Presets")[2]
    )
    heading, _, *rows = re.findall(r"^\|(.*)\|$", text.partition("\n## ")[0], re.MULTILINE)
    presets = [cell.split()[0] for cell in heading.split("|")[1:]]
    cells = [
        [re.split(r"[\s,](?!\d)", cell.strip())[0].strip("`") for cell in row.split("|")]
        for row in rows
    ]
    return {preset: {row[0]: row[1 + i] for row in cells} for i, preset in enumerate(presets)}


def value(text: str) -> Any:
    return None if text == "none" else float(text.replace(",", "")) if text[0].isdigit() else text


def defaults_of(preset: Preset) -> Mapping[str, Any]:
    return vars(engine_config({}, preset)) | vars(SamplingParams(**preset.sampling))


def test_step_limits_of_each_backend() -> None:
    for preset, backend, limits in (
        (SERVING, "cpu", (64, 512, 16)),
        (SERVING, "cuda", (256, 2048, 256)),
        (OFFLINE, "cuda", (256, 2048, 2048)),
    ):
        config = engine_config({"backend": backend}, preset)
        assert (config.max_seqs, config.max_rows, config.max_chunk_rows) == limits
    small = engine_config({"backend": "cuda", "max_num_batched_tokens": 100})
    assert (small.max_rows, small.max_chunk_rows) == (100, 100)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_documented(name: str) -> None:
    found, table = defaults_of(PRESETS[name]), documented()[name]
    assert {option: found[option] for option in table if option != "seed"} == {
        option: value(text) for option, text in table.items() if option != "seed"
    }
    assert SamplingParams(**PRESETS[name].sampling).seed == value(table["seed"])


def test_the_table_lists_every_preset_option() -> None:
    differing = {
        name
        for preset in PRESETS.values()
        for record in (preset.engine, preset.sampling)
        for name in record
    }
    assert differing == documented()["serving"].keys()
    assert defaults_of(SERVING) == vars(EngineConfig()) | vars(SamplingParams())


def test_headrace_run_has_the_interactive_preset() -> None:
    parser = cli.Parser("headrace run")
    run.configure(parser)
    args = vars(parser.parse(["m", "p"]))
    expected = defaults_of(INTERACTIVE) | {"seed": 0, "threads": 0}
    shared = args.keys() & expected.keys() - {"model"}
    assert {"temperature", "proposer", "kv_dtype", "draft_depth", "seed"} <= shared
    assert {name: args[name] for name in shared} == {name: expected[name] for name in shared}
