"""`headrace profile`: on a tiny model in this process, and once on the real one from outside."""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from headrace.backend import lower_program
from headrace.checkpoint.load import Checkpoint
from headrace.cli.main import main
from headrace.measure.op_profile import phases
from headrace.model import trace_model
from headrace.model.spec import ExpertSpec
from headrace.planner.fit import RUNTIME_BYTES
from headrace.planner.hardware import READ_BYTES, Machine
from headrace.program.kv import token_bytes
from tests.checkpoint.conftest import write_tiny_gguf
from tests.tiny import tiny_model

HERE = Machine("Zen 4", "avx512", 2, 36e9, {"int8": 940e9, "bf16": 470e9, "f32": 235e9})
SPEC, TENSORS = tiny_model(4, dim=64, ffn=96, format="Q8_0", context=700)
PROGRAM = lower_program("cpu", trace_model(SPEC, TENSORS), TENSORS)
QUICK = ("--prefill", "40,600", "--depth", "8,600", "--batch", "1,3", "--turns", "1")
NAMES = [
    "prefill 40",
    "prefill 600",
    "decode, depth 8, batch 1",
    "decode, depth 600, batch 1",
    "decode, depth 8, batch 3",
]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model `tiny` is a random one in memory, on a machine whose memory is slower at every
    second measurement.
    """
    checkpoint = Checkpoint(Path("tiny"), SPEC, TENSORS, None, Path("tiny"))
    monkeypatch.setattr("headrace.measure.profile.resolve", lambda model: Path(model))
    monkeypatch.setattr("headrace.measure.profile.open_files", lambda model, config: checkpoint)
    monkeypatch.setattr("headrace.measure.profile.open_checkpoint", lambda path: checkpoint)
    machines = cycle((HERE, replace(HERE, bandwidth=18e9)))
    monkeypatch.setattr(
        "headrace.planner.hardware.measure",
        lambda threads, backend="cpu": replace(next(machines), threads=threads or 2),
    )


def facts_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["profile", "tiny", *words, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.usefixtures("tiny")
class TestProfileTinyModel:
    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        facts = facts_of(capsys, *QUICK, "--threads", "1")
        assert [phase["name"] for phase in facts["phases"]] == NAMES and not facts["skipped"]
        assert (
            facts["threads"] == 1
            and facts["kv_dtype"] == "bf16"
            and facts["layers"] == SPEC.num_layers
        )
        assert [machine["bandwidth"] for machine in facts["measurements"]] == [36e9, 18e9]
        assert facts["machine"] == {"bandwidth": 27e9, "rates": dict(HERE.rates)}
        for phase, asked in zip(
            facts["phases"], phases((40, 600), (8, 600), (1, 3), 2), strict=True
        ):
            assert phase["steps"] == len(asked.steps) and phase["rounds"] >= 1
            assert phase["wall"]["min"] <= phase["wall"]["median"] <= phase["wall"]["max"]
            assert phase["tokens_per_second"] == pytest.approx(
                phase["tokens"] / phase["wall"]["median"]
            )
            assert phase["barriers"] == pytest.approx(
                phase["barriers_per_layer"] * phase["steps"] * SPEC.num_layers
            )
            for key, cost in (("bytes", "bytes"), ("operations", "flops")):
                own = sum(getattr(op, cost)(step) for op in PROGRAM.ops for step in asked.steps)
                assert sum(op[key] for op in phase["ops"]) == own
            total = sum(op["seconds"] for op in phase["ops"]) + phase["outside_ops"]
            assert sum(op["share"] for op in phase["ops"]) + phase[
                "outside_ops"
            ] / total == pytest.approx(1)
            assert phase["floor"] == pytest.approx(sum(op["floor"] for op in phase["ops"]))

    def test_tables_fit_a_hundred_columns(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the note of a busy machine, whether this machine is busy or not."""
        monkeypatch.setattr("headrace.cli.profile._BUSY", -1.0)
        assert main(["profile", "tiny", *QUICK]) == 0
        text = capsys.readouterr().out
        assert not [line for line in text.splitlines() if len(line) > 100]
        for name in NAMES:
            assert f"\n{name}" in text
        for word in (
            "glu_linear",
            "attention",
            "outside ops",
            "barriers a layer",
            "bound by",
            "min ms",
            "The machine was busy: the parts take",
        ):
            assert word in text
        assert "27.0 GB/s (18.0-36.0 in 2 measurements); it drifted" in text

    def test_svg_next_to_json(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "roofline.svg"
        facts = facts_of(capsys, *QUICK, "--svg", str(file))
        points = [
            group
            for group in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}g")
            if group.get("class") == "point"
        ]
        assert len(points) % len(facts["phases"]) == 0 and len(points) >= 5 * len(facts["phases"])

    def test_default_lengths_beyond_the_context_are_skipped(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headrace.measure.profile.PREFILL", (700, 701))
        monkeypatch.setattr("headrace.measure.profile.DEPTHS", (699, 700))
        words = ("--batch", "1", "--turns", "1")
        facts = facts_of(capsys, *words)
        assert [phase["name"] for phase in facts["phases"]] == [
            "prefill 700",
            "decode, depth 699, batch 1",
        ]
        assert list(facts["skipped"]) == ["prefill 701", "decode, depth 700, batch 1"]
        assert "ends at 700" in facts["skipped"]["prefill 701"]
        assert main(["profile", "tiny", *words]) == 0
        assert "Skipped\n" in capsys.readouterr().out

    def test_phases_beyond_memory_are_skipped(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = (
            3 * 32 * token_bytes(PROGRAM.kv_groups, "bf16") + 4 * SPEC.vocab_size * 3
        )  # three blocks, and the logits of three rows
        monkeypatch.setattr(
            "headrace.loader.memory.available_memory",
            lambda: PROGRAM.weight_bytes + RUNTIME_BYTES + READ_BYTES + free,
        )
        words = ("--prefill", "none", "--depth", "8", "--batch", "3,4", "--turns", "1")
        facts = facts_of(capsys, *words)
        assert [phase["name"] for phase in facts["phases"]] == ["decode, depth 8, batch 3"]
        assert f"the weights leave {free:,}" in facts["skipped"]["decode, depth 8, batch 4"]

    def test_op_that_only_the_backend_has(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from headrace.backend.cpu.executable import CpuExecutable

        right = CpuExecutable.profile

        def renamed(executable: CpuExecutable, batch: Any) -> Any:
            times = right(executable, batch)
            return times._replace(
                ops={
                    "mystery" if name == "glu_linear" else name: s for name, s in times.ops.items()
                }
            )

        monkeypatch.setattr(CpuExecutable, "profile", renamed)
        assert main(["profile", "tiny", *QUICK]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert any(line[:2] == ["mystery", "-"] and line[-1] == "unknown" for line in lines if line)
        assert any(line[0] == "glu_linear" and line[-1] == "unknown" for line in lines if line)


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model `mixture` has six experts in each layer, of which a row goes to two."""
    made = tiny_model(5, dim=64, context=700, architecture="mixtral", experts=ExpertSpec(6, 2, 64))
    checkpoint = Checkpoint(Path("mixture"), *made, None, Path("mixture"))
    monkeypatch.setattr("headrace.measure.profile.resolve", lambda model: Path(model))
    monkeypatch.setattr("headrace.measure.profile.open_files", lambda model, config: checkpoint)
    monkeypatch.setattr("headrace.measure.profile.open_checkpoint", lambda path: checkpoint)
    monkeypatch.setattr(
        "headrace.planner.hardware.measure",
        lambda threads, backend="cpu": replace(HERE, threads=threads or 2),
    )


@pytest.mark.usefixtures("mixture")
class TestProfileExperts:
    def test_measured_and_expected_experts(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        file = tmp_path / "experts.svg"
        facts = facts_of(capsys, *QUICK, "--experts", str(file))
        assert [experts["phase"] for experts in facts["experts"]] == NAMES
        assert [round(experts["distinct_expected"], 2) for experts in facts["experts"][2:]] == [
            2,
            2,
            4.22,
        ]
        assert [experts["distinct"] for experts in facts["experts"][2:4]] == [2, 2]
        loads = np.sum([experts["loads"] for experts in facts["experts"]], axis=0)
        assert loads.sum(axis=1).tolist() == [
            2 * (40 + 600 + 1 + 1 + 3),
            2 * (1 + 2 + 1 + 1 + 3),
        ]  # the last layer has logit rows only
        cells = [
            cell
            for cell in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}rect")
            if cell.get("class") == "expert"
        ]
        assert len(cells) == 12 and f": {loads[0, 0]:,} rows" in (cells[0][0].text or "")

    def test_the_table_fits_a_hundred_columns(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["profile", "tiny", *QUICK, "--experts", str(tmp_path / "experts.svg")]) == 0
        text = capsys.readouterr().out
        assert not [
            line for line in text.splitlines() if len(line) > 100 and str(tmp_path) not in line
        ]
        assert "if uniform" in text and "x mean" in text and "The experts are drawn in" in text


@pytest.mark.usefixtures("tiny")
class TestProfileErrors:
    def test_a_model_without_experts(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["profile", "tiny", *QUICK, "--experts", str(tmp_path / "experts.svg")]) == 2
        assert "has no experts" in capsys.readouterr().err

    def refused(self, capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
        assert main(["profile", "tiny", *words]) == code
        out, err = capsys.readouterr()
        assert not out and err.startswith("headrace: ") and len(err.splitlines()) == 1
        return err

    def test_lengths_beyond_the_context(self, capsys: pytest.CaptureFixture[str]) -> None:
        err = self.refused(capsys, 2, "--prefill", "16,701")
        assert (
            "prefill 701 is too long for the model's context of 700 tokens; use at most 700" in err
        )
        assert "depth 700 is too long" in self.refused(capsys, 2, "--depth", "700")

    def test_no_phases(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "set prefill, or depth" in self.refused(
            capsys, 2, "--prefill", "none", "--depth", "none"
        )

    def test_weights_beyond_memory(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headrace.loader.memory.available_memory", lambda: 1000)
        assert "are too large for this machine" in self.refused(capsys, 4)

    def test_no_phase_within_memory(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "headrace.loader.memory.available_memory",
            lambda: PROGRAM.weight_bytes + RUNTIME_BYTES + READ_BYTES + 100,
        )
        assert "the weights leave 100" in self.refused(
            capsys, 4, "--prefill", "40", "--depth", "none"
        )

    def test_unwritable_svg(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "name a file in a folder that exists" in self.refused(
            capsys, 2, "--svg", str(tmp_path / "none" / "a.svg")
        )
        assert "name a file" in self.refused(capsys, 2, "--svg", str(tmp_path))

    def test_threads_out_of_range(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "threads" in self.refused(capsys, 2, "--threads", "-1")

    @pytest.mark.parametrize(
        "words",
        [
            ("--prefill", "many"),
            ("--prefill", "0"),
            ("--prefill", ""),
            ("--depth", "1,,2"),
            ("--depth=-1",),
            ("--batch", "1.5"),
            ("--batch", str(2**40)),
            ("--turns", "0"),
            ("--kv-dtype", "fp4"),
        ],
    )
    def test_bad_arguments(
        self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
    ) -> None:
        err = self.refused(capsys, 2, *words)
        assert words[0].partition("=")[0] in err and "headrace profile --help" in err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--tokens", "99"), "--tokens belongs to a profile of attention; add --attention"),
            (("--attention", "--depth", "8"), "--depth does not belong to a profile of attention"),
            (("--attention", "--batch", "8"), "--batch does not belong to"),
            (("--attention", "--turns", "2"), "--turns does not belong to"),
            (("--attention", "-tp", "2"), "--tensor-parallel-size does not belong to"),
            (("--attention", "--backend", "reference"), "--backend does not belong to"),
        ],
    )
    def test_flags_of_the_other_profile(
        self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
    ) -> None:
        assert message in self.refused(capsys, 2, *words)


def test_profile_of_attention(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, text = write_tiny_gguf(tmp_path / "model.gguf"), tmp_path / "text.txt"
    text.write_text("hello well low hold " * 60)
    words = ["profile", str(model), "--attention", "--text", str(text), "--tokens", "128"]
    picture = tmp_path / "heads.svg"
    assert main([*words, "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "keys of 64 rows" in out and "% by bounds" in out and str(picture) in out
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 64


def test_profile_of_the_default_model(headrace, smollm2: Path) -> None:
    result = headrace(
        "profile",
        str(smollm2),
        "--prefill",
        "64",
        "--depth",
        "16",
        "--batch",
        "1,2",
        "--turns",
        "1",
        "--json",
    )
    assert result.returncode == 0 and not result.stderr
    facts = json.loads(result.stdout)
    assert [phase["name"] for phase in facts["phases"]] == [
        "prefill 64",
        "decode, depth 16, batch 1",
        "decode, depth 16, batch 2",
    ]
    assert facts["layers"] == 30 and facts["phases"][0]["barriers_per_layer"] > 1
