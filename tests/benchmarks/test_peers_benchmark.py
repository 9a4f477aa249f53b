"""The parts of `benchmarks/peers.py` that need no peer: figures, table, bfloat16 folders, and the
worker with Headrace itself.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.load import open_checkpoint
from headrace.quant.formats import FORMATS
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


class TestPeersFigures:
    def figures(
        self, workload: tuple[int, int, int], *times: tuple[float, float]
    ) -> dict[str, float]:
        from engines import Times
        from worker import Workload

        return dict(Workload(*workload, 1).figures([Times(*pair) for pair in times]))

    def test_one_request(self) -> None:
        assert self.figures((1, 8, 129), (0.5, 2.5)) == {"decode of 128 after 8": 64}
        assert self.figures((1, 512, 1), (2, 2)) == {"prefill of 512": 256}
        assert self.figures((1, 2048, 129), (4, 8)) == {
            "prefill of 2048": 512,
            "decode of 128 after 2048": 32,
        }

    def test_several_requests_last_until_the_slowest_has_ended(self) -> None:
        assert self.figures((2, 128, 64), (1, 8), (2, 4)) == {"2 requests x (128 + 64), output": 16}


class TestPeersTable:
    def rows(self, less_is_better: bool, **found: list[float]) -> list[list[str]]:
        from report import Figure, table

        figures = [
            Figure(i, engine, "speed", value, less_is_better)
            for engine, all_ in found.items()
            for i, value in enumerate(all_)
        ]
        lines = table("title", ["headrace", "a", "b"], figures).splitlines()
        assert len({len(line) for line in lines}) == 1
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    def test_medians_spreads_and_the_ratio_of_each_round_to_the_best_peer(self) -> None:
        heading, _, row = self.rows(
            False, headrace=[200, 300, 1000], a=[100, 100, 250], b=[1, 2, 1000]
        )
        assert heading == ["title", "headrace", "a", "b", "headrace / best peer"]
        assert row == ["speed", "300 (200-1,000)", "100 (100-250)", "2 (1-1,000)", "3 (2-4), a"]

    def test_best_peer_of_a_figure_that_should_be_low(self) -> None:
        row = self.rows(True, headrace=[2, 2], a=[100, 100], b=[4, 8])[2]
        assert row == [
            "speed, less is better",
            "2 (2-2)",
            "100 (100-100)",
            "6 (4-8)",
            "0.375 (0.25-0.5), b",
        ]

    def test_an_engine_that_failed_leaves_gaps(self) -> None:
        assert self.rows(False, headrace=[2, 4], a=[1])[2] == [
            "speed",
            "3 (2-4)",
            "1 (1-1)",
            "-",
            "2 (2-2), a",
        ]
        assert self.rows(False, headrace=[2])[2] == ["speed", "2 (2-2)", "-", "-", "-"]
        assert self.rows(False, a=[2])[2] == ["speed", "-", "2 (2-2)", "-", "-"]


def test_bf16_folder_equals_the_gguf_file(write_gguf: Any, tmp_path: Path) -> None:  # noqa: F811
    from peers import bf16_folder

    path = write_gguf(kind="Q8_0")
    folder = bf16_folder(path, tmp_path)
    assert bf16_folder(path, tmp_path) == folder
    stored, written = open_checkpoint(path), open_checkpoint(folder)
    assert replace(written.spec, name="") == replace(stored.spec, name="")
    assert written.tensors.keys() == stored.tensors.keys()
    for name, tensor in written.tensors.items():
        assert tensor.format == FORMATS["BF16"]
        values, want = tensor.dequantise(), stored.tensors[name].dequantise()
        assert (np.abs(values - want) <= np.abs(want) * 2.0**-8).all() and (values != 0).any()


def test_peers_worker(write_gguf: Any) -> None:  # noqa: F811
    options = ["--longest", "137", "--vocabulary", "264", "--threads", "1"]
    command = [
        sys.executable,
        str(BENCHMARKS / "worker.py"),
        "headrace",
        str(write_gguf()),
        "decode",
        *options,
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    started, found = map(json.loads, output.splitlines())
    assert started == {"started": True}
    assert (
        found["figures"].keys() == {"decode of 128 after 8"}
        and found["figures"]["decode of 128 after 8"] > 0
    )
    assert found["peak_memory"] > 10 << 20 and found["version"]


def test_prompts_are_new_in_every_run_and_the_same_for_all_engines() -> None:
    from worker import Prompts

    first, second = Prompts(1, 50), Prompts(1, 50)
    prompts = [first.new(20) for _ in range(3)]
    assert prompts == [second.new(20) for _ in range(3)] and prompts != [
        Prompts(2, 50).new(20) for _ in range(3)
    ]
    assert len({tuple(ids) for ids in prompts}) == 3 and all(
        0 <= token < 50 for ids in prompts for token in ids
    )
