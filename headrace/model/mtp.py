"""Layers for drafts in a model's own files: multi-token prediction (DeepSeek-V3, 2024).

The layer after the model's last is a drafter. Its row joins the embedding of a token with the
final row of the position before it, each after a norm, by one matrix. The files name the layer by
its number (`model.layers.61` of DeepSeek-V3); here it is layer 0.
"""

from headrace.model.decoder import Decoder, sequential
from headrace.model.family import Family, TensorSource
from headrace.model.spec import ModelSpec
from headrace.program.op import Value
from headrace.program.trace import Tracer

_LAYER = "model.layers.0"
TENSORS = {
    name: TensorSource(f"{_LAYER}.{file}.weight")
    for name, file in {
        "embed": "embed_tokens",
        "token_norm": "enorm",
        "row_norm": "hnorm",
        "join": "eh_proj",
        "norm": "shared_head.norm",
        "head": "shared_head.head",
    }.items()
} | {"target_norm": TensorSource("model.norm.weight")}


def from_target(spec: ModelSpec, g: Tracer) -> Value:
    """Trace the rows that join tokens with the target's final rows, before its last norm."""
    d = Decoder(spec, g)
    tokens = d.embed()
    return _forward(d, tokens, d.norm(g.input(spec.dim), "target_norm"))


def from_itself(spec: ModelSpec, g: Tracer) -> Value:
    """Trace the rows that join drafted tokens with the layer's own rows."""
    d = Decoder(spec, g)
    return _forward(d, d.embed(), g.input(spec.dim))


def _forward(d: Decoder, tokens: Value, rows: Value) -> Value:
    g, dim = d.g, d.spec.dim
    pair = g.concat_heads(d.norm(tokens, "token_norm"), d.norm(rows, "row_norm"), 1, dim, dim)
    x = sequential(d, 0, g.linear(pair, g.weight("join", dim, 2 * dim)))
    return g.linear(d.norm(x, "norm"), g.weight("head", d.spec.vocab_size, dim))


MTP = Family("mtp", from_target)
