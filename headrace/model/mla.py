"""Multi-head latent attention; `MlaSpec` describes its two forms."""

from typing import TYPE_CHECKING

from headrace.model.spec import MlaSpec
from headrace.program.op import Value, Weight

if TYPE_CHECKING:
    from headrace.model.decoder import Decoder


def attend(d: "Decoder", mla: MlaSpec, layer: int, x: Value) -> Value:
    """Attention before its output matrix. Writes KV.

    Queries and keys have a rotated part `pe` and a part `nope`.
    """
    g, spec, rope, name = d.g, d.spec, d.spec.rope, f"layers.{layer}"
    assert rope
    num_heads, rank = spec.num_heads, mla.kv_rank
    pe, nope = rope.dim, spec.head_dim - rope.dim
    angles = d.angles(rope)
    scale = spec.attention_scale or spec.head_dim**-0.5

    def latent_rows(part: str, width: int) -> Value:
        rows = d.linear(x, f"{name}.{part}", width, spec.qkv_bias)
        return g.norm(rows, g.vector(f"{name}.{part}_norm", width), mla.norm_eps)

    def heads(part: str, rows: int, cols: int) -> tuple[Weight, ...]:
        return tuple(
            g.weight(f"{name}.heads.{head}.{part}", rows, cols) for head in range(num_heads)
        )

    q_input, q_name = (latent_rows("q_a", mla.query_rank), "q_b") if mla.query_rank else (x, "q")
    q_nope = d.linear(q_input, f"{name}.{q_name}_nope", num_heads * nope, False)
    q_pe = g.rope(d.linear(q_input, f"{name}.{q_name}_pe", num_heads * pe, False), angles, pe)
    latent = latent_rows("kv_a", rank)
    k_pe = g.rope(d.linear(x, f"{name}.k_pe", pe, spec.qkv_bias), angles, pe)
    values = heads("v", mla.value_dim, rank)

    if mla.is_absorbed:
        q_latent = g.head_linear(q_nope, heads("k_absorbed", rank, nope))
        q = g.concat_heads(q_latent, q_pe, num_heads, rank, pe)
        g.kv_write(g.concat_heads(latent, k_pe, 1, rank, pe), None, layer)
        attended = g.attention(q, layer, 1, rank + pe, scale=scale, value_dim=rank, is_latent=True)
        return g.head_linear(attended, values)

    k = g.concat_heads(g.head_linear(latent, heads("k", nope, rank)), k_pe, num_heads, nope, pe)
    g.kv_write(k, g.head_linear(latent, values), layer)
    q = g.concat_heads(q_nope, q_pe, num_heads, nope, pe)
    return g.attention(q, layer, num_heads, spec.head_dim, scale=scale, value_dim=mla.value_dim)
