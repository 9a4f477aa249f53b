"""The reaper kills the processes of a cluster and no others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.scaleout.ray_reaper import processes_of

SECONDS = 30.0
HOLD = "import sys, time; file = open(sys.argv[1], 'w'); print('open', flush=True); time.sleep(600)"


def holding(file: Path) -> "subprocess.Popen[str]":
    """Start a process that holds a file open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "open\n"
    return process


def test_reaper_kills_a_cluster_after_its_starter_ends(tmp_path: Path) -> None:
    folder, other_folder = tmp_path / "headrace-ray-x", tmp_path / "headrace-ray-xy"
    folder.mkdir()
    other_folder.mkdir()
    left, other = holding(folder / "a.log"), holding(other_folder / "a.log")
    try:
        assert set(processes_of(str(folder))) == {left.pid}
        command = [
            sys.executable,
            "-P",
            "-m",
            "headrace.scaleout.ray_reaper",
            str(folder),
            str(os.getpid()),
        ]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE) as reaper,
            (folder / "mine.log").open("w"),
        ):
            assert reaper.stdin
            for number in (signal.SIGTERM, signal.SIGINT):
                time.sleep(0.2)
                reaper.send_signal(number)  # as a terminal would, to all
            assert left.poll() is None
            reaper.stdin.close()
            assert reaper.wait(SECONDS) == 0
        assert left.wait(SECONDS) == -signal.SIGKILL
        assert other.poll() is None and not folder.exists() and other_folder.exists()
    finally:
        for process in (left, other):
            process.kill()
            process.wait()
