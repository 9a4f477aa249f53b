"""Measure what a model, or a way to quantise it, costs in quality: on a text, beside a reference, next to bytes and speed.

NLL is the mean negative log-likelihood of a token of the text given those before it, in nats. KL is the divergence of the model's
distributions of the next token from the reference's, mean and 99th percentile; `same top` is how often both hold the same token for the
likeliest. With --formats the matrices of the model are also rounded to each of these formats, for a row of its own.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.cli.arguments import add_activations, add_json, add_kv_dtype, add_model, add_threads, whole_number
from headrace.errors import RequestError

if TYPE_CHECKING:
    from rich.progress import Progress

    from headrace.checkpoint.load import Checkpoint
    from headrace.convert.quality import Quality, Scorer
    from headrace.convert.remembered import Remembered
    from headrace.quant.formats import StoredTensor
    from headrace.quant.spec import QuantSpec

EXACT = "exact"
METHODS = ("rtn", "gptq", "awq", "smoothquant")
_MOST = 2**20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=True)
    parser.add_argument(
        "--reference",
        metavar="MODEL",
        help=f"another model of the same vocabulary, or `{EXACT}`: the model's own weights, computed in float64 (slow); with --formats, "
        "if left out, the model as it is",
    )
    parser.add_argument("--formats", metavar="NAME,...", help="round the model's matrices to these formats too, such as int4-g128,w8a8")
    parser.add_argument("--method", choices=METHODS, default="rtn", help="how: to the nearest, or by what a text shows")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="text for the methods; if left out, a part of Python's language reference"
    )
    parser.add_argument("--calibration-tokens", type=whole_number(2, _MOST), default=16384, metavar="N", help="tokens of that text")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text; if left out, a part of Python's language reference")
    parser.add_argument("--tokens", type=whole_number(2, _MOST), default=4096, metavar="N", help="tokens of the text that count")
    parser.add_argument(
        "--length", type=whole_number(2, _MOST), default=512, metavar="N", help="tokens of a piece, which is read by itself"
    )
    add_kv_dtype(parser)
    add_activations(parser)
    add_threads(parser)
    add_json(parser)


class Row(NamedTuple):
    """A model, or a way to quantise it, and how it did."""

    name: str
    weight_bytes: int
    """Of all weights, as they lie in memory."""
    bits: float
    """Of a weight that is quantised or could be, scales included."""
    quality: "Quality"
    prefill: float
    """Tokens/s of one piece."""
    decode: float
    """Tokens/s of one sequence."""


def run(args: argparse.Namespace) -> int:
    """Print a table, or one JSON document."""
    from headrace.cli.table import print_json, print_table

    rows = evaluate(args)
    if args.json:
        print_json([facts(row) for row in rows])
        return 0
    headings = ["", ">MB", ">bits", ">NLL", ">perplexity", ">KL", ">99th", ">same top", ">prefill, tokens/s", ">decode"]
    print_table(headings, [cells(row) for row in rows], f"{rows[0].quality.tokens:,} tokens of text")
    return 0


def facts(row: Row) -> dict[str, object]:
    """A row as JSON."""
    quality = {**vars(row.quality), "perplexity": row.quality.perplexity}
    return {**row._asdict(), "quality": quality}


def cells(row: Row) -> list[str]:
    """A row of the table."""
    q = row.quality
    compared = ["", "", ""]
    if q.kl is not None and q.kl_99 is not None and q.agreement is not None:
        compared = [f"{q.kl:.4f}", f"{q.kl_99:.3f}", f"{q.agreement:.1%}"]
    first = [row.name, f"{row.weight_bytes / 1e6:,.0f}", f"{row.bits:.2f}", f"{q.nll:.4f}", f"{q.perplexity:.2f}"]
    return [*first, *compared, f"{row.prefill:,.0f}", f"{row.decode:,.1f}"]


def evaluate(args: argparse.Namespace) -> list[Row]:
    """Read the text with the model and each format. Raises RequestError for formats and references that do not fit the model."""
    from rich.console import Console
    from rich.progress import Progress

    from headrace.checkpoint.load import open_checkpoint
    from headrace.checkpoint.source import resolve
    from headrace.convert.quality import pieces_of
    from headrace.convert.remembered import Remembered
    from headrace.convert.texts import read_text
    from headrace.quant.named import named_format

    formats = {name: named_format(name) for name in (args.formats or "").split(",") if name}
    checkpoint = open_checkpoint(resolve(args.model))
    length = min(args.length, checkpoint.spec.max_context)
    ids = checkpoint.load_tokenizer().encode(read_text(args.text, "evaluation"), add_special=False, parse_special=False)
    if len(ids) < 2:
        raise RequestError("a text to judge by has two tokens at least")
    pieces = pieces_of(ids, length, args.tokens)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar, Remembered() as said:
        if args.reference or formats:
            scorer = _reference(args, checkpoint, length)
            for piece in bar.track(pieces, description="the reference"):
                for some in scorer.log_probabilities(piece):
                    said.add(some)
            scorer.close()
        rows = [_row(args, args.model, checkpoint, checkpoint.tensors, pieces, said, bar)]
        for name, to in formats.items():
            rows.append(_row(args, name, checkpoint, _quantised(args, checkpoint, name, to, bar), pieces, said, bar))
    return rows


def _reference(args: argparse.Namespace, checkpoint: "Checkpoint", length: int) -> "Scorer":
    from headrace.checkpoint.load import open_checkpoint
    from headrace.checkpoint.source import resolve

    if args.reference in (None, EXACT):
        return _scorer(args, checkpoint, checkpoint.tensors, length, "reference" if args.reference else "cpu")
    other = open_checkpoint(resolve(args.reference))
    if other.spec.vocab_size != checkpoint.spec.vocab_size:
        sizes = f"{other.spec.vocab_size:,} and {checkpoint.spec.vocab_size:,}"
        raise RequestError(f"--reference {args.reference}: its vocabulary is another one ({sizes} tokens)")
    return _scorer(args, other, other.tensors, length)


def _scorer(
    args: argparse.Namespace, checkpoint: "Checkpoint", tensors: "Mapping[str, StoredTensor]", length: int, backend: str = "cpu"
) -> "Scorer":
    from headrace.convert.quality import Scorer
    from headrace.planner.host import usable_cores

    threads = args.threads or usable_cores()
    return Scorer(checkpoint.spec, tensors, length, backend, threads, args.kv_dtype, args.activations)


def _quantised(
    args: argparse.Namespace, checkpoint: "Checkpoint", name: str, to: "QuantSpec", bar: "Progress"
) -> "Mapping[str, StoredTensor]":
    from headrace.convert.awq import by_awq
    from headrace.convert.matrices import by_gptq, quantisable, rounded
    from headrace.convert.quality import pieces_of
    from headrace.convert.smoothquant import by_smoothquant
    from headrace.convert.texts import read_text
    from headrace.planner.host import usable_cores

    spec, tensors = checkpoint.spec, checkpoint.tensors
    names = quantisable(spec, tensors)
    task = bar.add_task(f"{args.method}, {name}", total=1.0)
    if args.method == "rtn":
        result = rounded(tensors, names, to, lambda done: bar.update(task, completed=done))
    else:
        ids = checkpoint.load_tokenizer().encode(read_text(args.calibration, "calibration"), add_special=False, parse_special=False)
        if not ids:
            raise RequestError("a text to calibrate with has a token at least")
        pieces = pieces_of(ids, min(args.length, spec.max_context), args.calibration_tokens)
        threads = args.threads or usable_cores()
        method = {"gptq": by_gptq, "awq": by_awq, "smoothquant": by_smoothquant}[args.method]
        result = method(spec, tensors, names, to, pieces, threads, lambda done: bar.update(task, completed=done))
    bar.remove_task(task)
    return result


def _row(
    args: argparse.Namespace,
    name: str,
    checkpoint: "Checkpoint",
    tensors: "Mapping[str, StoredTensor]",
    pieces: list[list[int]],
    said: "Remembered",
    bar: "Progress",
) -> Row:
    """How one model does; `said` is what the reference said, if there is one."""
    from headrace.convert.matrices import quantisable
    from headrace.convert.quality import Judge

    scorer, judge = _scorer(args, checkpoint, tensors, len(pieces[0])), Judge()
    by_reference = iter(said) if len(said) else None
    for piece in bar.track(pieces, description=name):
        judge.add(piece, scorer.log_probabilities(piece), by_reference)
    prefill, decode = scorer.speed(pieces[0])
    program = scorer.executable.program
    names = set(quantisable(checkpoint.spec, tensors))
    matrices = [weight for weight in program.weights.values() if weight.name in names]
    bits = 8 * sum(w.nbytes for w in matrices) / sum(w.rows * w.cols for w in matrices)
    scorer.close()
    return Row(name, program.weight_bytes, bits, judge.quality(), prefill, decode)
