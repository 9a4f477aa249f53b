import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import headrace.distil.student
import headrace.distil.student_eval
import headrace.distil.student_run
from headrace import LLM, SamplingParams
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.safetensors import read_safetensors
from headrace.cli.main import main
from headrace.convert.gguf.writer import plan_gguf, write_gguf
from headrace.convert.source_model import open_source_model
from headrace.distil.answers import AnswerSet, open_answers
from headrace.distil.record import record_answers
from headrace.distil.student import Student
from headrace.distil.student_eval import largest_difference
from headrace.distil.student_layers import best_layers, candidates
from headrace.distil.student_loss import Head, HeadLoss, head_loss
from headrace.distil.student_run import StudentOptions, TrainedStudent, train_student
from headrace.distil.student_shape import (
    Energy,
    default_taps,
    evenly_spaced,
    student_config,
    student_shape,
    student_tensors,
)
from headrace.distil.teacher import Recording
from headrace.errors import HeadraceError, RequestError, UnsupportedModelError
from headrace.measure.progress import ignore_progress
from tests.distil.conftest import write_model

ALL = ("outputs", "logits", "rows")
BOTH = HeadLoss(outputs=1.0, logits=1.0, temperature=2.0)


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.distil.student_eval, "_TOKENS", 256)
    monkeypatch.setattr(headrace.distil.student, "_BATCH_TOKENS", 256)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("large"), layers=4, dim=64)


