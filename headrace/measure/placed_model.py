"""A model on the devices of a plan: its tensors, the programs of the ranks, and their memory."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.backend import lower_program
from headrace.backend.cpu.memory import low_rank_bytes
from headrace.backend_traits import BackendName, KvDtype, traits_of
from headrace.checkpoint.dummy import dummy_tensors, is_config_only, open_dummy_checkpoint
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig
from headrace.errors import RequestError, UnsupportedModelError
from headrace.loader.drafts import model_program
from headrace.measure.gpu_memory import gpu_low_rank_bytes, gpu_runtime_bytes
from headrace.measure.place import Place
from headrace.parallel.mesh import Mesh, adapter_share, weights_of
from headrace.planner.adapter_costs import with_low_rank
from headrace.planner.fit import RUNTIME_BYTES, Fit
from headrace.program.adapter import Adapter, low_rank_part
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS, Format

FULL_MODEL = EngineConfig()


def open_model(model: str, format: str | None = None) -> Checkpoint:
    """Open a model, or its `config.json`, with all matrices in `format`; no weight is read.

    Raises RequestError for an unknown format, and the errors of `open_checkpoint`.
    """
    path = resolve(model)
    checkpoint = open_dummy_checkpoint(path) if is_config_only(path) else open_checkpoint(path)
    if format is None:
        return checkpoint
    if format.upper() not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise RequestError(f"format '{format}' is unknown; choose from: {known}")
    return replace(checkpoint, tensors=dummy_tensors(checkpoint.spec, FORMATS[format.upper()]))


def main_format(checkpoint: Checkpoint) -> Format:
    """The format of most bytes."""
    sizes: dict[Format, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__)


def stage_programs(
    checkpoint: Checkpoint, backend: BackendName, mesh: Mesh, config: EngineConfig = FULL_MODEL
) -> list[Program]:
    """The lowered program of the last rank of each stage, with the lossy options of `config`.

    It has the largest share of its stage, because smaller parts come first
    (`parallel/partition.py`).
    """
    traced, last = model_program(config, checkpoint), mesh.tensor - 1
    shares = [mesh.program(traced, mesh.rank(stage, last)) for stage in range(mesh.pipeline)]
    return [
        lower_program(backend, share, weights_of(share, checkpoint.tensors)) for share in shares
    ]


def with_adapter(
    programs: Sequence[Program], backend: BackendName, adapter: Adapter
) -> tuple[list[Program], int]:
    """Lowered programs of ranks with the costs of an adapter that all rows use, and the bytes of
    its matrices on the rank that has most.

    Raises UnsupportedModelError for an adapter with weights of its own.
    """
    low_rank = low_rank_part(adapter)
    if own := sorted(adapter.keys() - low_rank.keys()):
        raise UnsupportedModelError(
            f"the adapter has a weight of its own ({own[0]}), and a plan counts low-rank matrices "
            "alone; plan the merged model (headrace convert --merge-adapter)"
        )
    on_gpu = traits_of(backend).on_gpu
    nbytes = gpu_low_rank_bytes if on_gpu else low_rank_bytes
    shares = [adapter_share(program, low_rank) for program in programs]
    planned = [
        with_low_rank(program, share, nbytes, "bf16" if on_gpu else "f32")
        for program, share in zip(programs, shares, strict=True)
    ]
    return planned, max(sum(map(nbytes, share.values())) for share in shares)


def largest_fit(programs: Sequence[Program], place: Place, kv_dtype: KvDtype, length: int) -> Fit:
    """Memory of the stage that needs most, for sequences of `length` tokens."""
    return max((_fit(program, place, kv_dtype, length) for program in programs), key=_need)


def longest_context(
    programs: Sequence[Program],
    fit: Fit,
    place: Place,
    kv_dtype: KvDtype,
    batch: int,
    max_context: int,
) -> int:
    """Tokens that each of `batch` sequences can have in the memory that `fit` leaves for KV."""
    groups = [program.kv_groups for program in programs]

    def need(length: int) -> int:
        return batch * max(
            _kv_bytes(of_rank, place.backend, kv_dtype, length) for of_rank in groups
        )

    low, high = 0, max_context + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= fit.kv_budget else (low, middle)
    return low


def _kv_bytes(
    groups: Sequence[KvGroup], backend: BackendName, kv_dtype: KvDtype, length: int
) -> int:
    traits = traits_of(backend)
    block, rows = traits.kv_block_size, traits.max_num_batched_tokens
    return sum(
        group.num_blocks(length, rows, block) * group.block_bytes(kv_dtype, block)
        for group in groups
    )


def _fit(program: Program, place: Place, kv_dtype: KvDtype, length: int) -> Fit:
    on_gpu = traits_of(place.backend).on_gpu
    return Fit(
        memory=place.memory,
        weights=program.weight_bytes,
        kv_per_sequence=_kv_bytes(program.kv_groups, place.backend, kv_dtype, length),
        context=length,
        to_run=gpu_runtime_bytes(program, place.machine, kv_dtype) if on_gpu else RUNTIME_BYTES,
    )


def _need(fit: Fit) -> int:
    return fit.weights + fit.kv_per_sequence
