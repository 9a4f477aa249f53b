"""`distil draft`: from a model's name to a drafter that the engine runs."""

import json
import random
import resource
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headrace.distil.answers
import headrace.distil.draft
from headrace import LLM, SamplingParams
from headrace.checkpoint.drafters import open_drafter
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.safetensors import read_safetensors
from headrace.cli.main import main
from headrace.distil.answers import AnswerSet, open_answers
from headrace.distil.curve import Curve
from headrace.distil.draft import DraftStudent, _num_steps
from headrace.distil.draft_loss import padded
from headrace.distil.draft_run import DraftOptions, TrainedDraft, train_draft
from headrace.distil.loop import TrainingOptions, train
from headrace.errors import HeadraceError, RequestError
from headrace.measure.progress import ignore_progress
from tests.distil.answer_folders import tiny_target, write_answers
from tests.distil.conftest import write_model
from tests.tiny import tiny_model

OPTIONS = DraftOptions(
    num_tokens=400, vocab_size=80, steps=16, learning_rate=3e-3, temperature=1.0, threads=1
)
TARGET = tiny_target(tiny_model(4, layers=4))


def trained(model: Path, out: Path, options: DraftOptions = OPTIONS) -> TrainedDraft:
    return train_draft(str(model), out, options, ignore_progress)


