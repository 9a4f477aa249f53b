"""The JSON message with which rank 0 sets up another rank."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from headrace.config import EngineConfig, KvConfig
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
        "threads": rank.threads,
        "taps": list(taps),
    }


def kv_config_of(setup: dict[str, Any]) -> KvConfig:
    num_blocks, block_size, dtype = setup["kv"]
    return KvConfig(tuple(num_blocks), block_size, dtype)
