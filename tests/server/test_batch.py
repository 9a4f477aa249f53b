"""`headrace batch`: one response for every request, also if the run is interrupted."""

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.sampling.sampler import derive_seed
from tests.server.running import SECONDS, engine_of

FLAGS = ("--threads", "1", "--max-model-len", "1024", "--max-num-seqs", "4")


def command(model: str, source: Path, target: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "headrace",
        "batch",
        str(source),
        str(target),
        "--model",
        model,
        *FLAGS,
    ]


def run(model: str, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(model, source, target), capture_output=True, text=True, timeout=SECONDS, check=False
    )


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def request(number: int, output: int = 8) -> dict[str, Any]:
    body = {
        "prompt": f"hello {number}",
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    }


def responses(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "a line is repeated"
    return {line["custom_id"]: line["response"] for line in lines}


def test_batch_routes_and_errors(model: str, llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = {"messages": messages, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    message = {"messages": messages, "max_tokens": 5, "temperature": 0}
    requests = [
        request(0),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "embed", "url": "/v1/embeddings", "body": {"input": "hello"}},
        {
            "custom_id": "response",
            "url": "/v1/responses",
            "body": {"input": "hello", "max_output_tokens": 3},
        },
        {"custom_id": "message", "url": "/v1/messages", "body": message},
        {"custom_id": "bad", "url": "/v1/messages", "body": message | {"max_tokens": 0}},
        {"custom_id": "wrong", "url": "/v1/chat/completions", "body": chat | {"temperature": -1}},
        {"custom_id": "other", "url": "/v1/chat/completions", "body": chat | {"model": "other"}},
    ]
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    source.write_bytes(BOM_UTF8 + source.read_bytes())
    done = run(model, source, target)
    assert (
        done.returncode == 1
        and "8 responses, 3 of them errors: " in done.stderr
        and not done.stdout
    ), done.stderr
    found = responses(target)
    assert {
        name: response["status_code"]
        for name, response in found.items()
        if response["status_code"] != 200
    } == {
        "bad": 400,
        "wrong": 400,
        "other": 404,
    }
    assert found["wrong"]["body"]["error"]["param"] == "temperature"
    (expected,) = llm.chat(messages, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert found["chat"]["body"]["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert found["message"]["body"]["content"] == [
        {"type": "text", "text": expected.outputs[0].text}
    ]
    assert found["bad"]["body"]["type"] == "error"
    before = target.read_bytes()
    assert run(model, source, target).returncode == 0 and target.read_bytes() == before


def sampled(number: int) -> dict[str, Any]:
    """Two equal prompts in a body without a seed."""
    body = request(0, 300)["body"] | {"prompt": ["hello", "hello"], "temperature": 1}
    return request(number) | {"body": body}


def test_batch_resumes_after_kills(model: str, llm: LLM, tmp_path: Path) -> None:
    """The resumed batch has the responses of an uninterrupted one, also without a seed."""
    source, target, rng = (
        write(
            tmp_path / "in.jsonl",
            [sampled(i) if i % 6 == 0 else request(i, 300) for i in range(60)],
        ),
        tmp_path / "out.jsonl",
        random.Random(0),
    )
    for number, code in (
        (signal.SIGKILL, -9),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -9),
        (signal.SIGINT, 130),
    ):
        process = subprocess.Popen(command(model, source, target), stderr=subprocess.PIPE)
        size, end = target.stat().st_size if target.exists() else 0, time.monotonic() + SECONDS
        while process.poll() is None and (not target.exists() or target.stat().st_size == size):
            assert time.monotonic() < end
            time.sleep(0.002)
        time.sleep(rng.random() / 20)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=SECONDS)
        assert process.returncode in (code, 0) and b"Traceback" not in stderr, stderr
    with target.open("ab") as file:
        file.write(b'{"custom_id": "request-')  # a line that a full disk cut off
    assert run(model, source, target).returncode == 0
    found = responses(target)
    assert found.keys() == {f"request-{i}" for i in range(60)}
    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    for i, result in enumerate(llm.generate([f"hello {i}" for i in range(60)], params)):
        if i % 6:
            assert found[f"request-{i}"]["body"]["choices"][0]["token_ids"] == (
                result.outputs[0].token_ids
            )
    noise = set()
    for i in range(0, 60, 6):
        for index, choice in enumerate(found[f"request-{i}"]["body"]["choices"]):
            seed = derive_seed(derive_seed(0, f"request-{i}"), index)
            params = SamplingParams(max_tokens=300, temperature=1, ignore_eos=True, seed=seed)
            (result,) = llm.generate(["hello"], params)
            assert choice["token_ids"] == result.outputs[0].token_ids
            noise.add(choice["text"])
    assert len(noise) == 20


def test_batch_locks_its_output(model: str, tmp_path: Path) -> None:
    """A second run names the first. The lock of a run that was killed is gone."""
    source, target = write(tmp_path / "in.jsonl", [request(0)]), tmp_path / "out.jsonl"
    partial = b'{"custom_id": "request-'
    with target.open("wb") as file:
        file.write(partial)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run(model, source, target)
        assert done.returncode == 2 and target.read_bytes() == partial
        assert f"out.jsonl: process {os.getpid()} writes its responses to this" in done.stderr
    done = run(model, source, source)
    assert done.returncode == 2 and "is the input file; choose another" in done.stderr
    assert run(model, source, target).returncode == 0 and len(responses(target)) == 1


def test_batch_survives_engine_death(model: str, tmp_path: Path) -> None:
    source, target = (
        write(tmp_path / "in.jsonl", [request(i, 900) for i in range(24)]),
        tmp_path / "out.jsonl",
    )
    process = subprocess.Popen(command(model, source, target), stderr=subprocess.DEVNULL)
    while not target.exists() or not target.stat().st_size:
        assert process.poll() is None
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine_of(process.pid), signal.SIGKILL)
    assert process.wait(SECONDS) == 0
    assert {response["status_code"] for response in responses(target).values()} == {200} and len(
        responses(target)
    ) == 24


@pytest.mark.parametrize(
    "lines, says",
    [
        ("{", "in.jsonl:1"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body"),
        ('{"custom_id": "a", "url": "/metrics", "body": {}}', "/metrics"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "stream"),
        (
            '{"custom_id": "a", "url": "/v1/completions", "body": {}}\n\n{"custom_id": '
            '"a", "url": "/v1/completions", "body": {}}',
            "in.jsonl:3",
        ),
        ('{"custom_id": "", "url": "/v1/completions", "body": {}}', "in.jsonl:1"),
    ],
)
def test_invalid_batch_file_is_refused_before_the_start(
    model: str, tmp_path: Path, lines: str, says: str
) -> None:
    (tmp_path / "in.jsonl").write_text(lines)
    done = run(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (
        done.returncode == 2
        and says in done.stderr
        and done.stderr.count("\n") == 1
        and not (tmp_path / "out.jsonl").exists()
    )


def test_output_of_something_else_is_not_overwritten(model: str, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request(0)]), tmp_path / "out.jsonl"
    target.write_text("my notes\n")
    done = run(model, source, target)
    assert (
        done.returncode == 2 and "out.jsonl:1" in done.stderr and target.read_text() == "my notes\n"
    )
    assert run(model, tmp_path / "none.jsonl", target).returncode == 2
