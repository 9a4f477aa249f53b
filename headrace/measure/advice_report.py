"""An advice as JSON, and the commands that follow it."""

import shlex
from math import isfinite
from pathlib import Path
from typing import Any

from headrace.backend_traits import traits_of
from headrace.loader.mode_price import mode_flags
from headrace.measure.advice import Advice
from headrace.measure.configurations import Candidate
from headrace.measure.goal import METRICS, Goal

_MIXTURES = {"Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "Q3_K": "Q3_K_S", "Q2_K": "Q2_K_S"}
"""Mixtures of GGUF files whose main type this is, where no plain one exists."""


def commands(model: str, advice: Advice, found: Candidate) -> list[str]:
    """Commands of a shell that start a configuration."""
    setup, engine = found.setup, found.engine
    lines: list[str] = []
    if setup.format != advice.own_format:
        file = f"{_slug(model)}-{setup.format}.gguf"
        mixture = _MIXTURES.get(setup.format, setup.format)
        lines.append(f"headrace convert {shlex.quote(model)} {file} --to {mixture}")
        model = file
    words: list[object] = ["headrace", "serve", model, "--kv-dtype", setup.kv_dtype]
    words += ["--max-num-seqs", engine.max_num_seqs, "--max-model-len", advice.goal.context]
    if engine.chunk != traits_of(setup.place.backend).chunked_prefill_size:
        words += ["--chunked-prefill-size", engine.chunk]
    if setup.place.mesh.tensor > 1:
        words += ["-tp", setup.place.mesh.tensor]
    if setup.place.mesh.pipeline > 1:
        words += ["-pp", setup.place.mesh.pipeline]
    if engine.draft_depth:
        words += ["--proposer", "auto"]
    words += mode_flags(advice.mode)
    if found.replicas > 1:
        words += ["--replicas", found.replicas]
    return [*lines, " ".join(shlex.quote(str(word)) for word in words)]


def advice_facts(model: str, advice: Advice) -> dict[str, Any]:
    """An advice as JSON, in bytes, seconds, tokens/s and dollars."""
    found = {
        "best": advice.best,
        "runner_up": advice.runner_up,
        "own_format": advice.own,
        "nearest": advice.nearest,
    }
    return {
        "model": advice.model,
        "lossy": advice.mode.lossy,
        "goal": goal_facts(advice.goal),
        "budget": advice.space.budget,
        "met": advice.best is not None,
        **{name: one and _facts(model, advice, one) for name, one in found.items()},
        "changes": advice.changes,
        "tried": advice.tried,
    }


def goal_facts(goal: Goal) -> dict[str, Any]:
    return vars(goal) | {"text": goal.text}


def _facts(model: str, advice: Advice, found: Candidate) -> dict[str, Any]:
    setup, engine, fit = found.setup, found.engine, found.fit
    cost = found.value("cost")
    misses = found.misses(advice.goal, advice.space.budget)
    return {
        "machine": setup.place.name,
        "backend": setup.place.backend,
        "replicas": found.replicas,
        "tensor_parallel_size": setup.place.mesh.tensor,
        "pipeline_parallel_size": setup.place.mesh.pipeline,
        "format": setup.format,
        "kv_dtype": setup.kv_dtype,
        "max_num_seqs": engine.max_num_seqs,
        "chunked_prefill_size": engine.chunk,
        "draft_depth": engine.draft_depth,
        **{metric: found.value(metric) for metric in METRICS if metric != "cost"},
        "cost": cost if isfinite(cost) else None,
        "dollars_per_hour": found.price,
        "decoding": found.steady.decoding,
        "reading": found.steady.reading,
        "memory": fit.memory,
        "weights": fit.weights,
        "runtime": fit.to_run,
        "kv": engine.max_num_seqs * fit.kv_per_sequence,
        "loss": {"low": found.loss.low, "high": found.loss.high, "source": found.loss.source},
        "kv_nll_percent": advice.kv_nll["percent"].get(setup.kv_dtype),
        "misses": {name: factor for name, factor in misses.items() if isfinite(factor)},
        "commands": commands(model, advice, found),
        "reach": setup.place.reaches.source,
    }


def _slug(model: str) -> str:
    """A name for a file: of a folder, or of a file without its suffix."""
    path = Path(model.removesuffix("/config.json"))
    name = path.stem if path.suffix == ".gguf" else path.name
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name) or "model"
