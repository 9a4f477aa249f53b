"""The state machine of test_machine.py with a draft model, whose own KV cache is checked too."""

import zlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from numpy.typing import NDArray

from headrace.speculation.proposers.draft_model import DraftModelProposer
from tests.engine.test_machine import MAX_MODEL_LEN, SHAPES, WINDOWS, Life
from tests.engine.toy import Kept, ToyExecutable, toy_kv


class HalfRight(ToyExecutable):
    """The toy model, with negated logits for half of all texts."""

    def _logits(self, kept: Kept) -> NDArray[np.float32]:
        logits = super()._logits(kept)
        return -logits if zlib.crc32(logits.tobytes()) % 2 else logits


class DraftedLife(Life):
    @initialize(
        draft_blocks=st.integers(3, 40),
        draft_windows=WINDOWS,
        depth=st.integers(1, 5),
        width=st.integers(1, 3),
        **SHAPES,
    )
    def start(  # type: ignore[override]
        self,
        draft_blocks: int,
        draft_windows: tuple[int, ...],
        depth: int,
        width: int,
        **config: int,
    ) -> None:
        kv = toy_kv(draft_blocks, config["block_size"], draft_windows)
        executable = HalfRight(config["block_size"], windows=draft_windows)
        self.draft = DraftModelProposer(
            executable, kv, MAX_MODEL_LEN, depth, width, probabilities=False
        )
        self.begin(self.draft, **config)

    @invariant()
    def draft_blocks_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.draft.kv.check([draft.tables for draft in self.draft._contexts.values()])
        executable = self.draft._executable
        assert isinstance(executable, ToyExecutable)
        for draft in self.draft._contexts.values():
            executable.check(self.draft.kv, draft.tables, draft.tokens)
        assert self.engine.stats().proposer_failures == 0

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            self.draft_blocks_add_up()
            assert all(pool.num_free == pool.num_blocks for pool in self.draft.kv.pools)


TestDraftedLife = DraftedLife.TestCase
TestDraftedLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
