"""Resident memory of a run on a CPU, part by part."""

from collections.abc import Mapping, Sequence

from headrace.backend_traits import KvDtype
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.record import frozen

_HUGE_PAGE = 2 << 20
"""Bytes that become resident together in weights, KV and activations (`csrc/memory.h`)."""
_KV_RUN = 8
"""Blocks with adjacent memory (`csrc/kv.h`), which one sequence takes together."""


@frozen
class ProcessMemory:
    """Bytes of a process apart from a model's weights, KV and activations."""

    base: int
    """Interpreter, libraries, and tables of the engine."""
    per_token: float
    """Of the tokenizer, for each token of its vocabulary."""


SHIPPED_PROCESS = ProcessMemory(base=56_000_000, per_token=358.0)
"""Measured on Linux with Python 3.11, 2026-11; `headrace calibrate --machine` measures it here."""


@frozen(kw_only=True)
class RunMemory:
    """Resident bytes of a process that loads a model and runs requests.

    Pages count whole. `packing` is the most that stored matrices add to the packed ones while the
    model is loaded: the pages of a matrix stay resident until it is packed.
    """

    weights: int
    kv_groups: Mapping[str, int]
    """Bytes by group of layers."""
    kv_ahead: int
    """Bytes of KV that are resident ahead of those in use (`csrc/kv_pages.h`)."""
    activations: int
    base: int
    tokenizer: int
    converted: int
    """Stored tensors that were made while the model was opened, which stay."""
    packing: int

    @property
    def kv(self) -> int:
        return sum(self.kv_groups.values())

    @property
    def loaded(self) -> int:
        """Bytes when the model is loaded."""
        return self.base + self.tokenizer + self.converted + self.weights

    @property
    def peak(self) -> int:
        # While a tokenizer is built, its vocabulary exists twice.
        running = self.kv + self.kv_ahead + self.activations
        return self.loaded + max(self.packing, self.tokenizer, running)


def resident_weights(program: Program) -> int:
    """Bytes of matrices in whole pages, and of vectors."""
    vectors = {weight.name: weight.nbytes for op in program.ops for weight in op.vectors()}
    matrix_bytes = program.weight_bytes - sum(vectors.values())
    return whole_pages(matrix_bytes) + sum(vectors.values())


def packing_bytes(program: Program, stored: Mapping[str, int]) -> int:
    """Most bytes of files above the weights of a program, if its matrices are packed in order.

    `stored`: bytes of each matrix in its file.
    """
    packed, most, known = 0, 0, set[str]()
    for op in program.ops:
        for weight in op.matrices():
            if weight.name not in known:
                known.add(weight.name)
                packed += weight.nbytes
                most = max(most, packed + stored[weight.name])
    return max(0, most - packed)


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE


def used_kv(
    groups: Sequence[KvGroup], dtype: KvDtype, tokens: int, batch: int, block: int
) -> dict[str, int]:
    """Resident bytes of the KV of `batch` sequences of `tokens` tokens, by group of layers.

    A sequence takes runs of adjacent blocks, whose pages are resident from their first use. Layers
    with a window take new blocks too: the prefix cache keeps the old ones while there is room.
    """
    used = batch * (-(-tokens // (block * _KV_RUN)) * _KV_RUN)
    found: dict[str, int] = {}
    for group in groups:
        window = f" with a window of {group.window:,}" if group.window else ""
        name = f"{len(group.layers)} layers{window}"
        found[name] = found.get(name, 0) + whole_pages(used * group.block_bytes(dtype, block))
    return found