@pytest.fixture(scope="module")
def answers(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers with the rows of a student of two layers."""
    out = tmp_path_factory.mktemp("recorded") / "answers"
    recording = Recording(taps=(3, 4), num_tokens=900, max_tokens=24, temperature=1.0)
    record_answers(str(large), None, out, recording, threads=1)
    return out


def options(answers: Path, **changes: Any) -> StudentOptions:
    usual: dict[str, Any] = {"layers": (0, 3), "answers": answers, "steps": 24, "threads": 1}
    return StudentOptions(**usual | changes)


def train(large: Path, out: Path, chosen: StudentOptions) -> TrainedStudent:
    return train_student(str(large), out, chosen, ignore_progress)


@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("cap", [0.0, 4.0])
@pytest.mark.parametrize("parts", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_gradients_of_the_head(top_k: int, cap: float, parts: tuple[float, float]) -> None:
    torch.manual_seed(0)
    loss = HeadLoss(outputs=parts[0], logits=parts[1], temperature=2.0, top_k=top_k)
    rows, final = torch.randn(40, 8, requires_grad=True), torch.randn(40, 12)
    weight = torch.randn(23, 8, requires_grad=True)
    bias = torch.randn(23, requires_grad=True)
    teacher = Head(torch.randn(23, 12), None, 0.5, cap)
    targets = torch.randint(0, 23, (40,))

    def head(matrix: torch.Tensor, vector: torch.Tensor | None) -> Head:
        return Head(matrix, vector, 0.5, cap)

    products = rows @ weight.T + bias
    logits = 0.5 * products
    logits = torch.tanh(logits / cap) * cap if cap else logits
    wanted = (teacher.logits(final) / 2).softmax(-1)
    if top_k:
        smallest = wanted.topk(top_k, dim=-1).values[:, -1:]
        wanted = torch.where(wanted >= smallest, wanted, 0)
        wanted = wanted / wanted.sum(-1, keepdim=True)
    own = (logits / 2).log_softmax(-1)
    kl = torch.where(wanted > 0, wanted * (wanted.clamp_min(1e-30).log() - own), 0).sum(-1).mean()
    text = torch.nn.functional.cross_entropy(logits, targets)
    expected = parts[0] * text + parts[1] * 4 * kl
    expected_gradients = torch.autograd.grad(expected, (rows, weight, bias))

    found = head_loss(rows, weight, bias, head, teacher, final, targets, loss)
    gradients = torch.autograd.grad(3 * found, (rows, weight, bias))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for gradient, each in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, 3 * each, rtol=1e-3, atol=1e-5)


def test_layers_are_evenly_spaced() -> None:
    assert evenly_spaced(30, 15) == (0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29)
    assert evenly_spaced(4, 4) == (0, 1, 2, 3)
    assert evenly_spaced(4, 1) == (3,)


def test_layers_that_change_nothing_are_left_out(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", layers=6)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in (2, 3, 4):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    assert best_layers(open_checkpoint(folder), 3, 1, ignore_progress) == (0, 1, 5)
    assert (0, 1, 5) in candidates(6, 3) and evenly_spaced(6, 3) in candidates(6, 3)
    assert candidates(6, 1) == [(5,), (0,)]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"layers": 5}, "layers is 5"),
        ({"layers": (1, 0)}, "not ascending"),
        ({"layers": (2, 4)}, "not ascending"),
        ({"layers": 4}, "the model itself"),
        ({"width": 96}, "width is 96"),
        ({"width": 40}, "width is 40"),
        ({"ffn_width": 100}, "ffn_width is 100"),
        ({"learn": ("logits", "words")}, "unknown signal in learn 'words'"),
        ({"learn": ()}, "learn is empty"),
        ({"top_k": -1}, "top_k"),
        ({"logit_temperature": 0}, "logit_temperature"),
        ({"learning_rate": 2}, "learning_rate"),
        ({"rationales": True}, "have no rationales"),
        ({"layers": 3, "learn": ALL}, "has rows before the layers"),
    ],
)
def test_options_that_do_not_fit(
    large: Path, answers: Path, tmp_path: Path, chosen: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        train(large, tmp_path / "out", options(answers, **chosen))
    assert not (tmp_path / "out").exists()


def test_whole_model_is_its_own_student(large: Path, answers: Path) -> None:
    """All columns, heads and neurons of a layer are the layer, and norms keep their factor."""
    checkpoint = open_checkpoint(large)
    shape = student_shape(checkpoint.spec, (0, 1, 3))
    energy = Energy(64, (3, 4))
    for answer in open_answers(answers).sequences(range(4)):
        energy.add(answer.taps)
    tensors = student_tensors(checkpoint, shape, energy)
    assert energy.kept(64).tolist() == list(range(64))
    for name, source in (("layers.2.q", "layers.3.q"), ("norm", "norm"), ("embed", "embed")):
        expected = checkpoint.tensors[source].dequantise()
        np.testing.assert_array_equal(tensors[name].dequantise().ravel(), expected.ravel())


def twin_difference(folder: Path, answers: AnswerSet, layers: int, width: int) -> float:
    """The largest difference between the first student in torch and in the engine."""
    checkpoint = open_checkpoint(folder)
    shape = student_shape(checkpoint.spec, layers, width)
    student = Student(checkpoint, answers, shape, BOTH, learns_rows=False, seed=0)
    out = answers.folder.parent / f"{folder.name}-{layers}-{width}"
    student.save(out, checkpoint)
    tokens = answers.tokens(0)[:20].tolist()
    return largest_difference(out, tokens, student.log_probabilities(tokens), 1)


@pytest.mark.parametrize(("layers", "width"), [(2, 0), (3, 32), (4, 32)])
def test_student_in_torch_equals_the_engine(
    large: Path, answers: Path, layers: int, width: int
) -> None:
    assert twin_difference(large, open_answers(answers), layers, width) < 0.1


def test_family_with_biases(answers: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "qwen", layers=3, dim=64)
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=config["vocab_size"],
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    assert twin_difference(folder, open_answers(answers), 2, 32) < 0.1


def test_students_of_gguf_files(large: Path, answers: Path, tmp_path: Path) -> None:
    """A GGUF file and its folder have the same student."""
    source = open_source_model(large)
    write_gguf(
        source, tmp_path / "large.gguf", plan_gguf(source, "F32", {}), {}, lambda share: None
    )
    shape = student_shape(source.spec, 2, 32)
    energy = Energy(64, (3, 4))
    energy.add(open_answers(answers).answer(0).taps)
    of_file = open_checkpoint(tmp_path / "large.gguf")
    of_folder = student_tensors(open_checkpoint(large), shape, energy)
    for name, tensor in student_tensors(of_file, shape, energy).items():
        np.testing.assert_array_equal(tensor.dequantise(), of_folder[name].dequantise())
    assert twin_difference(tmp_path / "large.gguf", open_answers(answers), 2, 32) < 0.1


def test_trained_student(
    large: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is better than before, runs, converts to GGUF, and drafts for its teacher."""
    out = tmp_path / "out"
    words = f"distil student {large} {out} --layers 0,3 --answers {answers} --steps 60 --threads 1"
    assert main([*words.split(), "--learn", "outputs,logits,rows", "--compare"]) == 0
    assert f"headrace run {large} --draft-model {out}" in capsys.readouterr().out

    facts = json.loads((out / "curve.json").read_text())
    teacher, before, after, alone = (row["answers_nll"] for row in facts["scores"])
    assert teacher < after < before and alone < before
    evaluated = [point["held_out"] for point in facts["curve"] if point["held_out"]]
    assert evaluated[-1]["kl"] < 0.8 * evaluated[0]["kl"]
    assert (out / "curve.svg").read_text().startswith("<svg")
    assert not (tmp_path / "out.training").exists()
    AutoModelForCausalLM.from_pretrained(out)
    assert "lm_head.weight" not in read_safetensors(out / "model.safetensors")

    source = open_source_model(out)
    draft = tmp_path / "student.gguf"
    write_gguf(source, draft, plan_gguf(source, "F16", {}), {}, lambda share: None)
    params = SamplingParams(max_tokens=24, temperature=0)
    settings: dict[str, Any] = {"proposer": "draft_model", "adaptive_speculation": False}
    results = []
    for options_ in ({}, settings | {"draft_model": str(draft)}):
        with LLM(large, threads=1, **options_) as llm:
            results += llm.generate("Name a river.", params)
    plain, drafted = results
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.drafts["draft_model"].proposed > 0


class Stopped(Exception): ...


def test_stopped_training_goes_on(
    large: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_early(step: str, share: float) -> None:
        if step.startswith("training"):
            raise Stopped

    with pytest.raises(Stopped):  # before there is a state: another shape may follow
        train_student(str(large), tmp_path / "whole", options(answers), stop_early)
    chosen = options(answers, learn=ALL, width=32, steps=26)
    whole = train(large, tmp_path / "whole", chosen)
    assert whole.scores[1].weight_bytes == whole.scores[2].weight_bytes
    monkeypatch.setattr(headrace.distil.student_run, "_SAVE_SECONDS", 0.0)

    def stop(step: str, share: float) -> None:
        if step.startswith("training; step 23"):
            raise Stopped

    with pytest.raises(Stopped):
        train_student(str(large), tmp_path / "out", chosen, stop)
    with pytest.raises(RequestError, match="another width"):
        train(large, tmp_path / "out", replace(chosen, width=0))
    resumed = train(large, tmp_path / "out", chosen)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert weights[0] == weights[1]
    losses = [[point.loss for point in each.curve.points] for each in (whole, resumed)]
    assert losses[0] == losses[1]


def test_loss_that_is_not_finite(
    large: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(student: Student, step: int) -> tuple[torch.Tensor, int]:
        total = sum(each.sum() for each in student.module.parameters())
        return torch.as_tensor(total) * torch.nan, 1

    monkeypatch.setattr(Student, "loss", loss)
    with pytest.raises(HeadraceError, match="loss of step 1 is nan"):
        train(large, tmp_path / "out", options(answers))
    assert not (tmp_path / "out").exists()


def test_small_disk(
    large: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.distil.student_run, "_WEIGHT_BYTES", 1 << 50)
    with pytest.raises(RequestError, match="free some space"):
        train(large, tmp_path / "out", options(answers))
    assert not list(tmp_path.iterdir())


def test_full_disk(large: Path, answers: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(HeadraceError, match="File too large"):
            train(large, tmp_path / "out", options(answers))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()


def test_families_without_a_smaller_form(large: Path) -> None:
    spec = open_checkpoint(large).spec
    with pytest.raises(UnsupportedModelError, match="narrower"):
        student_shape(replace(spec, qk_norm="row"), 2, 32)
    student_shape(replace(spec, qk_norm="row"), 2)


def test_recorded_taps_are_the_layers_of_the_student(large: Path) -> None:
    shape = student_shape(open_checkpoint(large).spec, 3)
    assert shape.layers == (0, 2, 3)
    assert default_taps(shape, 4) == (2, 3, 4)


def test_config_of_another_family_is_kept(large: Path) -> None:
    checkpoint: Checkpoint = open_checkpoint(large)
    config = student_config(checkpoint, student_shape(checkpoint.spec, 2, 32))
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 2)
    assert config["num_attention_heads"] == 2 and config["eos_token_id"] == 2
