import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import headrace.distil.answers
import headrace.distil.teacher
from headrace.checkpoint.load import open_checkpoint
from headrace.config import EngineConfig
from headrace.distil.answers import LOOP_TOKENS, AnswerSet, is_held_out, loop_start, open_answers
from headrace.distil.prompts import REASON_FIRST
from headrace.distil.record import record_answers
from headrace.distil.teacher import Recording
from headrace.errors import FormatError, HeadraceError, RequestError
from tests.distil.conftest import write_model

TAPS = (0, 2, 3)
SMALL = Recording(taps=TAPS, num_tokens=300, max_tokens=24, temperature=0.8)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.distil.answers, "SHARD_TOKENS", 200)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(f"Name {'a' * (i % 7)} river {i}." for i in range(200)))
    return path


def record(
    model: Path, prompts: Path | None, out: Path, recording: Recording = SMALL, batch: int = 4
) -> AnswerSet:
    return record_answers(str(model), prompts, out, recording, threads=1, batch=batch)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_rows_are_those_of_the_tokens(teacher: Path, prompts: Path, tmp_path: Path) -> None:
    greedy = Recording(taps=TAPS, num_tokens=200, max_tokens=24)
    answers = record(teacher, prompts, tmp_path / "out", greedy)
    tensors = open_checkpoint(teacher).tensors
    embedding, norm = tensors["embed"].dequantise(), tensors["norm"].dequantise()

    assert answers.meta.num_answer_tokens >= 200
    assert len(answers) == answers.meta.num_sequences > 8
    for answer in answers.sequences(range(len(answers))):
        first, _, last = np.split(answer.taps, 3, axis=1)
        np.testing.assert_allclose(first, embedding[answer.tokens], rtol=2**-8)
        normed = last / np.sqrt((last**2).mean(axis=1, keepdims=True) + 1e-6) * norm
        np.testing.assert_allclose(answer.final, normed, rtol=0.02, atol=0.02)

        logits = answer.final @ embedding.T
        drawn = answer.targets[answer.answer_start - 1 :]
        rows = logits[answer.answer_start - 1 :]
        margin = rows.max(axis=1) - rows[np.arange(len(drawn)), drawn]
        assert (margin <= 0.05 * np.abs(rows).max()).all()


def test_answers_do_not_depend_on_the_batch(teacher: Path, prompts: Path, tmp_path: Path) -> None:
    for name, batch in (("one", 1), ("many", 7)):
        record(teacher, prompts, tmp_path / name, batch=batch)
    one, many = files(tmp_path / "one"), files(tmp_path / "many")
    assert one == many
    assert len([name for name in one if name.startswith("shard")]) > 2


