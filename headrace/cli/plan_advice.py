"""The output of `headrace plan --goal`."""

import argparse
from math import isfinite

from headrace.cli.arguments import mode_options
from headrace.errors import RequestError
from headrace.measure.advice import Advice, find_advice
from headrace.measure.advice_report import advice_facts, commands
from headrace.measure.configurations import MESHES, Candidate, SearchSpace
from headrace.measure.goal import METRICS, Goal, parse_dollars_per_hour, parse_goal
from headrace.measure.table import print_json, print_table, size

_OPTIONS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "throughput": "output",
    "cost": "a million output tokens",
    "budget": "budget",
    "users": "users",
    "context": "context",
}


def advise(args: argparse.Namespace) -> int:

    for flag in ("why", "sweep", "svg", "network"):
        if getattr(args, flag):
            raise RequestError(f"--{flag} is for a single plan; leave it out, or leave out --goal")
    goal = parse_goal(args.goal, prompt=args.prompt, output=args.output, context=args.context)
    found = find_advice(args.model, goal, _space(args))
    if args.json:
        print_json(advice_facts(args.model, found))
    else:
        _print(args.model, found)
    return 0 if found.best else 1


def _space(args: argparse.Namespace) -> SearchSpace:

    meshes = tuple(
        mesh
        for mesh in MESHES
        if args.tp in (None, mesh.tensor) and args.pp in (None, mesh.pipeline)
    )
    if not meshes:
        raise RequestError(
            f"-tp {args.tp} -pp {args.pp} is no mesh of a goal's search; use 1, 2, 4 or 8, at "
            "most 8 devices in all"
        )
    depth, acceptance = args.draft
    return SearchSpace(
        on=tuple(args.on.split(",")) if args.on else None,
        budget=parse_dollars_per_hour(args.budget) if args.budget else None,
        price=args.price,
        formats=tuple(args.format.split(",")) if args.format else None,
        kv_dtypes=(args.kv_dtype,) if args.kv_dtype else None,
        meshes=meshes,
        batches=(args.batch,) if args.batch else None,
        draft_depth=depth,
        draft_acceptance=acceptance,
        modes=mode_options(args),
    )


def _print(model: str, advice: Advice) -> None:

    goal = advice.goal
    print(
        f"{advice.model}: {goal.users:,} users at a time, each with a prompt of {goal.prompt:,} "
        f"and an output of {goal.output:,} tokens, within {goal.context:,}"
    )
    if advice.mode.lossy:
        print(f"Lossy: {advice.mode.lossy}.")
    if advice.best is None:
        _print_nearest(model, advice)
        return

    columns = {
        "best": advice.best,
        "runner-up": advice.runner_up,
        f"best in {advice.own_format}": advice.own,
    }
    shown = {name: found for name, found in columns.items() if found}
    rows = {name: _figures(goal, found) for name, found in shown.items()}
    print_table(
        ["", *shown],
        [[figure, *(row[figure] for row in rows.values())] for figure in rows["best"]],
    )
    print()
    _print_loss(advice, advice.best)
    for command in commands(model, advice, advice.best):
        print(f"$ {command}")


def _figures(goal: Goal, found: Candidate) -> dict[str, str]:

    setup, engine, fit = found.setup, found.engine, found.fit
    mesh = setup.place.mesh
    cost = found.value("cost")
    parts = [f"{found.replicas:,} replica" + "s" * (found.replicas != 1)]
    parts += [f"{mesh.tensor} x TP"] * (mesh.tensor > 1)
    parts += [f"{mesh.pipeline} x PP"] * (mesh.pipeline > 1)
    kv = min(engine.max_num_seqs, goal.users) * fit.kv_per_sequence
    return {
        "machine": f"{found.devices:,} x {setup.place.name}",
        "devices": ", ".join(parts),
        "weights": f"{setup.format}, {size(fit.weights)} a device",
        "KV": f"{setup.kv_dtype}, {size(kv)} a device",
        "memory": f"{(fit.weights + fit.to_run + kv) / fit.memory:.0%} of {size(fit.memory)}",
        "sequences": f"{engine.max_num_seqs:,} a replica",
        "prompt chunk": f"{engine.chunk:,} rows",
        "drafts": f"{engine.draft_depth} a step" if engine.draft_depth else "none",
        "first token": f"{found.value('ttft') * 1e3:,.0f} ms",
        "time per token": f"{found.value('tpot') * 1e3:,.2f} ms",
        "output": f"{found.throughput:,.0f} tokens/s",
        "price": "-" if found.price is None else f"{found.price:,.2f} $/h",
        "a million tokens": f"{cost:,.3f} $ of output" if isfinite(cost) else "-",
    }


def _print_loss(advice: Advice, found: Candidate) -> None:

    if found.loss.high:
        print(f"{found.setup.format} instead of {advice.own_format} costs: {found.loss.text}")
    if text := advice.kv_loss(found.setup.kv_dtype):
        print(text)


def _print_nearest(model: str, advice: Advice) -> None:

    goal, nearest = advice.goal, advice.nearest
    assert nearest
    print(f"No configuration of {advice.tried:,} meets the goal. The nearest:")
    figures = _figures(goal, nearest)
    print_table(["", ""], list(figures.items()))
    print()
    rows = []
    for name, factor in nearest.misses(goal, advice.space.budget).items():
        if name == "budget":
            bound, value = advice.space.budget, nearest.price
        else:
            metric = next(metric for metric in METRICS if metric == name)
            bound, value = goal.bound(metric), nearest.value(metric)
        by = f"{factor:,.2f} x" if isfinite(factor) else "-"
        rows.append([_OPTIONS[name], _value(name, bound), _value(name, value), by])
    print_table(["missed", ">bound", ">predicted", ">by"], rows)
    print()
    if not advice.changes:
        print("No change of a single term makes it possible; change two, or name other machines.")
        return
    print("It is met if one of these changes alone:")
    for name, value in advice.changes.items():
        print(f"  {_OPTIONS[name]}: {_value(name, value)}")


def _value(name: str, value: float | None) -> str:
    if value is None or not isfinite(value):
        return "unknown"
    match name:
        case "ttft" | "tpot":
            return f"{value * 1e3:,.{2 if value < 0.1 else 0}f} ms"
        case "throughput":
            return f"{value:,.0f} tokens/s"
        case "cost":
            return f"{value:,.3f} $"
        case "budget":
            return f"{value:,.2f} $/h"
    return f"{value:,.0f}"
