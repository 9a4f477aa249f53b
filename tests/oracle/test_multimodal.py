"""Text models of tiny random multimodal models, against transformers in float32."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.text_part import TEXT_MODELS, WHOLE_MODELS
from headrace.cli.main import main
from headrace.errors import UnsupportedModelError
from tests.families import SIZE, VOCAB
from tests.oracle.test_families import rows_of_ours

TOKENS = (np.arange(60) * 37 % (VOCAB - 9) + 9).tolist()
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CLIP = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 16}
QWEN = {"depth": 1, "num_heads": 2}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}
LLAMA4_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Whole(NamedTuple):
    """A multimodal model: its type, its text model's, and what they need beside the sizes."""

    kind: str
    text: Mapping[str, Any] = MappingProxyType({})
    vision: Mapping[str, Any] | None = None
    others: Mapping[str, Any] = MappingProxyType({})
    kv_groups: int = 1


WHOLES = {
    "gemma3": Whole(
        "gemma3",
        {"sliding_window": 9, "head_dim": 16, "layer_types": LAYERS},
        SIGLIP,
        {"mm_tokens_per_image": 4},
        2,
    ),
    "mistral3": Whole("mistral3", {"sliding_window": None, "head_dim": 16}, PIXTRAL),
    "ministral3": Whole(
        "mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": LLAMA4_YARN},
        PIXTRAL,
    ),
    "pixtral": Whole("llava", {"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "llava": Whole("llava", {}, CLIP),
    "llava_next": Whole("llava_next", {"model_type": "mistral", "sliding_window": 9}, CLIP),
    "llava_next_video": Whole("llava_next_video", {}, CLIP),
    "llava_onevision": Whole("llava_onevision", {"tie_word_embeddings": True}, SIGLIP),
    "vipllava": Whole("vipllava", {}, CLIP, {"vision_feature_layers": [-1, -1]}),
    "video_llava": Whole("video_llava", {}, CLIP),
    "qwen2_vl": Whole("qwen2_vl", MROPE, QWEN | {"embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl": Whole(
        "qwen2_5_vl",
        MROPE,
        QWEN
        | {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
        },
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl": Whole(
        "qwen3_vl",
        MROPE | {"head_dim": 16},
        QWEN
        | {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
    "idefics2": Whole(
        "idefics2",
        {"sliding_window": None},
        VISION,
        {
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 1,
            }
        },
    ),
    "idefics3": Whole("idefics3", {}, VISION),
    "smolvlm": Whole("smolvlm", {}, VISION),
    "aya_vision": Whole(
        "aya_vision", {"sliding_window": 9, "head_dim": 16, "layer_types": LAYERS}, SIGLIP, {}, 2
    ),
    "cohere2_vision": Whole(
        "cohere2_vision",
        {"sliding_window": 9, "head_dim": 16, "layer_types": LAYERS},
        SIGLIP,
        {},
        2,
    ),
    "internvl": Whole("internvl", {}, VISION | {"image_size": [28, 28], "patch_size": [14, 14]}),
    "qwen2_audio": Whole(
        "qwen2_audio",
        others={
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
            }
        },
    ),
    "voxtral": Whole(
        "voxtral",
        others={"audio_config": AUDIO | {"model_type": "voxtral_encoder", "intermediate_size": 48}},
    ),
}


def save(name: str, folder: Path) -> Any:
    """Save a tiny model, and return it."""
    whole = WHOLES[name]
    text = SIZE | {"model_type": WHOLE_MODELS[whole.kind]} | whole.text
    values = whole.others | {"text_config": text}
    if whole.vision:
        values["vision_config"] = whole.vision
    config = CONFIG_MAPPING[whole.kind](**values)
    for token in (
        "image_token_id",
        "image_token_index",
        "video_token_id",
        "video_token_index",
        "vision_start_token_id",
        "audio_token_id",
        "audio_token_index",
    ):
        if hasattr(config, token):
            setattr(config, token, 1)
    torch.manual_seed(0)
    kind = type(config).__name__.replace("Config", "ForConditionalGeneration")
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def error_of(name: str, model: Any, folder: Path) -> float:
    """The relative error of our logits."""
    with torch.no_grad():
        want = model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    checkpoint = open_checkpoint(folder)
    groups = WHOLES[name].kv_groups
    got = rows_of_ours(checkpoint.spec, checkpoint.tensors, TOKENS, groups, "reference")[0]
    if "cohere2" in checkpoint.spec.architecture:
        # transformers leaves out the scale of the text model.
        got = got / checkpoint.spec.logit_scale
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_all_are_here() -> None:
    assert {whole.kind for whole in WHOLES.values()} == WHOLE_MODELS.keys()


@pytest.mark.parametrize("name", WHOLES)
def test_logits_of_text(name: str, tmp_path: Path) -> None:
    assert error_of(name, save(name, tmp_path), tmp_path) < 1e-4
    checkpoint = open_checkpoint(tmp_path)
    assert "only the text model of" in checkpoint.notes[0] and checkpoint.left_out
    assert not any("embed_tokens" in left_out for left_out in checkpoint.left_out)
    # Queries of Ministral 3 are scaled after the original context.
    assert checkpoint.spec.max_context == (64 if name == "ministral3" else 256)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_conversions_are_text_models_of_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = save(name, tmp_path / "model"), tmp_path / "out"
    assert main(["convert", str(tmp_path / "model"), str(out), "--to", "f32"]) == 0
    assert re.search(r"not written: .*(vision_tower|visual)\.\* \(\d+\)", capsys.readouterr().err)
    text = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        want, got = (model(input_ids=torch.tensor([TOKENS])).logits for model in (whole, text))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_text_fields_at_the_top(name: str, tmp_path: Path) -> None:
    """The first Qwen2-VL folders have no `text_config`, and a scaling called mrope."""
    model, path = save(name, tmp_path), tmp_path / "config.json"
    values = json.loads(path.read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"]}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    kept = {key: value for key, value in text.items() if key not in ("model_type", "layer_types")}
    path.write_text(json.dumps(values | kept))
    assert error_of(name, model, tmp_path) < 1e-4


def test_gemma3_as_it_was_first_published(tmp_path: Path) -> None:
    """Linear scaling of the layers without a window; no other rotary field, no list of layers."""
    save("gemma3", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    omitted = ("rope_parameters", "layer_types", "tie_word_embeddings", "_sliding_window_pattern")
    text = {key: value for key, value in values["text_config"].items() if key not in omitted}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 3}
    values.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(values | {"text_config": text}))
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path)
    assert error_of("gemma3", model.float().eval(), tmp_path) < 1e-4


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_defaults_of_text_models(kind: str) -> None:
    config = CONFIG_MAPPING[kind]().to_dict()
    for field, value in TEXT_MODELS[kind].items():
        if field == "rope_theta":
            assert config["rope_parameters"][field] == value
        elif field not in ("architectures", "model_type"):
            assert config[field] == value, field


def test_other_text_models_are_refused_by_name(tmp_path: Path) -> None:
    save("llava", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for whole, text, name in (
        ("llava", "xglm", "'xglm'"),
        ("llama4", "llama4_text", "'Llama4ForConditionalGeneration'"),
        ("paligemma", "gemma2", "'PaligemmaForConditionalGeneration'"),
    ):
        values["architectures"] = [f"{whole.capitalize()}ForConditionalGeneration"]
        values |= {"model_type": whole, "text_config": {"model_type": text}}
        path.write_text(json.dumps(values))
        nearest = r"nearest known architecture, LlamaForCausalLM, has all of its tensors"
        with pytest.raises(UnsupportedModelError, match=rf"unknown architecture {name}.*{nearest}"):
            open_checkpoint(tmp_path)
