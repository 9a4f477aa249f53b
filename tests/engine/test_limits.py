"""The limits of a request: the context, a stop string, and the exact size of the KV cache."""

import pytest

from headrace.errors import RequestError
from headrace.outputs import RequestOutput
from headrace.request import PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from tests.tiny import tiny_engine, tiny_model

MODEL = tiny_model(0)
POOLED = PoolingParams(pooling="mean")


def run(
    prompt: list[int],
    params: SamplingParams | None = None,
    pooling: PoolingParams | None = None,
    **options: object,
) -> RequestOutput:
    """Run one request in a new engine, which is idle and empty afterwards; returns its result."""
    engine = tiny_engine(MODEL, **options)  # type: ignore[arg-type]
    engine.add(
        engine.check(prompt, params, pooling=pooling, options=RequestOptions(timeout=1000.0))
    )
    (result,) = [update.result for _ in range(200) for update in engine.step() if update.result]
    assert not engine.has_work and not engine._deadlines
    return result


@pytest.mark.parametrize("max_tokens", [5, 6, 16, None])
def test_an_output_ends_with_the_context(max_tokens: int | None) -> None:
    result = run(
        [1, 2, 3],
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        max_model_len=8,
    )
    assert (len(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (5, "length")


def test_an_output_ends_at_a_stop_string() -> None:
    text = (
        run([1, 2, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        .outputs[0]
        .text
    )
    stop = text[4:6]
    output = run(
        [1, 2, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
    ).outputs[0]
    assert (output.text, output.stop_reason) == (text[: text.index(stop)], stop)


@pytest.mark.parametrize("batching", ["inflight", "static"])
def test_an_embedding_needs_the_slots_of_its_prompt(batching: str) -> None:
    result = run([7] * 32, None, POOLED, slots=32, max_model_len=64, batching=batching)
    assert result.embedding is not None
    engine = tiny_engine(MODEL, slots=32, max_model_len=64)
    with pytest.raises(RequestError, match="blocks"):
        engine.check([7] * 33, pooling=POOLED)


def test_a_request_may_need_the_whole_kv_cache() -> None:
    params = SamplingParams(
        temperature=0, max_tokens=13, ignore_eos=True
    )  # the last token has no KV
    assert len(run([7] * 20, params, slots=32, max_model_len=64).outputs[0].token_ids) == 13
    engine = tiny_engine(MODEL, slots=32, max_model_len=64)
    with pytest.raises(RequestError, match="blocks"):
        engine.check([7] * 21, params)
