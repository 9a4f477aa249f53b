"""The text that a method of quantising learns from: the arguments, and the tokens."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import whole_number
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.checkpoint.load import Checkpoint

METHODS = ("rtn", "imatrix", "gptq", "awq", "smoothquant")
"""What `convert/methods.py` knows."""
MOST_TOKENS = 2**20


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """`--method`, and the text that methods read."""
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="rtn",
        help="how: to the nearest (rtn), or by what a text shows",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text for the methods; if left out, a part of Python's language reference",
    )
    tokens = whole_number(2, MOST_TOKENS)
    parser.add_argument(
        "--calibration-tokens", type=tokens, default=16384, metavar="N", help="tokens of that text"
    )
    parser.add_argument(
        "--length",
        type=tokens,
        default=512,
        metavar="N",
        help="tokens of a piece of text, which is read by itself",
    )


def calibration_pieces(args: argparse.Namespace, checkpoint: "Checkpoint") -> list[list[int]]:
    """The tokens of the text. Raises RequestError where it has none."""
    from headrace.convert.quality import split_pieces
    from headrace.convert.texts import read_text

    ids = checkpoint.load_tokenizer().encode(
        read_text(args.calibration, "calibration"), add_special=False, parse_special=False
    )
    if not ids:
        raise RequestError("a text to calibrate with has one token at least")
    return split_pieces(ids, min(args.length, checkpoint.spec.max_context), args.calibration_tokens)
