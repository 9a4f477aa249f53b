"""Quantise a model to a GGUF file, or to a folder of safetensors, perhaps with 2:4 sparsity.

If OUT ends in .gguf, it is a GGUF file in one of llama.cpp's mixtures (--to Q4_K_M). Otherwise it
is a folder in the format of compressed-tensors (--to int4-g64) or bitsandbytes (--to nf4). OUT
appears only when it is complete.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_calibration, add_model, add_threads
from headrace.cli.moefying import add_moefication, check_moefication, moefied_model
from headrace.cli.terminal import print_stderr
from headrace.errors import HeadraceError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.checkpoint.load import Checkpoint
    from headrace.convert.folder.writer import FolderPlan
    from headrace.convert.matrices import Target
    from headrace.convert.methods import Matrices
    from headrace.convert.pruning import PruneMethod
    from headrace.convert.source_model import SourceModel
    from headrace.measure.progress import ProgressCallback
    from headrace.quant.formats import StoredTensor

_PRUNE_METHODS = ("magnitude", "wanda", "sparsegpt")

_LARGE_SHARE = 0.25
"""Share of a folder above which its plain embeddings and head are worth a line."""
EXAMPLES = """\
  headrace convert hf:ORG/MODEL model.gguf --to Q4_K_M
  headrace convert hf:ORG/MODEL model-int4 --to int4-g64 --method gptq
  headrace convert hf:ORG/MODEL model-24 --to int8-row --sparsity 2:4 --method gptq"""


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
    add_moefication(parser)
    sparsity = parser.add_argument_group("sparsity", "Embedding, head and routers stay dense.")
    sparsity.add_argument(
        "--sparsity",
        metavar="2:4",
        help="2:4: of 4 neighbouring weights of a row, 2 are kept; OUT is a folder",
    )
    sparsity.add_argument(
        "--prune",
        choices=_PRUNE_METHODS,
        help="choice of the kept weights: by magnitude; by wanda, which weighs columns by their "
        "input; by sparsegpt, which changes the kept weights too (default: sparsegpt); all but "
        "magnitude read a calibration text",
    )
    embeddings = parser.add_argument_group("embedding and head", "No method calibrates them.")
    embeddings.add_argument(
        "--token-embedding-type",
        metavar="FORMAT",
        help="format of the token embedding: int8-row, int4-g64, bf16, ...; in a GGUF file Q8_0, "
        "Q6_K, F16, ... (default: int8-row in a folder of int2, int3 or int4, and int8 in one of "
        "int8; otherwise not quantised; in a GGUF file the mixture's)",
    )
    embeddings.add_argument(
        "--output-tensor-type",
        metavar="FORMAT",
        help="format of the head, likewise; a model with tied embeddings has one matrix for both",
    )
    add_calibration(parser)
    add_threads(parser.add_argument_group("compute"))


def run(args: argparse.Namespace) -> int:
    from headrace.checkpoint.source import resolve
    from headrace.cli.progress import progress_bar
    from headrace.convert.destination import check_destination
    from headrace.convert.pruning import check_pruning
    from headrace.convert.source_model import open_source_model

    check_destination(args.out)
    check_moefication(args)
    check_pruning(args.sparsity, args.prune, is_gguf=args.out.suffix == ".gguf")
    original = open_source_model(resolve(args.model))
    for note in original.checkpoint.notes:
        print(note, file=sys.stderr)
    original_size = sum(tensor.nbytes for tensor in original.tensors.values())
    if args.merge_adapter is not None:
        from headrace.checkpoint.adapter import read_adapter
        from headrace.convert.merge_adapter import merged

        original = merged(original, read_adapter(resolve(args.merge_adapter), original.spec))
    plan, lines, parent = None, list[str](), original.checkpoint
    with progress_bar() as on_progress:
        if args.moefy:
            original, lines = moefied_model(args, original, on_progress)
        if args.out.suffix == ".gguf":
            _write_gguf(args, original, on_progress)
        else:
            plan = _write_folder(args, original, on_progress)
        if args.sparsity:
            lines.append(_priced(args, parent, on_progress))

    if unused := original.unused(as_folder=args.out.suffix != ".gguf"):
        print(f"not written: {', '.join(unused)}", file=sys.stderr)
    files = [args.out] if args.out.is_file() else list(args.out.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print(f"{args.out}: {size / 1e6:,.1f} MB; {args.model} has {original_size / 1e6:,.1f} MB")
    for line in lines:
        print(line)
    if plan and plan.matrix_writer:
        _print_embeddings(args, original, plan, size)
    return 0


def _priced(args: argparse.Namespace, parent: "Checkpoint", on_progress: "ProgressCallback") -> str:
    """Measure the loss of the written folder, keep it there, and return a line about it."""
    from headrace.convert.folder.writer import add_price
    from headrace.measure.evaluate import file_price
    from headrace.planner.host import usable_cores

    try:
        price = file_price(args.out, parent, args.threads or usable_cores(), on_progress)
    except HeadraceError as error:
        return f"price not measured: {error}"
    add_price(args.out, asdict(price))
    return price.line


def _write_gguf(
    args: argparse.Namespace, original: "SourceModel", on_progress: "ProgressCallback"
) -> None:
    from headrace.convert.embedding_types import gguf_types
    from headrace.convert.gguf.writer import plan_gguf, write_gguf
    from headrace.convert.matrices import quantisable
    from headrace.convert.methods import prepare_model
    from headrace.planner.host import usable_cores

    checkpoint, mixture = original.checkpoint, args.to.upper()
    embeddings = gguf_types(checkpoint.spec, args.token_embedding_type, args.output_tensor_type)
    plan = plan_gguf(original, mixture, embeddings)
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
) -> "FolderPlan":
    from headrace.convert.embedding_types import folder_types, parsed_types
    from headrace.convert.folder.sparse import sparse_writer
    from headrace.convert.folder.writer import matrix_writer, plan_folder, write_folder
    from headrace.convert.matrices import quantisable, round_matrix
    from headrace.convert.pruning import check_columns
    from headrace.quant.format_names import named_format
    from headrace.quant.spec import PLAIN

    checkpoint = original.checkpoint
    types = (args.token_embedding_type, args.output_tensor_type)
    dtype = args.to.upper() if args.to.upper() in PLAIN else None
    if dtype and any(types):
        raise RequestError(
            f"--token-embedding-type and --output-tensor-type need quantised matrices, and "
            f"--to {args.to} has none; leave them out, or choose another --to"
        )
    if dtype and not args.sparsity:
        plan = plan_folder(original, None, (), dtype)
        write_folder(original, args.out, plan, checkpoint.tensors, ())
        return plan

    target = dtype or named_format(args.to)
    prune: PruneMethod | None = (args.prune or "sparsegpt") if args.sparsity else None
    writer = sparse_writer(target, prune) if prune else matrix_writer(named_format(args.to))
    names = quantisable(checkpoint.spec, checkpoint.tensors)
    embeddings = {} if dtype else parsed_types(folder_types(checkpoint.spec, args.to, *types))
    plan = plan_folder(original, writer, names, dtype, embeddings)
    if not plan.names:
        raise RequestError(
            f"{args.model} has no matrix that a folder can store quantised; write a GGUF file"
        )
    if prune:
        check_columns(checkpoint.tensors, plan.names)
    plan.planned()
    tensors, matrices = _rounded(args, checkpoint, plan.names, target, prune, on_progress)
    embedded = ((name, round_matrix(tensors[name], spec)) for name, spec in plan.embeddings.items())
    write_folder(original, args.out, plan, tensors, chain(embedded, matrices))
    return plan


def _rounded(
    args: argparse.Namespace,
    checkpoint: "Checkpoint",
    names: list[str],
    target: "Target",
    prune: "PruneMethod | None",
    on_progress: "ProgressCallback",
) -> tuple["Mapping[str, StoredTensor]", "Matrices"]:
    """All tensors as the method prepares them, and the pruned and rounded matrices."""
    from headrace.convert.methods import prepare_model, quantise_matrices
    from headrace.convert.pruning import check_method, prepare_pruning
    from headrace.planner.host import usable_cores

    spec, tensors = checkpoint.spec, checkpoint.tensors
    threads = args.threads or usable_cores()
    if prune:
        check_method(args.method, target)
    pieces = _calibration(args, checkpoint, prune)
    pruning = None
    if prune:
        step = _step(on_progress, f"{prune}: reading a text")
        pruning = prepare_pruning(prune, spec, tensors, names, pieces, threads, step)
    step = _step(on_progress, f"{args.method}: reading a text")
    model = prepare_model(args.method, spec, tensors, names, target, pieces, threads, step)
    words = target if isinstance(target, str) else target.name
    step = _step(on_progress, f"{f'{prune}, ' if prune else ''}{args.method}: to {words}")
    matrices = quantise_matrices(
        args.method, spec, model, names, target, pieces, threads, step, pruning
    )
    return model.tensors, matrices


def _print_embeddings(
    args: argparse.Namespace, original: "SourceModel", plan: "FolderPlan", size: int
) -> None:
    """Print the formats and bytes of the embedding and the head."""
    from headrace.convert.embedding_types import EMBED, OPTIONS
    from headrace.quant.format_names import named_format

    is_tied = original.spec.tied_embeddings and original.spec.has_head
    for name, file_name in original.embedding_names().items():
        words = "head" if name != EMBED else "embedding and head" if is_tied else "embedding"
        if name in plan.embeddings:
            tensor, _ = plan.quantised[file_name]
            nbytes = sum(part.nbytes for part in plan.parts(file_name))
            plain, spec = 2 * tensor.shape[0] * tensor.shape[1], plan.embeddings[name]
            print(f"{words}: {spec.name}, {nbytes / 1e6:,.1f} MB; {plain / 1e6:,.1f} MB as bf16")
            continue
        planned = plan.plain[file_name][1]
        line = f"{words}: {planned.format}, {planned.nbytes / 1e6:,.1f} MB"
        is_large = planned.nbytes > _LARGE_SHARE * size
        if is_large and not args.token_embedding_type and not args.sparsity:
            can_pack = plan.matrix_writer and plan.matrix_writer.packs_embeddings
            smaller = f"{OPTIONS[name]} int8-row" if can_pack else "a GGUF file (--to Q4_K_M)"
            line += f"; {smaller} makes it smaller"
        print(line)

    others = {spec for spec in plan.embeddings.values() if spec != named_format(args.to)}
    if EMBED in plan.embeddings and others:
        print(f"transformers cannot load it; with {OPTIONS[EMBED]} bf16 it can")


def _calibration(
    args: argparse.Namespace, checkpoint: "Checkpoint", prune: str | None = None
) -> list[list[int]]:
    from headrace.convert.texts import calibration_pieces

    readers = [name for name in (prune, args.method) if name not in (None, "magnitude", "rtn")]
    if not readers:
        return []
    pieces = calibration_pieces(checkpoint, args.calibration, args.length, args.calibration_tokens)
    if not sys.stderr.isatty():
        print_stderr(f"{readers[0]}: reads {sum(map(len, pieces)):,} tokens of a text")
    return pieces


def _step(on_progress: "ProgressCallback", step: str) -> Callable[[float], None]:
    return lambda share: on_progress(step, share)
