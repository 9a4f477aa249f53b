"""What the scripts of all clients share: it runs in the client's own environment, with the standard
library alone.
"""

import json
import os
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

URL, CALLER_URL, NARROW_URL, HASTY_URL = (
    os.environ.get(f"{name}_URL", "") for name in ("CHAT", "CALLER", "NARROW", "HASTY")
)
"""Servers: of the default model; of one that calls a tool; one with a place for one sequence; one
that gives a request a second.
"""
KEY = "the-key"
MODEL, CALLER = "smollm2", "caller.gguf"
QUESTION = "Name the planets of the solar system."
MESSAGES = [{"role": "user", "content": QUESTION}]
LENGTH = 32
TOO_LONG = 50_000
ENDLESS = 8000
"""Tokens that take longer than the hasty server gives."""
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
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = {"city": "Bern"}
REPLY = "It is sunny in Bern."

Check = Callable[[], str | None]


def run(checks: dict[str, Check]) -> None:
    """Print for each check whether it passed, and what it answered: all clients must be answered
    the same.
    """
    for name, check in checks.items():
        try:
            line = {"check": name, "passed": True, "answer": check()}
        except Exception:
            line = {"check": name, "passed": False, "answer": traceback.format_exc()}
        print(json.dumps(line), flush=True)


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def planet(text: str) -> str:
    """The text of JSON that must be a planet."""
    value = json.loads(text)
    assert (
        value.keys() == {"name", "moons"}
        and isinstance(value["name"], str)
        and 0 <= value["moons"] <= 99
    ), value
    return json.dumps(value)


def errors(url: str, code: str) -> int:
    """How many responses of a server had an error of this code, as it counts them."""
    request = urllib.request.Request(
        url.removesuffix("/v1") + "/metrics", headers={"x-api-key": KEY}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        lines = response.read().decode().splitlines()
    wanted = f'headrace_error_responses_total{{code="{code}"}} '
    return next(
        (int(float(line.removeprefix(wanted))) for line in lines if line.startswith(wanted)), 0
    )


@contextmanager
def full() -> Iterator[Callable[[], int]]:
    """The narrow server has its one place taken until it has refused a request; yields how many it
    has refused since.
    """
    before = errors(NARROW_URL, "server_overloaded")
    body = json.dumps(
        {"prompt": "Once", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    ).encode()
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    stream = urllib.request.urlopen(
        urllib.request.Request(NARROW_URL + "/completions", body, headers), timeout=SECONDS
    )
    stream.readline()  # it runs

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
    """What the hasty server refuses in it, since its time is up, it refuses once: no client may ask
    again.
    """
    before = errors(HASTY_URL, "timeout")
    yield
    assert errors(HASTY_URL, "timeout") == before + 1
