"""The guard: a step gets valid drafts or none, whatever a proposer does."""

import gc
import threading
import time
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits
from headrace.speculation.guard import Guard
from headrace.speculation.proposers import (
    METHODS,
    PROPOSERS,
    REQUIRED_OPTIONS,
    DraftModel,
    DraftModels,
    check_speculation,
    enabled_methods,
    make_proposers,
)
from tests.engine.toy import ToyExecutable, toy_kv
from tests.speculation.views import View


class Scripted:
    """Returns or raises the given result in `propose`, and fails in `observe`."""

    traits = ProposerTraits(4, time_limit=None)

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def propose(self, seqs: list[Any], budgets: list[int]) -> Any:
        self.asked = [seq.seq_id for seq in seqs]
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        raise RuntimeError


GOOD = DraftTree([1, 2], [-1, 0])
RESULT = StepResult([])


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("no"),
        None,
        [],
        [GOOD, GOOD],
        [None],
        [DraftTree([1], [])],
        [DraftTree([1], [0])],
        [DraftTree([1], [-2])],
        [DraftTree([1, 2], [-1, 1])],
        [DraftTree([10], [-1])],
        [DraftTree([-1], [-1])],
        [DraftTree(["a"], [-1])],  # type: ignore[list-item]
        [DraftTree([0.5], [-1])],  # type: ignore[list-item]
        [DraftTree([1] * 4, [-1] * 4)],
        [DraftTree([1], [-1], probabilities=np.ones((1, 9)))],
        [DraftTree([1], [-1], probabilities=np.ones((2, 10)))],
    ],
)
def test_an_invalid_result_is_no_draft(answer: Any) -> None:
    guard = Guard(Scripted(answer), vocab_size=10)
    for failures in (1, 2):
        assert guard.propose([View([1])], [3]) == [NO_DRAFT]
        assert guard.failures == failures and not guard.retired


def test_an_invalid_draft_does_not_discard_the_others() -> None:
    guard = Guard(Scripted([GOOD, DraftTree([99], [-1])]), vocab_size=10)
    assert guard.propose([View([1]), View([2])], [3, 3]) == [GOOD, NO_DRAFT]


def test_a_valid_draft_is_unchanged() -> None:
    draft = DraftTree([1, 9], [-1, -1], 99, True, np.ones((2, 10)))
    guard = Guard(Scripted([draft]), vocab_size=10)
    assert guard.propose([View([1])], [2]) == [
        draft._replace(confidence=31)
    ]  # the highest that there is
    assert guard.failures == 0


def test_each_node_may_have_a_confidence() -> None:
    draft = DraftTree([1, 9], [-1, 0], [40, 2])
    guard = Guard(Scripted([draft, draft._replace(confidence=[1])]), vocab_size=10)
    drafts = guard.propose([View([1]), View([2])], [2, 2])
    assert drafts == [draft._replace(confidence=[31, 2]), NO_DRAFT] and guard.failures == 1


def test_a_proposer_with_a_width_learns_whether_depths_pay() -> None:
    """Indices are those of the caller's sequences, though one has no budget."""
    asked: list[tuple[int, list[int]]] = []

    class Deep(Scripted):
        traits = Scripted.traits._replace(width=1)

        def propose(self, seqs: list[Any], budgets: list[int], pays: Any = None) -> Any:
            assert pays(0, [3]) is False
            return super().propose(seqs, budgets)

    def pays(index: int, confidences: Any) -> bool:
        asked.append((index, confidences))
        return False

    guard = Guard(Deep([DraftTree([1], [-1])]), vocab_size=10)
    assert guard.propose([View([1]), View([2])], [0, 2], pays)[1].tokens == [1]
    assert asked == [(1, [3])]


