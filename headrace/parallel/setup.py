"""The JSON message with which rank 0 sets up another rank."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config import EngineConfig, KeyRounding, KvConfig
from headrace.parallel.rank import RankConfig


def setup_of(
    model: str, config: EngineConfig, rank: RankConfig, taps: Sequence[int]
) -> dict[str, Any]:
    """Return the message. `taps` are the layers before which a drafter takes rows."""
    return {
        "model": model,
        "config": {field.name: getattr(config, field.name) for field in fields(config)},
        "rank": rank.rank,
        "kv": (rank.kv.num_blocks, rank.kv.block_size, rank.kv.dtype),
        "key_rounding": [
            (each.layer, _array_text(each.centre), _array_text(each.feedback))
            for each in rank.kv.key_rounding
        ],
        "threads": rank.threads,
        "taps": list(taps),
    }


def kv_config_of(setup: dict[str, Any]) -> KvConfig:
    num_blocks, block_size, dtype = setup["kv"]
    rounding = (
        KeyRounding(layer, _array_of(*centre), _array_of(*feedback))
        for layer, centre, feedback in setup["key_rounding"]
    )
    return KvConfig(tuple(num_blocks), block_size, dtype, tuple(rounding))


def _array_text(array: NDArray[np.float32]) -> tuple[tuple[int, ...], str]:
    return array.shape, b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _array_of(shape: Sequence[int], text: str) -> NDArray[np.float32]:
    return np.frombuffer(b64decode(text), np.float32).reshape(shape)
