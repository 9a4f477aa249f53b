"""What families promise the loader: names for every tensor of every model that they can describe."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import FAMILIES, tensor_shapes, trace_model
from headrace.model.family import Family, Layout, Stored, half_split, interleaved_rows, plain
from headrace.model.fields import JsonFields, shown
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.quant.formats import StoredTensor

SPEC = ModelSpec(
    architecture="llama",
    num_layers=2,
    dim=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_dim=1,
    vocab_size=5,
    max_context=16,
    norm_eps=1e-5,
    rope=RopeSpec(4),
)


def layouts(family: Family) -> list[Layout]:
    return [layout for layout in (family.config, family.gguf) if layout]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_a_place_of_its_own_in_every_layout(name: str) -> None:
    family = FAMILIES[name]
    assert family.name == name and layouts(family)
    for flags in product([False, True], repeat=4):
        fields = ("tied_embeddings", "qkv_bias", "output_bias", "mlp_bias")
        spec = replace(SPEC, architecture=name, **dict(zip(fields, flags, strict=True)))
        for layout in layouts(family):
            places = [layout.locate(tensor)[0].name for tensor in tensor_shapes(spec)]
            assert len(places) == len(set(places))
            assert not [place for place in places if "{" in place or place.endswith(layout.ignored or ("-",))]


def test_no_two_families_claim_the_same_files() -> None:
    for kind in ("config", "gguf"):
        claimed = [name for family in FAMILIES.values() if (layout := getattr(family, kind)) for name in layout.architectures]
        assert len(claimed) == len(set(claimed))


def test_shapes_are_those_that_tracing_asserts() -> None:
    spec = replace(SPEC, qkv_bias=True, mlp_bias=True)
    shapes = tensor_shapes(spec)
    assert shapes["embed"] == (5, 8) and shapes["norm"] == (8,)
    assert shapes["layers.1.q_bias"] == (16,) and shapes["layers.0.k"] == (8, 8)
    assert shapes["layers.1.gate"] == (1, 8) and shapes["layers.1.gate_bias"] == (1,)  # a matrix of one row is no vector
    tensors = {name: StoredTensor.from_floats(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()}
    used = {weight.name for op in trace_model(spec, tensors).ops for weight in op.weights()}
    assert used == shapes.keys()
    for name, shape in shapes.items():
        wrong = StoredTensor.from_floats(name, np.zeros((*shape[:-1], shape[-1] + 1), np.float32))
        with pytest.raises(FormatError, match=name):
            trace_model(spec, tensors | {name: wrong})


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'hyena'; there are: llama"):
        tensor_shapes(replace(SPEC, architecture="hyena"))


def test_places() -> None:
    layout = Layout(
        architectures=("x",),
        tensors=plain({"embed": "wte", "layers.{}.experts.{}.up": "h.{}.mlp.{}.up", "layers.{}.experts.{}.down": "h.{}.down"}),
    )
    assert layout.locate("embed") == (Stored("wte"), ())
    assert layout.locate("layers.3.experts.12.up") == (Stored("h.3.mlp.12.up"), (3, 12))
    assert layout.locate("layers.3.experts.12.down") == (Stored("h.3.down"), (3, 12))  # stacked: the rows go by the second number


def test_half_split_pairs() -> None:
    np.testing.assert_array_equal(interleaved_rows(6, 4, 2), [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11])
    tensors = half_split(plain({f"layers.{{}}.{part}": part for part in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias")}))
    orders = {name.removeprefix("layers.{}."): stored.rows(SPEC, (0,)) for name, stored in tensors.items() if stored.rows}
    assert {part: len(rows) for part, rows in orders.items()} == {"q": 16, "q_bias": 16, "k": 8, "k_bias": 8}


class TestFields:
    FIELDS = JsonFields({"i": 3, "f": 0.5, "b": True, "s": "text", "n": None, "o": {"i": "x"}, "l": [1] * 1000, "h": 10**30}, "a.json")

    def test_values(self) -> None:
        fields = self.FIELDS
        assert (fields.integer("i"), fields.number("i"), fields.number("f"), fields.flag("b"), fields.string("s")) == (
            3,
            3.0,
            0.5,
            True,
            "text",
        )
        assert (fields.integer("n", 7), fields.flag("none", False), fields.optional_number("n")) == (7, False, None)
        assert "n" in fields and "none" not in fields
        assert not fields.section("none")

    @pytest.mark.parametrize(
        ("getter", "key", "message"),
        [
            ("integer", "n", "a.json: n is missing"),
            ("integer", "none", "a.json: none is missing"),
            ("integer", "b", "b must be an integer, found True"),
            ("integer", "f", r"f must be an integer, found 0\.5"),
            ("integer", "h", "h is out of range"),
            ("number", "h", "h is out of range"),
            ("number", "s", "s must be a number, found text"),
            ("flag", "i", "i must be true or false"),
            ("string", "l", "l must be a string, found "),
            ("section", "i", "i must be an object"),
        ],
    )
    def test_refused(self, getter: str, key: str, message: str) -> None:
        with pytest.raises(FormatError, match=message):
            getattr(self.FIELDS, getter)(key)

    def test_sections_say_where_they_are(self) -> None:
        with pytest.raises(FormatError, match=r"a\.json: o: i must be an integer, found x"):
            self.FIELDS.section("o").integer("i")

    def test_neutral(self) -> None:
        self.FIELDS.require_neutral({"i": (3,), "n": (), "none": ()})
        with pytest.raises(UnsupportedModelError, match=r"a\.json: f = 0\.5 is not supported"):
            self.FIELDS.require_neutral({"f": (1,)})

    def test_messages_stay_short(self) -> None:
        assert max(len(shown(value)) for value in ("x" * 1000, ["y" * 1000] * 1000, np.zeros(10**6))) <= 80
