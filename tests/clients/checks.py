"""Shared by the scripts of all clients. It uses only the standard library."""

import json
import os
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

try:
    from pydantic import BaseModel, ConfigDict, Field
except ImportError:  # lm-eval's environment has none
    BaseModel = None

URL, CALLER_URL, NARROW_URL, HASTY_URL = (
    os.environ.get(f"{name}_URL", "") for name in ("CHAT", "CALLER", "NARROW", "HASTY")
)
"""Servers of the default model, of a model that calls a tool, with space for one sequence, and with
a timeout of one second.
"""
KEY = "the-key"
MODEL, CALLER = "smollm2", "caller.gguf"
QUESTION = "Name the planets of the solar system."
MESSAGES = [{"role": "user", "content": QUESTION}]
LENGTH = 32
TOO_LONG = 50_000
ENDLESS = 8000
"""A number of tokens that exceeds the hasty server's timeout."""
SECONDS = 60.0
SCHEMA = {
    "type": "object",
    "title": "Planet",
    "description": "A planet.",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "moons": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "moons"],
    "additionalProperties": False,
}
if BaseModel is not None:

    class Planet(BaseModel):
        """`SCHEMA` for clients that take classes."""

        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=12)
        moons: int = Field(ge=0, le=99)


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = {"city": "Bern"}
REPLY = "It is sunny in Bern."

Check = Callable[[], str | None]


def run(checks: dict[str, Check]) -> None:
    """Print whether each check passed, and its result, which must be equal for all clients."""
    for name, check in checks.items():
        try:
            line = {"check": name, "passed": True, "answer": check()}
        except Exception:
            line = {"check": name, "passed": False, "answer": traceback.format_exc()}
        print(json.dumps(line), flush=True)


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Return the error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def planet(text: str) -> str:
    value = json.loads(text)
    assert (
        value.keys() == {"name", "moons"}
        and isinstance(value["name"], str)
        and 0 <= value["moons"] <= 99
    ), value
    return json.dumps(value)


def embedded(vector: Iterable[float]) -> str:
    """Return the first numbers of an embedding, at the accuracy that all forms keep."""
    return json.dumps([round(float(number), 5) for number in list(vector)[:8]])


def errors(url: str, code: str) -> int:
    """Return a server's count of responses with this error code."""
    request = urllib.request.Request(
        url.removesuffix("/v1") + "/metrics", headers={"x-api-key": KEY}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        lines = response.read().decode().splitlines()
    wanted = f'headrace_error_responses_total{{code="{code}",'
    return next((int(float(line.split()[-1])) for line in lines if line.startswith(wanted)), 0)


@contextmanager
def full() -> Iterator[Callable[[], int]]:
    """Occupy the narrow server until it has refused a request; yields a counter of refusals."""
    before = errors(NARROW_URL, "server_overloaded")
    body = json.dumps(
        {"prompt": "Once", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    ).encode()
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    stream = urllib.request.urlopen(
        urllib.request.Request(NARROW_URL + "/completions", body, headers), timeout=SECONDS
    )
    stream.readline()  # the request runs

    def leave() -> None:
        while not over.wait(0.05) and errors(NARROW_URL, "server_overloaded") == before:
            pass
        stream.close()

    over = threading.Event()
    leaving = threading.Thread(target=leave)
    leaving.start()
    try:
        yield lambda: errors(NARROW_URL, "server_overloaded") - before
    finally:
        over.set()
        leaving.join()


@contextmanager
def asked_once() -> Iterator[None]:
    """Check that the client does not retry a request that timed out."""
    before = errors(HASTY_URL, "timeout")
    yield
    assert errors(HASTY_URL, "timeout") == before + 1
