"""Drafts of an EAGLE-3 drafter that stay on the GPU, next to drafts by way of the host.

    python benchmarks/cuda/drafts.py             all checks and times, over a model of 8B
    python benchmarks/cuda/drafts.py --smoke     whether they run at all, in Triton's interpreter

Checks: tokens equal plain decoding, greedy and sampled, and both ways draft the same. A check that
drafted nothing fails. Times:
milliseconds of a step and of its parts, both ways in turns. Weights are random, so nearly all
drafts are wrong, except with a bias towards a few tokens. Each line is also a row of the JSON.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import programs  # before torch, which must know where kernels run
import torch
from results import Results

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.stream import make_stream
from headrace.backend.cuda.timing import synchronise
from headrace.checkpoint.drafter import Drafter
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.loader import drafts
from headrace.model import trace_model
from headrace.model.spec import DrafterSpec, ModelSpec
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.eagle import DrafterPrograms, EagleProposer
from tests.backend.cuda.hollow import SPECS, hollow_tensors, make_weights_in_place
from tests.tiny import TinyVocabulary

BLOCK_SIZE = 64
WAYS = ("device", "host")


@dataclass(frozen=True)
class Scale:
    """Sizes of the checks and times."""

    spec: str = "8b"
    drafted: int = 32_000
    depth: int = 4
    batches: tuple[int, ...] = (1, 8, 64)
    checked: int = 16
    """Tokens of each request whose tokens are compared."""
    timed: int = 24
    """Tokens of each request whose steps are timed."""
    skipped: int = 6
    """First steps without a time: prompts, and the first graphs."""
    rounds: int = 2


SMOKE = Scale("tiny", 20, 2, (2,), 6, 4, 1, 1)
FEW = (3, 7, 11, 13)
"""Tokens that biased requests draw, which all drafters have."""


def kinds(number: int, max_tokens: int) -> dict[str, list[SamplingParams]]:
    """Parameters of `number` requests of each kind."""
    biased = {token: 100.0 for token in FEW}
    return {
        name: [
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i, **options)
            for i in range(number)
        ]
        for name, options in {
            "greedy": {"temperature": 0.0},
            "sampled": {"temperature": 0.8, "top_p": 0.95},
            "biased": {"temperature": 1.0, "logit_bias": biased},
        }.items()
    }


class Timed:
    """Seconds and drafts of a proposer's calls."""

    def __init__(self, proposer: EagleProposer) -> None:
        self.traits = proposer.traits
        self._proposer = proposer
        self.drafts: list[list[int]] = []
        self.propose_seconds: list[float] = []
        self.observe_seconds: list[float] = []

    def propose(self, seqs: Any, budgets: Any, *pays: Any) -> Any:
        begun = time.perf_counter()
        proposed = self._proposer.propose(seqs, budgets, *pays)
        self.propose_seconds.append(time.perf_counter() - begun)
        self.drafts += [draft.tokens for draft in proposed]
        return proposed

    def observe(self, seqs: Any, commits: Any, result: Any) -> None:
        begun = time.perf_counter()
        self._proposer.observe(seqs, commits, result)
        self.observe_seconds.append(time.perf_counter() - begun)


