"""Quantise a model to a file: a GGUF file, or a folder of safetensors that transformers reads as
well.

A name that ends in .gguf gets a GGUF file, in one of llama.cpp's mixtures (--to Q4_K_M); any other
a folder, in the format of compressed-tensors (--to int4-g64), or of bitsandbytes (--to nf4).
Nothing is there until all of it is.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_model, add_threads
from headrace.cli.calibrating import add_calibration, calibration_pieces
from headrace.errors import RequestError

if TYPE_CHECKING:
    from rich.progress import Progress

    from headrace.checkpoint.load import Checkpoint
    from headrace.convert.source_model import SourceModel


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=False)
    parser.add_argument(
        "out",
        type=Path,
        metavar="OUT",
        help="what to write: a file that ends in .gguf, or a folder",
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="of a GGUF file: Q4_K_M, Q8_0, F16, ...; of a folder: int4-g64, int8-row, "
        "int4-g32-asym, w8a8, e4m3, nf4, bf16, ...",
    )
    add_calibration(parser)
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    """Write it, and say what it is."""
    from rich.console import Console
    from rich.progress import Progress

    from headrace.checkpoint.source import resolve
    from headrace.convert.destination import check_destination
    from headrace.convert.source_model import open_source_model

    check_destination(args.out)
    original = open_source_model(resolve(args.model))
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        (_to_gguf if args.out.suffix == ".gguf" else _to_folder)(args, original, bar)
    files = [args.out] if args.out.is_file() else list(args.out.glob("*.safetensors"))
    print(
        f"{args.out}: {sum(file.stat().st_size for file in files) / 1e6:,.1f} MB, where "
        f"{args.model} has {_size(original) / 1e6:,.1f}"
    )
    return 0


def _size(original: "SourceModel") -> int:
    return sum(tensor.nbytes for tensor in original.tensors.values())


def _to_gguf(args: argparse.Namespace, original: "SourceModel", bar: "Progress") -> None:
    from headrace.convert.gguf.writer import plan_gguf, write_gguf
    from headrace.convert.matrices import quantisable
    from headrace.convert.methods import prepare_model
    from headrace.planner.host import usable_cores

    checkpoint, mixture, threads = (
        original.checkpoint,
        args.to.upper(),
        args.threads or usable_cores(),
    )
    plan, names = plan_gguf(original, mixture), quantisable(checkpoint.spec, checkpoint.tensors)
    pieces, tell = _calibration(args, checkpoint, bar)
    model = prepare_model(
        args.method, checkpoint.spec, checkpoint.tensors, names, mixture, pieces, threads, tell
    )
    write_gguf(original, args.out, plan, model.importance, _told(bar, f"to {mixture}"))


def _to_folder(args: argparse.Namespace, original: "SourceModel", bar: "Progress") -> None:
    from headrace.convert.folder.writer import matrix_writer, plan_folder, write_folder
    from headrace.convert.matrices import quantisable
    from headrace.convert.methods import prepare_model, quantise_matrices
    from headrace.planner.host import usable_cores
    from headrace.quant.format_names import named_format
    from headrace.quant.spec import PLAIN

    checkpoint, threads = original.checkpoint, args.threads or usable_cores()
    if args.to.upper() in PLAIN:
        plan = plan_folder(original, None, (), args.to.upper())
        write_folder(original, args.out, plan, checkpoint.tensors, ())
        return
    to = named_format(args.to)
    plan = plan_folder(
        original, matrix_writer(to), quantisable(checkpoint.spec, checkpoint.tensors)
    )
    if not plan.names:
        raise RequestError(f"{args.model} has no matrix that a folder can have quantised")
    plan.planned()
    pieces, tell = _calibration(args, checkpoint, bar)
    model = prepare_model(
        args.method, checkpoint.spec, checkpoint.tensors, plan.names, to, pieces, threads, tell
    )
    results = quantise_matrices(
        args.method, checkpoint.spec, model, plan.names, to, pieces, threads
    )
    write_folder(
        original,
        args.out,
        plan,
        model.tensors,
        bar.track(results, total=len(plan.names), description=f"to {to.name}"),
    )


def _calibration(
    args: argparse.Namespace, checkpoint: "Checkpoint", bar: "Progress"
) -> tuple[list[list[int]], Callable[[float], None]]:
    """The text that the method reads, if it reads any, and what hears how far it is."""
    if args.method == "rtn":
        return [], lambda done: None
    return calibration_pieces(args, checkpoint), _told(bar, f"{args.method}: reading a text")


def _told(bar: "Progress", what: str) -> Callable[[float], None]:
    task = bar.add_task(what, total=1.0)
    return lambda done: bar.update(task, completed=done)
