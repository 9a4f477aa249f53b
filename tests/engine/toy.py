"""A toy model with real bookkeeping: an executable whose KV is a dictionary, and plain decoding in
a loop.

A slot stores a hash of all tokens up to its own, computed from the hash of the slot before it, as
KV is. The logits follow from the hash of their row. So one wrong token, position or slot changes
everything after it, in any KV group.
"""

import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.batch import Ints, RaggedBatch
from headrace.checkpoint.adapter_digest import adapter_digest
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.kv.blocks import NULL_BLOCK
from headrace.kv.disk import DiskTier
from headrace.kv.folder import KvFolder
from headrace.kv.host import HostTier
from headrace.kv.manager import KvManager, Tables
from headrace.logit_ops import Done, LogitOp, LogitOpResult, StepResult
from headrace.program.kv import KvGroup, KvLayout
from headrace.proposer import Proposer
from headrace.request import Pooling
from headrace.sampling.host import run_logit_ops, tokens_of
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import make_proposers
from tests.late import LateExecutable
from tests.sampling.sampler_twin import SamplerTwin
from tests.tiny import TinyVocabulary

VOCAB = 23
TOY_DIM = 5
"""Numbers of a hidden row."""
FULL = (0,)
"""The windows of a model with one group of layers, which see everything."""


def toy_logits(tokens: list[int]) -> NDArray[np.float32]:
    return _logits_of(zlib.crc32(bytes(tokens)))


def _logits_of(text: int) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = np.random.default_rng(text).normal(0, 2, VOCAB).astype(np.float32)
    return logits


def toy_hidden(text: int) -> NDArray[np.float32]:
    """The hidden row after tokens with this hash."""
    hidden: NDArray[np.float32] = (
        np.random.default_rng([text, 1]).normal(0, 2, TOY_DIM).astype(np.float32)
    )
    return hidden


def toy_vector(tokens: list[int], pooling: Pooling) -> NDArray[np.float32]:
    """Embed a prompt without an engine."""
    rows = [toy_hidden(zlib.crc32(bytes(tokens[: end + 1]))) for end in range(len(tokens))]
    pooled = {"last": rows[-1:], "mean": rows, "cls": rows[:1]}[pooling]
    vector: NDArray[np.float32] = (
        sum(row.astype(np.float64) for row in pooled) / len(pooled)
    ).astype(np.float32)
    return vector


def hash_after(text: int, token: int) -> int:
    """Hash of some tokens and one more, from the hash of the former; 0 for no tokens."""
    return zlib.crc32(bytes([token]), text)


def toy_groups(windows: tuple[int, ...], sinks: int = 0) -> tuple[KvGroup, ...]:
    """A KV group of one layer for each window, with sinks."""
    return tuple(
        KvGroup((layer,), KvLayout(1, 2, 2), window, sinks if window else 0)
        for layer, window in enumerate(windows)
    )


def toy_kv(
    num_blocks: int,
    block_size: int,
    windows: tuple[int, ...] = FULL,
    max_rows: int = 512,
    sinks: int = 0,
    host: HostTier | None = None,
) -> KvManager:
    """A KV manager with `num_blocks` blocks in each group."""
    return KvManager(
        toy_groups(windows, sinks),
        KvConfig((num_blocks,) * len(windows), block_size),
        max_rows,
        host,
    )


class Kept(NamedTuple):
    """The content of a slot."""

    position: int
    text: int
    """Hash of all tokens up to its own."""
    is_broken: bool


class ToyHostBlocks:
    """Host copies of the dictionary's blocks, of one byte each."""

    block_seconds = 0.0

    def __init__(self, kv: list[dict[int, Kept]], block_size: int, num_blocks: int) -> None:
        self.num_blocks, self.block_bytes = (num_blocks,) * len(kv), (1,) * len(kv)
        self._kv, self._size = kv, block_size
        self._copies: dict[tuple[int, int], list[Kept]] = {}

    def save(self, group: int, block: int, host_block: int) -> None:
        self._copies[group, host_block] = [self._kv[group][slot] for slot in self._slots(block)]

    def load(self, group: int, host_block: int, block: int) -> None:
        self._kv[group] |= zip(self._slots(block), self._copies[group, host_block], strict=True)

    def _slots(self, block: int) -> range:
        return range(block * self._size, (block + 1) * self._size)


