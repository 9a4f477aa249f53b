"""Programs of generated shapes that together contain every op."""

from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from headrace.model import trace_model
from headrace.model.spec import RopeSpec
from headrace.program.op import Value, Weight
from headrace.program.trace import Program, Tracer, trace
from tests.backend.stored import random_stored
from tests.moe import MoeModel
from tests.tiny import Tensors, tiny_model

VOCAB = 61

SHAPES = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from([1, 2, 3]),
        "groups": st.sampled_from([1, 2, 3]),
        "head_dim": st.sampled_from([32, 64]),
        "rotated": st.sampled_from([4, 32]),
        "window": st.sampled_from([0, 1, 7, (5, 0)]),
        "format": st.sampled_from(["F32", "BF16", "Q4_0", "Q8_0", "I8_ROW"]),
    }
)


def decoder(shape: dict[str, Any]) -> tuple[Program, Tensors]:
    """A decoder with pooled rows."""
    heads, head_dim = shape["kv_heads"] * shape["groups"], shape["head_dim"]
    sizes = {
        "dim": heads * head_dim,
        "heads": heads,
        "kv_heads": shape["kv_heads"],
        "ffn": 96,
        "vocab": VOCAB,
    }
    spec, tensors = tiny_model(0, window=shape["window"], format=shape["format"], **sizes)
    return trace_model(
        replace(spec, rope=RopeSpec(shape["rotated"])), tensors
    ).with_pooled(), tensors


def others(shape: dict[str, Any]) -> tuple[Program, Tensors]:
    """A program with input rows, a lone silu, biases everywhere, and a layer without rope before a
    layer with rope.
    """
    dim, kv_dim, ffn = (
        n * shape["head_dim"] for n in (shape["kv_heads"] * shape["groups"], shape["kv_heads"], 2)
    )
    shapes = {
        "q": (dim, dim),
        "k": (kv_dim, dim),
        "v": (kv_dim, dim),
        "gate": (ffn, dim),
        "up": (ffn, dim),
        "down": (dim, ffn),
    }
    tensors = {
        name: random_stored(shape["format"], *size, i, name, 0.01)
        for i, (name, size) in enumerate(shapes.items())
    }
    for name, (rows, _) in shapes.items():
        tensors[f"{name}.bias"] = replace(
            random_stored("F32", 1, rows, rows, f"{name}.bias"), shape=(rows,)
        )

    def forward(g: Tracer) -> Value:
        def linear(x: Value, name: str) -> Value:
            return g.linear(
                x, g.weight(name, *shapes[name]), g.vector(f"{name}.bias", shapes[name][0])
            )

        x = g.input(dim)
        angles = g.rope_angles((1.0, 0.5), 1.0)
        for layer, rotates in enumerate((False, True)):
            q, k = (
                g.rope(linear(x, name), angles, shape["head_dim"]) if rotates else linear(x, name)
                for name in "qk"
            )
            g.kv_write(k, linear(x, "v"), layer)
            x = g.add(x, g.attention(q, layer, shape["kv_heads"], shape["head_dim"]))
        x = g.add(x, linear(g.glu(linear(x, "gate"), linear(x, "up")), "down"))
        return linear(g.gather_rows(g.add(g.activate(x, "silu"), x)), "gate")

    return trace(forward, tensors), tensors


