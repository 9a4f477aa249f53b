"""Every place that knows sampling parameters agrees with their table, `SAMPLING_FIELDS`."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace._native import Sampler
from headrace.cli import run
from headrace.sampling.sampler import make_sampler
from headrace.sampling_params import SAMPLING_FIELDS, SamplingField, SamplingParams
from headrace.server.generation import sampling_params
from headrace.server.openai_records import CompletionRequest, Sampling
from tests.sampling.sampler_twin import SamplerTwin

ROOT = Path(__file__).parents[2]
NUMBERS = [row for row in SAMPLING_FIELDS.values() if row.bounds]
SAMPLER_OPTIONS = [row for row in NUMBERS if row.is_sampler_option]
OPENAI_NUMBERS = [
    row for row in NUMBERS if row.is_openai_field and row.name not in ("seed", "logprobs")
]
OTHER_OPTIONS = {"vocab", "seq_index", "seed", "logit_bias", "banned", "banned_until"}
"""Options of a native sampler that follow from more than one parameter."""


def name_of(row: SamplingField) -> str:
    return row.name


def other_value(row: SamplingField) -> float:
    """A valid value that is not the default."""
    assert row.bounds
    low, high = row.bounds
    return row.kind(3 if row.kind is int else (max(low, -1.0) + min(high, 2.0)) / 2 + 0.125)


def outside(row: SamplingField) -> Iterator[float]:
    """The nearest values that are out of bounds."""
    assert row.bounds
    low, high = row.bounds
    step = 1 if row.kind is int else 1e-7
    yield low if row.excludes_min else low - step
    yield high + step


def test_the_table_has_every_field() -> None:
    assert list(SAMPLING_FIELDS) == [param.name for param in fields(SamplingParams)]
    assert SAMPLING_FIELDS["min_p"] == SamplingField(
        name="min_p",
        kind=float,
        is_optional=False,
        default=0.0,
        bounds=(0.0, 1.0),
        neutral=(0.0,),
        is_sampler_option=True,
        metavar="P",
        help=SAMPLING_FIELDS["min_p"].help,
    )
    assert SAMPLING_FIELDS["max_tokens"].is_optional and SAMPLING_FIELDS["max_tokens"].kind is int


class TestSamplers:
    def test_native_samplers_have_the_options_of_the_table(self) -> None:
        options = Sampler(8, []).options
        assert options.keys() - OTHER_OPTIONS == {row.name for row in SAMPLER_OPTIONS}
        for row in SAMPLER_OPTIONS:
            assert options[row.name] == row.default
            assert getattr(SamplerTwin(8, []), row.name) == row.default

    @pytest.mark.parametrize("row", SAMPLER_OPTIONS, ids=name_of)
    def test_a_parameter_reaches_the_native_sampler(self, row: SamplingField) -> None:
        params = SamplingParams(**{row.name: other_value(row)})
        options = make_sampler(params, [], vocab_size=8, seed=0, end_ids=[]).options
        assert options[row.name] == pytest.approx(other_value(row)) != row.default
        changed = {name for name, value in options.items() if value != Sampler(8, []).options[name]}
        assert changed == {row.name}


class TestOpenAI:
    @pytest.mark.parametrize("row", OPENAI_NUMBERS, ids=name_of)
    def test_a_number_has_the_bounds_of_the_table(self, row: SamplingField) -> None:
        assert row.bounds
        bounds = [row.bounds[1], other_value(row)] + [row.bounds[0]] * (not row.excludes_min)
        for value in bounds:
            assert getattr(self.read(row.name, value), row.name) == value
        for value in outside(row):
            with pytest.raises(msgspec.ValidationError, match=row.name):
                self.read(row.name, value)

    @pytest.mark.parametrize(
        "row", [row for row in OPENAI_NUMBERS if row.name != "max_tokens"], ids=name_of
    )
    def test_a_number_reaches_the_engine(self, row: SamplingField) -> None:
        request = self.read(row.name, other_value(row))
        params = sampling_params(request, {}, max_tokens=None, logprobs=None)
        assert getattr(params, row.name) == other_value(row)

    def test_records_have_every_other_field(self) -> None:
        expected = {row.name for row in SAMPLING_FIELDS.values() if row.is_openai_field}
        assert expected - {"logprobs"} <= set(Sampling.__struct_fields__)
        assert expected <= set(CompletionRequest.__struct_fields__)
        assert not {"beam_width", "early_stopping"} & set(Sampling.__struct_fields__)

    def read(self, name: str, value: float) -> Sampling:
        return msgspec.json.decode(msgspec.json.encode({name: value}), type=Sampling)


class TestFlags:
    def parse(self, *flags: str) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        run.configure(parser)
        return vars(parser.parse_args(["model", "prompt", *flags]))

    @pytest.mark.parametrize("row", [row for row in NUMBERS if row.metavar], ids=name_of)
    def test_run_has_the_flag(self, row: SamplingField) -> None:
        value = other_value(row)
        assert self.parse(f"--{row.name.replace('_', '-')}={value}")[row.name] == value

    def test_every_number_of_the_distribution_has_a_flag(self) -> None:
        assert all(row.metavar and row.help for row in SAMPLER_OPTIONS)


class TestSeam:
    """The row 'sampling parameter' of the seam table has every file that a new one touches."""

    def test_the_row_names_the_files_of_min_p(self) -> None:
        page = (ROOT / "docs/architecture.md").read_text()
        (row,) = re.findall(r"^\| sampling parameter \|.*$", page, re.MULTILINE)
        named = set(re.findall(r"`([\w/]+\.(?:py|cpp|h))`", row))
        files = [*ROOT.glob("headrace/**/*.py"), *ROOT.glob("csrc/**/*.*")]
        mentions = [f for f in files if re.search(r"\bmin_p(_depth)?\b", f.read_text(), re.I)]
        # These hold values for parameters; a new parameter needs no change in them.
        presets = {"config.py", "checkpoint/advised_sampling.py", "audit/options.py"}
        found = {str(f.relative_to(ROOT)).removeprefix("headrace/") for f in mentions} - presets
        twin = "tests/sampling/sampler_twin.py"
        assert named == found | {twin}
        assert len(found) <= 6
