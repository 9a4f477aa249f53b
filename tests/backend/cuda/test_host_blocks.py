"""KV blocks in host memory: the same bits, in stream order, and the same results of engines."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend import host_block_counts
from headrace.backend.cuda import host_blocks, memory
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.host_blocks import CudaHostBlocks, staging_bytes
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.speed import READ_BLOCK, multiply_add
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.stream import Mark, Stream, host_tensor, make_stream
from headrace.backend_traits import KvDtype, traits_of
from headrace.config import KvConfig
from headrace.engine.engine import Engine
from headrace.errors import MemoryLimitError
from headrace.loader.memory import memory_for
from headrace.loader.options import engine_config
from headrace.model import trace_model
from headrace.program.kv import KvGroup, KvLayout
from headrace.sampling_params import SamplingParams
from tests.backend.cuda.examples import examples
from tests.backend.cuda.late import LateStream
from tests.engine.test_promise import Ask, keeps_the_promise, model
from tests.tiny import run_all, tiny_engine

STREAMS: dict[str, Callable[[], Stream]] = {
    "own": make_stream,
    "late": LateStream,
    "early": lambda: LateStream(is_early=True),
}
LAYOUTS = [KvLayout(2, 16, 16), KvLayout(1, 24, 8), KvLayout(1, 16, 0)]


def filled(layout: KvLayout, dtype: KvDtype, num_blocks: int, block_size: int) -> KvStore:
    """A store of three layers whose blocks have different bytes."""
    store = KvStore(KvGroup((0, 1, 2), layout), num_blocks, block_size, dtype)
    rng = np.random.default_rng(0)
    for tensor in store.tensors:
        tensor.view(torch.uint8).copy_(
            torch.from_numpy(rng.integers(0, 120, tensor.view(torch.uint8).shape, np.uint8))
        )
    return store


def written(store: KvStore, block: int, stream: Stream) -> list[bytes]:
    """The bytes that a step writes to a block."""
    numbers = [
        host_tensor(tensor[:, block].nbytes, torch.uint8).random_(0, 120)
        for tensor in store.tensors
    ]
    for tensor, own in zip(store.tensors, numbers, strict=True):
        stream.copy(tensor[:, block], own.view(tensor.dtype).view(tensor[:, block].shape))
    return [own.numpy().tobytes() for own in numbers]


def bits(store: KvStore, block: int) -> list[bytes]:
    return [
        tensor[:, block].contiguous().view(torch.uint8).cpu().numpy().tobytes()
        for tensor in store.tensors
    ]


@settings(max_examples=examples(12), deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(["bf16", "f32", "fp8", "int8"]),
    block_size=st.sampled_from([1, 2, 4]),
    in_chunk=st.integers(1, 3),
    stream_name=st.sampled_from(sorted(STREAMS)),
)
def test_loaded_blocks_equal_saved_blocks(
    layout: KvLayout, dtype: KvDtype, block_size: int, in_chunk: int, stream_name: str
) -> None:
    stream = STREAMS[stream_name]()
    store = filled(layout, dtype, 6, block_size)
    went = [bits(store, block) for block in range(7)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_blocks, "_CHUNK_BYTES", in_chunk * store.block_bytes)
        blocks = CudaHostBlocks([store], [5], stream)
        assert [bits(store, block) for block in range(7)] == went
        assert sum(map(len, went[0])) == store.block_bytes == blocks.block_bytes[0]
        for host_block, block in enumerate((3, 0, 5, 1, 4)):
            blocks.save(0, block, host_block)
            for tensor in store.tensors:
                stream.copy(tensor[:, block], torch.zeros_like(tensor[:, block], device="cpu"))
        assert [len(chunk) for chunk in blocks._chunks[0]] == [
            min(in_chunk, 5 - i) for i in range(0, 5, in_chunk)
        ]
        for host_block, block in enumerate((0, 2, 1, 3, 5)):
            blocks.load(0, host_block, block)
        stream.mark().synchronize()
    assert [bits(store, block) for block in (0, 2, 1, 3, 5)] == [
        went[block] for block in (3, 0, 5, 1, 4)
    ]
    assert bits(store, 6) == went[6] and not any(map(any, bits(store, 4)))


@pytest.mark.parametrize("stream_name", STREAMS)
@pytest.mark.parametrize("seed", range(4))
def test_saves_and_loads_keep_the_order_of_the_stream(
    stream_name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves, loads and steps on blocks of two groups, with two staging blocks in total."""
    monkeypatch.setattr(host_blocks, "_MAX_STAGING_BLOCKS", 2)
    stream, rng = STREAMS[stream_name](), np.random.default_rng(seed)
    stores = [filled(KvLayout(2, 16, 16), "int8", 4, 1), filled(KvLayout(1, 16, 0), "bf16", 4, 1)]
    fresh = [bits(store, 0) for store in stores]
    blocks = CudaHostBlocks(stores, [3, 3], stream)
    there = [[bits(store, block) for block in range(4)] for store in stores]
    gone = [{0: own} for own in fresh]
    for _ in range(300):
        what, group, block, host_block = (int(rng.integers(n)) for n in (8, 2, 4, 3))
        if what < 3:
            blocks.save(group, block, host_block)
            gone[group][host_block] = there[group][block]
        elif what < 6 and host_block in gone[group]:
            blocks.load(group, host_block, block)
            there[group][block] = gone[group][host_block]
        elif what == 6:
            there[group][block] = written(stores[group], block, stream)
        elif what == 7:
            stream.catch_up()
    stream.mark().synchronize()
    assert [[bits(store, block) for block in range(4)] for store in stores] == there
    assert not isinstance(stream, LateStream) or stream.late_copies > 100