def weights(folder: Path) -> dict[str, bytes]:
    """The stored bytes of a drafter's tensors."""
    return {
        name: tensor.parts["codes"].tobytes()
        for name, tensor in read_safetensors(folder / "model.safetensors").items()
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> AnswerSet:
    return write_answers(tmp_path_factory.mktemp("recorded") / "answers", TARGET, (1, 2, 4))


@pytest.fixture(scope="module")
def draft(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained drafter of the teacher."""
    out = tmp_path_factory.mktemp("trained") / "draft"
    result = trained(teacher, out)
    first, last = result.curve.evaluated[0], result.curve.evaluated[-1]
    assert first.step == 0 and last.step == OPTIONS.steps
    assert last.held_out == result.held_out
    return out


def test_a_trained_drafter_drafts_and_changes_no_token(teacher: Path, draft: Path) -> None:
    assert not draft.with_name("draft.training").exists()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    texts = ["a river", "the mill"]
    with LLM(str(teacher), proposer="off") as llm:
        plain = [result.outputs[0].token_ids for result in llm.generate(texts, params)]
    with LLM(
        str(teacher), proposer="draft_model", draft_model=str(draft), adaptive_speculation=False
    ) as llm:
        found = [result.outputs[0].token_ids for result in llm.generate(texts, params)]
        stats = llm.stats()
    assert found == plain
    assert stats.drafted > 0 and stats.proposer_failures == 0


def test_the_folder_has_the_curve_as_numbers_and_as_a_picture(draft: Path) -> None:
    points = json.loads((draft / "curve.json").read_text())
    assert [point["step"] for point in points] == list(range(OPTIONS.steps + 1))
    assert points[-1]["loss"] < points[1]["loss"]
    assert points[-1]["held_out"].keys() >= {"acceptance_1", "acceptance_4", "tokens_per_step"}
    picture = (draft / "curve.svg").read_text()
    assert picture.startswith("<svg") and "tokens a step" in picture


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(
    teacher: Path, draft: Path, tmp_path: Path
) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    trained(teacher, again)
    assert weights(again) == weights(draft)
    trained(teacher, other, replace(OPTIONS, seed=1))
    assert weights(other) != weights(draft)


SCRIPT = """
import sys, time
from dataclasses import replace
from pathlib import Path
from headrace.distil.draft_run import DraftOptions, train_draft

options = DraftOptions(
    num_tokens=400, vocab_size=80, steps=16, learning_rate=3e-3, temperature=1.0, threads=1
)

def slow(step, share):
    time.sleep(0.03 if step.startswith("training") else 0)

train_draft(sys.argv[1], Path(sys.argv[2]), replace(options, save_seconds=0.0), slow)
"""


def test_a_killed_training_goes_on_and_ends_with_equal_weights(
    teacher: Path, draft: Path, tmp_path: Path
) -> None:
    """The process is killed at random moments, each time after it saved a state of its own."""
    out, rng, kills = tmp_path / "out", random.Random(3), 0
    state = tmp_path / "out.training/state.safetensors"
    while not out.exists():
        before = state.stat().st_mtime_ns if state.exists() else 0
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(teacher), str(out)])
        while kills < 2 and process.poll() is None:
            if state.exists() and state.stat().st_mtime_ns > before:
                time.sleep(rng.uniform(0, 0.2))
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        assert process.wait(120) in (0, -signal.SIGKILL)
    assert kills == 2 and weights(out) == weights(draft)
    assert not state.parent.exists()


class Stop(Exception):
    pass


def run(
    answers: AnswerSet,
    state: Path,
    stop_after: int = 0,
    words: list[str] | None = None,
    **options: float,
) -> tuple[DraftStudent, Curve]:
    """Train, and stop by an exception after a step (0: train to the end). `words` are the steps."""
    student = DraftStudent(TARGET, answers, frozenset(), vocab_size=40, dtype=torch.float32)

    def on_progress(step: str, share: float) -> None:
        if words is not None:
            words.append(step)
        if stop_after and step.startswith(f"training; step {stop_after} "):
            raise Stop

    settings = TrainingOptions(**{"steps": 24, "save_seconds": 0.0} | options)  # type: ignore[arg-type]
    return student, train(
        student, state, settings, {"seed": 0, "vocab_size": 40}, on_progress, student.start
    )


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_resumed_training_equals_an_uninterrupted_one(answers: AnswerSet, tmp_path: Path) -> None:
    """Weights and losses are equal to the bit, whenever the run was stopped."""
    whole, curve = run(answers, tmp_path / "whole.safetensors")
    state = tmp_path / "state.safetensors"
    for step in (1, 20):
        with pytest.raises(Stop):
            run(answers, state, stop_after=step)
    resumed, other = run(answers, state)
    for name, parameter in whole.module.named_parameters():
        assert torch.equal(parameter, resumed.module.get_parameter(name)), name
    points = [(point.step, point.loss, point.held_out) for point in curve.points]
    assert [(point.step, point.loss, point.held_out) for point in other.points] == points
    assert curve.points[-1].loss and curve.points[1].loss
    assert curve.points[-1].loss < curve.points[1].loss


def test_minutes_give_a_number_of_steps_that_a_resumed_run_keeps(
    answers: AnswerSet, tmp_path: Path
) -> None:
    """The first 20 steps are timed. A resumed run with other minutes has the same number."""
    state, numbers = tmp_path / "state.safetensors", list[str]()
    for stop_after, minutes in ((22, 9.0), (24, 0.1)):
        words = list[str]()
        with pytest.raises(Stop):
            run(answers, state, stop_after, words, steps=0, minutes=minutes)
        assert words[-1].startswith(f"training; step {stop_after} of ")
        numbers.append(words[-1].partition(" of ")[2].partition(", loss")[0])
    assert numbers[0] == numbers[1] and int(numbers[0].replace(",", "")) > 24


@pytest.mark.parametrize("name", ["seed", "vocab_size"])
def test_another_training_in_the_folder_is_refused_by_name(
    answers: AnswerSet, tmp_path: Path, name: str
) -> None:
    state = tmp_path / "state.safetensors"
    student, _ = run(answers, state, steps=2)
    options = TrainingOptions(steps=2)
    identity = {"seed": 0, "vocab_size": 40} | {name: 7}
    with pytest.raises(RequestError, match=f"another {name} .*here it is 7.*name another OUT"):
        train(student, state, options, identity, ignore_progress)


def test_a_loss_that_is_not_finite_ends_the_training_with_its_step(
    answers: AnswerSet, tmp_path: Path
) -> None:
    state = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        run(answers, state, stop_after=3)
    before = state.read_bytes()
    with pytest.raises(
        HeadraceError, match=r"the loss of step \d+ is .*lower --learning-rate \(here 1e\+30\)"
    ):
        run(answers, state, learning_rate=1e30, save_seconds=60.0)
    assert state.read_bytes() == before
    resumed, _ = run(answers, state)
    assert all(parameter.isfinite().all() for parameter in resumed.module.parameters())


def test_a_full_disk_keeps_the_last_whole_state(answers: AnswerSet, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        run(answers, state, stop_after=5)
    before = state.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(HeadraceError, match=r"File too large.*free some space"):
            run(answers, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert state.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_malformed_state_is_refused(answers: AnswerSet, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    _, _ = run(answers, state, steps=2)
    student = DraftStudent(TARGET, answers, frozenset(), vocab_size=39)
    with pytest.raises(HeadraceError, match=r"not the state of this training .*remove the folder"):
        train(
            student,
            state,
            TrainingOptions(steps=2),
            {"seed": 0, "vocab_size": 40},
            ignore_progress,
        )


def test_answers_of_another_model_are_refused(teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    other = write_model(tmp_path / "other", seed=5)
    options = replace(OPTIONS, answers=folder, steps=1)
    trained(teacher, tmp_path / "draft", options)
    with pytest.raises(RequestError, match=r"recorded from another model than .*other; name a new"):
        trained(other, tmp_path / "other-draft", options)
    with pytest.raises(RequestError, match=r"rows of taps 0,2,3, and --taps is 1,2; leave --taps"):
        trained(teacher, tmp_path / "taps", replace(options, taps=(1, 2)))
    assert not (tmp_path / "other-draft").exists() and folder.exists()

    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "rationales": True}))
    with pytest.raises(RequestError, match=r"have rationales, .*; name a new folder"):
        trained(teacher, tmp_path / "reasoned", options)


def test_steps_are_counted_as_the_engine_takes_them() -> None:
    """Each chain begins after the token that follows the accepted drafts of the last one."""
    rng = random.Random(1)
    for _ in range(50):
        lengths = [rng.randrange(1, 9) for _ in range(4)]
        depths, accepted, expected = list[int](), list[int](), 0
        for length in lengths:
            rights = [min(rng.randrange(5), length - 1 - i) for i in range(length)]
            depths += [-1, -1, *range(length)]
            accepted += [4, 4, *rights]
            place = 0
            while place < length:
                expected += 1
                place += 1 + rights[place]
        assert _num_steps(accepted, depths) == expected


@pytest.mark.parametrize("rows", [1, 255, 256, 257])
def test_products_get_few_numbers_of_rows(rows: int) -> None:
    x = torch.ones(rows, 3)
    assert len(padded(x)) in (256, 512)
    assert torch.equal(padded(x)[:rows], x) and not padded(x)[rows:].any()


class Shapes(TorchDispatchMode):  # type: ignore[misc]
    """Collects the shapes of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[tuple[torch.Size, ...]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.found.add((args[0].shape, args[1].shape))
        return func(*args, **(kwargs or {}))


def test_products_of_later_steps_have_the_shapes_of_earlier_ones(
    answers: AnswerSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN keeps memory for each new shape. The last batch of an epoch may have fewer rows."""
    monkeypatch.setattr(headrace.distil.draft, "_BATCH_TOKENS", 256)
    student = DraftStudent(TARGET, answers, frozenset(), vocab_size=40)
    counts = list[int]()
    with Shapes() as shapes:
        for step in range(30):
            if len(student._order.batch(step)) == 4:
                student.loss(step)[0].backward()
                counts.append(len(shapes.found))
    assert len(counts) > 15 and 0 < counts[1] == counts[-1]


def test_the_drafted_tokens_are_the_frequent_and_the_special_ones(answers: AnswerSet) -> None:
    counts = np.zeros(TARGET.spec.vocab_size, np.int64)
    for i in answers.training:
        counts += np.bincount(
            answers.tokens(i)[answers.answer_start(i) :], minlength=TARGET.spec.vocab_size
        )
    rare = int(np.argmin(counts))
    student = DraftStudent(TARGET, answers, frozenset({rare}), vocab_size=10)
    assert rare in student.tokens and (np.diff(student.tokens) > 0).all()
    others = np.delete(counts, student.tokens)
    assert counts[student.tokens[student.tokens != rare]].min() >= others.max()


def test_distil_draft_prints_what_it_trained_and_how_to_use_it(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out, answers = tmp_path / "prompts.txt", tmp_path / "draft", tmp_path / "answers"
    prompts.write_text("\n".join(f"river {i}" for i in range(12)))
    options = "--tokens 120 --temperature 1 --drafter eagle3 --vocab-size 80 --taps 1,3 --steps 2"
    options += " --learning-rate 0.01 --seed 3 --threads 1"
    command = ["distil", "draft", str(teacher), str(out), *options.split()]
    command += ["--prompts", str(prompts), "--answers", str(answers)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert f"headrace run {teacher} --draft-model {out}" in text
    assert "2 steps" in text and "tokens a step" in text

    meta = open_answers(answers).meta
    assert (meta.taps, meta.seed, meta.temperature) == ((1, 3), 3, 1.0)
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["draft_vocab_size"] == 80 and not config["embedding_in_residual"]
    drafter = open_drafter(out, open_checkpoint(teacher))
    assert drafter.tensors["fuse"].shape == (32, 64)
    assert main(command) == 2
    assert "exists; remove it" in capsys.readouterr().err


def test_the_engine_takes_about_as_many_steps_as_the_training_counts(
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program also compares the tokens with plain decoding. Loops count here: without them,
    the greedy answers of so small a model have few tokens.
    """
    monkeypatch.setattr(headrace.distil.answers, "LOOP_TOKENS", 1000)
    out, folder = tmp_path / "draft", tmp_path / "answers"
    trained(teacher, out, replace(OPTIONS, answers=folder, num_tokens=4000, steps=60))
    path = Path(__file__).parents[2] / "benchmarks/held_out_drafts.py"
    arguments = [str(path), str(teacher), str(out), str(folder)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(path), run_name="__main__")
    facts = json.loads(capsys.readouterr().out)
    assert facts["accepted"] > 50 and facts["tokens_as_recorded"] > 0.9 * facts["tokens"]
    predicted = facts["tokens_per_step_of_training"]
    assert predicted > 1.02 and abs(facts["tokens_per_step"] - predicted) < 0.15 * predicted


@pytest.mark.parametrize(("option", "temperature"), [("", 0.6), ("--temperature 0", 0.0)])
def test_temperature_of_the_answers(
    teacher: Path, tmp_path: Path, option: str, temperature: float
) -> None:
    answers = tmp_path / "answers"
    command = f"distil draft {teacher} {tmp_path / 'draft'} --answers {answers} --tokens 100 "
    command += f"--steps 1 --vocab-size 80 --threads 1 {option}"
    assert main(command.split()) == 0
    assert open_answers(answers).meta.temperature == temperature
