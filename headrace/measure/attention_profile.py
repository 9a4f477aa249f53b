"""Profile of attention on a text: how few keys have most of the weight, and which have none."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.backend.cpu import executable as cpu
from headrace.backend.reference.ops import rotated_key_biases
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.convert.texts import read_text, text_pieces
from headrace.errors import RequestError
from headrace.loader.backend_choice import with_kv_dtype
from headrace.loader.drafts import model_program
from headrace.loader.load import open_files
from headrace.loader.options import engine_config
from headrace.measure.options import EngineOptions
from headrace.measure.progress import ProgressCallback, ignore_progress, track
from headrace.planner.host import usable_cores
from headrace.program.ops import Attention, KvWrite
from headrace.program.trace import Program
from headrace.quant.arrays import Floats
from headrace.quant.kv import BLOCK_SIZE, hadamard, is_rotated, key_format, round_trip
from headrace.record import frozen

SHARES = (0.9, 0.99, 0.999)
"""Shares of the weight of a row whose keys are counted."""
_CHUNK = 512
_ROWS = 64
_UNDERFLOW = np.float32(-103.9721)
"""Natural logarithm below which a float32 weight is 0."""


@frozen(kw_only=True)
class HeadAttention:
    """Means over the rows, for a query head."""

    layer: int
    head: int
    keys: tuple[float, ...]
    """Keys that have each of `SHARES` of the weight."""
    zero_keys: float
    """Share of visible keys whose weight is exactly 0 in float32, next to the maximum's 1."""
    zero_blocks: float
    """Share of full visible blocks of 32 keys whose weights are all exactly 0."""
    bounded_blocks: float
    """Share of full visible blocks whose bounds of keys show that."""


@frozen(kw_only=True)
class AttentionProfile:
    model: str
    name: str
    tokens: int
    rows: int
    """Rows measured, at even distances in the last half of the tokens."""
    context: float
    """Mean number of tokens up to a measured row."""
    kv_dtype: str
    heads: Sequence[HeadAttention]

    def facts(self) -> dict[str, Any]:
        """The profile as JSON: numbers of keys, and shares of 1."""
        return {
            "model": self.model,
            "name": self.name,
            "tokens": self.tokens,
            "rows": self.rows,
            "context": self.context,
            "kv_dtype": self.kv_dtype,
            "shares": list(SHARES),
            "heads": [
                {
                    "layer": head.layer,
                    "head": head.head,
                    "keys": list(head.keys),
                    "zero_keys": head.zero_keys,
                    "zero_blocks": head.zero_blocks,
                    "bounded_blocks": head.bounded_blocks,
                }
                for head in self.heads
            ],
        }


