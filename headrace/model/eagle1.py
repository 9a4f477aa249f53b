"""EAGLE-1 and -2 drafters: a decoder layer over the model's final rows (Li et al. 2024).

A row joins the embedding of a token with the final row of the position before it by one matrix,
without norms. The layer has no norm before its attention, and the model's own head gives the
logits of its rows. EAGLE-2 has the same files and drafts trees. The names are the authors'
(SafeAILab/EAGLE, `eagle/model/cnets1.py`).
"""

from headrace.model.decoder import Decoder
from headrace.model.family import Family
from headrace.model.sources import half_split, weights
from headrace.model.spec import ModelSpec
from headrace.program.op import Value
from headrace.program.trace import Tracer

TENSORS = half_split(
    weights(
        {"embed": "embed_tokens", "fuse": "fc", "target_norm": "norm", "head": "lm_head"},
        "layers.{}",
        {
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        },
    )
)


def from_target(spec: ModelSpec, g: Tracer) -> Value:
    """Trace the rows that join tokens with the target's final rows, before its last norm."""
    d = Decoder(spec, g)
    tokens = d.embed()
    return _forward(d, tokens, d.norm(g.input(spec.dim), "target_norm"))


def from_itself(spec: ModelSpec, g: Tracer) -> Value:
    """Trace the rows that join drafted tokens with the drafter's own rows."""
    d = Decoder(spec, g)
    return _forward(d, d.embed(), g.input(spec.dim))


def _forward(d: Decoder, tokens: Value, rows: Value) -> Value:
    g, spec, dim = d.g, d.spec, d.spec.dim
    drafter = spec.drafter
    assert drafter
    x = d.linear(g.concat_heads(tokens, rows, 1, dim, dim), "fuse", dim, drafter.fuse_bias)
    attended, x = d.last_rows(0, d.attend(0, x), x)
    x = d.add(x, d.output(0, attended))
    x = d.add(x, d.mlp(0, d.norm(x, "layers.0.mlp_norm")))
    return g.linear(x, g.weight("head", spec.vocab_size, dim))


EAGLE1 = Family("eagle1", from_target)