class _Families:
    """The tensors of `families`, and functions of its equations."""

    def __init__(self, shape: dict[str, Any]) -> None:
        self.head_dim, self.heads = shape["head_dim"], shape["kv_heads"] * shape["groups"]
        self.dim, kv_dim = self.heads * self.head_dim, shape["kv_heads"] * self.head_dim
        dim, heads = self.dim, self.heads
        self.shapes = {
            "positions": (24, dim),
            "q": (dim, dim),
            "k": (kv_dim, dim),
            "v": (shape["kv_heads"] * 32, dim),
            "o": (dim, heads * 32),
            "latent.q": (dim, dim),
            "latent.k": (self.head_dim, dim),
            "up": (96, dim),
            "gate": (96, dim),
            "down": (dim, 96),
        }
        self.by_head = {
            part: tuple(f"{part}.{head}" for head in range(heads)) for part in ("absorbed", "value")
        }
        self.vectors = {
            "norm": dim,
            "norm.bias": dim,
            "head_norm": self.head_dim,
            "sinks": heads,
            "up.bias": 96,
        }
        self.tensors = self._tensors(shape["format"])

    def _tensors(self, format_name: str) -> Tensors:
        head_names = [name for names in self.by_head.values() for name in names]
        tensors = {
            name: random_stored(format_name, *size, i, name, 0.01)
            for i, (name, size) in enumerate(self.shapes.items())
        }
        for i, name in enumerate(head_names):
            tensors[name] = random_stored(format_name, self.head_dim, self.head_dim, i, name, 0.01)
        tensors["row_gate"] = random_stored("F32", 1, self.dim, 5, "row_gate", 0.1)
        for name, size in self.vectors.items():
            tensors[name] = replace(random_stored("F32", 1, size, 9, name, 1.0), shape=(size,))
        return tensors

    def linear(self, g: Tracer, x: Value, name: str) -> Value:
        return g.linear(x, g.weight(name, *self.shapes[name]))

    def head_linear(self, g: Tracer, x: Value, part: str) -> Value:
        size = self.head_dim
        return g.head_linear(x, tuple(g.weight(name, size, size) for name in self.by_head[part]))

    def vector(self, g: Tracer, name: str) -> Weight:
        return g.vector(name, self.vectors[name])


def families(shape: dict[str, Any]) -> tuple[Program, Tensors]:
    """A program with learned positions, LayerNorm and head norms, MLPs without a gate, and all
    kinds of attention.
    """
    model = _Families(shape)
    head_dim, heads, dim = model.head_dim, model.heads, model.dim

    def forward(g: Tracer) -> Value:
        linear, vector = partial(model.linear, g), partial(model.vector, g)
        head_linear = partial(model.head_linear, g)

        positions = g.embed_position(g.weight("positions", *model.shapes["positions"]))
        x = g.scale(g.add(g.input(dim), positions), 0.5)
        y = g.norm(x, vector("norm"), 1e-5, "layer", bias=vector("norm.bias"))
        q, k = (g.norm(linear(y, name), vector("head_norm"), 1e-5, size=head_dim) for name in "qk")
        g.kv_write(k, linear(y, "v"), 0)
        attended = g.attention(
            q,
            0,
            shape["kv_heads"],
            head_dim,
            7,
            num_sink_tokens=3,
            softcap=5.0,
            slopes=tuple(0.5**head for head in range(heads)),
            sinks=vector("sinks"),
            value_dim=32,
        )
        x = g.add(x, linear(attended, "o"))

        queries, latent = linear(x, "latent.q"), linear(x, "latent.k")
        absorbed = head_linear(queries, "absorbed")
        g.kv_write(g.concat_heads(latent, latent, 1, head_dim, head_dim), None, 1)
        q = g.concat_heads(absorbed, latent, heads, head_dim, head_dim)
        attended = g.attention(q, 1, 1, 2 * head_dim, scale=0.3, value_dim=head_dim, is_latent=True)
        x = g.add(g.add(x, head_linear(attended, "value")), head_linear(latent, "value"))

        hidden = g.linear(x, g.weight("up", *model.shapes["up"]), vector("up.bias"))
        for activation in ("gelu", "gelu_tanh", "relu"):
            hidden = g.add(hidden, g.activate(hidden, activation))
        mlp = g.add(linear(g.activate(linear(x, "up"), "gelu"), "down"), linear(hidden, "down"))
        gated = g.glu(linear(x, "gate"), linear(x, "up"), "clamped_swiglu")
        mlp = g.add(mlp, linear(gated, "down"))
        mlp = g.gate_rows(mlp, g.linear(x, g.weight("row_gate", 1, dim)))
        return g.soft_cap(linear(g.gather_rows(g.add(x, mlp)), "gate"), 30.0)

    return trace(forward, model.tensors), model.tensors


def moe_models(shape: dict[str, Any]) -> list[tuple[Program, Tensors]]:
    """Mixtures of experts, with every option of the routing and with none."""
    sizes = {
        "experts": 2 * shape["groups"] * shape["kv_heads"],
        "hidden": 32 * shape["groups"],
        "format": shape["format"],
    }
    groups = (shape["groups"], 1)
    rich = MoeModel(
        top_k=2,
        has_biases=True,
        scoring="sigmoid",
        factor=2.0,
        groups=groups,
        has_route_bias=True,
        **sizes,
    )
    return [
        moe_model.program()
        for moe_model in (rich, MoeModel(top_k=2, normalised=False, groups=groups, **sizes))
    ]
