"""Tunes the tiles of a model's matrix products on the GPU, and writes them for later engines."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.source import cache_folder
from headrace.config import Activations, EngineConfig
from headrace.loader.backend_choice import with_backend
from headrace.loader.drafts import target_program
from headrace.loader.load import open_files
from headrace.record import frozen

if TYPE_CHECKING:
    from headrace.backend.cuda.kernels.tiles import Tile
    from headrace.backend.cuda.tile_table import TunedTile

MAX_SECONDS = 600.0
ROWS = (1, 16, 32, 64, 128, 256, 512, 2048)
"""Rows of steps: few for decoding, many for prompts."""


@frozen(kw_only=True)
class TunedProduct:
    """A weight's tiles for steps of up to `max_rows` rows: before, and now."""

    weight: str
    max_rows: int
    tile_before: str
    tile: str
    microseconds_before: float
    microseconds: float

    @property
    def gain(self) -> float:
        """Time before over time now, less 1."""
        return self.microseconds_before / self.microseconds - 1

    def facts(self) -> dict[str, Any]:
        """The product as JSON."""
        return {
            "weight": self.weight,
            "max_rows": self.max_rows,
            "tile_before": self.tile_before,
            "tile": self.tile,
            "microseconds_before": self.microseconds_before,
            "microseconds": self.microseconds,
            "gain": self.gain,
        }


@frozen(kw_only=True)
class Tuning:
    gpu: str
    file: Path
    num_tiles: int
    """Tiles in the file, with those of other models."""
    products: tuple[TunedProduct, ...]
    num_left: int
    """Products that were not tuned when the time was over."""

    def facts(self) -> dict[str, Any]:
        """The tuning as JSON."""
        return {
            "gpu": self.gpu,
            "file": str(self.file),
            "tiles": self.num_tiles,
            "left": self.num_left,
            "products": [product.facts() for product in self.products],
        }


def ignore_product(product: TunedProduct, done: int, total: int) -> None:
    """Discard the progress: the default callback."""


def tune(
    model: str,
    *,
    rows: Sequence[int] = ROWS,
    max_seconds: float = MAX_SECONDS,
    out: Path | None = None,
    activations: Activations = EngineConfig.activations,
    on_product: Callable[[TunedProduct, int, int], None] = ignore_product,
) -> Tuning:
    """Time the tiles of a model's matrix products on this machine's GPU, and store the fastest.

    A tile changes the speed and no result. The weights are random: the model's files are opened,
    and no weight is read. Products that the file lacks come first, so a further call goes on.

    Args:
        rows: rows of steps to tune for; each is rounded up to a bucket of the table.
        max_seconds: time after which no further product is begun.
        out: file for the tiles, in place of this GPU's file in the cache folder, which
            engines read.
        on_product: called after each product, with the number of products done and in all.

    Raises:
        ModelError: the model is missing, malformed or unknown.
        RequestError: no GPU is usable here.
        MemoryLimitError: the GPU has no room for the weights of a product.
        CacheError: the file cannot be written.
    """
    config = EngineConfig(backend="cuda", activations=activations)
    checkpoint = open_files(model, config)
    config = with_backend(config, checkpoint)
    program = target_program(config, checkpoint)

    # After the check of the GPU: without torch, these modules cannot be imported.
    from headrace.backend.cuda.device import device_name, multiplied_type
    from headrace.backend.cuda.kernels.tiles import bucket_of
    from headrace.backend.cuda.tile_table import read_tiles, tile_file, write_tiles
    from headrace.backend.cuda.tune import Tuner, linears_of

    file = out or tile_file(cache_folder())
    known = {(one.product, one.max_rows) for one in read_tiles(file)}
    buckets = sorted({bucket_of(number) for number in rows})
    linears = linears_of(program, checkpoint.tensors, multiplied_type(activations))
    work = [(linear, rows) for linear in linears for rows in buckets if rows <= linear.max_rows]
    work.sort(key=lambda one: (one[0].product, one[1]) in known)

    begun = time.monotonic()
    tuner: Tuner | None = None
    products: list[TunedProduct] = []
    num_tiles = len(known)
    for linear, num_rows in work:
        if products and time.monotonic() - begun >= max_seconds:
            break
        if tuner is None or tuner.weight != linear:
            tuner = None  # frees its weights
            tuner = Tuner(linear)
        before, tuned = tuner.tune(num_rows)
        # Written at once: a tuning that is interrupted keeps its tiles.
        num_tiles = write_tiles(file, [tuned])
        products.append(_product(before, tuned))
        on_product(products[-1], len(products), len(work))
    return Tuning(
        gpu=device_name(),
        file=file,
        num_tiles=num_tiles,
        products=tuple(products),
        num_left=len(work) - len(products),
    )


def _product(before: "Tile", tuned: "TunedTile") -> TunedProduct:
    product = tuned.product
    types = "" if product.activations == "bfloat16" else f", x {product.activations}"
    return TunedProduct(
        weight=f"{product.rows:,} x {product.cols:,} {product.format}{types}",
        max_rows=tuned.max_rows,
        tile_before=_text(before),
        tile=_text(tuned.tile),
        microseconds_before=tuned.microseconds_before,
        microseconds=tuned.microseconds,
    )


def _text(tile: "Tile") -> str:
    """A tile as `16x64 w4 s3 u2 split`."""
    shape = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages} u{tile.unroll}"
    return f"{shape} split" if tile.is_parallel else shape