def attention_profile(
    model: str,
    *,
    text: Path | None = None,
    tokens: int = 2048,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[EngineOptions],
) -> AttentionProfile:
    """Run a text on the CPU, and weigh the keys of 64 rows in NumPy.

    Args:
        text: path of a text; by default a part of Python's language reference.
        tokens: length of the piece, at most the model's context.
        options: fields of `EngineConfig`.

    Raises RequestError for a text with fewer tokens.
    """
    config = engine_config(options)
    checkpoint = open_files(model, config)
    config = with_kv_dtype(config, checkpoint)
    if tokens > checkpoint.spec.max_context:
        raise RequestError(
            f"tokens {tokens:,} is too long for the model's context of "
            f"{checkpoint.spec.max_context:,} tokens; use at most {checkpoint.spec.max_context:,}"
        )
    words = read_text(text, "evaluation")
    piece = text_pieces(checkpoint.load_tokenizer(), words, tokens, tokens, f"text {str(text)!r}")[
        0
    ]
    if len(piece) < tokens:
        raise RequestError(
            f"the text has {len(piece):,} tokens, and {tokens:,} are wanted; set text to a longer "
            "one, or tokens to fewer"
        )
    rows = np.unique(np.linspace(tokens // 2, tokens - 1, _ROWS).astype(np.int64))

    program = model_program(config, checkpoint)
    layers = _read(program, checkpoint, config, piece, rows, on_progress)
    heads = [
        head
        for layer in track(layers, len(layers), "weights of keys", on_progress)
        for head in _heads(layer, rows, checkpoint, config.kv_format)
    ]
    return AttentionProfile(
        model=model,
        name=checkpoint.spec.name,
        tokens=tokens,
        rows=len(rows),
        context=float(rows.mean() + 1),
        kv_dtype=config.kv_format,
        heads=heads,
    )


class _Layer(NamedTuple):
    op: Attention
    queries: Floats  # [measured rows, heads * numbers]
    keys: Floats  # [tokens, KV heads * numbers]


def _read(
    program: Program,
    checkpoint: Checkpoint,
    config: EngineConfig,
    piece: Sequence[int],
    rows: NDArray[np.int64],
    on_progress: ProgressCallback,
) -> list[_Layer]:
    """The queries of the measured rows and all keys, by layer, before keys are rounded."""
    attention = [op for op in program.ops if isinstance(op, Attention)]
    writes = {op.layer: op for op in program.ops if isinstance(op, KvWrite)}
    blocks, groups = num_blocks(len(piece)), len(program.kv_groups)
    executable = cpu.CpuExecutable(
        program,
        checkpoint.tensors,
        KvConfig((blocks,) * groups, dtype=config.kv_format),
        config.threads or usable_cores(),
        "",
        lower=cpu.lower_unfused,
        kept=frozenset(v.id for op in attention for v in (op.q, writes[op.layer].k)),
        activations=config.activations,
    )
    queries: dict[int, list[Floats]] = {op.layer: [] for op in attention}
    keys: dict[int, list[Floats]] = {op.layer: [] for op in attention}
    firsts = range(0, len(piece), _CHUNK)
    try:
        for first in track(firsts, len(firsts), "text", on_progress):
            end = min(first + _CHUNK, len(piece))
            batch = sequence_batch(piece, first, end, 1, blocks, groups)
            executable.run(batch, batch.tokens)
            measured = rows[(rows >= first) & (rows < end)] - first
            for op in attention:
                q = executable.value(op.q.id, end - first)[measured]
                queries[op.layer].append(q)
                k = executable.value(writes[op.layer].k.id, end - first)
                keys[op.layer].append(k.copy())
    finally:
        executable.close()
    return [
        _Layer(op, np.concatenate(queries[op.layer]), np.concatenate(keys[op.layer]))
        for op in attention
    ]


def _heads(
    layer: _Layer, rows: NDArray[np.int64], checkpoint: Checkpoint, kv_dtype: Any
) -> Iterator[HeadAttention]:
    op = layer.op
    num_tokens, share = len(layer.keys), op.num_heads // op.num_kv_heads
    queries = layer.queries.reshape(len(rows), op.num_heads, op.head_dim)
    keys = round_trip(
        layer.keys.reshape(num_tokens, op.num_kv_heads, op.head_dim).astype(np.float64),
        key_format(kv_dtype),
    )
    biases = None
    if op.key_bias:
        stored = checkpoint.tensors[op.key_bias.name].dequantise()
        biases = rotated_key_biases(op, stored.astype(np.float64), num_tokens)
    positions = np.arange(num_tokens)
    distance = rows[:, None] - positions
    visible = distance >= 0
    if op.window:
        visible &= (distance < op.window) | (positions < op.num_sink_tokens)

    for head in range(op.num_heads):
        q, k = queries[:, head].astype(np.float64), keys[:, head // share]
        products = q @ k.T
        bounds = _block_bounds(q, k, is_rotated(kv_dtype), op.head_dim)
        if biases is not None:
            added = q @ biases[:, head // share].T
            products += added
            bounds += _by_block(added).max(axis=2)
        slope = op.slopes[head] if op.slopes else 0.0
        scores = _scores(op, products) - slope * distance
        last_keys = BLOCK_SIZE * np.arange(1, 1 + bounds.shape[1]) - 1
        bounds = _scores(op, bounds) - slope * (rows[:, None] - last_keys)
        yield head_attention(op.layer, head, scores, bounds, visible)


def _scores(op: Attention, products: NDArray[np.float64]) -> NDArray[np.float64]:
    scores = products * op.scale
    return op.softcap * np.tanh(scores / op.softcap) if op.softcap else scores


def _by_block(x: NDArray[Any]) -> NDArray[Any]:
    """[rows, blocks, tokens of a block], without the last tokens that fill no block."""
    blocks = x.shape[1] // BLOCK_SIZE
    return x[:, : blocks * BLOCK_SIZE].reshape(len(x), blocks, BLOCK_SIZE)


def _block_bounds(
    q: NDArray[np.float64], k: NDArray[np.float64], rotated: bool, head_dim: int
) -> NDArray[np.float64]:
    """The highest products that keys within the bounds of each block can have."""
    if rotated:
        q, k = q @ hadamard(head_dim), k @ hadamard(head_dim)
    blocks = len(k) // BLOCK_SIZE
    by_block = k[: blocks * BLOCK_SIZE].reshape(blocks, BLOCK_SIZE, head_dim)
    bounds: NDArray[np.float64] = (
        np.maximum(q, 0) @ by_block.max(axis=1).T + np.minimum(q, 0) @ by_block.min(axis=1).T
    )
    return bounds


def head_attention(
    layer: int,
    head: int,
    scores: NDArray[np.float64],
    bounds: NDArray[np.float64],
    visible: NDArray[np.bool],
) -> HeadAttention:
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=1, keepdims=True)
    below = (scores - top).astype(np.float32)
    weights = np.exp(below)
    is_zero = visible & (below < _UNDERFLOW)
    sums = -np.sort(-weights, axis=1).cumsum(axis=1, dtype=np.float64)
    keys = [1 + (sums < share * sums[:, -1:]).sum(axis=1).mean() for share in SHARES]
    full = _by_block(visible).all(axis=2)
    zero_blocks = full & _by_block(is_zero).all(axis=2)
    bounded_blocks = full & ((bounds - top).astype(np.float32) < _UNDERFLOW)
    return HeadAttention(
        layer=layer,
        head=head,
        keys=tuple(map(float, keys)),
        zero_keys=float(is_zero.sum() / visible.sum()),
        zero_blocks=float(zero_blocks.sum() / max(1, full.sum())),
        bounded_blocks=float(bounded_blocks.sum() / max(1, full.sum())),
    )


def by_layer(profile: AttentionProfile) -> Mapping[int, list[HeadAttention]]:
    layers: dict[int, list[HeadAttention]] = {}
    for head in profile.heads:
        layers.setdefault(head.layer, []).append(head)
    return layers
