"""`benchmarks/session_peers.py`: a session and separate requests do the same work."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import write_tiny_gguf
from tests.texts import ROOT

SMALL = "--prompt 70 --count 3 --width 2 --tokens 4 --vocabulary 200 --threads 1".split()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of both ways of Headrace."""
    folder: Path = tmp_path_factory.mktemp("peers")
    model = write_tiny_gguf(folder / "tiny.gguf", {"llama.context_length": 4096})
    results = {}
    for way in ("session", "requests"):
        words = [sys.executable, ROOT / "benchmarks/session_worker.py", way, model, *SMALL]
        result = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert not result.returncode, result.stderr
        results[way] = json.loads(result.stdout)
    return results


def test_both_ways_of_the_session_benchmark_score_alike(found: dict[str, Any]) -> None:
    assert found["session"]["mean"] == found["requests"]["mean"] < 0


def test_the_session_benchmark_times_each_job(found: dict[str, Any]) -> None:
    for result in found.values():
        assert result["seconds"].keys() == {"score", "tree"}
        assert min(result["seconds"].values()) > 0
