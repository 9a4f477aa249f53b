"""Attention by latent rows: `MlaSpec` says what is computed in either form."""

from typing import TYPE_CHECKING

from headrace.model.spec import MlaSpec
from headrace.program.op import Value, Weight

if TYPE_CHECKING:
    from headrace.model.decoder import Decoder


def attend(d: "Decoder", form: MlaSpec, layer: int, x: Value) -> Value:
    """Attention of the rows `x`, before its output matrix; writes their KV."""
    g, spec, rope, name = d.g, d.spec, d.spec.rope, f"layers.{layer}"
    assert rope
    num_heads, pe, rank = spec.num_heads, rope.dim, form.kv_rank
    nope, angles, scale = (
        spec.head_dim - pe,
        d.angles(rope),
        spec.attention_scale or spec.head_dim**-0.5,
    )

    def compressed(part: str, width: int) -> Value:
        rows = d.linear(x, f"{name}.{part}", width, spec.qkv_bias)
        return g.norm(rows, g.vector(f"{name}.{part}_norm", width), form.norm_eps)

    def by_head(part: str, rows: int, cols: int) -> tuple[Weight, ...]:
        return tuple(
            g.weight(f"{name}.heads.{head}.{part}", rows, cols) for head in range(num_heads)
        )

    source, part = (compressed("q_a", form.query_rank), "q_b") if form.query_rank else (x, "q")
    q_nope = d.linear(source, f"{name}.{part}_nope", num_heads * nope, False)
    q_pe = g.rope(d.linear(source, f"{name}.{part}_pe", num_heads * pe, False), angles, pe)
    latent = compressed("kv_a", rank)
    k_pe = g.rope(d.linear(x, f"{name}.k_pe", pe, spec.qkv_bias), angles, pe)
    values = by_head("v", form.value_dim, rank)
    if form.is_absorbed:
        q = g.concat_heads(
            g.head_linear(q_nope, by_head("k_absorbed", rank, nope)), q_pe, num_heads, rank, pe
        )
        g.kv_write(g.concat_heads(latent, k_pe, 1, rank, pe), None, layer)
        return g.head_linear(
            g.attention(q, layer, 1, rank + pe, scale=scale, value_dim=rank, is_latent=True), values
        )
    k = g.head_linear(latent, by_head("k", nope, rank))
    g.kv_write(g.concat_heads(k, k_pe, num_heads, nope, pe), g.head_linear(latent, values), layer)
    q = g.concat_heads(q_nope, q_pe, num_heads, nope, pe)
    return g.attention(q, layer, num_heads, spec.head_dim, scale=scale, value_dim=form.value_dim)
