"""Sizes of the KV cache, next to the weights."""

from typing import Any

import pytest

from headrace.config import KvConfig
from headrace.errors import MemoryLimitError
from headrace.loader.kv_size import KvUse, Memory, size_kv
from headrace.loader.options import engine_config
from headrace.model import trace_model
from headrace.planner.fit import RUNTIME_BYTES
from tests.tiny import tiny_model


class TestKvSize:
    MODEL = tiny_model(0, context=1000)
    BLOCK = (
        2 * 2 * 32 * (8 + 16) * 2
    )  # layers, KV heads, tokens, head dim of K and, padded, of V, bytes
    WEIGHTS = 10_000

    def size(self, blocks: float, on_gpu: bool = False, **options: Any) -> KvConfig:
        """Return the KV size if memory has room for `blocks` blocks besides weights and runtime."""
        models = [KvUse(trace_model(*self.MODEL).kv_groups, 512)]
        (kv,) = size_kv(
            models,
            engine_config(options),
            1000,
            self.WEIGHTS,
            Memory(self.WEIGHTS + RUNTIME_BYTES + int(blocks * self.BLOCK), on_gpu=on_gpu),
        )
        return kv

    def test_kv_for_all_sequences(self) -> None:
        assert self.size(10_000, max_num_seqs=3) == KvConfig((3 * 32,), 32, "bf16")

    def test_kv_takes_half_of_the_memory(self) -> None:
        assert self.size(200).num_blocks == (100,)
        assert self.size(200, kv_dtype="f32").num_blocks == (50,)

    def test_kv_takes_most_of_the_memory_of_a_gpu(self) -> None:
        assert self.size(200, on_gpu=True).num_blocks == (180,)
        assert self.size(34, on_gpu=True).num_blocks == (32,)

    def test_kv_for_at_least_one_sequence(self) -> None:
        assert self.size(40).num_blocks == (32,)

    def test_kv_blocks_option(self) -> None:
        assert self.size(8, kv_blocks=7).num_blocks == (7,)

    def test_kv_of_layers_with_a_window(self) -> None:
        """Two layers have full attention, and four a window of 64 tokens. A step of 512 rows
        touches 19 blocks of the window.
        """
        model = tiny_model(0, context=4096, layers=6, window=(0, 64, 64))
        groups = trace_model(*model).kv_groups
        of_sequence = [128 * self.BLOCK, 19 * 2 * self.BLOCK]

        def sizes(memory: int, **options: Any) -> tuple[int, ...]:
            (kv,) = size_kv(
                [KvUse(groups, 512)],
                engine_config(options),
                4096,
                self.WEIGHTS,
                Memory(self.WEIGHTS + RUNTIME_BYTES + memory),
            )
            return kv.num_blocks

        assert sizes(10**9, max_num_seqs=3) == (3 * 128, 3 * 19)
        assert sizes(10**9, kv_blocks=1000, max_num_seqs=3) == (1000, 3 * 19)
        assert sizes(10**9, kv_blocks=10) == (
            10,
            10,
        )  # however the tokens of ten blocks are divided among sequences
        for memory in (
            10**7,
            3 * 10**7,
            10**8,
        ):  # half of it, or one sequence with as many windows as fit beside it
            full, windowed = sizes(memory)
            nbytes = full * self.BLOCK + 2 * windowed * self.BLOCK
            assert (
                full == 128
                or full * self.BLOCK + 2 * min(windowed, 64 * 19) * self.BLOCK
                > memory // 2 - 3 * self.BLOCK
            )
            assert nbytes <= max(memory // 2, sum(of_sequence)) and windowed >= 19
        with pytest.raises(MemoryLimitError):
            sizes(sum(of_sequence) - 1)
        assert sizes(sum(of_sequence)) == (128, 19)

    @pytest.mark.parametrize(
        ("blocks", "options", "message"),
        [
            (
                20.5,
                {},
                "10,000 bytes of weights, 196,608 bytes of KV for 1,024 tokens and "
                "157,286,400 bytes of runtime",
            ),
            (20.5, {}, "are 157,493,008 bytes, but 157,422,352 are available"),
            (20.5, {}, "set max_model_len to 640 or less"),
            (20.5, {"kv_blocks": 21}, "set kv_blocks to 20 or less"),
            (-1, {}, "the model is too large for this machine"),
        ],
    )
    def test_kv_too_large_raises(
        self, blocks: float, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(MemoryLimitError) as error:
            self.size(blocks, **options)
        assert message in str(error.value)
