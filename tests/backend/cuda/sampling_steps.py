"""Sampling launches as an executable makes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.sampling import AnyStep, DeviceSampler
from headrace.logit_ops import LaterExpands, LogitOp, LogitOpResult


class Steps:
    """Launches ops on logits; each launch can be read later. `spare` rows of the logits
    are padding, full of NaN.
    """

    def __init__(self, vocab: int, chunk: int = 32, listed: int = 32, spare: int = 1) -> None:
        self.sampler = DeviceSampler(vocab, DEVICE, chunk, listed)
        self.spare = spare

    def launch(self, logits: np.ndarray, ops: Sequence[LogitOp]) -> tuple[AnyStep, torch.Tensor]:
        return self._launch(logits, self.sampler.begin(ops))

    def run_chains(self, logits: np.ndarray, ops: Sequence[LogitOp]) -> list[Any]:
        """Run the expand ops of chains, or of their next depth (`LaterExpands`)."""
        step = self.sampler.repeat(ops) if isinstance(ops, LaterExpands) else None
        return self.read(self._launch(logits, step or self.sampler.begin(ops, with_chains=True)))

    def _launch(self, logits: np.ndarray, step: AnyStep) -> tuple[AnyStep, torch.Tensor]:
        rows = np.full((len(logits) + self.spare, logits.shape[1]), np.nan, np.float32)
        rows[: len(logits)] = logits
        layout = step.layout
        host = np.full(layout.num_ints, 0x7FC00000, np.int32)  # rubbish of the steps before
        masks = np.zeros((max(layout.masks, 1), self.sampler.mask_words), np.uint32)
        step.fill(host)
        step.fill_masks(masks)
        results = torch.full((layout.num_results,), -7, dtype=torch.int32, device=DEVICE)
        area, its_masks = (
            torch.from_numpy(array.view(np.int32)).to(DEVICE) for array in (host, masks)
        )
        for launch in self.sampler.launches(
            layout, torch.from_numpy(rows).to(DEVICE), area, its_masks, results
        ):
            launch()
        return step, results

    def read(self, launched: tuple[AnyStep, torch.Tensor]) -> list[LogitOpResult]:
        step, results = launched
        return step.read(results.cpu().numpy())

    def run(self, logits: np.ndarray, ops: Sequence[LogitOp]) -> list[Any]:
        return self.read(self.launch(logits, ops))
