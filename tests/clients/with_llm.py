"""The command-line tool `llm`; a file in its folder lists OpenAI-compatible servers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import (
    CALLER,
    CALLER_URL,
    ENDLESS,
    HASTY_URL,
    KEY,
    LENGTH,
    MODEL,
    NARROW_URL,
    QUESTION,
    REPLY,
    SCHEMA,
    TOO_LONG,
    URL,
    asked_once,
    full,
    planet,
    run,
)

OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", str(LENGTH))
MODELS = [
    {"model_id": "chat", "model_name": MODEL, "api_base": URL},
    {"model_id": "responses", "model_name": MODEL, "api_base": URL, "responses": True},
    {"model_id": "other", "model_name": "other", "api_base": URL},
    {"model_id": "caller", "model_name": CALLER, "api_base": CALLER_URL},
    {"model_id": "narrow", "model_name": MODEL, "api_base": NARROW_URL},
    {"model_id": "hasty", "model_name": MODEL, "api_base": HASTY_URL},
]
WEATHER = """
def weather(city: str) -> str:
    "The weather of a city."
    return "sunny in " + city
"""


def llm(name: str, *flags: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    command = [
        Path(sys.executable).with_name("llm"),
        "prompt",
        "-m",
        name,
        "--key",
        key,
        "--no-log",
        *flags,
        QUESTION,
    ]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def text(name: str, *flags: str) -> str:
    ran = llm(name, *flags)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.removesuffix("\n")


def error(name: str, *flags: str, key: str = KEY) -> str:
    ran = llm(name, *flags, key=key)
    assert ran.returncode == 1, ran
    return ran.stderr


def chat() -> str:
    response = text("chat", *OPTIONS, "--no-stream")
    assert text("responses", *OPTIONS, "--no-stream") == response
    return response


def stream() -> str:
    response = text("chat", *OPTIONS)
    assert text("responses", *OPTIONS) == response
    return response


def tools() -> None:
    for flags in ((), ("--no-stream",)):
        ran = llm("caller", "--functions", WEATHER, "--tools-debug", *flags)
        assert ran.stdout.strip().endswith(REPLY) and "sunny in Bern" in ran.stderr, ran


def schema() -> str:
    return planet(text("chat", "--schema", json.dumps(SCHEMA), *OPTIONS))


def wrong_key() -> None:
    assert "the API key is missing or invalid" in error("chat", *OPTIONS, key="wrong")


def unknown_model() -> None:
    assert "does not exist" in error("other", *OPTIONS)


def too_long() -> None:
    assert "maximum context length" in error("chat", "-o", "max_tokens", str(TOO_LONG))


def full_for_a_moment() -> str:
    with full() as refused:
        response = text("narrow", *OPTIONS)
        assert refused() > 0
    return response


def out_of_time() -> None:
    with asked_once():
        assert "504" in error(
            "hasty",
            "-o",
            "max_tokens",
            str(ENDLESS),
            "-o",
            "logit_bias",
            json.dumps({"2": -100}),
            "--no-stream",
        )


with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    known = [
        model | {"supports_schema": True, "supports_tools": True, "api_key_name": "headrace"}
        for model in MODELS
    ]
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps(known))  # JSON is YAML
    run(
        {
            "chat": chat,
            "stream": stream,
            "tools": tools,
            "JSON schema": schema,
            "wrong key": wrong_key,
            "unknown model": unknown_model,
            "too long": too_long,
            "full, then not": full_for_a_moment,
            "out of time": out_of_time,
        }
    )
