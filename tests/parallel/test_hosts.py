"""Ranks on several hosts, started by torchrun or a LeaderWorkerSet."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import RequestError
from headrace.parallel.hosts import Placement, interface_of, placement
from tests.parallel.test_processes import children, save_with_tokenizer

SCRIPT = """
import json, sys
from headrace import LLM, SamplingParams

with LLM(sys.argv[1], tensor_parallel_size=int(sys.argv[2]), threads=1, max_num_seqs=2) as llm:
    for seed in range(2):
        params = SamplingParams(
            max_tokens=60, temperature=0.8, seed=seed, logprobs=1, ignore_eos=True
        )
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs
        print(json.dumps([output.token_ids, output.logprobs]), flush=True)
        if "wait" in sys.argv:
            sys.stdin.readline()
    print(llm.stats().failed_steps)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, str(model), "1"]
    *outputs, failed = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(outputs) == 2 and failed == "0"
    return outputs


def test_ranks_started_by_torchrun(model: Path, expected: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        str(script),
        str(model),
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*expected, "0"]


def test_ranks_started_by_a_leader_worker_set(model: Path, expected: list[str]) -> None:
    """The worker starts first, and its process is lost once; both commands end by themselves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", SCRIPT, str(model), "2", "wait"]

    def start(rank: int) -> "subprocess.Popen[str]":
        environment = os.environ | common | {"LWS_WORKER_INDEX": str(rank)}
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    worker = start(1)
    time.sleep(1.0)
    leader = start(0)
    assert leader.stdin and leader.stdout
    first = leader.stdout.readline()
    (process,) = children(worker.pid)
    os.kill(process, signal.SIGKILL)
    leader.stdin.write("\n\n")
    leader.stdin.close()
    assert (first + leader.stdout.read()).splitlines() == [*expected, "1"]
    assert (leader.wait(20), worker.wait(20)) == (0, 0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
            Placement(rank=1, size=2, address="a", port=7, has_store=False),
        ),
        (
            {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "a"},
            Placement(rank=0, size=3, address="a", port=29500, has_store=False),
        ),
    ],
)
def test_placement(environment: dict[str, str], expected: Placement | None) -> None:
    assert placement(environment) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "2"},
        {"RANK": ""},
        {"RANK": "-1"},
        {"WORLD_SIZE": "x"},
        {"MASTER_ADDR": ""},
        {"MASTER_PORT": "70000"},
    ],
)
def test_invalid_placement(change: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="the environment has an invalid rank"):
        placement(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7", **change}
        )


def test_number_of_ranks_differs_from_the_environment(model: Path) -> None:
    environment = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "7",
    }
    command = [
        sys.executable,
        "-m",
        "headrace",
        "run",
        str(model),
        "hello",
        "--tensor-parallel-size",
        "2",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "headrace: the environment has 3 ranks, but tensor_parallel_size 2 x "
        "pipeline_parallel_size 1 is 2; start one process per rank\n"
    )


def test_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == ""
