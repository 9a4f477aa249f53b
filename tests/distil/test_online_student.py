"""The student that learns from served windows: its weights, scores and slices."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.checkpoint.drafter import Drafter
from headrace.checkpoint.drafters import open_drafter
from headrace.distil import online_student
from headrace.distil.draft import DraftKind, draft_spec
from headrace.distil.draft_files import write_drafter
from headrace.distil.draft_layer import DraftLayer
from headrace.distil.online import gain
from headrace.distil.online_student import OnlineStudent, Score, weights_of
from headrace.speculation.learning.buffer import PAIRS, Window, to_bits
from tests.distil.answer_folders import tiny_target
from tests.drafters import Twin, random_drafter
from tests.drafters import write_drafter as write_folder
from tests.tiny import tiny_model

torch.set_num_threads(1)

MODEL = tiny_model(4, layers=3)
TAPS = (0, 1, 2)
WIDTH = 3 * MODEL[0].dim


def predictable(number: int, seed: int = 0, count: int = PAIRS, first: int = 0) -> Window:
    """A window whose rows tell the token after the next one."""
    rng = np.random.default_rng(seed)
    meaning = rng.standard_normal((61, WIDTH)).astype(np.float32)
    tokens = np.random.default_rng(number).integers(0, 61, count + 1)
    return Window(
        number=number,
        position=3,
        first=first,
        tokens=tokens[:-1].astype(np.int32),
        taps=to_bits(meaning[tokens[1:]]),
    )


def student(
    tmp_path: Path, vocab: int = 0, rate: float = 3e-3, dtype: torch.dtype = torch.float32
) -> tuple[OnlineStudent, Drafter]:
    written = random_drafter(MODEL, vocab=vocab, taps=TAPS)
    folder = write_folder(tmp_path / "drafter", written, "authors")
    drafter = open_drafter(folder, tiny_target(MODEL))
    return OnlineStudent(drafter, rate, dtype), drafter


@pytest.mark.parametrize("vocab", [0, 20], ids=["all tokens", "some tokens"])
def test_weights_survive_the_file_and_the_folder(tmp_path: Path, vocab: int) -> None:
    one, drafter = student(tmp_path, vocab)
    write_drafter(tmp_path / "new", one.spec, one.module, one.tokens, {})
    again = weights_of(open_drafter(tmp_path / "new", tiny_target(MODEL)))
    for name, value in weights_of(drafter).items():
        torch.testing.assert_close(again[name], value.bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["eagle3", "joined"])
def test_both_kinds_of_layers_learn(tmp_path: Path, kind: DraftKind) -> None:
    spec = draft_spec(MODEL[0], TAPS, 40, kind)
    module, generator = DraftLayer(spec), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.2, generator=generator)
    write_drafter(tmp_path / "drafter", spec, module, np.arange(5, 45), {})
    drafter = open_drafter(tmp_path / "drafter", tiny_target(MODEL))
    weights = weights_of(drafter)
    assert weights.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            weights[name], parameter.detach().bfloat16().float(), rtol=0, atol=0
        )
    one = OnlineStudent(drafter, 3e-3, torch.float32)
    for step in range(12):
        list(one.learn([predictable(step)]))
        one.update()
    first, held_out = weights, [predictable(number) for number in range(100, 104)]
    learned = one.weights()
    scores = [one.score(learned, each).accepted for each in held_out]
    assert sum(scores) > sum(one.score(first, each).accepted for each in held_out)


def test_scores_count_the_drafts_of_the_published_equations(tmp_path: Path) -> None:
    one, drafter = student(tmp_path, vocab=20)
    rng, count, first = np.random.default_rng(1), 24, 5
    taps = to_bits(rng.standard_normal((count, WIDTH)).astype(np.float32))
    rows = (taps.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    twin, known = Twin(drafter), rng.integers(0, 61, count + 1).tolist()
    for position in range(first, count - 1):  # some tokens are those that the drafter expects
        if position % 3:
            known[position + 2] = twin.draft(known[: position + 2], rows[: position + 1], 1)[0]
    accepted = 0
    for position in range(first, count - 1):
        drafts = twin.draft(known[: position + 2], rows[: position + 1], 4)
        following = known[position + 2 :]
        right = [a == b for a, b in zip(drafts, following, strict=False)]
        accepted += right.index(False) if False in right else len(right)
    window = Window(
        number=1, position=0, first=first, tokens=np.array(known[1:], np.int32), taps=taps
    )
    assert one.score(one.weights(), window) == Score(accepted, count - 1 - first)
    assert accepted > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_learning_raises_the_score_of_held_out_windows(tmp_path: Path, dtype: torch.dtype) -> None:
    one, _ = student(tmp_path, dtype=dtype)
    first, held_out = one.weights(), [predictable(number) for number in range(100, 110)]
    for step in range(25):
        windows = [predictable(2 * step), predictable(2 * step + 1)]
        assert sum(one.learn(windows)) > 0
        one.update()
    learned = one.weights()
    gained = gain(
        [one.score(learned, each) for each in held_out],
        [one.score(first, each) for each in held_out],
    )
    assert gained.mean > 0.05 and gained.mean > 5 * gained.error


def test_windows_without_a_known_token_change_nothing(tmp_path: Path) -> None:
    one, drafter = student(tmp_path, vocab=20)
    assert drafter.tokens is not None
    unknown = next(token for token in range(61) if token not in drafter.tokens)
    window = predictable(1)._replace(tokens=np.full(PAIRS, unknown, np.int32))
    before = one.weights()
    assert sum(one.learn([window])) > 0
    one.update()
    for name, value in one.weights().items():
        assert torch.equal(value, before[name])


def test_not_finite_rows_change_nothing(tmp_path: Path) -> None:
    one, _ = student(tmp_path)
    window = predictable(1)
    window.taps[7, 3] = 0x7FC0  # not a number
    before = one.weights()
    list(one.learn([window]))
    one.update()
    for name, value in one.weights().items():
        assert torch.equal(value, before[name])


def test_slow_windows_are_cut_into_slices(tmp_path: Path) -> None:
    one, _ = student(tmp_path)
    one._pairs = 32
    pieces = list(one._pieces(predictable(1, first=10)))
    assert all(len(piece.tokens) <= 32 for piece in pieces)
    trained = [
        piece.position + pair
        for piece in pieces
        for pair in range(piece.first, len(piece.tokens) - 1)
    ]
    assert sorted(set(trained)) == trained == list(range(3 + 10, 3 + PAIRS - 1))


def test_the_copy_that_computes_follows_the_weights(tmp_path: Path) -> None:
    one, _ = student(tmp_path)
    first = one.weights()
    for step in range(2):
        list(one.learn([predictable(step)]))
        one.update()
    for name, value in one._copy.named_parameters():
        assert torch.equal(value, one.weights()[name]) and not torch.equal(value, first[name])
    one.use(first)
    for name, value in one._copy.named_parameters():
        assert torch.equal(value, first[name])


def test_padding_keeps_shapes_few_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled product for each number of rows held 2 GB after 1,000 slices."""
    one, _ = student(tmp_path)
    windows = [predictable(n, count=count) for n, count in enumerate((20, 33, 40, 57, 61, 64))]
    shapes, gradients = list[set[torch.Size]](), list[list[torch.Tensor]]()
    for lengths, rows in ((1, 1), (32, 64)):
        monkeypatch.setattr(online_student, "_LENGTHS", lengths)
        monkeypatch.setattr(online_student, "_ROWS", rows)
        seen = set[torch.Size]()
        handle = one._copy.lm_head.register_forward_hook(
            lambda layer, inputs, output, seen=seen: seen.add(output.shape)
        )
        one.use(one.weights())
        for window in windows:
            list(one.learn([window]))
        handle.remove()
        shapes.append(seen)
        gradients.append([p.grad.clone() for p in one.module.parameters() if p.grad is not None])
        one.module.zero_grad()
    assert len(shapes[0]) == 6 and len(shapes[1]) <= 4
    for padded, exact in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(padded, exact, rtol=1e-3, atol=1e-4)


def test_other_work_does_not_shorten_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice that waits for a processor lasts long, and computes no longer."""
    lengths = []
    for waited in (0.0, 10.0):
        one, _ = student(tmp_path / str(waited))
        monkeypatch.setattr(online_student, "monotonic", itertools.count(0.0, waited).__next__)
        monkeypatch.setattr(online_student, "process_time", lambda: 0.0)
        for step in range(4):
            list(one.learn([predictable(step)]))
        lengths.append(one._pairs)
    assert lengths[0] == lengths[1] > 4 * PAIRS


def test_gain_has_the_error_of_its_mean() -> None:
    rng = np.random.default_rng(0)
    means = []
    for _ in range(400):
        base = rng.binomial(50, 0.3, 12)
        scores = [Score(int(value), 50) for value in base + rng.integers(-4, 7, 12)]
        means.append(gain(scores, [Score(int(value), 50) for value in base]))
    spread = float(np.std([each.mean for each in means]))
    assert abs(float(np.mean([each.mean for each in means])) - 1 / 50) < 0.003
    assert 0.85 < float(np.mean([each.error for each in means])) / spread < 1.15
