"""Attention by latent rows: `LatentSpec` says what is computed in either form."""

from typing import TYPE_CHECKING

from headrace.model.spec import LatentSpec
from headrace.program.op import Value, Weight

if TYPE_CHECKING:
    from headrace.model.decoder import Decoder


def attend(d: "Decoder", form: LatentSpec, layer: int, x: Value) -> Value:
    """Attention of the rows `x`, before its output matrix; writes their KV."""
    g, spec, rope, name = d.g, d.spec, d.spec.rope, f"layers.{layer}"
    assert rope
    num_heads, turned, rank = spec.num_heads, rope.dim, form.kv_rank
    still, angles, scale = spec.head_dim - turned, d.angles(rope), spec.attention_scale or None

    def compressed(part: str, width: int) -> Value:
        rows = d.linear(x, f"{name}.{part}", width, spec.qkv_bias)
        return g.norm(rows, g.vector(f"{name}.{part}_norm", width), form.norm_eps)

    def by_head(part: str, rows: int, cols: int) -> tuple[Weight, ...]:
        return tuple(g.weight(f"{name}.heads.{head}.{part}", rows, cols) for head in range(num_heads))

    source, part = (compressed("q_a", form.query_rank), "q_b") if form.query_rank else (x, "q")
    q_still = d.linear(source, f"{name}.{part}_still", num_heads * still, False)
    q_turned = g.rope(d.linear(source, f"{name}.{part}_turned", num_heads * turned, False), angles, turned)
    latent = compressed("kv_a", rank)
    k_turned = g.rope(d.linear(x, f"{name}.k_turned", turned, spec.qkv_bias), angles, turned)
    values = by_head("v", form.value_dim, rank)
    if form.is_absorbed:
        q = g.concat_heads(g.head_linear(q_still, by_head("k_absorbed", rank, still)), q_turned, num_heads, rank, turned)
        g.kv_write(g.concat_heads(latent, k_turned, 1, rank, turned), None, layer)
        scale = scale or spec.head_dim**-0.5
        return g.head_linear(g.attention(q, layer, 1, rank + turned, scale=scale, value_dim=rank, latent=True), values)
    k = g.head_linear(latent, by_head("k", still, rank))
    g.kv_write(g.concat_heads(k, k_turned, num_heads, still, turned), g.head_linear(latent, values), layer)
    q = g.concat_heads(q_still, q_turned, num_heads, still, turned)
    return g.attention(q, layer, num_heads, spec.head_dim, scale=scale, value_dim=form.value_dim)
