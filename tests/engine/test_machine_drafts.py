"""The state machine of test_machine.py with a draft model: its own pool adds up after every rule, and is free in the end."""

import zlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from numpy.typing import NDArray

from headrace.batch import RaggedBatch
from headrace.kv.blocks import BlockPool
from headrace.propose.draft_model import DraftModelProposer
from tests.engine.test_machine import MAX_MODEL_LEN, SHAPES, Life
from tests.engine.toy import ToyExecutable


class HalfRight(ToyExecutable):
    """The toy model, turned upside down after every other text."""

    def _logits(self, batch: RaggedBatch, seq: int, row: int) -> NDArray[np.float32]:
        logits = super()._logits(batch, seq, row)
        return -logits if zlib.crc32(logits.tobytes()) % 2 else logits


class DraftedLife(Life):
    @initialize(
        draft_blocks=st.integers(3, 40),
        depth=st.integers(1, 5),
        width=st.integers(1, 3),
        **SHAPES,
    )
    def start(self, draft_blocks: int, depth: int, width: int, **config: int) -> None:  # type: ignore[override]
        pool = BlockPool(draft_blocks, config["block_size"])
        self.draft = DraftModelProposer(HalfRight(config["block_size"]), pool, MAX_MODEL_LEN, depth, width, probabilities=False)
        self.begin(self.draft, **config)

    @invariant()
    def draft_blocks_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.draft.pool.check([draft.table for draft in self.draft._drafts.values()])
        executable = self.draft._executable
        assert isinstance(executable, ToyExecutable)
        for draft in self.draft._drafts.values():
            for i, token in enumerate(draft.tokens):
                assert executable.kv[self.draft.pool.slot(draft.table, i)] == (i, token)
        assert self.engine.stats().proposer_failures == 0

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            self.draft_blocks_add_up()
            assert self.draft.pool.num_free == self.draft.pool.num_blocks


TestDraftedLife = DraftedLife.TestCase
TestDraftedLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
