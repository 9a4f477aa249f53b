"""Roundings of int4 keys for programs that no text was measured for."""

import numpy as np

from headrace.config import KeyRounding
from headrace.program.ops import Attention
from headrace.program.trace import Program
from headrace.quant.key_rounding import key_rounding


def roundings(program: Program, seed: int = 0) -> tuple[KeyRounding, ...]:
    """Of all layers with values of their own; centres where scores may shift."""
    found = {}
    for op in program.ops:
        if not isinstance(op, Attention) or op.is_latent or op.layer in found:
            continue
        rng = np.random.default_rng([seed, op.layer])
        shape = op.num_kv_heads, op.head_dim
        queries = rng.standard_normal((*shape, op.head_dim)) * rng.uniform(0.1, 2, op.head_dim)
        centre = 0.3 * rng.standard_normal(shape)
        if op.softcap or op.sinks is not None:
            centre = np.zeros(shape)
        found[op.layer] = key_rounding(op.layer, queries.transpose(0, 2, 1) @ queries, centre)
    return tuple(rounding for rounding in found.values() if rounding)
