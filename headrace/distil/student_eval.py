"""Evaluates a student next to its teacher, each as the engine runs it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig
from headrace.convert.quality import Scorer
from headrace.distil.answers import Answer, AnswerSet
from headrace.measure.evaluate import evaluate
from headrace.measure.progress import ProgressCallback
from headrace.model import trace_model
from headrace.record import frozen

_TOKENS = 4096
"""Tokens of a text that are evaluated."""
_LENGTH = 512


@frozen(kw_only=True)
class Score:
    """Size, quality and speed of a model."""

    name: str
    weight_bytes: int
    answers_nll: float
    """Loss of the held-out answers of the teacher, in nats a token."""
    same_top: float
    """Share of their tokens that are also this model's likeliest."""
    text_nll: float
    """Loss of Python's language reference, in nats a token."""
    decode: float
    """Tokens/s of one sequence."""


def score(
    name: str, model: str, answers: AnswerSet, threads: int, on_progress: ProgressCallback
) -> Score:
    """Evaluate a model on the held-out answers and on the text of `headrace eval`."""
    nll, same_top = _on_answers(resolve(model), answers, threads)
    (row,) = evaluate(
        model, tokens=_TOKENS, length=_LENGTH, on_progress=on_progress, threads=threads
    )
    return Score(
        name=name,
        weight_bytes=row.weight_bytes,
        answers_nll=nll,
        same_top=same_top,
        text_nll=row.quality.nll,
        decode=row.decode,
    )


def _on_answers(path: Path, answers: AnswerSet, threads: int) -> tuple[float, float]:
    """The loss of held-out answers, and the share of their tokens that are the likeliest."""
    checkpoint, config = open_checkpoint(path), EngineConfig(backend="cpu")
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    scorer = Scorer(
        program, checkpoint.tensors, _LENGTH, "cpu", threads, config.kv_format, config.activations
    )
    losses, hits = list[NDArray[np.float32]](), list[NDArray[np.bool_]]()
    try:
        for answer in held_out(answers):
            tokens = answer.tokens[:_LENGTH].tolist()
            targets = answer.targets[: len(tokens)]
            rows = np.concatenate(list(scorer.log_probabilities(tokens)))
            rows, targets = rows[answer.answer_start - 1 :], targets[answer.answer_start - 1 :]
            losses.append(-rows[np.arange(len(rows)), targets])
            hits.append(rows.argmax(axis=1) == targets)
    finally:
        scorer.close()
    return float(np.concatenate(losses).mean()), float(np.concatenate(hits).mean())


def held_out(answers: AnswerSet) -> Iterator[Answer]:
    """Yield held-out answers whose prompts fit, up to the number of evaluated tokens."""
    count = 0
    for answer in answers.sequences(answers.held_out):
        if count >= _TOKENS:
            return
        if answer.answer_start < _LENGTH:
            count += len(answer.tokens) - answer.answer_start + 1
            yield answer


def largest_difference(
    path: Path, tokens: Sequence[int], expected: NDArray[np.float32], threads: int
) -> float:
    """The largest difference of log-probabilities from `expected` [tokens, vocab], in nats.

    Tokens that are less likely than one in a million count no more than that.
    """
    checkpoint = open_checkpoint(path)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    scorer = Scorer(program, checkpoint.tensors, len(tokens), "cpu", threads, activations="f32")
    try:
        rows = np.concatenate(list(scorer.log_probabilities(tokens)))
    finally:
        scorer.close()
    low = np.float32(np.log(1e-6))
    return float(np.abs(np.maximum(rows, low) - np.maximum(expected, low)).max())
