"""Quantise a model to a GGUF file, or to a folder of safetensors that transformers reads as well.

If OUT ends in .gguf, it is a GGUF file in one of llama.cpp's mixtures (--to Q4_K_M). Otherwise it
is a folder in the format of compressed-tensors (--to int4-g64) or bitsandbytes (--to nf4). OUT
appears only when it is complete.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_calibration, add_model, add_threads
from headrace.cli.terminal import print_stderr
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.checkpoint.load import Checkpoint
    from headrace.convert.source_model import SourceModel
    from headrace.measure.progress import ProgressCallback

_LARGE_SHARE = 0.25
"""Share of a folder above which its plain matrices are worth a line."""
EXAMPLES = """\
  headrace convert hf:ORG/MODEL model.gguf --to Q4_K_M
  headrace convert hf:ORG/MODEL model-int4 --to int4-g64 --method gptq"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=False)
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="new file that ends in .gguf, or new folder"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="format of a GGUF file: Q4_K_M, Q8_0, F16, ...; of a folder: int4-g64, int8-row, "
        "int4-g32-asym, w8a8, e4m3, nf4, bf16, ...",
    )
    parser.add_argument(
        "--merge-adapter",
        metavar="PATH",
        help="adapter that is merged into the weights first: a folder of PEFT or mlx-lm, a GGUF "
        "file, or hf:ORG/REPO",
    )
    add_calibration(parser)
    add_threads(parser.add_argument_group("compute"))


def run(args: argparse.Namespace) -> int:
    from headrace.checkpoint.source import resolve
    from headrace.cli.progress import progress_bar
    from headrace.convert.destination import check_destination
    from headrace.convert.source_model import open_source_model

    check_destination(args.out)
    original = open_source_model(resolve(args.model))
    for note in original.checkpoint.notes:
        print(note, file=sys.stderr)
    original_size = sum(tensor.nbytes for tensor in original.tensors.values())
    if args.merge_adapter is not None:
        from headrace.checkpoint.adapter import read_adapter
        from headrace.convert.merge_adapter import merged

        original = merged(original, read_adapter(resolve(args.merge_adapter), original.spec))
    plain_bytes = 0
    with progress_bar() as on_progress:
        if args.out.suffix == ".gguf":
            _write_gguf(args, original, on_progress)
        else:
            plain_bytes = _write_folder(args, original, on_progress)

    if unused := original.unused(as_folder=args.out.suffix != ".gguf"):
        print(f"not written: {', '.join(unused)}", file=sys.stderr)
    files = [args.out] if args.out.is_file() else list(args.out.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print(f"{args.out}: {size / 1e6:,.1f} MB; {args.model} has {original_size / 1e6:,.1f} MB")
    if plain_bytes > _LARGE_SHARE * size:
        print(
            f"Of them {plain_bytes / 1e6:,.1f} MB are embeddings and head, which a folder does not "
            "quantise; a GGUF file does (OUT.gguf --to Q4_K_M)"
        )
    return 0


def _write_gguf(
    args: argparse.Namespace, original: "SourceModel", on_progress: "ProgressCallback"
) -> None:
    from headrace.convert.gguf.writer import plan_gguf, write_gguf
    from headrace.convert.matrices import quantisable
    from headrace.convert.methods import prepare_model
    from headrace.planner.host import usable_cores

    checkpoint, mixture = original.checkpoint, args.to.upper()
    plan = plan_gguf(original, mixture)
    model = prepare_model(
        args.method,
        checkpoint.spec,
        checkpoint.tensors,
        quantisable(checkpoint.spec, checkpoint.tensors),
        mixture,
        _calibration(args, checkpoint),
        args.threads or usable_cores(),
        _step(on_progress, f"{args.method}: reading a text"),
    )
    write_gguf(original, args.out, plan, model.importance, _step(on_progress, f"to {mixture}"))


def _write_folder(
    args: argparse.Namespace, original: "SourceModel", on_progress: "ProgressCallback"
) -> int:
    """Return the bytes of matrices that stay as they are next to quantised ones."""
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
        return 0

    target = named_format(args.to)
    names = quantisable(checkpoint.spec, checkpoint.tensors)
    plan = plan_folder(original, matrix_writer(target), names)
    if not plan.names:
        raise RequestError(
            f"{args.model} has no matrix that a folder can store quantised; write a GGUF file"
        )
    plan.planned()
    pieces = _calibration(args, checkpoint)
    model = prepare_model(
        args.method,
        checkpoint.spec,
        checkpoint.tensors,
        plan.names,
        target,
        pieces,
        threads,
        _step(on_progress, f"{args.method}: reading a text"),
    )
    matrices = quantise_matrices(
        args.method,
        checkpoint.spec,
        model,
        plan.names,
        target,
        pieces,
        threads,
        _step(on_progress, f"{args.method}: quantising to {target.name}"),
    )
    write_folder(original, args.out, plan, model.tensors, matrices)
    planned = (planned for _, planned in plan.plain.values())
    return sum(tensor.nbytes for tensor in planned if len(tensor.shape) == 2)


def _calibration(args: argparse.Namespace, checkpoint: "Checkpoint") -> list[list[int]]:
    from headrace.convert.texts import calibration_pieces

    if args.method == "rtn":
        return []
    pieces = calibration_pieces(checkpoint, args.calibration, args.length, args.calibration_tokens)
    if not sys.stderr.isatty():
        print_stderr(f"{args.method}: reads {sum(map(len, pieces)):,} tokens of a text")
    return pieces


def _step(on_progress: "ProgressCallback", step: str) -> Callable[[float], None]:
    return lambda share: on_progress(step, share)
