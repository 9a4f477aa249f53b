"""A drafter learns while a server serves in rounds with pauses. Its training is killed at random
moments, and the server is restarted.

A tiny model with a drafter of random weights, or, with HEADRACE_SOAK_DRAFTER=FOLDER, the default
model with the drafter in that folder. It needs torch.
"""

import math
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from harness import Findings, Running, children, held, is_alive, tiny_model, wait

from headrace.checkpoint.load import open_checkpoint
from tests.drafters import random_drafter, write_drafter

_SECONDS = 3600.0
_LIFE_SECONDS = 600.0
_PAUSE = 4.0
_WARM = 0.4
"""Share of a life after which memory has to stay."""
_GROWTH = 0.05, 8 << 20
"""Bound on the growth of memory, as a share and in bytes."""
_TRAINER = b"headrace.distil.online"
_FIXED = {"prompt": "Three rivers:", "max_tokens": 48, "temperature": 0, "ignore_eos": True}


class _Sample(NamedTuple):
    at: float
    engine: int
    trainer: int
    """Bytes of anonymous memory; 0 without a process."""


def run(findings: Findings) -> None:
    seconds = findings.seconds or _SECONDS
    count = max(2, round(seconds / _LIFE_SECONDS))
    with tempfile.TemporaryDirectory() as folder:
        model, drafter = _files(Path(folder))
        plain = Running(model, "--proposer", "off", "--threads", "1")
        expected = _fixed(plain)
        plain.stop()

        home, rng = Path(folder) / "learned", random.Random(0)
        totals = [0.0, 0.0]
        for number in range(count):
            server = Running(model, *_flags(drafter, str(home)))
            try:
                life = _Life(findings, server, expected, rng)
                life.serve(seconds / count, kills=number % 2 == 1)
                figures = server.figures()
            except BaseException:
                server.stop(signal.SIGKILL)
                raise
            totals[0] += figures["headrace_draft_swaps_total"]
            totals[1] += figures["headrace_draft_rollbacks_total"]
            _end(findings, server, kills=number % 4 == 2)
        findings.says(f"{totals[0]:.0f} new weights and {totals[1]:.0f} roll-backs in all lives")

        if (home / "model.safetensors").exists():
            last = Running(model, *_flags(str(home), ""))
            findings.holds(_fixed(last) == expected, "learned weights draft, and no token changes")
            last.stop()


def _files(folder: Path) -> tuple[str, str]:
    if given := os.environ.get("HEADRACE_SOAK_DRAFTER"):
        return "smollm2", given
    target = open_checkpoint(Path(tiny_model()))
    made = random_drafter((target.spec, dict(target.tensors)))
    return tiny_model(), str(write_drafter(folder / "drafter", made, "authors"))


def _flags(drafter: str, home: str) -> list[str]:
    learning = ["--learn-drafts", home] if home else []
    return [
        *("--proposer", "draft_model", "--draft-model", drafter, *learning),
        *("--threads", "1", "--kv-blocks", "256", "--max-num-seqs", "4", "--max-model-len", "1024"),
    ]


def _fixed(server: Running) -> Any:
    return server.post("/v1/completions", _FIXED).json["choices"][0]["text"]


def _trainer(server: Running) -> int:
    """The process that trains; 0 if there is none."""
    for pid in children(server.engine_pid):
        try:
            if _TRAINER in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            continue
    return 0


class _Life:
    """The time of a server from its start to its end."""

    def __init__(
        self, findings: Findings, server: Running, expected: str, rng: random.Random
    ) -> None:
        self._findings, self._server, self._expected, self._rng = findings, server, expected, rng
        self._begun = time.monotonic()
        self._samples: list[_Sample] = []
        self._rounds = self._wrong = 0

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begun

    def serve(self, seconds: float, *, kills: bool) -> None:
        """Serve rounds. `kills`: the training, at a random moment of the second half."""
        kill_at = seconds * self._rng.uniform(0.5, 0.9) if kills else math.inf
        killed = 0
        while self._now < seconds:
            self._round()
            pause_ends = self._now + _PAUSE * self._rng.uniform(0.5, 1.5)
            while self._now < pause_ends:
                self._look()
                if self._now > kill_at and not killed and (killed := _trainer(self._server)):
                    os.kill(killed, signal.SIGKILL)
                time.sleep(0.5)
        self._report(kills, killed)

    def _round(self) -> None:
        prompts = [[self._rng.randrange(3, 60) for _ in range(8)] for _ in range(3)]
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 120, "temperature": 0.5, "ignore_eos": True}
            self._wrong += self._server.post("/v1/completions", body).status != 200
        self._wrong += _fixed(self._server) != self._expected
        self._rounds += 1

    def _look(self) -> None:
        trainer = _trainer(self._server)
        engine = held(self._server.engine_pid).anon
        try:
            sample = _Sample(self._now, engine, held(trainer).anon if trainer else 0)
        except (OSError, KeyError):  # it has just ended
            return
        minute = not self._samples or self._samples[-1].at // 60 < sample.at // 60
        self._samples.append(sample)
        if minute:
            figures = self._server.figures()
            self._findings.says(
                f"{self._now / 60:4.0f} min: engine {sample.engine / 2**20:.0f} MB, training "
                f"{sample.trainer / 2**20:.0f} MB, "
                f"{figures['headrace_draft_learning_tokens_total']:,.0f} tokens, "
                f"{figures['headrace_draft_swaps_total']:.0f} new weights, "
                f"{figures['headrace_draft_rollbacks_total']:.0f} roll-backs"
            )

    def _report(self, kills: bool, killed: int) -> None:
        findings, server = self._findings, self._server
        findings.holds(not self._wrong, f"{self._rounds} rounds, {self._wrong} wrong responses")
        learned = server.figures()["headrace_draft_learning_tokens_total"]
        findings.holds(learned > 0, f"{learned:,.0f} tokens to learn from")
        ends = "drafts learn no more"
        warnings = [line for line in server.log if ends in line]
        if kills:
            wait(lambda: any(ends in line for line in server.log), 10)
            warnings = [line.strip() for line in server.log if ends in line]
            right = len(warnings) == 1 and "status -9" in warnings[0] and not _trainer(server)
            findings.holds(killed > 0 and right, f"the training was killed: {warnings}")
        else:
            right = not warnings and _trainer(server) > 0
            findings.holds(right, f"the training goes on {warnings}")
            self._check_memory()

    def _check_memory(self) -> None:
        warm = self._now * _WARM
        late = [sample for sample in self._samples if sample.at >= warm]
        half = len(late) // 2
        for name in ("engine", "trainer"):
            values = [getattr(sample, name) for sample in late]
            first, second = statistics.mean(values[:half]), statistics.mean(values[half:])
            bound = first * (1 + _GROWTH[0]) + _GROWTH[1]
            self._findings.holds(
                second <= bound,
                f"{name}: {first / 2**20:.0f} MB, then {second / 2**20:.0f} "
                f"(at most {bound / 2**20:.0f})",
            )


def _end(findings: Findings, server: Running, *, kills: bool) -> None:
    """End the server, by kill -9 if `kills`; the training ends with it."""
    left = [server.engine_pid, *children(server.engine_pid)]
    code = server.stop(signal.SIGKILL if kills else signal.SIGTERM)
    took = wait(lambda: not any(map(is_alive, left)), 10)
    findings.holds(
        took is not None and code == (-9 if kills else 0),
        f"the server ended with {code}, and its {len(left)} processes after {took or 10:.1f} s",
    )
