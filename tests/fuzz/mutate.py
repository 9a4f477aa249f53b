"""Changes to valid input: to bytes, and to JSON values that parsers may not expect."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

_INTERESTING = [
    0,
    1,
    7,
    8,
    9,
    0x0A,
    0x22,
    0x2C,
    0x39,
    0x5B,
    0x5D,
    0x7B,
    0x7D,
    0x7F,
    0x80,
    0xE2,
    0xFF,
]
_NUMBERS = [
    0,
    1,
    2,
    31,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 32,
    2**64 - 1,
]

_SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1000, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30,
    10**400,
    -(2**63), 0.0, -0.5, 1.5, 1e-300,
    1e30, 1e300, float("nan"), float("inf"), float("-inf"), "", " ", "a", "0", "-1", "default",
    "\0", "\ud800", "é€😀", "../x",
    "/etc/passwd",
    "llama", "{{ x }}", "a" * 100, "a" * 100_000, [], {}, [[]], [None], {"": None},
    {"type": "BPE"}, [1, 2, 3], ["a", "b"],
]  # fmt: skip
_MORE = 40
"""Copies of a repeated value."""


def mutate_bytes(
    rng: random.Random, content: bytes, header: int | None = None, most: int = 4
) -> bytes:
    """Change bits, bytes, integers or pieces, or truncate; nine of ten changes are
    before `header`.
    """
    result = bytearray(content)
    for _ in range(rng.randint(1, most)):
        if not result:
            break
        at = rng.randrange(
            min(header, len(result)) if header and rng.random() < 0.9 else len(result)
        )
        match rng.randrange(9):
            case 0 | 1:
                result[at] ^= 1 << rng.randrange(8)
            case 2 | 3:
                result[at] = rng.choice([*_INTERESTING, rng.randrange(256)])
            case 4:
                size = rng.choice([2, 4, 8])
                result[at : at + size] = (rng.choice(_NUMBERS) % 256**size).to_bytes(size, "little")
            case 5:
                del result[at : at + rng.choice([1, 4, 8, rng.randint(1, 200)])]
            case 6:
                start = rng.randrange(len(result))
                result[at:at] = result[start : start + rng.choice([1, 4, 8, rng.randint(1, 200)])]
            case 7:
                start, size = rng.randrange(len(result)), rng.randint(1, 64)
                result[at : at + size] = result[start : start + size]
            case _:
                if rng.random() < 0.3:
                    del result[at:]
    return bytes(result)


def mutate_json(
    rng: random.Random, value: Any, extra: list[Any] | None = None, most: int = 3
) -> bytes:
    """Replace, double, rename or drop parts of the value, sometimes repeat keys or
    damage the text; `extra` has further hostile values.
    """
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, most)):
        value = _change(rng, value, [*_SCALARS, *(extra or [])])
    text = json.dumps(value)
    if rng.random() < 0.05:
        text = text.replace("{", '{"type": 1, "model": {}, ', 1)
    if rng.random() < 0.02:
        text = text.replace("null", "[" * rng.choice([50, 500, 100_000]), 1)
    content = text.encode()
    return mutate_bytes(rng, content) if rng.random() < 0.1 else content


def _change(rng: random.Random, value: Any, hostile: list[Any]) -> Any:
    places = list(_places(value))
    if not places or rng.random() < 0.01:
        return deepcopy(rng.choice(hostile))
    parent, key = rng.choice(places)
    match rng.randrange(10):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice(["", "a", "type", "content", "\ud800", key * 2])] = parent.pop(key)
        case 1:
            parent[key:key] = [deepcopy(parent[key]) for _ in range(rng.choice([1, _MORE]))]
        case 2:
            other, its = rng.choice(places)
            parent[key] = deepcopy(other[its])
        case 3 if isinstance(parent[key], str):
            parent[key] = _change_text(rng, parent[key])
        case 4 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            number = parent[key]
            half = number + 0.5 if abs(number) < 2**53 else 0.5
            parent[key] = rng.choice(
                [number + 1, number - 1, -number, number * 2, half, str(number)]
            )
        case 5:
            parent[key] = [deepcopy(parent[key]) for _ in range(rng.choice([1, 2, _MORE]))]
        case 6 if isinstance(parent, list):
            rng.shuffle(parent)
        case _:
            parent[key] = deepcopy(rng.choice(hostile))
    return value


def _change_text(rng: random.Random, text: str) -> str:
    at, piece = rng.randint(0, len(text)), rng.choice(["", "\0", "é", "{{", "*", "(", "%}", " "])
    return rng.choice([text[:at], text[at:], text[:at] + piece + text[at:], text * 2, text[::-1]])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `value` with each of its keys or indices; only some of long
    lists.
    """
    stack = [value]
    while stack:
        node = stack.pop()
        keys: Any = (
            list(node)
            if isinstance(node, dict)
            else range(min(len(node), 20))
            if isinstance(node, list)
            else ()
        )
        for key in keys:
            yield node, key
            if isinstance(node[key], dict | list):
                stack.append(node[key])