class DraftedModel:
    """A model with a drafter, compiled once to draft on the device and once by way of the host."""

    def __init__(self, scale: Scale) -> None:
        make_weights_in_place(DEVICE)
        self.scale, self.spec = scale, SPECS[scale.spec]
        n = self.spec.num_layers
        taps = (min(2, n - 1), n // 2, max(0, n - 3))
        tensors = hollow_tensors(self.spec, "BF16")
        program = trace_model(self.spec, tensors).with_taps(taps)
        each = 64 + max(scale.checked, scale.timed) + scale.depth
        blocks = max(scale.batches) * -(-each // BLOCK_SIZE) + 1
        self.kv = KvConfig((blocks,), BLOCK_SIZE, "bf16")
        self.target = CudaExecutable(program, tensors, self.kv, torch.bfloat16, make_stream())
        drafter = drafter_of(self.spec, taps, scale.drafted)
        self.programs = {"host": self._compiled(drafter, False)}
        self.programs["device"] = self._compiled(drafter, True)
        self._store = self.target._tap_store

        rows = max(scale.batches) * (1 + scale.depth)
        self.target.prepare(rows, rows)
        for compiled in self.programs.values():
            for mapped in (compiled.from_target, compiled.from_itself):
                mapped.executable.prepare(rows, max(scale.batches))

    def _compiled(self, drafter: Drafter, on_device: bool) -> DrafterPrograms:
        torch.manual_seed(1)  # the same random weights both ways
        with patch.object(drafts, "DRAFTS_ON_DEVICE", on_device):
            return drafts.compile_drafter(
                drafter, self.spec, self.target, self.kv, self.scale.depth
            )

    def engine(self, way: str) -> tuple[Engine, Timed | None]:
        """An engine that drafts one way, or `off`."""
        self.target._tap_store = self._store if way == "device" else None
        config = EngineConfig(
            backend="cuda",
            proposer="off",
            prefix_cache=False,
            adaptive_speculation=False,
            multi_step_ms=0,
            max_num_seqs=max(self.scale.batches),
            max_draft_tokens=self.scale.depth,
        )
        limits = EngineLimits(
            self.spec.vocab_size, self.spec.max_context, self.kv, self.target.kv_groups
        )
        proposer = None
        if way != "off":
            proposer = Timed(
                EagleProposer(
                    self.programs[way],
                    self.scale.depth,
                    1,
                    probabilities=False,
                    prefix_cache=False,
                )
            )
        vocabulary = TinyVocabulary(self.spec.vocab_size)
        proposers: dict[str, Any] = {"draft_model": proposer} if proposer else {}
        return Engine(self.target, vocabulary, limits, config, proposers), proposer

    def run(self, way: str, requests: list[SamplingParams]) -> "Run":
        engine, proposer = self.engine(way)
        ids = [engine.add_request([3 + i, 5, 7, 9], each) for i, each in enumerate(requests)]
        tokens: dict[str, list[int]] = {number: [] for number in ids}
        steps = []
        while engine.has_work:
            begun = time.perf_counter()
            for update in engine.step():
                tokens[update.request_id] += update.token_ids
            steps.append(time.perf_counter() - begun)
        stats = engine.stats()
        del engine  # closing it would close the target
        programs.forget()  # sequences free the drafter's KV
        synchronise()
        return Run([tokens[number] for number in ids], steps, stats, proposer)


@dataclass(frozen=True)
class Run:
    """Tokens of each request, seconds of each step, and the proposer's record."""

    tokens: list[list[int]]
    steps: list[float]
    stats: Any
    proposer: Timed | None

    def milliseconds(self, skipped: int) -> dict[str, float]:
        """Medians of a step and of its parts."""
        parts = {"step": self.steps}
        if self.proposer:
            parts["propose"] = self.proposer.propose_seconds
            parts["observe"] = self.proposer.observe_seconds
        return {
            name: round(1e3 * statistics.median(took[skipped:] or took), 3)
            for name, took in parts.items()
        }


def drafter_of(target: ModelSpec, taps: tuple[int, ...], vocab: int) -> Drafter:
    """A random drafter whose layer has the sizes of the target's."""
    own = DrafterSpec(taps=taps, target_dim=target.dim, vocab_size=vocab)
    spec = replace(target, architecture="eagle3", num_layers=1, drafter=own, tied_embeddings=False)
    others = np.arange(max(FEW) + 1, target.vocab_size)
    step = max(1, len(others) // vocab)
    tokens = np.concatenate([np.array(FEW), others[::step][: vocab - len(FEW)]])
    return Drafter(spec, hollow_tensors(spec, "BF16"), tokens.astype(np.int32))


def checks(model: DraftedModel, number: int) -> Iterator[dict[str, Any]]:
    """Compare tokens with plain decoding, and the drafts of both ways."""
    for name, requests in kinds(number, model.scale.checked).items():
        plain = model.run("off", requests)
        mine, its = (model.run(way, requests) for way in WAYS)
        assert mine.proposer and its.proposer
        yield {
            "check": f"{name}, batch {number}",
            "tokens_equal": mine.tokens == plain.tokens == its.tokens,
            "drafts_equal": mine.proposer.drafts == its.proposer.drafts,
            "drafted": min(mine.stats.drafted, its.stats.drafted),
            "accepted": mine.stats.accepted,
            "failures": mine.stats.proposer_failures + its.stats.proposer_failures,
        }


def times(model: DraftedModel, number: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of steps, in turns."""
    scale = model.scale
    requests = kinds(number, scale.timed)["sampled"]
    for turn in range(scale.rounds):
        for way in ("off", *WAYS):
            run = model.run(way, requests)
            took = run.milliseconds(scale.skipped)
            yield {"time": way, "batch": number, "round": turn, "ms": took}


def main() -> None:
    """Run the checks, then the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="sizes that are small enough for the interpreter"
    )
    args = parser.parse_args()
    results, begun, rows = Results(args.out), time.perf_counter(), list[dict[str, Any]]()
    scale = SMOKE if args.smoke else Scale()

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(f"{time.perf_counter() - begun:6.1f} s  {row}", flush=True)
        results.write("drafts", rows)

    model = DraftedModel(scale)
    add({"made": scale.spec, "seconds": round(time.perf_counter() - begun, 1)})
    for number, part in product(scale.batches, (checks, times)):
        try:
            for row in part(model, number):
                add(row)
        except Exception as error:  # the other parts are still worth having
            add({"failed": part.__name__, "error": f"{type(error).__name__}: {error}"[:400]})
    programs.forget()
    is_right = [
        row.get("tokens_equal", True)
        and row.get("drafts_equal", True)
        and row.get("drafted", 1) > 0
        and "failed" not in row
        and not row.get("failures")
        for row in rows
    ]
    print(f"{sum(is_right)} of {len(rows)} rows are right")
    sys.exit(not all(is_right))


if __name__ == "__main__":
    main()
