"""Files of tuned tiles: one for each kind of GPU, written by `headrace tune`, read at load.

A file belongs to a GPU, to the sources of the kernels and to Triton's version. With others it is
a miss, and tiles are chosen by rule. Weights are keyed by shape and format, so a file serves all
models with these weights.
"""

import json
import logging
import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import triton

from headrace.backend.cuda.architecture import architecture
from headrace.backend.cuda.device import device_name
from headrace.backend.cuda.kernels.tiles import ROW_BUCKETS, Product, Tile, use_tiles
from headrace.errors import CacheError
from headrace.whole_file import replace_file

_log = logging.getLogger("headrace.loader")

_VERSION = 1
_MAX_BYTES = 16 << 20
SOURCES = (
    *("layout.py", "kernels/linear.py", "kernels/product.py", "kernels/code_pairs.py"),
    *("kernels/weight_format.py", "kernels/tiles.py", "kernels/activations.py"),
    "kernels/quantise_rows.py",
)
"""Files that decide what a product's kernel is, and which tiles suit it."""
_REMEDY = "tiles are chosen by rule; `headrace tune` writes the file again"


class TunedTile(NamedTuple):
    product: Product
    max_rows: int  # Of `ROW_BUCKETS`
    tile: Tile
    microseconds: float
    microseconds_before: float  # With the tile that the rule chooses


def tile_file(cache_folder: Path) -> Path:
    """The file of this process's GPU."""
    gpu = architecture()
    major, minor = gpu.capability
    name = re.sub(r"[^A-Za-z0-9]+", "-", device_name()).strip("-")
    return cache_folder / "tiles" / f"sm_{major}{minor}-{gpu.multiprocessors}-{name}.json"


def load_tiles(cache_folder: Path) -> None:
    """Let products take their tiles from this GPU's file, if there is one."""
    file = tile_file(cache_folder)
    tuned = read_tiles(file)
    use_tiles({(one.product, one.max_rows): one.tile for one in tuned})
    if tuned:
        _log.info("%d tuned tiles of products are from %s", len(tuned), file)


def read_tiles(file: Path) -> list[TunedTile]:
    """The tiles of a file; none if it is absent, for another GPU or other kernels.

    A malformed file is a warning in the log.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("%s cannot be read (%s); %s", file, error.strerror, _REMEDY)
        return []
    try:
        return _parse(file, text)
    except (ValueError, RecursionError) as error:  # also malformed JSON and UTF-8
        reason = str(error) or type(error).__name__
        _log.warning("%s is no table of tiles (%s); %s", file, reason[:200], _REMEDY)
        return []


def _parse(file: Path, text: bytes) -> list[TunedTile]:
    """The tiles of a file's text. Raises ValueError if it is malformed."""
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
    table = json.loads(text)
    if not isinstance(table, dict) or not isinstance(table.get("tiles"), list):
        raise ValueError("it has no list 'tiles'")
    for key, expected in _header().items():
        if table.get(key) != expected:
            _log.info("%s is for %s %r, not %r; %s", file, key, table.get(key), expected, _REMEDY)
            return []
    return [_tile_of(entry) for entry in table["tiles"]]


def _tile_of(entry: Any) -> TunedTile:
    if not isinstance(entry, dict):
        raise ValueError("an entry of 'tiles' is not an object")

    def field(name: str, *kinds: type) -> Any:
        value = entry.get(name)
        if type(value) not in kinds:  # a bool is an int as well
            raise ValueError(f"an entry of 'tiles' has {name} {value!r}")
        return value

    if entry.get("max_rows") not in ROW_BUCKETS:
        raise ValueError(f"an entry of 'tiles' has max_rows {entry.get('max_rows')!r}")
    product = Product(
        format=field("format", str),
        rows=field("rows", int),
        cols=field("cols", int),
        activations=field("activations", str),
    )
    tile = Tile(
        block_m=field("block_m", int),
        block_n=field("block_n", int),
        is_parallel=field("is_parallel", bool),
        unroll=field("unroll", int),
        num_warps=field("num_warps", int),
        num_stages=field("num_stages", int),
    )
    return TunedTile(
        product=product,
        max_rows=field("max_rows", int),
        tile=tile,
        microseconds=field("microseconds", int, float),
        microseconds_before=field("microseconds_before", int, float),
    )


def write_tiles(file: Path, tuned: Sequence[TunedTile]) -> int:
    """Add tiles to a file, in place of older ones of the same products; return the new count.

    Raises CacheError if the file cannot be written.
    """
    entries = {(one.product, one.max_rows): one for one in (*read_tiles(file), *tuned)}
    flat = [
        {
            **one.product._asdict(),
            "max_rows": one.max_rows,
            **one.tile._asdict(),
            "microseconds": round(one.microseconds, 3),
            "microseconds_before": round(one.microseconds_before, 3),
        }
        for one in entries.values()
    ]
    lines = ",\n".join(json.dumps(entry) for entry in flat)
    header = json.dumps(_header())
    text = f'{header[:-1]}, "tiles": [\n{lines}\n]}}\n'
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text)
    except OSError as error:
        raise CacheError(
            f"{file}: {error.strerror}; change the permissions of its folder, or name another "
            "file with --out"
        ) from error
    return len(flat)


def _header() -> dict[str, Any]:
    """The GPU and the kernels that a table belongs to."""
    gpu = architecture()
    return {
        "version": _VERSION,
        "gpu": device_name(),
        "capability": list(gpu.capability),
        "multiprocessors": gpu.multiprocessors,
        "shared_bytes": gpu.shared_bytes,
        "kernels": kernels_digest(),
    }


@cache
def kernels_digest() -> str:
    """Digest of the kernels' sources and of their compiler's version."""
    digest = sha256(triton.__version__.encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]
