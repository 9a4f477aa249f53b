"""Priorities, timeouts and the target step time: order, early ends, waiting, and no starvation."""

from typing import Any

import pytest

from headrace.engine.queues import STEPS_PER_PRIORITY
from headrace.engine.step_timer import WINDOW, StepTimer
from headrace.errors import RequestError
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.engine.toy import plain_decoding, toy_engine
from tests.tiny import drain

ONE = SamplingParams(temperature=0, max_tokens=1)
TWO = SamplingParams(temperature=0, max_tokens=2)


def order(updates: list[Any]) -> list[str]:
    """Return the requests in the order in which they ended."""
    return [update.request_id for update in updates if update.result]


class TestPriority:
    def test_the_lowest_priority_runs_first(self) -> None:
        engine = toy_engine(max_num_seqs=1)
        for i, priority in enumerate([0, 3, -2, 0, 1, -2]):
            engine.add_request([i], ONE, options=RequestOptions(priority=priority))
        assert order(drain(engine)) == ["2", "5", "0", "3", "4", "1"]

    def test_waiting_raises_the_priority(self) -> None:
        """A stream of urgent requests cannot hold back a request that arrived one priority level of
        steps earlier.
        """
        engine = toy_engine(max_num_seqs=1)
        patient = engine.add_request([0], ONE, options=RequestOptions(priority=1))
        ended: list[str] = []
        while patient not in ended:
            if len(engine._requests) < 3:
                engine.add_request([1], ONE)
            ended += order(engine.step())
            assert engine.stats().steps <= STEPS_PER_PRIORITY + 4
        assert engine.stats().steps >= STEPS_PER_PRIORITY

    def test_the_highest_priority_value_is_preempted(self) -> None:
        engine = toy_engine(num_blocks=7, block_size=4)
        for i, priority in enumerate([1, 0]):
            engine.add_request(
                [i] * 8,
                SamplingParams(temperature=0, max_tokens=12),
                options=RequestOptions(priority=priority),
            )
        updates = []
        while not engine.stats().preemptions:
            updates += engine.step()
        assert [seq.seq_id for seq in engine._scheduler.waiting] == [(0, 0)]
        assert order(updates + drain(engine)) == ["1", "0"]

    @pytest.mark.parametrize("priority", [1001, -1001, 0.5, "high", True])
    def test_out_of_range(self, priority: Any) -> None:
        with pytest.raises(RequestError, match="priority must be a whole number"):
            toy_engine().add_request([1], ONE, options=RequestOptions(priority=priority))


class TestTimeout:
    def test_timeout_in_the_queue_and_while_running(self) -> None:
        engine = toy_engine(max_num_seqs=1)
        params = SamplingParams(temperature=0, max_tokens=30)
        running = engine.add_request([1, 2], params)
        waiting = engine.add_request([3], params, options=RequestOptions(timeout=0.0))
        updates = [update for _ in range(4) for update in engine.step()]
        (result,) = [update.result for update in updates if update.result]
        assert (
            result.request_id,
            result.outputs[0].finish_reason,
            result.outputs[0].token_ids,
        ) == (waiting, "timeout", [])
        engine._deadlines.add(0.0, engine._requests[running])  # as if its time were up
        (update,) = engine.step()
        assert update.result and update.result.finished and update.finish_reason == "timeout"
        assert [1, 2, *update.result.outputs[0].token_ids] == plain_decoding([1, 2], params, 0)[:6]
        stats = engine.stats()
        assert not engine.has_work and stats.blocks_free == stats.blocks_total

    def test_timeout_ends_all_sequences(self) -> None:
        engine = toy_engine()
        engine.add_request(
            [1], SamplingParams(n=3, seed=1, max_tokens=20), options=RequestOptions(timeout=0.0)
        )
        updates = engine.step()
        assert [update.finish_reason for update in updates] == ["timeout"] * 3
        assert [update.result is not None for update in updates] == [False, False, True]

    def test_timeout_does_not_end_a_later_request_of_the_same_id(self) -> None:
        engine = toy_engine()
        engine.add_request([1], TWO, request_id="a", options=RequestOptions(timeout=0.0))
        engine.abort("a")
        engine.add_request([1], TWO, request_id="a")
        assert [update.finish_reason for update in drain(engine)] == [None, "length"]

    @pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1", 10**400])
    def test_out_of_range(self, timeout: Any) -> None:
        with pytest.raises(RequestError, match="timeout must be a number from 0"):
            toy_engine().add_request([1], ONE, options=RequestOptions(timeout=timeout))


class TestPace:
    def test_the_median_ignores_one_slow_step(self) -> None:
        step_timer = StepTimer(target_ms=10)
        for seconds in [0.001] * (WINDOW - 1):
            step_timer.record(seconds)
            assert not step_timer.allows_admission
        step_timer.record(9.0)
        assert step_timer.allows_admission
        step_timer.reset()
        assert not step_timer.allows_admission
        for _ in range(WINDOW):
            step_timer.record(0.011)
        assert not step_timer.allows_admission
        for _ in range(WINDOW // 2 + 1):
            step_timer.record(0.010)
        assert step_timer.allows_admission
        assert StepTimer(0).allows_admission

    def test_slow_steps_delay_admission_and_keep_the_tokens(self) -> None:
        engine = toy_engine(target_token_ms=1e-6)  # no step is so fast
        prompts = [[i, 1, 2] for i in range(4)]
        for prompt in prompts:
            engine.add_request(prompt, TWO)
        updates = []
        while engine.has_work:
            updates += engine.step()
            assert engine.stats().running <= 1
        tokens = {
            update.request_id: update.result.outputs[0].token_ids
            for update in updates
            if update.result
        }
        assert [prompt + tokens[str(i)] for i, prompt in enumerate(prompts)] == [
            plain_decoding(p, TWO, 0) for p in prompts
        ]

    def test_fast_steps_admit_every_request(self) -> None:
        engine = toy_engine(target_token_ms=1e6)
        params = SamplingParams(temperature=0, max_tokens=30)
        for i in range(3):
            engine.add_request([i], params)
        for _ in range(2 * WINDOW + 1):
            engine.step()
        assert engine.stats().running == 3
