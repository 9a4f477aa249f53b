"""Medusa heads: their equations, their tree, and the drafts of heads fitted to the model."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backend import forward
from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.config import KvConfig
from headrace.logit_ops import StepResult
from headrace.model import trace_model
from headrace.program.trace import trace
from headrace.proposer import ProposerTraits
from headrace.quant.formats import StoredTensor
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.medusa import (
    MedusaProposer,
    _input_rows,
    head_forward,
    static_tree,
)
from tests.draft_engines import draft_engine, head_tensors, medusa_heads
from tests.speculation.views import View
from tests.tiny import BLOCK_SIZE, run_all, tiny_engine, tiny_executable, tiny_model

MODEL = tiny_model(4)
SPEC = MODEL[0]
GREEDY = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


class Watcher:
    """Records the hidden row of every sampled token."""

    traits = ProposerTraits(0, needs_hidden=True)

    def __init__(self) -> None:
        self.hidden: list[NDArray[np.float32]] = []

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[Any]:
        return []

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        assert result.hidden is not None
        self.hidden += [
            result.hidden[commit.last_row].copy() for commit in commits if commit.tokens
        ]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_head_computes_the_published_equations(backend: str) -> None:
    target = tiny_executable(MODEL, backend, KvConfig((2,), BLOCK_SIZE[backend], "f32"))
    x = np.random.default_rng(0).normal(0, 1, (5, SPEC.dim)).astype(np.float32)
    tensors = head_tensors(SPEC, 2)
    for i, head in enumerate(medusa_heads(target, SPEC, 2)):
        w, b, out = (
            tensors[f"medusa.{i}.{name}"].dequantise()
            for name in ("0.linear.weight", "0.linear.bias", "1.weight")
        )
        mixed = x @ w.T + b
        expected = (x + mixed / (1 + np.exp(-mixed))) @ out.T
        np.testing.assert_allclose(
            forward(head, _input_rows(x)).logits, expected, rtol=1e-4, atol=1e-4
        )


def test_heads_fitted_to_the_model_draft_right_tokens() -> None:
    """The heads are fitted by least squares; with W = 0 a head is linear in the hidden row."""
    watcher = Watcher()
    target = tiny_executable(MODEL, "cpu", KvConfig((8,), 32, "f32"))
    hidden_program = trace_model(*MODEL).with_hidden()
    engine = tiny_engine(
        MODEL,
        "cpu",
        proposer=watcher,
        executable=target.attach(hidden_program, MODEL[1]),
        kv_dtype="f32",
    )
    (plain,) = run_all(engine, [([1, 2, 3], GREEDY)])
    output = plain.outputs[0].token_ids
    tensors = head_tensors(SPEC, 2)
    for i in range(2):
        following = np.array(output[i + 1 :])
        weights = np.linalg.lstsq(
            np.array(watcher.hidden[: len(following)]),
            np.eye(SPEC.vocab_size)[following],
            rcond=1e-4,
        )[0]
        fitted = {
            "0.linear.weight": np.zeros((SPEC.dim, SPEC.dim)),
            "0.linear.bias": np.zeros(SPEC.dim),
            "1.weight": weights.T,
        }
        for part, values in fitted.items():
            name = f"medusa.{i}.{part}"
            tensors[name] = StoredTensor.from_floats(name, values.astype(np.float32))
    executable = target.attach(hidden_program, MODEL[1])
    heads = [
        executable.attach(
            trace(lambda g, i=i: head_forward(i, SPEC.dim, SPEC.vocab_size, g), tensors), tensors
        )
        for i in range(2)
    ]
    engine = tiny_engine(
        MODEL, "cpu", proposer=MedusaProposer(heads, 2, 2), executable=executable, kv_dtype="f32"
    )
    (result,) = run_all(engine, [([1, 2, 3], GREEDY)])
    assert result.outputs[0].token_ids == output
    stats = engine.stats()
    assert stats.accepted > 1.5 * stats.steps and stats.proposer_failures == 0


def test_the_tree_has_the_likeliest_paths() -> None:
    assert static_tree(3, 4) == [(0,), (0, 0), (1,), (0, 0, 0)]
    for heads, nodes in ((1, 4), (4, 30)):
        tree = static_tree(heads, nodes)
        assert len(set(tree)) == len(tree) == nodes
        assert all(
            len(path) <= heads and (len(path) == 1 or path[:-1] in tree[:i])
            for i, path in enumerate(tree)
        )
    assert static_tree(0, 5) == []


def test_there_is_no_draft_from_a_hidden_row_of_another_length() -> None:
    """A sequence that grew unobserved, as by a fork, has no hidden row of its last token."""
    engine, proposers = draft_engine(MODEL, "medusa", width=2)
    proposer = proposers["medusa"]
    assert isinstance(proposer, MedusaProposer)
    engine.add_request([1, 2], GREEDY)
    engine.step()
    (seq,) = engine._scheduler.running
    assert proposer.propose([seq], [4])[0].tokens
    seq.known.append(1)
    assert not proposer.propose([seq], [4])[0].tokens
    seq.known.pop()
    engine.close()


def test_the_row_of_the_last_token_is_kept() -> None:
    target = tiny_executable(MODEL, "cpu", KvConfig((2,), BLOCK_SIZE["cpu"], "f32"))
    proposer = MedusaProposer(medusa_heads(target, SPEC, 2), 2, 2)
    hidden = np.random.default_rng(0).normal(0, 1, (4, SPEC.dim)).astype(np.float32)

    def drafts(*commits: Commit) -> list[DraftTree]:
        views = [View([1, 2]), View([3])]
        proposer.observe(views, list(commits), StepResult([], hidden=hidden))
        return proposer.propose(views, [4, 4])

    rows = [drafts(Commit(0, [], [2], [], row=row))[0] for row in range(4)]
    assert (
        all(len(draft.tokens) == 4 for draft in rows)
        and len({tuple(draft.tokens) for draft in rows}) == 4
    )
    assert drafts(Commit(0, [0], [5, 2], [], row=1), Commit(1, [], [3], [], row=3)) == [
        rows[2],
        rows[3],
    ]
    # The first of several continuations goes to the sequence itself, and inside a prompt nothing is
    # drawn.
    assert drafts(
        Commit(0, [], [2], [], row=1), Commit(0, [], [9], [], row=3), Commit(1, [], [], [])
    ) == [rows[1], NO_DRAFT]
    hidden[0] = np.nan
    assert drafts(Commit(0, [], [2], [], row=0), Commit(1, [], [3], [], row=3)) == [
        NO_DRAFT,
        rows[3],
    ]
    assert drafts() == [NO_DRAFT, NO_DRAFT]
