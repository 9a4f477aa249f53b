from headrace.errors import UnsupportedModelError
from headrace.program.collective import Columns

TILE_ROWS = 16
"""A tile of the packed formats stays on one rank."""


def split_evenly(total: int, ranks: int, unit: int = 1) -> tuple[Columns, ...]:
    """Split into adjacent parts of whole units; smaller parts come first."""
    units = -(-total // unit)
    ends = [min(total, unit * (units * (rank + 1) // ranks)) for rank in range(ranks)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def scaled(parts: tuple[Columns, ...], size: int) -> tuple[Columns, ...]:
    return tuple((first * size, last * size) for first, last in parts)


def kv_head_parts(num_kv_heads: int, ranks: int) -> tuple[Columns, ...]:
    """Ranks share a head if there are too few."""
    if ranks <= num_kv_heads:
        return split_evenly(num_kv_heads, ranks)
    heads = [rank * num_kv_heads // ranks for rank in range(ranks)]
    return tuple((head, head + 1) for head in heads)


def query_head_parts(num_heads: int, num_kv_heads: int, ranks: int) -> tuple[Columns, ...]:
    """Return the query heads of each rank.

    Raises UnsupportedModelError if there are fewer heads than ranks.
    """
    if num_heads < ranks:
        raise UnsupportedModelError(
            f"{ranks} ranks cannot share {num_heads} attention heads; use at most {num_heads} ranks"
        )
    group_size = num_heads // num_kv_heads
    kv_parts = kv_head_parts(num_kv_heads, ranks)
    if ranks <= num_kv_heads:
        return scaled(kv_parts, group_size)

    parts = []
    for rank, (head, _) in enumerate(kv_parts):
        sharers = [other for other, (first, _) in enumerate(kv_parts) if first == head]
        first, last = split_evenly(group_size, len(sharers))[sharers.index(rank)]
        parts.append((head * group_size + first, head * group_size + last))
    return tuple(parts)
