"""Latencies of users: one alone has the plan's times, and many obey Little's law."""

from itertools import pairwise

import pytest

from headrace.measure.place import find_place
from headrace.measure.placed_model import open_model, stage_programs
from headrace.parallel.mesh import Mesh
from headrace.planner.steady_state import Batching, Load, SteadyState, steady_state
from headrace.planner.step_time import StepTimer
from headrace.planner.steps import decode_step, prompt_steps, round_seconds
from tests.planner.models import LLAMA_8B_CONFIG, write_config

KV_BYTES = 2.0


@pytest.fixture(scope="module")
def timer(tmp_path_factory: pytest.TempPathFactory) -> StepTimer:
    return _timer(tmp_path_factory, Mesh())


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> StepTimer:
    return _timer(tmp_path_factory, Mesh(pipeline=2))


def _timer(factory: pytest.TempPathFactory, mesh: Mesh) -> StepTimer:
    config = LLAMA_8B_CONFIG | {"num_hidden_layers": 4}
    checkpoint = open_model(str(write_config(factory.mktemp("model"), config)))
    place = find_place("h100-sxm", mesh)
    stages = stage_programs(checkpoint, place.backend, mesh)
    return StepTimer(stages, place.machine, place.reaches, place.link)


def solve(
    timer: StepTimer,
    users: int,
    *,
    prompt: int = 1000,
    output: int = 100,
    max_num_seqs: int = 256,
    chunk: int = 256,
    pipeline: int = 1,
    draft_depth: int = 0,
) -> SteadyState:
    batching = Batching(
        max_num_seqs=max_num_seqs,
        chunk=chunk,
        max_rows=2048,
        crossover=5000.0,
        kv_bytes=KV_BYTES,
        pipeline=pipeline,
        draft_depth=draft_depth,
        draft_acceptance=0.7,
    )
    return steady_state(timer, Load(users=users, prompt=prompt, output=output), batching)


@pytest.mark.parametrize("prompt", [1, 500, 2048, 5000])
def test_a_user_alone_has_the_times_of_the_plan(timer: StepTimer, prompt: int) -> None:
    found = solve(timer, 1, prompt=prompt)
    read = sum(map(timer.seconds, prompt_steps(prompt, 2048, KV_BYTES)))
    assert found.ttft == pytest.approx(read)
    assert found.tpot == pytest.approx(timer.seconds(decode_step(prompt + 50, 1, KV_BYTES)))


def test_a_user_alone_in_a_pipeline(two_stages: StepTimer) -> None:
    found = solve(two_stages, 1, pipeline=2)
    assert found.ttft == pytest.approx(
        sum(map(two_stages.seconds, prompt_steps(1000, 2048, KV_BYTES)))
    )
    step = decode_step(1050, 1, KV_BYTES, pipeline=2)
    assert found.tpot == pytest.approx(round_seconds(two_stages.stage_seconds(step), 1))


@pytest.mark.parametrize("users", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("chunk", [16, 256, 2048])
def test_littles_law(timer: StepTimer, users: int, chunk: int) -> None:
    """Users are requests per second x seconds of a request, also if some wait for a place."""
    found = solve(timer, users, chunk=chunk, max_num_seqs=32)
    seconds = found.ttft + 99 * found.tpot
    assert users == pytest.approx(found.requests_per_second * seconds, rel=1e-4)
    assert 0 < found.reading <= 1 and found.decoding <= min(users, 32)


def test_users_slow_each_other_down(timer: StepTimer) -> None:
    found = [solve(timer, users) for users in (1, 4, 16, 64, 256)]
    for fewer, more in pairwise(found):
        assert fewer.ttft < more.ttft and fewer.tpot < more.tpot
        assert fewer.requests_per_second < more.requests_per_second * 1.01


def test_chunks_trade_first_tokens_for_steady_ones(timer: StepTimer) -> None:
    small, large = solve(timer, 32, chunk=32), solve(timer, 32, chunk=1024)
    assert small.ttft > 2 * large.ttft and small.tpot < large.tpot
    fewer = solve(timer, 32, chunk=1024, max_num_seqs=8)
    assert fewer.tpot < large.tpot and fewer.ttft > large.ttft


def test_drafts_shorten_decoding(timer: StepTimer) -> None:
    plain, drafted = solve(timer, 4), solve(timer, 4, draft_depth=4)
    assert 2 < plain.tpot / drafted.tpot < 2.78


def test_an_output_of_one_token_is_all_reading(timer: StepTimer) -> None:
    found = solve(timer, 3, output=1)
    assert found.reading == 1 and found.decoding == pytest.approx(0)
