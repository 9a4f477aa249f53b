"""Copies of blocks in the host's memory: the same bits, in the order of the stream, and engines that cannot tell."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend import host_block_counts
from headrace.backend.cuda import CudaExecutable, host_blocks
from headrace.backend.cuda.host_blocks import CudaHostBlocks
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.stream import make_stream
from headrace.config import KvConfig, KvDtype
from headrace.engine.engine import Engine
from headrace.model import trace_model
from headrace.program.kv import KvGroup, KvLayout
from headrace.request import SamplingParams
from tests.backend.cuda.examples import examples
from tests.backend.cuda.late import LateStream
from tests.engine.test_promise import Ask, keeps_the_promise, model
from tests.tiny import run_all, tiny_engine

LAYOUTS = [KvLayout(2, 16, 16), KvLayout(1, 24, 8), KvLayout(1, 16, 0)]


def filled(layout: KvLayout, dtype: KvDtype, num_blocks: int, block_size: int) -> KvStore:
    """A store of three layers with bytes of which no two blocks have the same."""
    store = KvStore(KvGroup((0, 1, 2), layout), num_blocks, block_size, dtype)
    rng = np.random.default_rng(0)
    for tensor in store.tensors:
        tensor.view(torch.uint8).copy_(torch.from_numpy(rng.integers(0, 120, tensor.view(torch.uint8).shape, np.uint8)))
    return store


def bits(store: KvStore, block: int) -> list[bytes]:
    return [tensor[:, block].contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in store.tensors]


@settings(max_examples=examples(12), deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(["bf16", "f32", "fp8", "int8"]),
    block_size=st.sampled_from([1, 2, 4]),
    in_chunk=st.integers(1, 3),
    late=st.booleans(),
)
def test_what_comes_back_is_what_went(layout: KvLayout, dtype: KvDtype, block_size: int, in_chunk: int, late: bool) -> None:
    stream = LateStream() if late else make_stream()
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
        assert [len(chunk[0]) for chunk in blocks._chunks[0]] == [min(in_chunk, 5 - i) for i in range(0, 5, in_chunk)]
        for host_block, block in enumerate((0, 2, 1, 3, 5)):
            blocks.load(0, host_block, block)
        stream.mark().synchronize()
    assert [bits(store, block) for block in (0, 2, 1, 3, 5)] == [went[block] for block in (3, 0, 5, 1, 4)]
    assert bits(store, 6) == went[6] and not any(map(any, bits(store, 4)))


def test_bytes_are_shared_by_what_there_is() -> None:
    assert host_block_counts(1000, [(10, 20), (40, 5)]) == [25, 100]
    assert host_block_counts(39, [(10, 20), (40, 5)]) == [0, 3]


def test_memory_is_pinned_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(LAYOUTS[0], "bf16", 4, 4)
    monkeypatch.setattr(host_blocks, "_CHUNK_BYTES", 2 * store.block_bytes)
    blocks = CudaHostBlocks([store], [100], make_stream())

    def full(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(host_blocks, "host_tensor", full)
    blocks.save(0, 1, 1)
    with pytest.raises(MemoryError, match="bytes more"):
        blocks.save(0, 1, 2)


STEM = list(range(1, 14))
REQUESTS: list[Ask] = [
    ([*STEM, 20], SamplingParams(temperature=0, max_tokens=4, logprobs=2)),
    ([30, *STEM[::-1], 7], SamplingParams(seed=1, temperature=0.8, max_tokens=7, logprobs=1)),
    ([*STEM[:9], 40, 41, 42, 43, 44], SamplingParams(n=2, seed=2, max_tokens=5, logprobs=0)),
]


def engine_over(stream: Any, which: int, kv_dtype: KvDtype, slots: int, **config: Any) -> Engine:
    """An engine with so many slots in blocks of four."""
    spec, tensors = model(which)
    program = trace_model(spec, tensors).pooling()
    kv = KvConfig((slots // 4,) * len(program.kv_groups), 4, kv_dtype)
    executable = CudaExecutable(program, tensors, kv, torch.bfloat16, stream)
    return tiny_engine(model(which), "cuda", executable=executable, kv_dtype=kv_dtype, slots=slots, eos_ids=(60,), **config)


@pytest.mark.parametrize(("which", "kv_dtype", "late"), [(2, "bf16", True), (3, "fp8", False), (11, "int8", True)])
def test_engines_cannot_tell(which: int, kv_dtype: KvDtype, late: bool) -> None:
    """Requests that recur and preempt each other, in a pool that holds one and a half of them: tokens and log-probabilities to the bit."""
    ample = engine_over(make_stream(), which, kv_dtype, 200, prefix_cache=False)
    alone = [run_all(ample, [request])[0] for request in REQUESTS]
    stream = LateStream() if late else make_stream()
    engine = engine_over(stream, which, kv_dtype, 36, kv_offload_bytes=1 << 20)
    for order in ([0, 1, 2], [1, 0]):
        keeps_the_promise(engine, order, 1, alone, True, REQUESTS)
    stats = engine.stats()
    assert stats.offloaded_blocks > 0 and stats.restored_blocks > 0 and stats.kv_host_bytes <= 1 << 20
    assert stats.blocks_free == stats.blocks_total
    engine._kv.check([])