def test_the_proposer_sees_only_sequences_with_a_budget() -> None:
    inner = Scripted([DraftTree([1], [-1]), GOOD])
    guard = Guard(inner, vocab_size=10)
    views = [View([i], (i, 0)) for i in range(3)]
    assert guard.propose(views, [0, 1, 3]) == [NO_DRAFT, DraftTree([1], [-1]), GOOD]
    assert inner.asked == [(1, 0), (2, 0)]
    assert guard.failures == 0


def test_failures_to_observe_are_counted_and_the_first_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = Guard(Scripted([]), vocab_size=10)
    for failures in (1, 2):
        guard.observe([], [], RESULT)
        assert guard.failures == failures
    (record,) = caplog.records
    assert record.message.startswith("Scripted failed, and drafted nothing: ") and record.exc_info


class Watching(Scripted):
    """Records its observations and their thread."""

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        self.observed = (seqs, commits, result, threading.current_thread())


@pytest.mark.parametrize("in_engine_thread", [True, False])
def test_a_proposer_observes_in_the_thread_of_its_traits(in_engine_thread: bool) -> None:
    inner, views, commits = Watching([]), [View([1])], [Commit(0, [], [1], [])]
    inner.traits = inner.traits._replace(in_engine_thread=in_engine_thread)
    guard = Guard(inner, vocab_size=10)
    guard.observe(views, commits, RESULT)
    *observed, thread = inner.observed
    assert observed == [views, commits, RESULT] and guard.failures == 0
    assert (thread is threading.current_thread()) == in_engine_thread
    assert (
        in_engine_thread or thread.daemon
    )  # so that one that hangs does not keep the process from ending


def test_proposers_are_made_by_name() -> None:
    made = {
        name: make_proposers(EngineConfig(proposer=name, max_draft_tokens=5))  # type: ignore[arg-type]
        for name in PROPOSERS
        if name not in REQUIRED_OPTIONS
    }
    assert made["off"] == {} and list(made["auto"]) == ["suffix"]
    assert all(
        list(made[name]) == [name] and made[name][name].traits.max_nodes == 5
        for name in METHODS
        if name not in REQUIRED_OPTIONS
    )
    assert set(get_args(get_type_hints(EngineConfig)["proposer"])) == set(PROPOSERS)
    with pytest.raises(RequestError, match="choose from off, auto, suffix"):
        make_proposers(EngineConfig(proposer="nrgam"))  # type: ignore[arg-type]
    for name in REQUIRED_OPTIONS:
        with pytest.raises(RequestError, match=f"proposer '{name}' needs"):
            make_proposers(EngineConfig(proposer=name))  # type: ignore[arg-type]


def test_auto_has_the_configured_proposers() -> None:
    every = EngineConfig(proposer="auto", draft_model="x", draft_layers=2, medusa_heads="y")
    assert enabled_methods(every) == ("suffix", "draft_model", "self_draft", "medusa")
    assert enabled_methods(EngineConfig(proposer="auto", draft_layers=2)) == (
        "suffix",
        "self_draft",
    )
    with pytest.raises(RequestError, match="needs a smaller model"):
        make_proposers(every)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, ""),
        ({"acceptance_method": "typical"}, "acceptance_method 'typical' verifies drafts"),
        ({"acceptance_method": "rejection"}, "acceptance_method 'rejection' verifies drafts"),
        ({"proposer": "suffix", "acceptance_method": "typical"}, ""),
        ({"proposer": "suffix", "acceptance_method": "rejection"}, "'rejection' needs chains"),
        ({"proposer": "auto", "acceptance_method": "rejection"}, "'rejection' needs chains"),
        ({"proposer": "auto", "acceptance_method": "rejection", "draft_layers": 2}, ""),
        (
            {"proposer": "draft_model", "acceptance_method": "rejection", "draft_width": 2},
            "'rejection' needs chains",
        ),
        ({"proposer": "draft_model", "acceptance_method": "rejection"}, ""),
        (
            {"proposer": "self_draft", "draft_model": "x"},
            "draft_model is for proposer 'draft_model' or 'auto', and proposer is 'self_draft'",
        ),
        ({"draft_layers": 2}, "draft_layers is for proposer 'self_draft'"),
        ({"proposer": "medusa", "medusa_heads": "x"}, ""),
        ({"proposer": "suffix", "medusa_heads": "x"}, "medusa_heads is for proposer 'medusa'"),
        ({"proposer": "auto", "medusa_heads": "x", "draft_model": "x", "draft_layers": 2}, ""),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    if message:
        with pytest.raises(RequestError, match=message):
            check_speculation(EngineConfig(**options))
    else:
        check_speculation(EngineConfig(**options))