def test_the_last_save_to_a_host_block_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier copy to the same host block may still be pending, as long as its staging
    block is unused.
    """
    monkeypatch.setattr(host_blocks, "_MAX_STAGING_BLOCKS", 2)
    stream, store = LateStream(), filled(LAYOUTS[0], "bf16", 4, 4)
    blocks = CudaHostBlocks([store], [4], stream)
    for save, load in (((0, 1, 1), None), ((0, 2, 1), (0, 1, 3)), ((0, 0, 2), (0, 1, 0))):
        blocks.save(*save)
        if load:
            blocks.load(*load)
            stream.catch_up()
    assert bits(store, 3) == bits(store, 0) == bits(store, 2) != bits(store, 1)


def test_loads_overlap_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save waits for the steps that write the block; a load overlaps them."""
    stream, store = (
        LateStream(is_early=True) if is_interpreting() else make_stream(),
        filled(LAYOUTS[0], "bf16", 4, 4),
    )
    blocks, marks, copy_overlapped = (
        CudaHostBlocks([store], [4], stream),
        list[Mark](),
        stream.copy_overlapped,
    )

    def noted(*args: Any) -> Mark:
        marks.append(copy_overlapped(*args))
        return marks[-1]

    monkeypatch.setattr(stream, "copy_overlapped", noted)
    blocks.save(0, 1, 1)
    stream.mark().synchronize()
    marks[0].synchronize()
    stream.run(
        [
            multiply_add(
                torch.zeros(READ_BLOCK, device=DEVICE), 1 if is_interpreting() else 10_000_000
            )
        ]
    )  # 20 ms
    blocks.save(0, 2, 2)
    blocks.load(0, 1, 3)
    blocks.load(0, 0, 2)
    given, (_, goes, *comes) = stream.mark(), marks
    for mark in comes:
        assert mark.query() or not is_interpreting()
        mark.synchronize()
    assert not goes.query() and not given.query()
    given.synchronize()
    assert bits(store, 3) == bits(store, 1) and bits(store, 2) == bits(store, 0)


def test_steps_do_not_wait_for_saves_with_free_staging() -> None:
    stream, store = LateStream(), filled(LAYOUTS[0], "bf16", 4, 4)
    blocks = CudaHostBlocks([store], [4], stream)
    for block in (1, 2, 3):
        blocks.save(0, block, block)
    stream.catch_up()
    assert not any(blocks._saved[0, block].query() for block in (1, 2, 3))


def test_host_bytes_are_split_between_groups() -> None:
    assert host_block_counts(1000, [(10, 20), (40, 5)]) == [25, 100]
    assert host_block_counts(39, [(10, 20), (40, 5)]) == [0, 3]


