"""What a server says that it takes, and what it takes: cases by Schemathesis against every route
and field, and none of them breaks it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from math import ceil

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.sampling_params import MAX_SEQUENCES
from headrace.server.field_types import MAX_PROMPTS
from tests.server.api_cases import Description, as_clients_write
from tests.server.running import Running, running, until
from tests.server.test_tools import tools_model  # noqa: F401 - a fixture

CASES = int(os.environ.get("HEADRACE_API_CASES", 500))
ROUNDS = 1 + CASES // 2000
"""In each of them every field is in other company."""
SEED = ROUNDS * int(os.environ.get("HEADRACE_API_SEED", 0))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OF_THE_ENGINE = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
}
QUIET = settings(
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
ENDLESS = "/stats/stream"


@pytest.fixture(scope="module")
def described(tools_model: str) -> Iterator[Running]:  # noqa: F811
    """It has a place for all sequences that one request can make."""
    flags = (
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "8",
        "--max-waiting",
        str(MAX_SEQUENCES * MAX_PROMPTS),
        "--kv-blocks",
        "64",
    )
    yield from running(tools_model, *flags, "--threads", "1", "--allow-adapter-changes")


def test_all_that_can_be_asked_is_answered_or_refused(described: Running) -> None:
    description = Description(
        described.get("/openapi.json").json, described.get("/v1/models").json["data"][0]["id"]
    )
    pid, before = described.engine_pid, described.figures()
    seen: Counter[tuple[str, int]] = Counter()

    def ask(case: Case) -> None:
        case.body = as_clients_write(case.body)
        response = case.call(
            base_url=f"http://127.0.0.1:{described.port}", session=session, timeout=60
        )
        seen[case.path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        assert b"internal_error" not in response.content, (
            response.content
        )  # as an event of a stream
        assert response.status_code >= 400 or as_described(
            description, case.path, response.request.body
        ), response.request.body

    with requests.Session() as session:
        for path, fields in description.fields().items():
            share = len(fields) / sum(map(len, description.fields().values()))
            for number in range(SEED, SEED + ROUNDS):
                cases = description.cases(path, number)
                seed(number)(
                    settings(QUIET, max_examples=ceil(CASES * share / ROUNDS))(given(cases)(ask))
                )()
    reached = sum(
        count for (path, status), count in seen.items() if path in OF_THE_ENGINE and status == 200
    )
    print(f"\n{sum(seen.values()):,} cases, {reached:,} of them answered by the engine:")
    print(
        "\n".join(f"{count:7,}  {status}  {path}" for (path, status), count in sorted(seen.items()))
    )
    assert sum(seen.values()) >= CASES and reached >= 0.2 * sum(seen.values())
    assert {path for path, status in seen if status == 200} >= OF_THE_ENGINE
    until(
        lambda: (
            described.figures()["headrace_steps_total"] - before["headrace_steps_total"] >= reached
        )
    )  # by the engine's own count
    until(described.at_rest)
    assert (
        described.engine_pid == pid and described.figures()["headrace_engine_restarts_total"] == 0
    )


def as_described(description: Description, path: str, sent: object) -> bool:
    assert isinstance(sent, bytes | str)
    return description.allows(path, json.loads(sent))


def test_what_takes_no_body_is_answered(described: Running) -> None:
    document = described.get("/openapi.json").json
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if operation.method == "get" and operation.path != ENDLESS:
            case = operation.Case(
                path_parameters={"model": "none"} if "{" in operation.path else {}
            )
            response = case.call(base_url=f"http://127.0.0.1:{described.port}", timeout=60)
            case.validate_response(response, checks=CHECKS)
            assert response.status_code == (404 if "{" in operation.path else 200), operation.path
