import pytest

from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.source import resolve
from headrace.convert.gguf.mixtures import MIXTURES, MixtureFacts, mixture_facts, tensor_types
from headrace.errors import RequestError
from headrace.model.fields import JsonFields
from tests.llama_cpp import mixtures

LAYER = {
    "attn_v.weight": (64, 256),
    "ffn_down.weight": (256, 512),
    "ffn_up.weight": (512, 256),
    "attn_norm.weight": (256,),
}
SHAPES = {"token_embd.weight": (100, 256), "output.weight": (100, 256)} | {
    f"blk.{layer}.{name}": shape for layer in range(8) for name, shape in LAYER.items()
}
FACTS = MixtureFacts("llama", 8, heads_per_kv_head=4)


@pytest.mark.parametrize("name", mixtures.MODELS)
def test_mixtures_are_those_of_llama_cpp(name: str) -> None:
    found = mixtures.kept()[name]
    assert len(found.types) >= len(MIXTURES) - 2
    assert mixtures.differences(found) == []


def test_the_first_and_last_layers_and_a_third_of_the_others_have_more_bits() -> None:
    found = tensor_types("Q4_K_M", SHAPES, FACTS)
    assert [layer for layer in range(8) if found[f"blk.{layer}.ffn_down.weight"] == "Q6_K"] == [
        0,
        3,
        6,
        7,
    ]
    assert {found[f"blk.{layer}.ffn_up.weight"] for layer in range(8)} == {"Q4_K"}
    assert (
        found["token_embd.weight"],
        found["output.weight"],
        found["blk.0.attn_norm.weight"],
    ) == ("Q4_K", "Q6_K", "F32")


def test_embeddings_that_make_logits_have_their_format() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "output.weight"}
    assert tensor_types("Q4_K_M", shapes, FACTS)["token_embd.weight"] == "Q6_K"


def test_mixtures_of_hybrid_models() -> None:
    """In hybrid models, the rule counts only layers with attention."""
    shapes = {
        name: shape for name, shape in SHAPES.items() if "attn_v" not in name or name[4] in "37"
    }
    found = tensor_types("Q3_K_M", shapes, FACTS)
    assert (found["blk.3.attn_v.weight"], found["blk.7.attn_v.weight"]) == ("Q5_K", "Q5_K")


def test_mixtures_for_rows_that_do_not_fit_blocks() -> None:
    facts = MixtureFacts("llama", 100)
    for mixture, short in {
        "Q6_K": "Q8_0",
        "Q5_K_S": "Q5_1",
        "Q4_K_S": "Q5_0",
        "Q3_K_S": "Q4_0",
        "IQ4_XS": "IQ4_NL",
    }.items():
        shapes = {
            "blk.50.attn_q.weight": (4, 288),
            "blk.50.ffn_up.weight": (4, 40),
            "blk.50.ffn_gate.weight": (4, 256),
        }
        assert list(tensor_types(mixture, shapes, facts).values()) == [
            short,
            "F16",
            MIXTURES[mixture].format,
        ]


def test_mxfp4_mixture_of_dense_models() -> None:
    found = tensor_types("MXFP4", SHAPES, FACTS)
    assert found["blk.0.ffn_up.weight"] == found["blk.3.attn_v.weight"] == "MXFP4"
    assert found["token_embd.weight"] == found["output.weight"] == "Q8_0"
    assert tensor_types("MXFP4_MOE", SHAPES, FACTS)["blk.0.ffn_up.weight"] == "Q8_0"


def test_routers_biases_and_vectors_stay() -> None:
    shapes = {
        "blk.0.ffn_gate_inp.weight": (8, 256),
        "blk.0.ffn_down_exps.bias": (8, 256),
        "blk.0.attn_k_norm.weight": (4, 256),
    }
    shapes |= {"position_embd.weight": (64, 256), "blk.0.ffn_gate_inp_shexp.weight": (1, 256)}
    for mixture in MIXTURES:
        assert set(tensor_types(mixture, shapes, FACTS).values()) == {"F32"}


def test_an_unknown_mixture_is_refused() -> None:
    with pytest.raises(
        RequestError, match="unknown mixture of formats 'Q9_K'; use one of F32, F16"
    ):
        tensor_types("Q9_K", SHAPES, FACTS)


def test_mixture_facts() -> None:
    assert mixture_facts(read_gguf(resolve("smollm2", progress=False)).metadata) == MixtureFacts(
        "llama", 30, 3
    )
    fields = {
        "general.architecture": "gpt2",
        "gpt2.block_count": 12,
        "gpt2.attention.head_count": 12,
    }
    assert mixture_facts(JsonFields(fields, "made")) == MixtureFacts("gpt2", 12, 1)
