"""Measures how the int4 keys of a model are rounded, and keeps the result with the models."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from headrace.backend.cpu import executable as cpu
from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.source import cache_folder
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KeyRounding, KvConfig
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.model import trace_model
from headrace.planner.host import usable_cores
from headrace.program.ops import Attention, KvWrite
from headrace.quant.key_rounding import key_rounding
from headrace.whole_file import replace_file

_log = logging.getLogger("headrace.loader")
_TOKENS = 1024
_CHUNK = 256
_VERSION = 1
"""Of the measurement and of the file."""


def with_key_rounding(
    kv: KvConfig,
    config: EngineConfig,
    checkpoint: Checkpoint,
    load_tokenizer: Callable[[], Tokenizer],
) -> KvConfig:
    """Add the rounding of int4 keys, which depends on the model alone.

    The first call for a model runs 1,024 tokens of a text, and keeps what it measured in the
    folder of downloaded models. Formats other than int4 stay as they are.
    """
    return replace(kv, key_rounding=key_rounding_of(config, checkpoint, load_tokenizer))


def key_rounding_of(
    config: EngineConfig,
    checkpoint: Checkpoint,
    load_tokenizer: Callable[[], Tokenizer] | None = None,
) -> tuple[KeyRounding, ...]:
    """The rounding of int4 keys; none for other formats."""
    if config.kv_format != "int4":
        return ()
    tokenizer = (load_tokenizer or checkpoint.load_tokenizer)()
    text = files("headrace.loader").joinpath("key_text.txt").read_text(encoding="utf-8")
    key = _key(checkpoint, tokenizer, config, text)
    path = cache_folder() / "key_rounding" / f"{key}.npz"
    rounding = _read(path)
    if rounding is None:
        tokens = [*tokenizer.prefix_ids, *tokenizer.encode(text, add_special=False)]
        rounding = _measure(checkpoint, config, tokens[: min(_TOKENS, checkpoint.spec.max_context)])
        _keep(path, rounding)
    return rounding


def _key(checkpoint: Checkpoint, tokenizer: Tokenizer, config: EngineConfig, text: str) -> str:
    parts = (_VERSION, cpu.instructions(), config.activations, text)
    digest = blake2b(repr(parts).encode(), digest_size=16)
    digest.update(fingerprint(checkpoint, tokenizer).encode())
    return digest.hexdigest()


def rounding_digest(rounding: Sequence[KeyRounding]) -> str:
    """Hash roundings: equal ones make equal keys of equal numbers."""
    digest = blake2b(digest_size=16)
    for each in rounding:
        digest.update(f"{each.layer} {each.feedback.shape}".encode())
        digest.update(np.ascontiguousarray(each.centre).tobytes())
        digest.update(np.ascontiguousarray(each.feedback).tobytes())
    return digest.hexdigest()


def _measure(
    checkpoint: Checkpoint, config: EngineConfig, tokens: Sequence[int]
) -> tuple[KeyRounding, ...]:
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    attention = [op for op in program.ops if isinstance(op, Attention) and not op.is_latent]
    if not attention:
        return ()
    _log.warning(
        "the first start with int4 KV runs %d tokens to measure the keys; later starts read the "
        "result",
        len(tokens),
    )
    writes = {op.layer: op for op in program.ops if isinstance(op, KvWrite)}
    blocks, groups = num_blocks(len(tokens)), len(program.kv_groups)
    executable = cpu.CpuExecutable(
        program,
        checkpoint.tensors,
        KvConfig((blocks,) * groups),
        config.threads or usable_cores(),
        cpu.instructions(),
        lower=cpu.lower_unfused,
        kept=frozenset(v.id for op in attention for v in (op.q, writes[op.layer].k)),
        activations=config.activations,
    )
    sums = {op.layer: _Sums(op) for op in attention}
    try:
        executable.wait_for_weights()
        for first in range(0, len(tokens), _CHUNK):
            end = min(first + _CHUNK, len(tokens))
            batch = sequence_batch(tokens, first, end, 1, blocks, groups)
            executable.run(batch, batch.tokens)
            for op in attention:
                q = executable.value(op.q.id, end - first)
                sums[op.layer].add(q, executable.value(writes[op.layer].k.id, end - first))
    finally:
        executable.close()
    found = (each.rounding(len(tokens)) for each in sums.values())
    return tuple(rounding for rounding in found if rounding)


class _Sums:
    """Sums over the rows of a text, for the keys of a layer."""

    def __init__(self, op: Attention) -> None:
        self._op = op
        self._queries = np.zeros((op.num_kv_heads, op.head_dim, op.head_dim))
        self._keys = np.zeros((op.num_kv_heads, op.head_dim))

    def add(self, q: NDArray[Any], k: NDArray[Any]) -> None:
        op = self._op
        queries = q.reshape(len(q), op.num_kv_heads, -1, op.head_dim).astype(np.float64)
        for head in range(op.num_kv_heads):
            rows = queries[:, head].reshape(-1, op.head_dim)
            self._queries[head] += rows.T @ rows
        self._keys += k.reshape(len(k), op.num_kv_heads, op.head_dim).sum(axis=0, dtype=np.float64)

    def rounding(self, rows: int) -> KeyRounding | None:
        op = self._op
        # Soft caps and sinks compare scores with constants: the same may not be added to all.
        may_shift = not op.softcap and op.sinks is None
        centre = self._keys / rows if may_shift else np.zeros_like(self._keys)
        return key_rounding(op.layer, self._queries / rows, centre)


def _read(path: Path) -> tuple[KeyRounding, ...] | None:
    """None for a file that is missing or damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return tuple(
                KeyRounding(int(layer), arrays[f"centre{layer}"], arrays[f"feedback{layer}"])
                for layer in arrays["layers"]
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def _keep(path: Path, rounding: Sequence[KeyRounding]) -> None:
    """Write the file if the folder can be written."""
    from io import BytesIO

    arrays: dict[str, NDArray[Any]] = {"layers": np.array([each.layer for each in rounding])}
    for each in rounding:
        arrays[f"centre{each.layer}"] = each.centre
        arrays[f"feedback{each.layer}"] = each.feedback
    content = BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())
    except OSError as error:
        _log.info("%s: %s; the next start measures the keys again", path, error.strerror)
