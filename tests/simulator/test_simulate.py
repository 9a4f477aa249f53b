import json
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main
from headrace.errors import MemoryLimitError, RequestError
from headrace.measure.plan import plan
from headrace.simulator.report import Percentiles, report_facts
from headrace.simulator.simulate import deploy, simulate
from tests.planner.models import LLAMA_8B_CONFIG, write_config

TRACE = "lognormal:requests=24,rate=8,prompt=100,output=20"


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers, so that tests are quick."""
    config = LLAMA_8B_CONFIG | {"max_position_embeddings": 8192, "num_hidden_layers": 4}
    return str(write_config(tmp_path_factory.mktemp("llama"), config))


def test_a_lone_request_takes_the_planned_time(llama_8b: str) -> None:
    """A prompt in one step, and then one step for each of the other tokens."""
    request = "lognormal:requests=1,prompt=512,output=128,spread=0"
    found = simulate(request, llama_8b, on="h100-sxm")
    planned = plan(llama_8b, on="h100-sxm", prompt=512, output=128)
    latencies = found.latencies
    assert latencies.first_token.p50 == pytest.approx(planned.first_token, rel=0.02)
    assert latencies.per_token.p50 == pytest.approx(planned.per_token, rel=0.02)
    total = latencies.first_token.p50 + 127 * latencies.per_token.p50
    assert found.seconds == latencies.total.p50 == pytest.approx(total)
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (1, 512, 128)


def test_kv_blocks_are_those_of_a_loaded_model(llama_8b: str) -> None:
    """90 % of the memory that weights and runtime leave, in blocks of 64 tokens of 16,384
    bytes each.
    """
    deployment = deploy(llama_8b, on="l4")
    fit = plan(llama_8b, on="l4").fit
    (blocks,) = deployment.setup.limits.kv.num_blocks
    assert blocks == int(0.9 * fit.kv_budget) // (64 * 16_384)
    assert deploy(llama_8b, on="l4", kv_blocks=200).setup.limits.kv.num_blocks == (200,)


def test_more_load_takes_longer_and_gives_more_tokens(llama_8b: str) -> None:
    runs = [
        simulate("lognormal:requests=60,prompt=300,output=30", llama_8b, on="l4", rate=rate)
        for rate in (0.5, 100.0)
    ]
    light, heavy = runs
    assert heavy.output_tokens_per_second > 2 * light.output_tokens_per_second
    assert heavy.latencies.first_token.p95 > 2 * light.latencies.first_token.p95
    assert heavy.replicas[0].kv_max > light.replicas[0].kv_max
    assert light.replicas[0].busy < heavy.replicas[0].busy <= 1


def test_shared_prefixes_come_from_the_cache(llama_8b: str) -> None:
    trace = "rag:requests=30,prefixes=1,prefix=640,prompt=10,spread=0"
    cached = simulate(trace, llama_8b, on="h100-sxm")
    computed = simulate(trace, llama_8b, on="h100-sxm", prefix_cache=False)
    assert cached.hit_rate == pytest.approx(29 / 30 * 640 / 650, rel=0.05)
    assert computed.hit_rate == 0
    assert cached.latencies.first_token.p50 < computed.latencies.first_token.p50


def test_turns_continue_their_conversation(llama_8b: str) -> None:
    found = simulate("chat:requests=8,turns=8,prefix=0,spread=0", llama_8b, on="h100-sxm")
    # 96 new tokens, and then 96 more and 160 of the response for each turn.
    assert found.prompt_tokens == sum(96 + turn * 256 for turn in range(8))
    assert found.hit_rate > 0.8


@pytest.mark.parametrize("router", ["prefix", "two-choices", "round-robin"])
def test_replicas_share_the_requests(llama_8b: str, router: str) -> None:
    found = simulate(TRACE, llama_8b, on="l4", replicas=3, router=router, max_model_len=512)  # type: ignore[arg-type]
    counts = [replica.requests for replica in found.replicas]
    assert sum(counts) == found.requests == 24
    assert min(counts) >= 4


def test_drafts_speed_decoding_up(llama_8b: str) -> None:
    plain = simulate(TRACE, llama_8b, on="h100-sxm")
    drafted = simulate(TRACE, llama_8b, on="h100-sxm", draft_depth=3, draft_acceptance=0.9)
    assert drafted.acceptance and drafted.acceptance > 0.7
    assert drafted.latencies.per_token.p50 < 0.7 * plain.latencies.per_token.p50
    assert plain.acceptance is None


def test_requests_that_do_not_fit_are_refused(llama_8b: str) -> None:
    found = simulate(
        "lognormal:requests=10,prompt=600,output=5,spread=0.5", llama_8b, on="l4", max_model_len=600
    )
    assert 0 < found.refused < 10 and found.requests == 10 - found.refused
    assert "max_model_len 600" in found.refusal


def test_a_report_of_no_request() -> None:
    assert Percentiles.of([]) == (0.0,) * 5
    assert Percentiles.of(range(101)) == (50.0, 50.0, 90.0, 95.0, 99.0)


def test_equal_seeds_give_equal_bytes(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", TRACE, "--model", llama_8b, "--on", "h100-sxm", "--draft", "2:0.5"]
    outputs = []
    for seed in ("1", "1", "2"):
        assert main([*words, "--replicas", "2", "--json", "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_command(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", TRACE, "--model", llama_8b, "--on", "h100-sxm", "-tp", "2"]
    assert main([*words, "--json", "--replicas", "2", "--price", "3.6"]) == 0
    facts = json.loads(capsys.readouterr().out)
    found = simulate(TRACE, llama_8b, on="h100-sxm", tensor=2, replicas=2)
    assert facts["devices"] == 4
    assert facts | dict(report_facts(found)) == facts
    # Four devices at 0.1 cents a second each.
    tokens_per_second = found.output_tokens_per_second
    assert facts["dollars_per_million"] == pytest.approx(0.004 / tokens_per_second * 1e6)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "first token, s" in text and "2 x NVIDIA H100" in text and "$ of all devices" in text


@pytest.mark.parametrize(
    "words, part",
    [
        (["nowhere"], "neither a file nor a workload"),
        (["chat", "--on", "h1000"], "h1000"),
        (["chat", "--replicas", "0"], "replicas"),
        (["chat", "--max-model-len", "9000"], "max_model_len is 9,000"),
        (["chat", "--on", "l4", "--kv-dtype", "int4"], "int4"),
    ],
)
def test_errors(
    llama_8b: str, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--model", llama_8b, "--on", "h100-sxm", *words]) == 2
    assert part in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_an_error(llama_8b: str) -> None:
    with pytest.raises(MemoryLimitError, match="set kv_blocks to"):
        simulate(TRACE, llama_8b, on="l4", kv_blocks=10**6)
    with pytest.raises(RequestError, match="replicas"):
        deploy(llama_8b, replicas=0)


def test_the_function_is_public() -> None:
    assert headrace.simulate is simulate and headrace.simulate is simulate


def test_no_torch_is_imported(llama_8b: str, tmp_path: Path) -> None:
    program = (
        "import sys; from headrace.cli.main import main;"
        f"code = main(['simulate', {TRACE!r}, '--model', {llama_8b!r}, '--on', 'h100-sxm']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, capture_output=True)
