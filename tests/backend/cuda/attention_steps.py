"""Attention layers alone, on the GPU backend and on the reference: random rows, and their
results.

A row's query, key and value depend only on its token. So rows of one token after the same
tokens are equal in any batch.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backend.cuda.attention_tiles import Tiles, work_of
from headrace.backend.cuda.attention_work import (
    FIELDS,
    ROW_FIELDS,
    WorkArrays,
    build_work,
    min_partials,
)
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels.attention import (
    AttentionWork,
    Scratch,
    attention,
    summed_dim,
)
from headrace.backend.cuda.kernels.attention_bias import KeyBias
from headrace.backend.cuda.kernels.kv_write import kv_write
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.launch import Launch
from headrace.backend.reference.ops import Step
from headrace.backend_traits import KvDtype
from headrace.batch import RaggedBatch
from headrace.program.kv import KvGroup, KvLayout
from headrace.program.op import Value, Weight
from headrace.program.ops import Attention, KvWrite
from tests.backend.batches import Sequence, batch_of

VOCAB = 40
TILES = Tiles(rows=16, keys=16, split=32, programs=3, num_warps=4, num_stages=2, min_units=3)
"""As small as possible, so that contexts of a hundred tokens have several splits."""
TOLERANCE: dict[KvDtype, float] = {
    "f32": 1e-5,
    "f16": 0.002,
    "bf16": 0.01,
    "fp8": 0.01,
    "int8": 0.01,
}
"""Relative to the norm of results: except in float32 stores, queries and key weights are
rounded to bf16.
"""


class Layer(NamedTuple):
    """A layer of attention."""

    kv_heads: int = 1
    share: int = 1
    key_dim: int = 16
    value_dim: int = 16
    latent: bool = False
    scale: float = 0.3
    window: int = 0
    softcap: float = 0.0
    sloped: bool = False
    has_sinks: bool = False
    num_sink_tokens: int = 0
    has_key_bias: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.share


def op_of(layer: Layer) -> Attention:
    slopes = (
        tuple(2.0 ** -(1 + 8 * head / layer.heads) for head in range(layer.heads))
        if layer.sloped
        else ()
    )
    frequencies = tuple(0.7**pair for pair in range(layer.key_dim // 2 - 1))
    bias = Weight("key_bias", 1, layer.kv_heads * layer.key_dim, 0)
    return Attention(
        Value(4, layer.heads * layer.value_dim, "step"),
        Value(3, layer.heads * layer.key_dim, "step"),
        0,
        layer.heads,
        layer.kv_heads,
        layer.key_dim,
        layer.value_dim,
        layer.scale,
        layer.window,
        layer.softcap,
        slopes,
        Weight("sinks", 1, layer.heads, 0) if layer.has_sinks else None,
        layer.latent,
        layer.num_sink_tokens if layer.window else 0,
        bias if layer.has_key_bias else None,
        frequencies,
        1.2,
    )


def on_device(x: Any, dtype: Any = torch.float32) -> Any:
    return torch.tensor(np.asarray(x), dtype=dtype, device=DEVICE)


class Rows(NamedTuple):
    """Per token, [VOCAB, width]."""

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32] | None

    @classmethod
    def random(cls, layer: Layer, seed: int) -> "Rows":
        rng = np.random.default_rng(seed)
        widths = (
            layer.heads * layer.key_dim,
            layer.kv_heads * layer.key_dim,
            layer.kv_heads * layer.value_dim,
        )
        q, k, v = (rng.standard_normal((VOCAB, width)).astype(np.float32) for width in widths)
        return cls(q, k, None if layer.latent else v)


class Device:
    """A layer on the GPU backend. Its store begins as NaN, which shows reads of unwritten
    rows.
    """

    def __init__(
        self,
        layer: Layer,
        rows: Rows,
        dtype: KvDtype,
        num_blocks: int,
        block_size: int,
        tiles: Tiles = TILES,
    ) -> None:
        self.op, self.rows, self.tiles = op_of(layer), rows, tiles
        group = KvGroup(
            (0,),
            KvLayout(layer.kv_heads, layer.key_dim, 0 if layer.latent else layer.value_dim),
            self.op.window,
        )
        self.store = KvStore(group, num_blocks, block_size, dtype)
        self.forget(slice(None))
        self.slopes = on_device(self.op.slopes) if self.op.slopes else None
        self.sinks = on_device(sinks_of(layer)) if self.op.sinks else None
        self.launches: list[Launch] = []  # of the last run
        self.key_bias: KeyBias | None = None
        if self.op.key_bias:
            self.key_bias = KeyBias.of(self.op, key_bias_of(layer), tiles.split)

    def forget(self, blocks: Any) -> None:
        """Fill blocks with NaN, or with the largest codes."""
        store = self.store
        for tensor in (store.keys, store.values, store.key_scales, store.value_scales):
            if tensor is not None:
                is_code = tensor.element_size() == 1
                (tensor.view(torch.uint8) if is_code else tensor)[:, blocks] = (
                    0x7F if is_code else np.nan
                )

    def run(
        self, batch: RaggedBatch, padding: int = 0, spare: int = 500, packed: bool = False
    ) -> NDArray[np.float32]:
        """Results of the rows of a step, [rows, heads * value_dim], before an equal
        number of padding rows.
        """
        op, num_rows = self.op, len(batch.tokens) + padding
        q, k, v = (
            None if x is None else on_device(np.pad(x[batch.tokens], ((0, padding), (0, 0))))
            for x in self.rows
        )
        slots = on_device(
            np.pad(batch.kv[0].slots, (0, padding), constant_values=self.store.padding_slot),
            torch.int32,
        )
        kv_write(k, v, slots, self.store, 0)()
        nodes = 0 if batch.ancestors is None else 64 * batch.ancestors.shape[1]
        partials = min_partials(num_rows, nodes, self.tiles.split) + spare
        work, table = (
            self._work(batch, num_rows, partials, num_rows * nodes),
            batch.kv[0].block_table,
        )
        assert work.table.numel() == table.size + 5
        scratch = self._scratch(partials, num_rows)
        out = torch.full(
            (num_rows, op.out.width),
            torch.nan,
            dtype=torch.bfloat16 if packed else torch.float32,
            device=DEVICE,
        )
        self.launches = attention(
            op,
            q,
            out,
            self.store,
            work,
            scratch,
            self.tiles,
            self.slopes,
            self.sinks,
            self.key_bias,
        )
        for launch in self.launches:
            launch()
        assert not scratch.arrivals.any()  # the next launch counts from 0
        result = out.float().cpu().numpy()
        assert not result[len(batch.tokens) :].any()
        return result[: len(batch.tokens)]

    def _work(self, batch: RaggedBatch, num_rows: int, partials: int, paths: int) -> AttentionWork:
        def full(
            *shape: int,
        ) -> NDArray[np.int32]:  # what is not written must not be read: it would be out of bounds
            return np.full(shape, 2**30, np.int32)

        arrays, table = (
            WorkArrays(full(partials, FIELDS), full(1), full(num_rows, ROW_FIELDS), full(paths)),
            batch.kv[0].block_table,
        )
        build_work(batch, work_of(self.op, self.tiles), 5, table.shape[1], arrays)
        flat = np.concatenate([np.full(5, 2**30), table.ravel()])
        return AttentionWork(
            *(
                on_device(x, torch.int32)
                for x in (arrays.items, arrays.num_items, arrays.rows, flat, arrays.paths)
            )
        )

    def _scratch(self, partials: int, num_rows: int) -> Scratch:
        sizes = (
            partials * self.op.num_heads * summed_dim(self.op, self.store),
            partials * self.op.num_heads * 2,
        )
        return Scratch(
            *(torch.full((size,), torch.nan, device=DEVICE) for size in sizes),
            torch.zeros(num_rows * self.op.num_heads, dtype=torch.int32, device=DEVICE),
            torch.empty(num_rows, self.op.q.width, device=DEVICE),
        )


class Truth:
    """The layer on the reference backend."""

    def __init__(
        self, layer: Layer, rows: Rows, dtype: KvDtype, num_blocks: int, block_size: int
    ) -> None:
        self.op, self.rows = op_of(layer), rows
        shape = (1, num_blocks * block_size, layer.kv_heads)
        store = SimpleNamespace(
            keys=np.zeros((*shape, layer.key_dim)), values=np.zeros((*shape, layer.value_dim))
        )
        self.executable: Any = SimpleNamespace(
            kv=SimpleNamespace(block_size=block_size, dtype=dtype),
            key_rounding={},
            places={0: (0, 0)},
            stores=[store],
            weights={
                "sinks": sinks_of(layer),
                "key_bias": key_bias_of(layer).astype(np.float64),
            },
        )

    def run(self, batch: RaggedBatch) -> NDArray[np.float64]:
        step = Step(self.executable, batch)
        width = self.rows.k.shape[1]
        k, v = (
            Value(1, width, "step"),
            None if self.rows.v is None else Value(2, self.rows.v.shape[1], "step"),
        )
        for value, rows in ((self.op.q, self.rows.q), (k, self.rows.k), (v, self.rows.v)):
            if value is not None and rows is not None:
                step.rows[value.id] = rows[batch.tokens].astype(np.float64)
        step.run(KvWrite(k, v, 0))
        step.run(self.op)
        return step.rows[self.op.out.id]


def sinks_of(layer: Layer) -> NDArray[np.float64]:
    return np.linspace(-1, 2, layer.heads)


def key_bias_of(layer: Layer) -> NDArray[np.float32]:  # [kv_heads * key_dim]
    """Biases of the first pair of each head, and of the last, which does not rotate."""
    bias = np.zeros((layer.kv_heads, layer.key_dim), np.float32)
    bias[:, :2], bias[:, -2:] = (3.0, -4.0), (2.0, 1.0)
    return bias.reshape(-1)


def shuffled_sequences(
    rng: np.random.Generator, number: int, blocks: int, block_size: int
) -> list[Sequence]:
    """Sequences of shuffled blocks; block 0 is unused."""
    order = 1 + rng.permutation(number * blocks)
    return [
        Sequence([int(block) for block in part], block_size)
        for part in np.array_split(order, number)
    ]


def random_steps(
    rng: np.random.Generator, sequences: list[Sequence], counts: list[int], nodes: int, steps: int
) -> Any:
    """Steps of all sequences: the known tokens, a choice of scheduled ones, and random
    trees.
    """
    for _ in range(steps):
        known, drafts = [], []
        for sequence in sequences:
            space = len(sequence.blocks) * sequence.block_size - sequence.computed
            known.append(
                rng.integers(0, VOCAB, max(1, min(int(rng.choice(counts)), space // 2))).tolist()
            )
            size = min(int(rng.integers(0, nodes + 1)), space - len(known[-1]))
            drafts.append(
                (
                    rng.integers(0, VOCAB, size).tolist(),
                    [int(rng.integers(max(-1, i - 3), i)) for i in range(size)],
                )
            )
        yield batch_of(sequences, known, drafts, nodes > 0), known, drafts
        for sequence, tokens in zip(sequences, known, strict=True):
            sequence.computed += len(tokens)
