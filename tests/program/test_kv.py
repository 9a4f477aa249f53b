"""Blocks and bytes of KV groups."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.dummy import dummy_tensors
from headrace.config import KvConfig
from headrace.kv.manager import KvManager
from headrace.model import trace_model
from headrace.program.kv import KvGroup, KvLayout, number_bytes, token_bytes
from headrace.quant import kv
from headrace.quant.formats import FORMATS
from tests.families import spec_of

TWO, ONE = KvGroup((0, 2), KvLayout(3, 64, 64), window=8), KvGroup((1,), KvLayout(1, 96, 96))


def test_block_bytes() -> None:
    for dtype in ("f32", "bf16", "int8", "int4"):
        record = kv.block_bytes(dtype, 64, 64)
        assert [TWO.block_bytes(dtype, size) for size in (32, 64, 16)] == [
            6 * record,
            12 * record,
            3 * record,
        ]
        assert isinstance(TWO.block_bytes(dtype, 32), int)


def test_number_bytes_and_token_bytes() -> None:
    assert TWO.block_bytes("f32", 32) == 32 * 4 * TWO.numbers == 32 * 4 * 2 * 3 * 128
    assert number_bytes((TWO, ONE), "f32") == 4 and token_bytes((TWO, ONE), "f32") == 4 * (
        6 * 128 + 192
    )
    both = TWO.block_bytes("int4", 32) + ONE.block_bytes("int4", 32)
    assert number_bytes((TWO, ONE), "int4") == pytest.approx(both / (32 * (6 * 128 + 192)))
    assert token_bytes((TWO, ONE), "int4") == -(-both // 32)
    assert isinstance(token_bytes((TWO, ONE), "int4"), int)


@pytest.mark.parametrize(
    ("name", "kv_heads", "numbers"), [("deepseek-v2", 1, 40 + 8), ("llama3-gqa", 2, 2 * 16)]
)
def test_token_bytes_of_families(name: str, kv_heads: int, numbers: int) -> None:
    """With absorbed MLA, a token has one latent row with the rotated part of keys; else a key and a
    value for each KV head.
    """
    spec = spec_of(name)
    if spec.mla:
        spec = replace(spec, mla=replace(spec.mla, is_absorbed=True))
    groups = trace_model(spec, dummy_tensors(spec, FORMATS["F32"])).kv_groups
    for dtype, size in (("f32", 4), ("bf16", 2)):
        assert token_bytes(groups, dtype) == spec.num_layers * kv_heads * numbers * size


def test_token_bytes_of_deepseek_v2_lite() -> None:
    """The absorbed form has 512 + 64 numbers in each of 27 layers, the plain form 16 heads of 192 +
    128.
    """
    layers = tuple(range(27))
    assert token_bytes((KvGroup(layers, KvLayout(1, 512 + 64, 0)),), "bf16") == 27 * 576 * 2
    assert token_bytes((KvGroup(layers, KvLayout(16, 192, 128)),), "bf16") == 27 * 16 * 320 * 2


def test_windows_of_gemma3_need_less_than_a_quarter_of_the_kv() -> None:
    """32,768 tokens in chunks of 512, with windows of 1,024 (Gemma 3, 4B)."""
    layout, length, chunk = KvLayout(4, 256, 256), 32768, 512
    groups = KvGroup((0, 1, 2, 3, 4), layout, 1024), KvGroup((5,), layout)
    manager = KvManager(groups, KvConfig((length // 32, length // 32), 32), chunk)
    tables = manager.new_tables()
    most = 0
    for computed in range(0, length, chunk):
        manager.advance(tables, computed, length)
        assert manager.allocate(tables, computed, chunk) == []
        held = [pool.num_blocks - pool.num_available for pool in manager.pools]
        most = max(
            most,
            sum(
                group.block_bytes("bf16", 32) * blocks
                for group, blocks in zip(groups, held, strict=True)
            ),
        )
    full = length * 6 * 2 * 4 * 256 * 2
    windows = 5 * 2 * 4 * 256 * 2 * 32 * ((1024 + chunk) // 32 + 1)
    assert most <= full // 6 + windows < full / 4


@given(
    window=st.integers(0, 20),
    max_rows=st.integers(1, 12),
    block_size=st.sampled_from([1, 4, 8]),
    num_tokens=st.integers(1, 90),
)
def test_max_blocks_of_a_sequence(
    window: int, max_rows: int, block_size: int, num_tokens: int
) -> None:
    """The count equals the blocks that a step's rows see, at any start and for any number of
    rows.
    """
    most = 0
    for computed in range(num_tokens):
        last = min(computed + max_rows, num_tokens) - 1
        first = max(0, computed - window + 1) if window else 0
        most = max(most, last // block_size - first // block_size + 1)
    found = KvGroup((0,), KvLayout(1, 32, 32), window).num_blocks(num_tokens, max_rows, block_size)
    whole = -(-num_tokens // block_size)
    assert most <= found <= whole
    if not window or num_tokens >= window + max_rows + 2 * block_size:
        assert found == most