class Hanging(Scripted):
    """Returns once, and hangs in the next call until the test wakes it."""

    traits = ProposerTraits(4, time_limit=0.05)

    def __init__(self) -> None:
        super().__init__([GOOD])
        self.wakes, self.calls = threading.Event(), 0

    def propose(self, seqs: list[Any], budgets: list[int]) -> Any:
        self.calls += 1
        if self.calls > 1:
            self.wakes.wait()
        return super().propose(seqs, budgets)


def test_a_hanging_proposer_is_retired() -> None:
    inner = Hanging()
    guard = Guard(inner, vocab_size=10)
    assert guard.propose([View([1])], [3]) == [GOOD]
    start = time.perf_counter()
    assert guard.propose([View([1])], [3]) == [NO_DRAFT]
    assert time.perf_counter() - start >= 0.05
    assert (guard.retired, guard.failures) == (True, 1)
    inner.wakes.set()  # too late
    assert guard.propose([View([1])], [3]) == [NO_DRAFT]
    guard.observe([], [], None)  # type: ignore[arg-type]
    assert (inner.calls, guard.failures) == (2, 1)


def test_a_proposer_in_the_engines_thread_has_a_time_limit_too() -> None:
    times = iter([0.0, 1.0, 1.0, 2.1])
    inner = Scripted([GOOD])
    inner.traits = ProposerTraits(4, in_engine_thread=True, time_limit=1.0)
    guard = Guard(inner, vocab_size=10, clock=lambda: next(times))
    assert guard.propose([View([1])], [3]) == [GOOD]
    assert guard.propose([View([1])], [3]) == [NO_DRAFT]
    assert (guard.retired, guard.failures) == (True, 1)


def test_the_thread_ends_with_the_guard() -> None:
    guard = Guard(Scripted([GOOD]), vocab_size=10)
    guard.propose([View([1])], [3])
    assert guard._worker
    thread = guard._worker._thread
    assert thread and thread.is_alive()
    del guard
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_traits_of_the_proposers() -> None:
    """All run in the engine's thread. Quick proposers have no time limit."""
    plain = ProposerTraits(7, in_engine_thread=True, time_limit=None)
    needs = {
        "suffix": plain._replace(observes=False),
        "jacobi": plain._replace(learns_from_rows=True, needs_logits=True),
        "lookahead": plain._replace(learns_from_rows=True, needs_logits=True),
        "draft_model": ProposerTraits(6, 2, in_engine_thread=True, time_limit=10.0),
        "self_draft": ProposerTraits(6, 2, in_engine_thread=True, time_limit=10.0),
        "medusa": ProposerTraits(4, in_engine_thread=True, time_limit=10.0, needs_hidden=True),
    }
    toy = ToyExecutable(4)
    draft = DraftModel(toy, toy_kv(4, 4), 100)
    models = DraftModels(draft=draft, self_draft=toy, heads=[toy, toy])
    for name, make in METHODS.items():
        traits = make(EngineConfig(max_draft_tokens=7, draft_depth=3, draft_width=2), models).traits
        rates = traits.acceptance
        assert traits._replace(acceptance=(0.5,)) == needs[name], name
        assert all(0 < rate < 1 for rate in rates), name
        classes = {"suffix": 20, "draft_model": 9, "self_draft": 9}  # one rate for each
        assert len(rates) == classes.get(name, 1)
