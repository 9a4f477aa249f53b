"""EAGLE-3 drafters: a decoder layer over rows of the model that they draft for (Li et al. 2025).

A row of the drafter joins the embedding of a token with the row of the position before it: first
the target's rows at several depths, mixed by one matrix, then the drafter's own rows. The names
are the authors' (SafeAILab/EAGLE, `eagle/model/cnets.py`) with `layers.0` for `midlayer`, as
`speculators` writes them.

`headrace distil` trains a variant, `embedding_in_residual`: one matrix joins the embedding and the
rows, each after a norm, to the row that the layer reads. So a linear map of all of them can draft,
and the layer attends over rows of half the width. Another matrix joins the drafter's own rows.
"""

from headrace.model.decoder import Decoder, sequential
from headrace.model.family import Family
from headrace.model.sources import half_split, weights
from headrace.model.spec import ModelSpec
from headrace.program.op import Value, Weight
from headrace.program.trace import Tracer

TENSORS = half_split(
    weights(
        {
            "embed": "embed_tokens",
            "fuse": "fc",
            "own_fuse": "fc_own",
            "taps_norm": "taps_norm",
            "norm": "norm",
            "head": "lm_head",
        },
        "layers.{}",
        {
            "attn_norm": "input_layernorm",
            "hidden_norm": "hidden_norm",
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            "mlp_norm": "post_attention_layernorm",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        },
    )
)


def from_target(spec: ModelSpec, g: Tracer) -> Value:
    """Trace the rows that join tokens with the target's rows."""
    drafter = spec.drafter
    assert drafter
    width = len(drafter.taps) * drafter.target_dim
    if not drafter.embedding_in_residual:
        return _forward(spec, g, g.linear(g.input(width), g.weight("fuse", spec.dim, width)))

    _own_matrix(spec, g)  # a tensor of the drafter, which `from_itself` multiplies
    d = Decoder(spec, g)
    tokens = d.norm(d.embed(), "layers.0.attn_norm")
    norms = g.vector("taps_norm", width)
    taps = g.norm(g.input(width), norms, spec.norm_eps, size=drafter.target_dim)
    matrix = g.weight("fuse", spec.dim, spec.dim + width)
    return _layer(d, g.linear(g.concat_heads(tokens, taps, 1, spec.dim, width), matrix))


def from_itself(spec: ModelSpec, g: Tracer) -> Value:
    """Trace the rows that join drafted tokens with the drafter's own rows."""
    drafter, rows = spec.drafter, g.input(spec.dim)
    assert drafter
    if not drafter.embedding_in_residual:
        return _forward(spec, g, rows)

    d = Decoder(spec, g)
    tokens = d.norm(d.embed(), "layers.0.attn_norm")
    pair = g.concat_heads(tokens, d.norm(rows, "norm"), 1, spec.dim, spec.dim)
    return _layer(d, g.linear(pair, _own_matrix(spec, g)))


def _own_matrix(spec: ModelSpec, g: Tracer) -> Weight:
    return g.weight("own_fuse", spec.dim, 2 * spec.dim)


def _layer(d: Decoder, x: Value) -> Value:
    """The layer over joined rows, and the logits."""
    g, spec = d.g, d.spec
    drafter = spec.drafter
    assert drafter
    attended = d.attend(0, d.norm(x, "layers.0.hidden_norm"))
    attended, x = d.last_rows(0, attended, x)
    x = d.add(x, d.output(0, attended))
    x = d.add(x, d.mlp(0, d.norm(x, "layers.0.mlp_norm")))
    return g.linear(d.norm(x, "norm"), g.weight("head", drafter.vocab_size, spec.dim))


def _forward(spec: ModelSpec, g: Tracer, rows: Value) -> Value:
    drafter = spec.drafter
    assert drafter
    d = Decoder(spec, g)
    tokens = d.norm(d.embed(), "layers.0.attn_norm")
    normed = d.norm(rows, "layers.0.hidden_norm")
    residual = normed if drafter.norm_before_residual else rows
    attended = d.attend(0, g.concat_heads(tokens, normed, 1, spec.dim, spec.dim))
    attended, residual = d.last_rows(0, attended, residual)
    x = d.add(residual, d.output(0, attended))
    x = d.add(x, d.mlp(0, d.norm(x, "layers.0.mlp_norm")))
    for layer in range(1, spec.num_layers):
        x = sequential(d, layer, x)
    return g.linear(d.norm(x, "norm"), g.weight("head", drafter.vocab_size, spec.dim))


EAGLE3 = Family("eagle3", from_target)
