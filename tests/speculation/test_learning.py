"""The engine's part of learning: windows of verified tokens, and the watch over acceptance."""

from typing import Any

import numpy as np
import pytest

from headrace.engine.engine import Engine
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.speculation.learning.acceptance_watch import AcceptanceWatch
from headrace.speculation.learning.buffer import (
    PAIRS,
    LearningBuffer,
    Window,
    to_bits,
    window_bytes,
)
from headrace.speculation.learning.collector import CONTEXT, Collector
from tests.draft_engines import draft_engine
from tests.drafters import random_drafter
from tests.tiny import tiny_engine, tiny_model

MODEL = tiny_model(4, layers=3, context=512)
TAPS = (0, 1, 2)
WIDTH = 3 * MODEL[0].dim
GREEDY = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)


class Listener:
    """Collects from an engine as a learner does."""

    is_open = True

    def __init__(self, num_bytes: int = 1 << 24) -> None:
        self.buffer = LearningBuffer(WIDTH, num_bytes)
        self.collector = Collector(self.buffer, WIDTH)

    def observe(self, commits: Any, results: Any, candidates: Any) -> None:
        for item, commit in commits:
            rows = [*item.rows, *(item.rows.stop + node for node in commit.path)]
            for launch, result in enumerate(results):
                position = item.end - item.num_scheduled + launch
                self.collector.add(item.seq, position, result.taps, rows)

    @property
    def windows(self) -> list[Window]:
        found = [self.buffer.read(number) for number in range(1, self.buffer.written + 1)]
        return [window for window in found if window]


def listened(prompts: list[list[int]], **options: Any) -> tuple[Listener, list[list[int]]]:
    """Run requests, and return the windows and all tokens of each sequence."""
    drafter = random_drafter(MODEL, taps=TAPS)
    engine, _ = draft_engine(MODEL, "draft_model", drafter=drafter, slots=2048, **options)
    listener: Any = Listener()
    engine._loop.learner = listener
    ids = [engine.add_request(prompt, GREEDY, RequestOptions()) for prompt in prompts]
    tokens = {}
    while engine.has_work:
        for update in engine.step():
            if update.result:
                output = update.result.outputs[0].token_ids
                tokens[update.request_id] = [*update.result.prompt_token_ids, *output]
            del update
    return listener, [tokens[request_id] for request_id in ids]


def true_taps(tokens: list[int]) -> Any:
    """The rows of a text, computed at once."""
    drafter = random_drafter(MODEL, taps=TAPS)
    engine, _ = draft_engine(MODEL, "draft_model", drafter=drafter, slots=2048)
    seen = []

    class Reader:
        def observe(self, commits: Any, results: Any, candidates: Any) -> None:
            seen.append(results[0].taps.copy())

    reader: Any = Reader()
    engine._loop.learner = reader
    engine.add_request(tokens, SamplingParams(temperature=0, max_tokens=1))
    while engine.has_work:
        engine.step()
    return np.concatenate(seen)


@pytest.mark.parametrize("adaptive", [False, True])
def test_windows_have_the_rows_and_tokens_of_each_position(adaptive: bool) -> None:
    """With `adaptive`, plain decoding takes several launches in a step."""
    prompts = [[7, 8, 9, 7, 8], [token % 61 for token in range(70)]]
    listener, texts = listened(
        prompts, adaptive_speculation=adaptive, multi_step_ms=50.0, max_num_batched_tokens=32
    )
    trained: set[tuple[int, int]] = set()
    rows = [to_bits(true_taps(text)) for text in texts]
    for window in listener.windows:
        places = range(window.position, window.position + len(window.tokens))
        found = [
            i
            for i, text in enumerate(texts)
            if list(window.tokens) == text[places.start + 1 : places.stop + 1]
        ]
        assert len(found) == 1
        text = found[0]
        assert np.array_equal(window.taps, rows[text][places.start : places.stop])
        own = {(text, places[pair]) for pair in range(window.first, len(places) - 1)}
        assert not own & trained
        trained |= own
    for text, (prompt, tokens) in enumerate(zip(prompts, texts, strict=True)):
        positions = [position for of, position in sorted(trained) if of == text]
        assert positions == list(range(len(prompt) - 1, positions[-1] + 1))
        assert positions[-1] >= len(tokens) - 12  # a window has at least 8 tokens
    assert listener.collector.num_tokens == len(trained)
    longest = max(len(window.tokens) for window in listener.windows)
    assert longest == PAIRS and any(window.first == CONTEXT - 1 for window in listener.windows)


def test_the_buffer_keeps_the_latest_windows_in_its_bytes() -> None:
    num_bytes = 5 * window_bytes(WIDTH) + 64
    buffer = LearningBuffer(WIDTH, num_bytes)
    assert buffer.num_windows == 5
    for number in range(1, 13):
        taps = np.full((number, WIDTH), number, np.uint16)
        buffer.write(number, 0, np.full(number, number, np.int32), taps)
    assert buffer.written == 12
    for number in range(1, 13):
        window = buffer.read(number)
        assert (window is None) == (number <= 7)
        if window:
            assert len(window.tokens) == number and (window.taps == number).all()
            assert window.position == number and window.num_trained == number - 1
    other = LearningBuffer(WIDTH, num_bytes, buffer.descriptor)
    assert other.written == 12 and other.idle_seconds > 0
    buffer.set_idle(False)
    assert other.idle_seconds < 0
    buffer.set_idle(True)
    assert 0 <= other.idle_seconds < 5


def test_bits_are_the_nearest_bf16() -> None:
    rows = np.array([[1.0, -2.5, 1.00390625, 1.01171875, 3e38]], np.float32)
    values = (to_bits(rows).astype(np.uint32) << 16).view(np.float32)
    assert values.tolist() == [[1.0, -2.5, 1.0, 1.015625, values[0, 4]]]


def watched(before: float, after: float, count: int = 300) -> tuple[AcceptanceWatch, str]:
    watch, verdict = AcceptanceWatch(), ""
    rng = np.random.default_rng(0)
    for right in rng.random(400) < before:
        watch.record(bool(right))
    watch.begin(is_open=True)
    for right in rng.random(count) < after:
        watch.record(bool(right))
        watch.count_tokens(2)
        verdict = verdict or watch.verdict()
    return watch, verdict


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [(0.5, 0.3, "fell"), (0.5, 0.5, "kept"), (0.3, 0.6, "kept"), (0.0, 0.0, "kept")],
)
def test_the_watch_tells_a_fall_from_chance(before: float, after: float, verdict: str) -> None:
    watch, found = watched(before, after)
    assert found == verdict and not watch.is_open
    assert abs(watch.before - before) < 0.08 and abs(watch.now - after) < 0.08


def test_the_watch_waits_for_enough_drafts_or_tokens() -> None:
    watch, verdict = watched(0.5, 0.1, count=100)
    assert not verdict and watch.is_open
    watch.count_tokens(10_000)
    assert watch.verdict() == "fell"


def test_an_engine_without_the_option_has_no_learner() -> None:
    engine: Engine = tiny_engine(MODEL, "cpu")
    assert engine.learner is None and engine.stats().learning.tokens == 0
