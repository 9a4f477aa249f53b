"""Number formats of KV: bytes of a token, tokens that fit into memory, and loss of the model.

Loss is measured on a text in pieces of 512 tokens, each with an empty cache: the mean negative
log-likelihood, and the divergence KL(reference, format) of next-token distributions from the
reference backend in float64. All rows of the cpu backend have int8 activations, so the loss of a
format is the difference from f32.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bench import Bench, say
from numpy.typing import NDArray

from headrace.backend import compile_program, forward
from headrace.backend_traits import KvDtype, traits_of
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig, KvConfig
from headrace.convert.texts import text_pieces
from headrace.loader.key_rounding import with_key_rounding
from headrace.measure.describe import describe
from headrace.model import trace_model
from tests.backend.batches import Sequence, batch_of

TEXT = Path(__file__).resolve().parents[2] / "tests/data/nll_text.txt"
_TRUTH = "reference"


def kv_formats(bench: Bench) -> None:
    checkpoint = open_checkpoint(resolve(bench.model))
    facts = describe(bench.model)
    length, max_pieces = (48, 1) if bench.quick else (512, 8)
    pieces = text_pieces(
        checkpoint.load_tokenizer(), TEXT.read_text(), length, max_pieces * length, "the text"
    )
    truth = _log_probabilities(checkpoint, "reference", "f32", pieces, bench.threads)
    formats = {
        name: _log_probabilities(checkpoint, "cpu", name, pieces, bench.threads)
        for name in sorted(traits_of("cpu").kv_dtypes)
    }
    losses: dict[str, list[NDArray[np.float64]]] = {_TRUTH: [], **{name: [] for name in formats}}
    divergences: dict[str, list[NDArray[np.float64]]] = {name: [] for name in losses}
    for number, piece in enumerate(pieces):
        say(f"piece {number + 1} of {len(pieces)}")
        p = next(truth)
        for name, q in {_TRUTH: p, **{name: next(run) for name, run in formats.items()}}.items():
            losses[name].append(-q[np.arange(length - 1), piece[1:]])
            divergences[name].append((np.exp(p) * (p - q)).sum(axis=1))
    say("")
    rows = []
    for name in losses:
        loss, divergence = float(np.mean(losses[name])), float(np.mean(divergences[name]))
        row = {"kv_dtype": name, "nll": loss, "kl": divergence}
        cells = [name, "", "", f"{loss:.4f}", "" if name == _TRUTH else f"{divergence:.4f}"]
        if name != _TRUTH:
            row |= {
                "bytes_per_token": facts["kv_bytes_per_token"][name],
                "tokens_that_fit": facts["fits"][name]["tokens"],
            }
            cells[1:3] = f"{row['bytes_per_token']:,}", f"{row['tokens_that_fit']:,}"
        rows.append((row, cells))
    title = f"KV formats: {len(pieces)} pieces of {length} tokens"
    bench.table(
        "kv_formats",
        title,
        ["format", ">bytes/token", ">tokens that fit", ">mean NLL", ">KL"],
        rows,
    )


def _log_probabilities(
    checkpoint: Checkpoint, backend: str, dtype: KvDtype, pieces: list[list[int]], threads: int
) -> Iterator[NDArray[np.float64]]:  # [tokens, vocabulary], piece by piece
    program, blocks = (
        trace_model(checkpoint.spec, checkpoint.tensors),
        -(-len(pieces[0]) // KvConfig.block_size),
    )
    num_groups = len(program.kv_groups)
    kv = KvConfig((blocks,) * num_groups, dtype=dtype)
    if backend == "cpu":
        kv = with_key_rounding(
            kv, EngineConfig(kv_dtype=dtype), checkpoint, checkpoint.load_tokenizer
        )
    executable = compile_program(backend, program, checkpoint.tensors, kv, threads)
    for piece in pieces:
        sequence = Sequence(list(range(blocks)), kv.block_size)
        logits = forward(
            executable, batch_of([sequence], [piece], [([], [])], False, num_groups)
        ).logits.astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
