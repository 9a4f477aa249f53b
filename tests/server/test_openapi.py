"""Schemathesis sends generated requests to every route and field of the OpenAPI document."""

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
from tests.server.test_tool_calls import tools_model  # noqa: F401 - a fixture

CASES = int(os.environ.get("HEADRACE_API_CASES", 500))
ROUNDS = 1 + CASES // 2000
"""Rounds, in each of which a field is combined with others."""
SEED = ROUNDS * int(os.environ.get("HEADRACE_API_SEED", 0))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
GENERATION_ROUTES = {
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
def api_server(tools_model: str) -> Iterator[Running]:  # noqa: F811
    """A server with space for all sequences that one request can make."""
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


def test_generated_requests_follow_the_openapi_document(api_server: Running) -> None:
    description = Description(
        api_server.get("/openapi.json").json,
        api_server.get("/v1/models").json["data"][0]["id"],
    )
    pid, before = api_server.engine_pid, api_server.figures()
    seen: Counter[tuple[str, int]] = Counter()

    def send(case: Case) -> None:
        case.body = as_clients_write(case.body)
        response = case.call(
            base_url=f"http://127.0.0.1:{api_server.port}", session=session, timeout=150
        )
        seen[case.path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if case.path == "/v1/sessions" and response.status_code == 200:
            path = f"/v1/sessions/{response.json()['id']}"
            assert api_server.request("DELETE", path).status == 200
        assert b"internal_error" not in response.content, (
            response.content
        )  # also not as an event of a stream
        assert response.status_code >= 400 or is_valid(
            description, case.path, response.request.body
        ), response.request.body

    with requests.Session() as session:
        for path, fields in description.fields().items():
            share = len(fields) / sum(map(len, description.fields().values()))
            for number in range(SEED, SEED + ROUNDS):
                cases = description.cases(path, number)
                seed(number)(
                    settings(QUIET, max_examples=ceil(CASES * share / ROUNDS))(given(cases)(send))
                )()
    reached = sum(
        count
        for (path, status), count in seen.items()
        if path in GENERATION_ROUTES and status == 200
    )
    print(f"\n{sum(seen.values()):,} cases, {reached:,} of them answered by the engine:")
    print(
        "\n".join(f"{count:7,}  {status}  {path}" for (path, status), count in sorted(seen.items()))
    )
    assert sum(seen.values()) >= CASES and reached >= 0.2 * sum(seen.values())
    assert {path for path, status in seen if status == 200} >= GENERATION_ROUTES
    until(
        lambda: (
            api_server.figures()["headrace_steps_total"] - before["headrace_steps_total"] >= reached
        )
    )  # as the engine counts them
    until(api_server.at_rest)
    assert (
        api_server.engine_pid == pid and api_server.figures()["headrace_engine_restarts_total"] == 0
    )


def is_valid(description: Description, path: str, sent: object) -> bool:
    assert isinstance(sent, bytes | str)
    return description.allows(path, json.loads(sent))


def test_get_routes_follow_the_openapi_document(api_server: Running) -> None:
    document = api_server.get("/openapi.json").json
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if operation.method == "get" and operation.path != ENDLESS:
            case = operation.Case(
                path_parameters={"model": "none"} if "{" in operation.path else {}
            )
            response = case.call(base_url=f"http://127.0.0.1:{api_server.port}", timeout=150)
            case.validate_response(response, checks=CHECKS)
            assert response.status_code == (404 if "{" in operation.path else 200), operation.path