def test_host_memory_is_pinned_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(LAYOUTS[0], "bf16", 4, 4)
    monkeypatch.setattr(host_blocks, "_CHUNK_BYTES", 2 * store.block_bytes)
    blocks = CudaHostBlocks([store], [100], make_stream())

    def full(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(host_blocks, "host_tensor", full)
    blocks.save(0, 1, 1)
    with pytest.raises(MemoryError, match="more bytes"):
        blocks.save(0, 1, 2)


def test_failed_pinning_at_start_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executable = executable_over(make_stream(), 2, "bf16", 36)

    def full(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(host_blocks, "host_tensor", full)
        advice = (
            r"the host cannot pin [\d,]+ more bytes for KV blocks; lower "
            r"kv_offload_bytes, or .* \(ulimit -l\)"
        )
        with pytest.raises(MemoryLimitError, match=advice):
            executable.host_blocks(1 << 20)

    def full_gpu(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ..."
        )

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full_gpu)
        with pytest.raises(MemoryLimitError, match="the GPU is out of memory: CUDA out of memory"):
            executable.host_blocks(1 << 20)


@pytest.mark.parametrize("kv_dtype", traits_of("cuda").kv_dtypes)
def test_memory_is_reserved_for_staging_blocks(
    kv_dtype: KvDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    program = executable_over(make_stream(), 3, kv_dtype, 36).program
    aside, without, uncached = (
        memory_for(
            engine_config({"backend": "cuda", "kv_dtype": kv_dtype, **options}), program
        ).runtime
        for options in (
            {"kv_offload_bytes": 1 << 20},
            {},
            {"kv_offload_bytes": 1 << 20, "prefix_cache": False},
        )
    )
    stores = [KvStore(group, 2, 64, kv_dtype) for group in program.kv_groups]
    blocks = CudaHostBlocks(stores, [2] * len(stores), make_stream())
    staging = sum(own.whole.nbytes for own in (*blocks._out, *blocks._in))
    assert (
        uncached == without and staging <= aside - without <= 2 * staging
    )  # the CPU has small heads padded


def test_staging_blocks_are_bounded() -> None:
    assert (
        staging_bytes([8 << 20, 1 << 20]) == 2 * host_blocks._STAGING_BYTES
    )  # 16 blocks of a model of 8B each way
    assert staging_bytes([1000, 999]) == 2 * 64 * 1000
    assert staging_bytes([1 << 30]) == 4 << 30


STEM = list(range(1, 14))
REQUESTS: list[Ask] = [
    ([*STEM, 20], SamplingParams(temperature=0, max_tokens=4, logprobs=2)),
    ([30, *STEM[::-1], 7], SamplingParams(seed=1, temperature=0.8, max_tokens=7, logprobs=1)),
    ([*STEM[:9], 40, 41, 42, 43, 44], SamplingParams(n=2, seed=2, max_tokens=5, logprobs=0)),
]


def executable_over(stream: Any, which: int, kv_dtype: KvDtype, slots: int) -> CudaExecutable:
    """With `slots` slots in blocks of four."""
    spec, tensors = model(which)
    program = trace_model(spec, tensors).with_pooled()
    kv = KvConfig((slots // 4,) * len(program.kv_groups), 4, kv_dtype)
    return CudaExecutable(program, tensors, kv, torch.bfloat16, stream)


def engine_over(stream: Any, which: int, kv_dtype: KvDtype, slots: int, **config: Any) -> Engine:
    executable = executable_over(stream, which, kv_dtype, slots)
    return tiny_engine(
        model(which),
        "cuda",
        executable=executable,
        kv_dtype=kv_dtype,
        slots=slots,
        eos_ids=(60,),
        **config,
    )


@pytest.mark.parametrize(
    ("which", "kv_dtype", "stream_name"),
    [(2, "bf16", "late"), (3, "fp8", "own"), (11, "int8", "early")],
)
def test_offloaded_kv_changes_no_token(
    which: int, kv_dtype: KvDtype, stream_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests recur and preempt each other in a pool for one and a half of them; tokens
    and log-probabilities are equal to the bit.
    """
    ample = engine_over(make_stream(), which, kv_dtype, 200, prefix_cache=False)
    alone = [run_all(ample, [request])[0] for request in REQUESTS]
    monkeypatch.setattr(host_blocks, "_MAX_STAGING_BLOCKS", 2)
    stream = STREAMS[stream_name]()
    engine = engine_over(stream, which, kv_dtype, 36, kv_offload_bytes=1 << 20)
    for order in ([0, 1, 2], [1, 0]):
        keeps_the_promise(engine, order, 1, alone, True, REQUESTS)
    stats = engine.stats()
    assert (
        stats.offloaded_blocks > 0 and stats.restored_blocks > 0 and stats.kv_host_bytes <= 1 << 20
    )
    assert stats.blocks_free == stats.blocks_total
    engine._kv.check([])
