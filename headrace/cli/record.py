"""Reads the record of an engine, which any program of the user may have written: every value is
checked before it is believed.
"""

import json
from collections.abc import Mapping
from typing import Any, get_type_hints

from headrace.engine.publish import MAX_BLOCKS, MAX_SEQUENCES, VERSION
from headrace.outputs import DraftStats
from headrace.stats import BlockMap, GroupMap, Holding, KvStats, SequenceStats, Stats

Record = dict[str, Any]
"""As `Engine` makes it, with `stats` a `Stats` and `map` a `BlockMap`; times are seconds since the
epoch.
"""

_MOST = 2**63
_POSITIVE = ("block_size", "block_bytes", "blocks_total", "num_blocks")
_SIGNED = ("seconds_saved",)


def parse_record(data: bytes) -> Record:
    """The record. Raises ValueError for what is none, of this version."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("it is too deep") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError("it is no record of this version")
    record: Record = {name: _value(name, kind, found.get(name)) for name, kind in _PLAIN.items()}
    record["config"] = _config(found.get("config"))
    record["stats"] = _stats(found.get("stats"))
    record["history"] = [_value("history", float, value) for value in _items(found.get("history"))]
    record["seqs"] = [
        _read(SequenceStats, line)._asdict() for line in _items(found.get("seqs"))[:MAX_SEQUENCES]
    ]
    return record | ({"map": _block_map(found["map"])} if "map" in found else {})


_PLAIN = {
    "version": int,
    "pid": int,
    "model": str,
    "started": float,
    "time": float,
    "sequences_left_off": int,
}
_CONFIG = {"max_num_seqs": int, "max_num_batched_tokens": int, "max_model_len": int}
"""Settings that are counted with; the others are shown as they are."""


def _config(found: object) -> Record:
    if not isinstance(found, dict):
        raise ValueError("config is no object")
    return found | {name: _value(name, kind, found.get(name)) for name, kind in _CONFIG.items()}


def _stats(found: object) -> Stats:
    if not isinstance(found, dict):
        raise ValueError("stats is no object")
    drafts = found.get("drafts")
    if not isinstance(drafts, dict):
        raise ValueError("drafts is no object")
    kv = [_read(KvStats, group) for group in _items(found.get("kv"))]
    if not kv:
        raise ValueError("kv is empty")
    read = {
        "kv": kv,
        "drafts": {name: _read(DraftStats, figures) for name, figures in drafts.items()},
    }
    loads = [
        [_value("expert_loads", int, load) for load in _items(own)]
        for own in _items(found.get("expert_loads", []))
    ]
    adapters = found.get("adapters", {})
    if not isinstance(adapters, dict):
        raise ValueError("adapters is no object")
    users = {str(name): _value("adapters", int, count) for name, count in adapters.items()}
    stats: Stats = _read(Stats, found | read | {"expert_loads": loads, "adapters": users})
    return stats


def _block_map(found: object) -> BlockMap:
    groups = []
    for values in _items(_named(BlockMap, found)["groups"]):
        group = _named(GroupMap, values)
        size = _value("num_blocks", int, group["num_blocks"])
        if size > MAX_BLOCKS:
            raise ValueError("too many blocks")
        holdings = []
        for values in _items(group["holdings"]):
            holding = _named(Holding, values)
            holdings.append(
                _read(Holding, holding | {"blocks": _blocks(holding["blocks"], -1, size)})
            )
        groups.append(
            _read(
                GroupMap,
                group | {"holdings": holdings, "cached": _blocks(group.get("cached", []), 0, size)},
            )
        )
    return BlockMap(_value("block_size", int, _named(BlockMap, found)["block_size"]), groups)


def _blocks(found: object, least: int, end: int) -> list[int]:
    blocks = _items(found)
    if not all(type(block) is int and least <= block < end for block in blocks):
        raise ValueError("a block is not in the pool")
    return blocks


def _read(cls: Any, found: object) -> Any:
    """A NamedTuple whose plain fields are checked; the others have been."""
    values = _named(cls, found)
    return cls(
        **{
            name: _value(name, kind, values[name])
            for name, kind in get_type_hints(cls).items()
            if name in values
        }
    )


def _named(cls: Any, found: object) -> dict[str, Any]:
    """The fields of a NamedTuple by name; JSON makes a list of one that is inside another
    record.
    """
    if isinstance(found, list | tuple) and len(found) <= len(cls._fields):
        found = dict(zip(cls._fields, found, strict=False))
    if (
        not isinstance(found, Mapping)
        or not set(cls._fields) - set(cls._field_defaults) <= found.keys()
    ):
        raise ValueError(f"no {cls.__name__}")
    return {name: found[name] for name in cls._fields if name in found}


def _value(name: str, kind: Any, value: Any) -> Any:
    """A number within bounds, or a text; anything of another kind is given back as it is, since it
    was read before.
    """
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    if kind in (int, float):
        least = 1 if name in _POSITIVE else -_MOST if name in _SIGNED else 0
        if type(value) not in (int, kind) or not least <= value <= _MOST:  # NaN is not
            raise ValueError(f"{name} is no number from {least} on")
    return value


def _items(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError("no list")
    return found
