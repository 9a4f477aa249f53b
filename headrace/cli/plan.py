"""Plan a model on a machine that need not be at hand: the memory that it takes, the time of its
steps with what bounds each part, and what a million tokens cost.

MODEL may be a `config.json`. No weight is read, and no GPU is needed. `--list` shows the machines.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from headrace.backend_traits import KvDtype, traits_of
from headrace.cli.arguments import (
    DEFAULT_MODEL,
    MAX_COUNT,
    MAX_TOKENS,
    add_json,
    add_model,
    add_modes,
    add_price,
    draft_chain,
    mode_options,
    whole_number,
)
from headrace.cli.output_file import check_writable, write
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.batch_curve import BatchCurve
    from headrace.measure.plan import Plan, Times

EXAMPLES = """\
  headrace plan smollm2
  headrace plan ./Llama-3.1-8B/config.json --on h100-sxm --format Q4_0 --batch 64
  headrace plan ./Llama-3.1-70B/config.json --on a100-80 -tp 4 --why
  headrace plan ./Llama-3.1-8B/config.json --goal "ttft<1s tpot<30ms users=40 context=8k"
  headrace plan smollm2 --on this --goal "throughput users=16 tpot<20ms"
  headrace plan smollm2 --adapter ./adapters/legal --batch 8
  headrace plan --check
  headrace plan --list"""
_MAX_RANKS = 1024


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    parser.set_defaults(model=None)  # `--check` without a model runs random ones
    add_json(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="predicted and measured times on this machine, of the model or of random models",
    )
    parser.add_argument(
        "--list", action="store_true", help="list of the known machines and networks"
    )
    parser.add_argument("--why", action="store_true", help="arithmetic of each figure, and sources")
    parser.add_argument(
        "--sweep", action="store_true", help="time per token at each batch, with the knee"
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="SVG file for pictures of the memory, the time per token at each batch, and the "
        "roofline",
    )
    _add_goal(parser.add_argument_group("advice"))
    _add_machine(parser.add_argument_group("machine"))
    _add_work(parser.add_argument_group("work"))
    add_modes(parser)


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goal",
        metavar="TERMS",
        help="bounds and sizes of a service, such as 'ttft<1s tpot<30ms users=40 context=8k'; "
        "other terms are prompt, output, throughput and cost",
    )
    group.add_argument(
        "--budget", metavar="D", help="maximum price of a goal's devices, such as 2$/h"
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--on",
        metavar="NAME",
        help="name of a machine, or this (measured); with a goal, names separated by commas "
        "(default: this; with a goal, all that have a price)",
    )
    ranks = whole_number(1, _MAX_RANKS)
    group.add_argument(
        "-tp",
        type=ranks,
        metavar="N",
        help="number of devices that share each matrix (default: 1; with a goal, any)",
    )
    group.add_argument(
        "-pp",
        type=ranks,
        metavar="N",
        help="number of pipeline stages (default: 1; with a goal, any)",
    )
    group.add_argument(
        "--network",
        metavar="NAME",
        help="network between the pipeline stages, each on a host of its own (see --list)",
    )
    add_price(group, "a device", " (default: the machine file's)")
    group.add_argument(
        "--format",
        metavar="TYPE",
        help="GGUF type of all matrices; with a goal, types separated by commas (default: the "
        "file's; with a goal, smaller ones too)",
    )
    group.add_argument(
        "--kv-dtype",
        choices=get_args(KvDtype),
        help="number format of the KV cache (default: bf16; with a goal, int8 too)",
    )


def _add_work(group: argparse._ArgumentGroup) -> None:
    tokens = whole_number(1, MAX_TOKENS)
    group.add_argument(
        "--prompt",
        type=tokens,
        metavar="N",
        help="length of a prompt, in tokens (default: 512)",
    )
    group.add_argument(
        "--output",
        type=tokens,
        metavar="N",
        help="length of an output, in tokens (default: 128)",
    )
    group.add_argument(
        "--context",
        type=tokens,
        metavar="N",
        help="tokens that each sequence has room for (default: prompt and output)",
    )
    group.add_argument(
        "--batch",
        type=whole_number(1, MAX_COUNT),
        metavar="N",
        help="number of sequences that decode together (default: 1; with a goal, any)",
    )
    group.add_argument(
        "--draft",
        type=draft_chain,
        default=(0, 0.0),
        metavar="DEPTH:ACCEPTANCE",
        help="draft tokens in a step, and the share of them that is accepted, such as 4:0.7; with "
        "a goal, the most of them (default: no drafts)",
    )
    group.add_argument(
        "--adapter",
        metavar="FILE",
        help="LoRA adapter that all sequences use: a folder of PEFT or mlx-lm, a GGUF file, or "
        "hf:ORG/REPO (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    from headrace.measure.batch_curve import batch_curve
    from headrace.measure.plan import plan, plan_facts
    from headrace.measure.table import print_json

    modes = mode_options(args)
    for flag in ("list", "check", "goal"):
        if args.adapter and getattr(args, flag) not in (None, False):
            raise RequestError(
                f"--adapter is for the plan of one configuration; leave it or --{flag} out"
            )
    if args.list:
        if modes != mode_options():
            raise RequestError("--list shows machines; leave out the lossy modes")
        _print_machines(args.json)
        return 0
    if args.check:
        from headrace.cli.plan_check import check

        return check(args)
    args.model = args.model or DEFAULT_MODEL
    if args.svg:
        check_writable("--svg", args.svg)
    if args.goal is not None:
        from headrace.cli.plan_advice import advise

        return advise(args)
    if args.budget:
        raise RequestError("--budget is for a goal; add --goal, or leave out --budget")
    depth, acceptance = args.draft
    found = plan(
        args.model,
        on=args.on or "this",
        tensor=args.tp or 1,
        pipeline=args.pp or 1,
        network=args.network,
        format=args.format,
        kv_dtype=args.kv_dtype or "bf16",
        prompt=args.prompt or 512,
        output=args.output or 128,
        batch=args.batch or 1,
        context=args.context,
        draft_depth=depth,
        draft_acceptance=acceptance,
        adapter=args.adapter,
        **modes,
    )
    if args.svg:
        from headrace.measure.plan_picture import plan_svg

        write("--svg", args.svg, plan_svg(found))
    if args.json:
        sweep = {"sweep": batch_curve(found).facts()} if args.sweep else {}
        print_json(plan_facts(found, args.price) | sweep)
        return 0
    _print(found, args.price)
    if args.sweep:
        _print_sweep(found, batch_curve(found))
    if args.why:
        _print_why(found)
    if args.svg:
        print(f"The plan is drawn in {args.svg}.")
    return 0


def _print_machines(as_json: bool) -> None:
    from headrace.measure.table import print_json, print_table, size
    from headrace.planner.machine_files import machine_names, networks, read_machine

    machines = [read_machine(name) for name in machine_names()]
    if as_json:
        print_json(
            [
                {
                    "machine": machine.key,
                    "name": machine.name,
                    "memory": machine.memory.value,
                    "bandwidth": machine.bandwidth.value,
                    "rates": {kind: figure.value for kind, figure in machine.rates.items()},
                    "links": {kind: figure.value for kind, figure in machine.links.items()},
                    "price": machine.price.value if machine.price else None,
                }
                for machine in machines
            ]
        )
        return
    rows = [
        [
            machine.key,
            machine.name,
            size(machine.memory.value),
            f"{machine.bandwidth.value / 1e9:,.0f} GB/s",
            f"{machine.rates['bf16'].value / 1e12:,.1f}",
            f"{machine.rates['int8'].value / 1e12:,.1f}",
            f"{machine.link.value / 1e9:,.0f} GB/s" if machine.link else "-",
            f"{machine.price.value:.2f}" if machine.price else "-",
        ]
        for machine in machines
    ]
    headings = ["machine", "name", ">memory", ">bandwidth", ">bf16 TFLOPS", ">int8 TOPS", ">link"]
    print_table([*headings, ">$/h"], rows)
    for network in networks().values():
        print(f"--network {network.key}: {network.bandwidth / 1e9:,.2f} GB/s between hosts")


def _print(found: "Plan", price: float | None) -> None:
    from headrace.loader.kv_size import kv_share
    from headrace.measure.table import print_figures, size

    place, fit, work = found.place, found.fit, found.workload
    ranks = place.mesh.ranks
    devices = f"{ranks} x {place.title}" if ranks > 1 else place.title
    share = kv_share(on_gpu=traits_of(place.backend).on_gpu)
    default = int(share * fit.kv_budget) // fit.kv_per_sequence
    memory = {
        "weights": f"{size(fit.weights)} in {found.format}",
        **({"adapter": f"{size(fit.adapter)} in bf16"} if fit.adapter else {}),
        "runtime": f"about {size(fit.to_run)}",
        "left for KV": size(fit.kv_budget),
        f"a sequence of {fit.context:,} tokens": f"{size(fit.kv_per_sequence)} of KV in "
        f"{found.kv_dtype}",
        "fitting sequences": f"{fit.sequences:,}, or {default:,} in the engine's default share, "
        f"{share:.0%}",
        f"longest context of {work.batch:,}": f"{found.longest:,} tokens",
    }
    each = " of each device" if ranks > 1 else ""
    print_figures(f"Memory{each}: {size(fit.memory)} on {devices}", memory)
    if run := found.run_memory:
        parts = {
            "weights": run.weights,
            **{f"KV of {layers}": kv for layers, kv in run.kv_groups.items()},
            "KV ahead of its use": run.kv_ahead,
            "activations": run.activations,
            "interpreter and engine": run.base,
            "tokenizer": run.tokenizer,
            "converted tensors": run.converted,
            "peak": run.peak,
        }
        requests = f"{work.batch:,} x {work.prompt + work.output:,} tokens"
        print_figures(f"Resident memory of {requests}", {k: size(v) for k, v in parts.items()})
    if found.lossy:
        print(f"Lossy: {found.lossy}. `headrace eval` with these options measures the price.\n")
    _print_times(f"Step of {work.batch:,} x 1 row at depth {work.depth:,}", found.decode)
    _print_times(f"Step of a prompt of {work.prompt:,} tokens", found.prefill)

    speed = {
        "first token": f"{found.first_token * 1e3:,.1f} ms, alone",
        "time per token": f"{found.per_token * 1e3:,.2f} ms",
        "output": f"{found.tokens_per_second:,.0f} tokens/s",
        "output per device": f"{found.tokens_per_second / ranks:,.0f} tokens/s",
    }
    if found.draft:
        speed["drafts"] = (
            f"{found.draft.tokens:.2f} tokens in a step, {found.draft.speedup:.2f} x the speed"
        )
    if costs := found.cost(price):
        speed["a million tokens"] = f"{costs[0]:.3f} $ of prompt, {costs[1]:.3f} $ of output"
    elif place.name != "this":
        speed["a million tokens"] = "no price is known; add --price"
    print_figures(f"Prediction, by kernels measured on {place.reaches.source}", speed)
    if work.batch > fit.sequences:
        print(f"The batch of {work.batch:,} does not fit: the KV of {fit.sequences:,} does.")


def _print_times(title: str, times: "Times") -> None:
    from headrace.measure.table import print_table

    rows = [
        [
            part.part,
            f"{part.calls:,}",
            f"{part.seconds * 1e3:,.3f}",
            f"{part.seconds / times.slowest:.0%}",
            part.bound,
        ]
        for part in times.parts
    ]
    stages = f", the slowest of {len(times.stages)} stages" if len(times.stages) > 1 else ""
    heading = f"{title}: {times.slowest * 1e3:,.2f} ms{stages}"
    print_table(["part", ">calls", ">ms", ">share", "bound by"], rows, heading)
    print()


def _print_sweep(found: "Plan", curve: "BatchCurve") -> None:
    from headrace.measure.table import print_table

    rows = [
        [
            f"{point.batch:,}" + " (knee)" * (point.batch == curve.knee),
            f"{point.per_token * 1e3:,.2f}",
            f"{point.tokens_per_second:,.0f}",
            f"{point.tokens_per_second / found.place.mesh.ranks:,.0f}",
            "yes" if point.fits else "no",
        ]
        for point in curve.points
    ]
    headings = [">batch", ">ms a token", ">tokens/s", ">tokens/s a device", "KV fits"]
    print_table(headings, rows, f"Batches at depth {found.workload.depth:,}, without drafts")
    knee = "beyond these batches" if curve.knee is None else f"{curve.knee:,} sequences"
    print(f"Knee, at which a step takes twice the time of one sequence: {knee}.")
    print()


def _print_why(found: "Plan") -> None:
    """Print each formula with its numbers."""
    place, fit, work = found.place, found.fit, found.workload
    machine, ranks = place.machine, place.mesh.ranks
    rates = ", ".join(f"{rate / 1e12:,.2f} T in {kind}" for kind, rate in machine.rates.items())
    print(f"roofs: {machine.bandwidth / 1e9:,.1f} GB/s; operations/s: {rates}")
    print(
        "time of an op = fixed time of a call + (memory^p + arithmetic^p)^(1/p); memory = bytes / "
        "(bandwidth x share); arithmetic = operations x (1 + unpack x blocks / rows) / (rate x "
        "share) + written numbers x work / rate of f32"
    )
    for part_name, by_bits in place.reaches.table.items():
        for bits, reach in by_bits.items():
            print(
                f"{part_name}, {bits:g} bits: {reach.seconds * 1e6:.2f} us a call, share of "
                f"bandwidth {reach.bandwidth:.2f}, of rate {reach.rate:.2f}, unpack "
                f"{reach.unpack:.1f} rows, work {reach.written:.0f} a number, p {reach.overlap:g}"
            )
    for times, name in ((found.decode, "decode"), (found.prefill, "prefill")):
        for part in times.parts:
            print(
                f"{name} {part.part}: {part.seconds * 1e3:.3f} ms = {part.launch * 1e3:.3f} of "
                f"{part.calls:,} calls + {part.memory * 1e3:.3f} of memory + "
                f"{part.arithmetic * 1e3:.3f} of arithmetic + {part.link * 1e3:.3f} of links"
            )
    print(
        f"left for KV: {fit.memory:,} - {fit.weights:,} of weights - {fit.adapter:,} of adapters - "
        f"{fit.to_run:,} of runtime = "
        f"{fit.kv_budget:,} bytes; / {fit.kv_per_sequence:,} a sequence = {fit.sequences:,}"
    )
    print(
        f"output: {work.batch:,} sequences / {found.per_token * 1e3:.3f} ms = "
        f"{found.tokens_per_second:,.1f} tokens/s on {ranks:,} devices"
    )
    for source in place.sources:
        print(f"source: {source}")
