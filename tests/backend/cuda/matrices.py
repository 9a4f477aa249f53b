"""Random matrices in every stored format."""

import numpy as np

from headrace.quant.formats import FORMATS, StoredTensor
from tests.backend.stored import random_stored
from tests.tables import KINDS, SPARSE_KINDS, random_table

FORMAT_NAMES = [*FORMATS, *KINDS, *SPARSE_KINDS]
SUPER_BLOCKS = [name for name, form in FORMATS.items() if form.spec and form.spec.super_block]


def random_matrix(name: str, rows: int, blocks: int, seed: int) -> StoredTensor:
    """A matrix of `blocks` blocks of columns, sometimes with a partial last group."""
    if name in KINDS | SPARSE_KINDS:
        return random_table(name, rows, (20 if seed % 3 == 0 else 32) * blocks, seed)
    size = FORMATS[name].block
    return random_stored(name, rows, blocks * (size if size > 1 else 20 + seed % 13), seed)


def any_bytes(name: str, rows: int, blocks: int, seed: int) -> StoredTensor:
    """A matrix in a GGUF format with hostile bytes: all kinds of scales, including
    infinity and NaN.
    """
    form, rng = FORMATS[name], np.random.default_rng(seed)
    return StoredTensor.from_bytes(
        "w",
        form,
        (rows, blocks * form.block),
        rng.integers(0, 256, rows * blocks * form.nbytes, np.uint8),
    )
