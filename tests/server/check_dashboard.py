"""Checks deploy/prometheus.yaml and deploy/grafana.json against a running Prometheus:
`make test-dashboard`.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.planner import hardware
from tests.server.running import SECONDS, Running, running

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = shutil.which(os.environ.get("HEADRACE_PROMETHEUS", "prometheus"))
KEY = "secret"
NUM_SCRAPES = 4
LISTEN = 19090
PANELS = [
    panel
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    if panel["type"] != "row"
]


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Running]:
    flags = ("--threads", "1", "--kv-blocks", "512", "--proposer", "suffix")
    hardware.measure(1)  # shares of the machine need its speed
    yield from running(model, *flags, f"--api-key={KEY}")


@pytest.fixture(scope="module")
def prometheus(served: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has scraped the server several times while it worked."""
    assert PROMETHEUS, "prometheus is not installed: it is a package of Debian"
    folder = tmp_path_factory.mktemp("prometheus")
    config = (DEPLOY / "prometheus.yaml").read_text()
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}").replace("5s", "1s")
    (folder / "prometheus.yaml").write_text(config)
    (folder / "api-key").write_text(KEY)
    url = f"http://127.0.0.1:{LISTEN}"
    process = subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{LISTEN}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        use(served)
        begun = time.monotonic()
        while query(url, "count_over_time(headrace_steps_total[1m])") < [NUM_SCRAPES]:
            assert time.monotonic() < begun + SECONDS
            use(served)
        yield url
    finally:
        process.terminate()
        process.wait(SECONDS)


def use(served: Running) -> None:
    """Send requests of all kinds: cached, with drafts, refused."""
    key = {"authorization": f"Bearer {KEY}"}
    # One token again and again, so that drafts are proposed and accepted.
    body = {"prompt": "one two " * 40, "max_tokens": 60, "logit_bias": {"65": 100}}
    assert served.post("/v1/completions", body, key).status == 200
    assert served.post("/v1/completions", {"prompt": 5}, key).status == 400
    time.sleep(0.2)


def query(url: str, expression: str) -> list[float]:
    """The values of an expression now; none while Prometheus starts."""
    words = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{words}", timeout=SECONDS) as response:
            result = json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expression}: {error.read().decode()}") from None
    except OSError:
        return []
    return [float(series["value"][1]) for series in result]


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_panel_has_data(prometheus: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expression = target["expr"].replace("$model_name", ".*").replace("$__rate_interval", "1m")
        values = query(prometheus, expression)
        assert values and all(value >= 0 for value in values), (expression, values)


LATENCIES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
MODEL = '{model_name="tiny.gguf"}'
OF_VLLM = [
    *(
        f"histogram_quantile(0.99, sum by(le) (rate(vllm:{x}_bucket{MODEL}[1m])))"
        for x in LATENCIES
    ),
    f"rate(vllm:prompt_tokens_total{MODEL}[1m])",
    f"rate(vllm:generation_tokens_total{MODEL}[1m])",
    f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}[1m]))",
    f"vllm:num_requests_running{MODEL}",
    f"vllm:num_requests_waiting{MODEL}",
    f"vllm:kv_cache_usage_perc{MODEL}",
]


@pytest.mark.parametrize("expression", OF_VLLM)
def test_queries_as_on_dashboards_for_vllm(prometheus: str, expression: str) -> None:
    assert query(prometheus, expression)


def test_models_of_the_variable(prometheus: str) -> None:
    assert query(prometheus, 'count by (model_name) (headrace_steps_total{version!=""})') == [1]