class ToyKvBlocks:
    """The dictionary's blocks as bytes, which no other thread may write while one copies."""

    _SLOT = struct.Struct("<qI?")

    def __init__(self, kv: list[dict[int, Kept]], block_size: int) -> None:
        self.block_bytes = (block_size * self._SLOT.size,) * len(kv)
        self._kv, self._size = kv, block_size

    def read(self, group: int, block: int, to: NDArray[np.uint8]) -> None:
        slots = range(block * self._size, (block + 1) * self._size)
        content = b"".join(self._SLOT.pack(*self._kv[group][slot]) for slot in slots)
        to[:] = np.frombuffer(content, np.uint8)

    def write(self, group: int, block: int, source: NDArray[np.uint8]) -> None:
        for i, values in enumerate(self._SLOT.iter_unpack(source.tobytes())):
            self._kv[group][block * self._size + i] = Kept(*values)


class ToyExecutable:
    """Checks every batch while it runs it. A window must cover at least the token before."""

    max_in_flight = 1

    def __init__(
        self,
        block_size: int,
        broken: int = -1,
        threads: int = 2,
        windows: tuple[int, ...] = FULL,
        sinks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.sinks = sinks
        self.windows = windows
        self._pool = _native.Pool(threads)
        self._values: list[LogitOpResult] = []
        self.broken = broken
        """A token that gives NaN wherever a row sees it."""
        self.kv: list[dict[int, Kept]] = [{} for _ in windows]  # of each group, by slot
        self.largest = (0, 0, 0)  # most rows, logit rows and sequences in a step
        self.closed = False

    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        pass

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> Done:
        rows, pooled = self.forward(batch._replace(tokens=tokens_of(batch, self._values)))
        self._values = run_logit_ops(ops, rows, pooled, self._pool)
        return Done(StepResult(self._values, rows if logits else None))

    def expert_loads(self) -> NDArray[np.int64]:
        return np.zeros((0, 0), np.int64)

    def forward(
        self, batch: RaggedBatch
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # [logit rows, vocab], [pooled rows, dim]
        assert len(batch.kv) == len(self.windows)
        assert all(len(set(group.slots.tolist())) == len(batch.tokens) for group in batch.kv), (
            "two rows write one slot"
        )
        assert list(batch.logit_rows) == sorted(set(batch.logit_rows.tolist()))
        sizes = (len(batch.tokens), len(batch.logit_rows), len(batch.scheduled_len))
        self.largest = tuple(map(max, self.largest, sizes))
        texts = [
            self._write(batch, seq, row)
            for seq in range(len(batch.scheduled_len))
            for row in range(*batch.row_start[seq : seq + 2])
        ]
        rows = [self._logits(texts[row]) for row in batch.logit_rows]
        pooled = [
            self._hidden(texts[row])
            for row in (() if batch.pooled_rows is None else batch.pooled_rows)
        ]
        return np.array(rows, np.float32).reshape(-1, VOCAB), np.array(pooled, np.float32).reshape(
            -1, TOY_DIM
        )

    def _write(self, batch: RaggedBatch, seq: int, row: int) -> Kept:
        """Return the content of a row's slot, from the slots it sees, which must agree between
        groups.
        """
        seen = self._seen(batch, seq, row)
        assert batch.positions[row] == len(seen), "a row has a wrong position"
        found = set()
        for window, group, kv in zip(self.windows, batch.kv, self.kv, strict=True):
            table = group.block_table[seq]
            before = max(0, len(seen) + 1 - window) if window else 0
            places = seen[: min(before, self.sinks)] + seen[before:]
            visible = [
                kv[int(table[i // self.block_size]) * self.block_size + i % self.block_size]
                for i in places
            ]
            assert [kept.position for kept in visible] == [
                *range(min(before, self.sinks)),
                *range(before, len(seen)),
            ], "wrong positions"
            found.add(visible[-1] if visible else Kept(-1, 0, False))
        (before,) = found
        token = int(batch.tokens[row])
        kept = Kept(
            len(seen), hash_after(before.text, token), before.is_broken or token == self.broken
        )
        for group, kv in zip(batch.kv, self.kv, strict=True):
            kv[int(group.slots[row])] = kept
        return kept

    def _seen(self, batch: RaggedBatch, seq: int, row: int) -> list[int]:
        """Return the indices of the slots that a row sees."""
        start, context, num_scheduled = (
            batch.row_start[seq],
            int(batch.context_len[seq]),
            int(batch.scheduled_len[seq]),
        )
        local = int(row - start)
        seen = list(range(context + min(local, num_scheduled)))
        if local > num_scheduled:
            nodes = range(local - num_scheduled)
            if batch.ancestors is not None:
                nodes = [n for n in nodes if int(batch.ancestors[row, n // 64]) >> n % 64 & 1]
            seen += [context + num_scheduled + node for node in nodes]
        return seen

    def _logits(self, kept: Kept) -> NDArray[np.float32]:
        return np.full(VOCAB, np.nan, np.float32) if kept.is_broken else _logits_of(kept.text)

    def _hidden(self, kept: Kept) -> NDArray[np.float32]:
        return np.full(TOY_DIM, np.nan, np.float32) if kept.is_broken else toy_hidden(kept.text)

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            self.kv[group][t] = self.kv[group].get(s, Kept(-1, 0, False))

    def host_blocks(self, num_bytes: int) -> ToyHostBlocks:
        return ToyHostBlocks(self.kv, self.block_size, num_bytes)

    def kv_blocks(self) -> ToyKvBlocks:
        return ToyKvBlocks(self.kv, self.block_size)

    def check(self, kv: KvManager, tables: Tables, tokens: list[int]) -> None:
        """Assert that the held slots of a sequence contain these tokens."""
        for pool, table, kept in zip(kv.pools, tables, self.kv, strict=True):
            for i in [i for i in range(len(tokens)) if table[i // self.block_size] != NULL_BLOCK]:
                assert kept[pool.slot(table, i)][:2] == (i, zlib.crc32(bytes(tokens[: i + 1])))

    def close(self) -> None:
        self.closed = True


def toy_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 40,
    broken: int = -1,
    threads: int = 2,
    attention_crossover: float = math.inf,
    proposer: Proposer | Mapping[str, Proposer] | None = None,
    windows: tuple[int, ...] = FULL,
    sinks: int = 0,
    clock: Callable[[], float] = perf_counter,
    late: bool = False,
    folder: Path | None = None,
    max_bytes: int = 1 << 30,
    **config: Any,
) -> Engine:
    """`folder`, of at most `max_bytes`, keeps the blocks of the prefix cache."""
    kv = KvConfig((num_blocks,) * len(windows), block_size)
    limits = EngineLimits(
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        kv=kv,
        kv_groups=toy_groups(windows, sinks),
        attention_crossover=attention_crossover,
    )
    defaults: dict[str, Any] = {
        "multi_step_ms": 0,
        "adaptive_speculation": False,
        "max_draft_tokens": 128,
    }
    options = EngineConfig(**defaults | config)
    proposers = (
        proposer
        if isinstance(proposer, Mapping)
        else {"test": proposer}
        if proposer
        else make_proposers(options)
    )
    toy = ToyExecutable(block_size, broken, threads, windows, sinks)
    return Engine(
        LateExecutable(toy) if late else toy,
        TinyVocabulary(VOCAB),
        limits,
        options,
        proposers,
        clock=clock,
        disk=toy_disk(toy, folder, max_bytes) if folder else None,
    )


def toy_disk(toy: ToyExecutable, folder: Path, max_bytes: int = 1 << 30) -> DiskTier:
    shape = f"{toy.windows} {toy.sinks} {toy.block_size}"
    model = blake2b(shape.encode(), digest_size=16).digest()
    files = KvFolder(folder, model, {"model": shape}, max_bytes)
    # Reading takes no time: a row of the toy takes less than a file.
    return DiskTier(files, toy.kv_blocks(), toy.block_size, adapter_digest, clock=lambda: 0.0)


def plain_decoding(
    prompt: list[int], params: SamplingParams, index: int, max_model_len: int = 40
) -> list[int]:
    """Prompt and output of one sequence, token by token, with the sampler's twin; only the length
    stops it.
    """
    sampler = SamplerTwin(
        VOCAB,
        prompt,
        seq_index=index,
        seed=params.seed or 0,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
    )
    known = list(prompt)
    while len(known) < min(max_model_len, len(prompt) + (params.max_tokens or max_model_len)):
        known.append(sampler.draw(toy_logits(known), len(known)))
    return known
