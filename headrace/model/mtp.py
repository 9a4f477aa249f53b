"""Layers for drafts in a model's own files: multi-token prediction (DeepSeek-V3, 2024).

The layer after the model's last is a drafter. Its row joins the embedding of a token with the
final row of the position before it, each after a norm, by one matrix. Files name the layer by its
number (`model.layers.61` of DeepSeek-V3) or in a list of its own; here it is layer 0. MiMo (2025)
joins in the other order, and further drafts read rows after the layer's last norm.
"""

from headrace.model.decoder import Decoder, sequential
from headrace.model.family import Family
from headrace.model.spec import ModelSpec
from headrace.program.op import Value
from headrace.program.trace import Tracer


def from_target(spec: ModelSpec, g: Tracer) -> Value:
    """Trace the rows that join tokens with the target's final rows, before its last norm."""
    d = Decoder(spec, g)
    tokens = d.embed()
    return _forward(d, tokens, d.norm(g.input(spec.dim), "target_norm"))


def from_itself(spec: ModelSpec, g: Tracer) -> Value:
    """Trace the rows that join drafted tokens with the layer's own rows, before its last norm."""
    d = Decoder(spec, g)
    tokens, rows = d.embed(), g.input(spec.dim)
    assert spec.drafter
    return _forward(d, tokens, d.norm(rows, "norm") if spec.drafter.drafts_from_normed else rows)


def _forward(d: Decoder, tokens: Value, rows: Value) -> Value:
    g, dim, drafter = d.g, d.spec.dim, d.spec.drafter
    assert drafter
    first, second = d.norm(tokens, "token_norm"), d.norm(rows, "row_norm")
    if drafter.row_first:
        first, second = second, first
    pair = g.concat_heads(first, second, 1, dim, dim)
    x = sequential(d, 0, g.linear(pair, g.weight("join", dim, 2 * dim)))
    return g.linear(d.norm(x, "norm"), g.weight("head", d.spec.vocab_size, dim))


MTP = Family("mtp", from_target)
