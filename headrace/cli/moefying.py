"""The step of `headrace convert` that cuts FFNs into experts."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from headrace.cli.arguments import whole_number
from headrace.cli.terminal import print_stderr
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.convert.moefy import Moefication, MoefiedLayer
    from headrace.convert.source_model import SourceModel
    from headrace.measure.progress import ProgressCallback

_MAX_GROUPS = 4096
_OPTIONS = ("active", "shared", "moefy_layers")


def add_moefication(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "experts", "Dense FFNs are cut into experts by the calibration text; see --calibration."
    )
    group.add_argument(
        "--moefy",
        type=whole_number(2, _MAX_GROUPS),
        metavar="EXPERTS",
        help="number of equal groups of neurons of each FFN, with the shared ones; OUT has the "
        "shape of Qwen2-MoE",
    )
    group.add_argument(
        "--active",
        type=whole_number(2, _MAX_GROUPS),
        metavar="K",
        help="number of groups that a token uses, with the shared ones",
    )
    group.add_argument(
        "--shared",
        type=whole_number(1, _MAX_GROUPS),
        metavar="S",
        help="number of groups that every token uses (default: three quarters of K)",
    )
    group.add_argument(
        "--moefy-layers",
        metavar="LAYERS",
        help="layers with experts, such as 4-11,20; or a number: so many layers, those with the "
        "smallest measured loss (default: all)",
    )


def check_moefication(args: argparse.Namespace) -> None:
    """Raises RequestError for options that need another one."""
    if args.moefy is None:
        for name in _OPTIONS:
            if getattr(args, name) is not None:
                raise RequestError(f"--{name.replace('_', '-')} needs --moefy EXPERTS; add it")
    elif args.active is None:
        raise RequestError("--moefy needs --active K, the number of groups of a token; add it")


def moefied_model(
    args: argparse.Namespace, original: "SourceModel", on_progress: "ProgressCallback"
) -> "tuple[SourceModel, list[str]]":
    """Return the model with experts, and lines for the user. Raises RequestError."""
    from headrace.convert.moefied_quality import MoefiedQuality, best_layers
    from headrace.convert.moefy import Moefication, moefied_layers, moefied_spec, with_experts
    from headrace.convert.texts import calibration_pieces
    from headrace.loader.layers import layer_choice
    from headrace.measure.evaluate import DEFAULT_TEXT, measured_price
    from headrace.planner.host import usable_cores

    choice = layer_choice("--moefy-layers", args.moefy_layers or 0)
    options = Moefication(
        experts=args.moefy,
        active=args.active,
        shared=args.shared or 0,
        layers=() if isinstance(choice, int) else choice,
    )
    moefied_spec(original.spec, options)
    threads = args.threads or usable_cores()
    pieces = calibration_pieces(
        original.checkpoint, args.calibration, args.length, args.calibration_tokens
    )
    if not sys.stderr.isatty():
        print_stderr(f"moefy: reads {sum(map(len, pieces)):,} tokens of a text")
    made = moefied_layers(
        original, options, pieces, threads, lambda share: on_progress("moefy: reading", share)
    )
    meter = MoefiedQuality(original, pieces[-1], threads)
    lines = []
    if isinstance(choice, int) and 0 < choice < len(made):
        losses = meter.losses(
            options, made, lambda share: on_progress("moefy: measuring layers", share)
        )
        made = {layer: made[layer] for layer in best_layers(losses, choice)}
        lines = _loss_lines(losses, made)
    model = with_experts(original, options, made)
    text = args.calibration.name if args.calibration else DEFAULT_TEXT
    price = measured_price(f"{text}, before --to", meter.parent, meter.quality(model))
    summary = _summary(options, made)
    noted = replace(model, note=f"cut from {args.model}: {summary}", price=asdict(price))
    return noted, [*lines, f"{summary}; {price.line}"]


def _loss_lines(losses: Mapping[int, float], made: "Mapping[int, MoefiedLayer]") -> list[str]:
    from headrace.loader.layers import layers_text

    words = ", ".join(f"{layer}: {losses[layer]:.4f}" for layer in sorted(losses))
    return [
        f"KL of experts in one layer alone, in nats: {words}",
        f"layers with experts: {layers_text(sorted(made))}",
    ]


def _summary(options: "Moefication", made: "Mapping[int, MoefiedLayer]") -> str:
    errors = [layer.error for layer in made.values()]
    return (
        f"experts: {options.experts} groups of neurons in {len(made)} layers, {options.active} for "
        f"each token, {options.num_shared} of them shared; error of an FFN's output "
        f"{min(errors):.0%} to {max(errors):.0%}"
    )
