"""A sequence for acceptors, made by hand."""

from dataclasses import dataclass

from headrace import _native
from headrace.batch import NO_DRAFT, DraftTree
from headrace.constraint import Masks
from headrace.engine.output import Output


@dataclass(eq=False)
class Sampled:
    source: int
    first_sample_row: int
    position: int
    sampler: _native.Sampler
    output: Output
    draft: DraftTree = NO_DRAFT
    num_logprobs: int = -1
    masks: Masks | None = None
