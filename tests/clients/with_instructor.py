"""instructor, which makes objects of pydantic's classes."""

from typing import Any

import instructor
import openai
from checks import KEY, MESSAGES, MODEL, URL, Planet, planet, raised, run

REQUEST = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "temperature": 0}


def client(mode: str, **more: Any) -> Any:
    made = openai.OpenAI(**{"base_url": URL, "api_key": KEY, "max_retries": 0} | more)
    return instructor.from_openai(made, mode=instructor.Mode[mode])


def ask(mode: str) -> str:
    found = client(mode).create(response_model=Planet, max_retries=0, **REQUEST)
    return planet(found.model_dump_json())


def schema() -> None:
    ask("JSON_SCHEMA")


def tools() -> None:
    """The model has no template for tools; the call is forced."""
    for mode in ("TOOLS", "TOOLS_STRICT"):
        ask(mode)


def responses_tools() -> None:
    """This mode sends a forced call and a text format together."""
    request = {name: value for name, value in REQUEST.items() if name != "max_tokens"}
    found = client("RESPONSES_TOOLS").create(
        response_model=Planet, max_retries=0, max_output_tokens=200, **request
    )
    planet(found.model_dump_json())


def stream() -> None:
    partial = client("JSON_SCHEMA").create_partial(
        response_model=Planet, max_retries=0, stream=True, **REQUEST
    )
    *earlier, last = partial
    assert earlier
    planet(last.model_dump_json())


def unknown_model() -> None:
    """instructor raises a class of its own, whose text has the error of the server."""
    call = client("JSON_SCHEMA").create
    request = REQUEST | {"model": "other"}
    error = raised(Exception, lambda: call(response_model=Planet, max_retries=0, **request))
    assert "model_not_found" in str(error) or "does not exist" in str(error), error


run(
    {
        "JSON schema as an object": schema,
        "forced call": tools,
        "forced call with a text format": responses_tools,
        "partial objects": stream,
        "unknown model": unknown_model,
    }
)