def test_preempted_answers_are_the_same(
    teacher: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(teacher, prompts, tmp_path / "plain")
    few = partial(EngineConfig, kv_blocks=8)
    monkeypatch.setattr(headrace.distil.teacher, "EngineConfig", few)
    record(teacher, prompts, tmp_path / "preempted", batch=8)
    assert files(tmp_path / "plain") == files(tmp_path / "preempted")


class Stopped(Exception): ...


@pytest.mark.parametrize("written", [False, True])
def test_stopped_recording_goes_on(
    teacher: Path, prompts: Path, tmp_path: Path, written: bool
) -> None:
    source = None if written else prompts
    record(teacher, source, tmp_path / "whole")

    def stop_at(limit: float, step: str, share: float) -> None:
        if share >= limit:
            raise Stopped

    for limit in (0.01, 0.4, 0.8):
        stop = partial(stop_at, limit)
        with pytest.raises(Stopped):
            record_answers(
                str(teacher), source, tmp_path / "out", SMALL, threads=1, batch=4, on_progress=stop
            )
        with pytest.raises(RequestError, match="not finished"):
            open_answers(tmp_path / "out")
    (tmp_path / "out/shard-00001.safetensors.unfinished").write_bytes(b"half")
    record(teacher, source, tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_killed_recording_goes_on(teacher: Path, prompts: Path, tmp_path: Path) -> None:
    recording = Recording(num_tokens=1500, max_tokens=24, temperature=0.8)
    script = (
        "import sys, headrace.distil.answers as a; a.SHARD_TOKENS = 200\n"
        "from pathlib import Path\n"
        "from headrace.distil.record import record_answers\n"
        "from headrace.distil.teacher import Recording\n"
        f"record_answers({str(teacher)!r}, Path({str(prompts)!r}), Path(sys.argv[1]), "
        f"{recording!r}, threads=1, batch=4, on_progress=lambda step, share: print(share))"
    )
    out = tmp_path / "out"
    for limit in (0.1, 0.5):
        command = [sys.executable, "-c", script, str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                if float(line) >= limit:
                    os.kill(process.pid, signal.SIGKILL)
                    break
        assert not json.loads((out / "meta.json").read_text())["finished"]
    record(teacher, prompts, out, recording)
    record(teacher, prompts, tmp_path / "whole", recording)
    assert files(out) == files(tmp_path / "whole")


def test_finished_recording_is_only_opened(teacher: Path, prompts: Path, tmp_path: Path) -> None:
    record(teacher, prompts, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    record(teacher, prompts, tmp_path / "out")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_other_recordings_are_refused(
    teacher: Path, base_teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    record(teacher, prompts, out)
    other_seed = Recording(taps=TAPS, num_tokens=300, max_tokens=24, temperature=0.8, seed=1)
    for call, name in (
        (lambda: record(teacher, prompts, out, other_seed), "seed"),
        (lambda: record(teacher, None, out), "prompts"),
        (lambda: record(teacher, prompts, out, Recording(taps=(1,))), "taps"),
    ):
        with pytest.raises(RequestError, match=f"another {name} "):
            call()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="other files"):
        record(teacher, prompts, tmp_path / "full")
    with pytest.raises(RequestError, match="taps"):
        record(teacher, prompts, tmp_path / "new", Recording(taps=(4,)))
    with pytest.raises(RequestError, match="no recorded answers"):
        open_answers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "out"]


def test_full_disk_keeps_whole_shards(teacher: Path, prompts: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(HeadraceError, match="out: File too large; all whole files"):
            record(teacher, prompts, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["meta.json"]
    huge = Recording(num_tokens=1 << 40, max_tokens=24)
    with pytest.raises(RequestError, match="free some space"):
        record(teacher, prompts, tmp_path / "huge", huge)


def test_malformed_answers_are_refused(teacher: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    record(teacher, prompts, out)
    meta = json.loads((out / "meta.json").read_text())
    for change, message in (
        ({"dim": 16}, "do not fit"),
        ({"num_sequences": 1}, "sequences"),
        ({"version": 0}, "version"),
        ({"taps": 3}, "meta.json"),
    ):
        (out / "meta.json").write_text(json.dumps(meta | change))
        with pytest.raises(FormatError, match=message):
            open_answers(out)


def test_rationales_are_asked_for_and_not_stored(
    teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    wanted = Recording(taps=TAPS, num_tokens=100, max_tokens=24, rationales=True)
    answers = record(teacher, prompts, tmp_path / "out", wanted)
    tokenizer = open_checkpoint(teacher).load_tokenizer()
    asked = Recording(taps=TAPS, num_tokens=100, max_tokens=24)
    instructed = tmp_path / "instructed.jsonl"
    lines = [f"{line}\n\n{REASON_FIRST}" for line in prompts.read_text().splitlines()]
    instructed.write_text("\n".join(map(json.dumps, lines)))
    reference = record(teacher, instructed, tmp_path / "reference", asked)

    for answer, full in zip(
        answers.sequences(range(4)), reference.sequences(range(4)), strict=True
    ):
        start, full_start = answer.answer_start, full.answer_start
        assert "step by step" not in tokenizer.decode(answer.tokens.tolist())
        assert "step by step" in tokenizer.decode(full.tokens.tolist())
        np.testing.assert_array_equal(answer.tokens[start:], full.tokens[full_start:])
        np.testing.assert_array_equal(answer.final[start - 1 :], full.final[full_start - 1 :])
        assert not answer.taps[: start - 1].any()


def test_held_out_prompts_depend_on_their_tokens_alone(
    teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    wanted = Recording(num_tokens=1500, max_tokens=24)
    answers = record(teacher, prompts, tmp_path / "out", wanted)
    for i in range(len(answers)):
        prompt = answers.tokens(i)[: answers.answer_start(i)]
        assert is_held_out(prompt.tolist()) == (i in answers.held_out)
        assert (i in answers.training) != (i in answers.held_out)
    assert 0 < len(answers.held_out) < len(answers) / 4


def test_held_out_answers_are_the_likeliest_tokens(
    teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    wanted = Recording(num_tokens=1500, max_tokens=24, temperature=1.0)
    drawn = record(teacher, prompts, tmp_path / "drawn", wanted)
    greedy = record(teacher, prompts, tmp_path / "greedy", replace(wanted, temperature=0.0))
    likeliest = {tuple(greedy.tokens(i)) for i in range(len(greedy))}
    assert drawn.held_out
    equal = [tuple(drawn.tokens(i)) in likeliest for i in range(len(drawn))]
    assert all(equal[i] for i in drawn.held_out if i < len(greedy) - 4)
    assert sum(equal) < len(drawn) / 2


def test_a_loop_begins_with_the_first_repeated_run() -> None:
    run = list(range(LOOP_TOKENS))
    assert loop_start([*run, 99, *run]) == LOOP_TOKENS + 1
    assert loop_start([*run, 99, *run[:-1]]) == 2 * LOOP_TOKENS
    assert loop_start([5] * 40) == 1
    assert loop_start([]) == 0


def test_recorded_answers_end_before_they_loop(tmp_path: Path) -> None:
    """Greedy answers of a tiny model soon loop."""
    model = write_model(tmp_path / "model", layers=1, seed=3)
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"river {i}" for i in range(20)))
    answers = record(model, path, tmp_path / "out", Recording(num_tokens=4000, max_tokens=120))
    ended = 0
    for i in range(len(answers)):
        answer = answers.answer(i)
        written = answer.targets[answer.answer_start - 1 :].tolist()
        assert loop_start(written[:-1]) == len(written) - 1
        ended += len(written) < 120 and written[-1] != 2
        assert len(answer.final) == len(answer.taps) == len(answer.tokens)
    assert ended > 3
