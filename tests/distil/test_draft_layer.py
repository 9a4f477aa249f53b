"""The torch layer of a drafter computes what the engine computes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.backend import compile_program
from headrace.batch import RaggedBatch
from headrace.checkpoint.drafters import open_drafter
from headrace.config import KvConfig
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.distil.draft import DraftStudent, draft_spec
from headrace.distil.draft_files import write_drafter
from headrace.distil.draft_layer import DraftLayer
from headrace.distil.draft_loss import SoftCrossEntropy
from headrace.distil.draft_start import ridge
from headrace.loader.drafts import drafter_program
from headrace.measure.progress import ignore_progress
from headrace.model.spec import ModelSpec
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor
from tests.distil.answer_folders import tiny_target, write_answers
from tests.tiny import tiny_model

TARGET = tiny_target(tiny_model(4, layers=8))
TAPS = (2, 4, 8)
VOCAB = 20
NUM_STEPS = 4
LENGTH = 12


def spec_of(kind: str) -> ModelSpec:
    spec = draft_spec(TARGET.spec, TAPS, VOCAB, "joined" if kind == "joined" else "eagle3")
    assert spec.drafter
    is_normed = kind == "normed"
    return replace(spec, drafter=replace(spec.drafter, norm_before_residual=is_normed))


def random_layer(seed: int, spec: ModelSpec) -> DraftLayer:
    """A layer with random weights in bf16, so that files keep them exactly."""
    module = DraftLayer(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            deviation = parameter.shape[-1] ** -0.5
            parameter.normal_(float(parameter.dim() == 1), deviation, generator=generator)
            parameter.copy_(parameter.bfloat16().float())
    return module


class Chains:
    """The compiled programs of a drafter, which draft along a given text."""

    def __init__(self, folder: Path) -> None:
        drafter = open_drafter(folder, TARGET)
        first, further = drafter_program(drafter), drafter_program(drafter, from_itself=True)
        self._blocks, self._groups = num_blocks(64), len(first.kv_groups)
        kv = KvConfig((self._blocks,) * self._groups, dtype="f32")
        self._from_target = compile_program("reference", first, drafter.tensors, kv, 1)
        self._from_itself = self._from_target.attach(further, drafter.tensors)

    def logits(self, tokens: list[int], taps: Floats, last: int) -> list[Floats]:
        """Logits of a chain that starts at pair `last`, whose drafts are the tokens of the text."""
        batch = self._batch(tokens, 0, last + 1)._replace(inputs=taps[: last + 1])
        result = self._from_target.launch(batch, logits=True, hidden=True).wait()
        logits = []
        for step in range(1, NUM_STEPS + 1):
            assert result.logits is not None and result.hidden is not None
            logits.append(result.logits[-1].copy())
            row, end = result.hidden[-1:].copy(), last + step
            if end == len(taps) or step == NUM_STEPS:
                break
            batch = self._batch(tokens, end, end + 1)._replace(inputs=row)
            result = self._from_itself.launch(batch, logits=True, hidden=True).wait()
        return logits

    def _batch(self, tokens: list[int], first: int, end: int) -> RaggedBatch:
        """Pairs `first` to `end`, each with the token after its position."""
        return sequence_batch(tokens[1:], first, end, 1, self._blocks, self._groups)


@pytest.mark.parametrize("kind", ["eagle3", "normed", "joined"])
def test_training_steps_equal_the_drafts_of_the_engine(tmp_path: Path, kind: str) -> None:
    """Two texts share a row of the batch; each chain of each text is compared."""
    rng = np.random.default_rng(1)
    spec = spec_of(kind)
    module = random_layer(1, spec)
    drafted = np.sort(rng.choice(spec.vocab_size, VOCAB, replace=False))
    write_drafter(tmp_path / "drafter", spec, module, drafted, {})
    chains = Chains(tmp_path / "drafter")

    texts = rng.integers(0, spec.vocab_size, (2, LENGTH + 1))
    taps = rng.standard_normal((2, LENGTH, 3 * spec.dim)).astype(np.float32)
    embedding = torch.from_numpy(TARGET.tensors["embed"].dequantise().copy())
    with torch.no_grad():
        rows = module.rows(
            embedding[torch.from_numpy(texts[:, 1:])].reshape(1, 2 * LENGTH, -1),
            torch.from_numpy(taps).reshape(1, 2 * LENGTH, -1),
            torch.arange(LENGTH).repeat(2)[None],
            torch.arange(2).repeat_interleave(LENGTH)[None],
            NUM_STEPS,
        )
        logits = [module.logits(step)[0].numpy() for step in rows]
    for text in range(2):
        for last in range(LENGTH):
            expected = chains.logits(texts[text].tolist(), taps[text], last)
            assert len(expected) == min(NUM_STEPS, LENGTH - last)
            for step, wanted in enumerate(expected):
                found = logits[step][text * LENGTH + last + step]
                np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


def test_the_loss_and_its_gradients_equal_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(2050, 8, generator=generator, requires_grad=True)
    head = torch.randn(20, 8, generator=generator, requires_grad=True)
    wanted = torch.randn(30, 20, generator=generator).softmax(-1)
    index = torch.randint(0, 30, (2050,), generator=generator)
    weights = torch.rand(2050, generator=generator)
    loss = SoftCrossEntropy.apply(rows, head, wanted, index, weights)
    found = torch.autograd.grad(loss, (rows, head))

    logs = (rows @ head.T).log_softmax(-1)
    expected = -(weights[:, None] * wanted[index] * logs).sum()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(found, torch.autograd.grad(expected, (rows, head)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_ridge_regression_finds_a_linear_map() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4000, 12, generator=generator)
    matrix = torch.randn(5, 12, generator=generator)
    noise = 0.1 * torch.randn(4000, 5, generator=generator)
    wanted = inputs @ matrix.T + noise
    found = ridge(zip(inputs.split(1000), wanted.split(1000), strict=True))
    torch.testing.assert_close(found, matrix, rtol=0.02, atol=0.02)


def test_the_first_weights_draft_better_than_chance(tmp_path: Path) -> None:
    """Of a target whose next row is a linear map of its rows, the first weights draft all."""
    spec, tensors = tiny_model(4, layers=8)
    # Without attention and MLP, a row is the embedding of its token, and the tied head repeats it.
    still = {
        name: StoredTensor.from_floats(name, np.zeros(tensor.shape, np.float32))
        if name.rpartition(".")[2] in ("o", "down")
        else tensor
        for name, tensor in tensors.items()
    }
    target = tiny_target((replace(spec, tied_embeddings=True), still))
    answers = write_answers(tmp_path / "answers", target, (2, 8))
    student = DraftStudent(target, answers, frozenset(), vocab_size=61, dtype=torch.float32)
    student.start(ignore_progress)
    assert student.evaluate()["acceptance_1"] > 0.9
