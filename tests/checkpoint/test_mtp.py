"""Layers for drafts in a model's own files, against transformers' layer of DeepSeek-V3."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from headrace import LLM
from headrace.backend import compile_program
from headrace.batch import DraftTree
from headrace.checkpoint.assemble import assemble, locate_tensors, stored_shapes
from headrace.checkpoint.draft_layers import num_draft_layers
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.mtp import open_mtp
from headrace.checkpoint.split import read_gguf_model
from headrace.config import KvConfig
from headrace.errors import FormatError, RequestError
from headrace.loader.drafts import (
    compile_draft_models,
    open_draft_checkpoints,
    target_program,
    unused_layers,
)
from headrace.loader.options import engine_config
from headrace.model import tensor_shapes
from headrace.model.deepseek import DEEPSEEK_V2
from headrace.model.family import Layout, TensorSource
from headrace.model.spec import ModelSpec
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import make_proposers
from tests.checkpoint.conftest import SHAPE, write_tiny_gguf
from tests.checkpoint.conftest import tensors as tiny_tensors
from tests.draft_engines import draft_engine
from tests.engine.test_promise import same
from tests.families import LATENT, SIZE, V3_GROUPS
from tests.tiny import run_all, tiny_engine

LAYERS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
PROMPTS = [[7, 8, 9, 7, 8], [3], list(range(1, 40))]


def made(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a model whose last layer is for drafts; returns it with the layer, and its tensors."""
    torch.manual_seed(0)
    options = LATENT | V3_GROUPS | {"num_hidden_layers": LAYERS + 1}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    dim, vocab = options["hidden_size"], options["vocab_size"]
    own = {
        "embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
        "enorm.weight": 1 + 0.1 * torch.randn(dim),
        "hnorm.weight": 1 + 0.1 * torch.randn(dim),
        "eh_proj.weight": torch.randn(dim, 2 * dim) / dim**0.5,
        "shared_head.norm.weight": 1 + 0.1 * torch.randn(dim),
        "shared_head.head.weight": torch.randn(vocab, dim) / 4,
    }
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return model, own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp") / "model"


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return made(folder)


@pytest.fixture(scope="module")
def target(folder: Path, reference: Any) -> Checkpoint:
    return open_checkpoint(folder)


@torch.no_grad()
def twin(model: Any, own: dict[str, torch.Tensor], known: Sequence[int], depth: int) -> list[int]:
    """The likeliest tokens, by the equations of the technical report (section 2.2)."""
    body = model.model
    x = body.embed_tokens(torch.tensor([known[:-1]]))
    positions = torch.arange(len(known) - 1)[None]
    for layer in body.layers[:LAYERS]:
        x = layer(x, **_causal(body, x, positions))
    rows = body.norm(x)[0]

    inputs: list[torch.Tensor] = []
    tokens = list(known[1:])
    drafted: list[int] = []
    for _ in range(depth):
        for token, row in zip(tokens[len(inputs) :], rows, strict=True):
            embedded = own["embed_tokens.weight"][token]
            pair = _norm(embedded, own["enorm.weight"]), _norm(row, own["hnorm.weight"])
            inputs.append(own["eh_proj.weight"] @ torch.cat(pair))
        x = torch.stack(inputs)[None]
        last = body.layers[LAYERS](x, **_causal(body, x, torch.arange(len(inputs))[None]))[0, -1]
        logits = own["shared_head.head.weight"] @ _norm(last, own["shared_head.norm.weight"])
        drafted.append(int(logits.argmax()))
        tokens.append(drafted[-1])
        rows = last[None]
    return drafted


def _causal(body: Any, x: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    length = x.shape[1]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    return {
        "attention_mask": mask,
        "position_ids": positions,
        "position_embeddings": body.rotary_emb(x, positions),
    }


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean() + 1e-6) * weight


class Recorder:
    """Records the sequences and drafts of a proposer."""

    def __init__(self, proposer: Any) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []
        self.observe = proposer.observe
        self._propose = proposer.propose

    def propose(self, seqs: list[Any], budgets: list[int], *rest: Any) -> list[DraftTree]:
        drafts: list[DraftTree] = self._propose(seqs, budgets, *rest)
        for seq, draft in zip(seqs, drafts, strict=True):
            if draft.tokens:
                self.drafts.append((list(seq.known), draft.tokens))
        return drafts


def test_mtp_drafts_equal_the_published_equations(target: Checkpoint, reference: Any) -> None:
    checked = (target.spec, dict(target.tensors))
    engine, _ = draft_engine(checked, "draft_model", "reference", drafter=open_mtp(target), depth=3)
    guard = engine._speculation._guards["draft_model"]
    guard._proposer = recorder = Recorder(guard._proposer)
    run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    assert engine.stats().proposer_failures == 0 and len(recorder.drafts) > 20
    for known, drafted in recorder.drafts:
        assert drafted == twin(*reference, known, len(drafted))


def test_mtp_on_a_gpu_drafts_the_published_equations(target: Checkpoint, reference: Any) -> None:
    """The layer's rows and tokens stay on the device."""
    checked = (target.spec, dict(target.tensors))
    engine, _ = draft_engine(
        checked,
        "draft_model",
        "cuda",
        drafter=open_mtp(target),
        depth=3,
        compile=partial(compile_program, activations="f32"),
    )
    guard = engine._speculation._guards["draft_model"]
    guard._proposer = recorder = Recorder(guard._proposer)
    run_all(engine, [(PROMPTS[0], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))])
    assert engine.stats().proposer_failures == 0 and len(recorder.drafts) > 2
    for known, drafted in recorder.drafts:
        assert drafted == twin(*reference, known, len(drafted))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_mtp_changes_no_token(target: Checkpoint, params: SamplingParams) -> None:
    checked, requests = (target.spec, dict(target.tensors)), [(p, params) for p in PROMPTS]
    plain = run_all(tiny_engine(checked, "cpu", kv_dtype="f32"), requests)
    engine, _ = draft_engine(checked, "draft_model", drafter=open_mtp(target), width=2)
    for one, other in zip(run_all(engine, requests), plain, strict=True):
        same(one, other, exact=True)
    stats = engine.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0


def test_mtp_lends_what_its_layer_copies(target: Checkpoint) -> None:
    """DeepSeek-V3's layer has a copy of the model's embedding."""
    drafter = open_mtp(target)
    assert drafter.tensors["embed"] is target.tensors["embed"]
    assert drafter.tensors["target_norm"] is target.tensors["norm"]
    assert drafter.tensors["head"] is not target.tensors["head"]


def test_mtp_from_files_to_drafts(target: Checkpoint) -> None:
    """The loader's own steps, from the option to the tokens."""
    config = engine_config({"backend": "cpu", "proposer": "auto", "draft_model": "mtp"})
    drafts = open_draft_checkpoints(config, target, _no_tokenizer)
    program = target_program(config, target, drafts.taps)
    kv = KvConfig((8,) * len(program.kv_groups), 32, "f32")
    use = drafts.kv_use(config)
    assert use and len(use.groups) == 1 and drafts.weight_bytes("cpu", target) > 0
    executable = compile_program("cpu", program, target.tensors, kv, 1)
    models = compile_draft_models(config, drafts, target, executable, KvConfig((8,), 32, "f32"))
    checked, requests = (target.spec, dict(target.tensors)), [(p, GREEDY) for p in PROMPTS]
    engine = tiny_engine(
        checked,
        "cpu",
        executable=executable,
        proposer={"draft_model": make_proposers(config, models)["draft_model"]},
        kv_dtype="f32",
    )
    plain = run_all(tiny_engine(checked, "cpu", kv_dtype="f32"), requests)
    for one, other in zip(run_all(engine, requests), plain, strict=True):
        same(one, other, exact=True)
    stats = engine.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0


def _no_tokenizer() -> Any:
    raise AssertionError("the layer is in the model's own files")


def test_a_model_without_mtp_layers_raises(target: Checkpoint) -> None:
    without = {
        name: tensor
        for name, tensor in target.stored.items()
        if not name.startswith(f"model.layers.{LAYERS}.")
    }
    with pytest.raises(RequestError, match="draft_model is 'mtp', but model has no layers for d"):
        open_mtp(_with_stored(target, without))
    incomplete = dict(target.stored)
    del incomplete[f"model.layers.{LAYERS}.eh_proj.weight"]
    with pytest.raises(FormatError, match=r"tensor model.layers.0.eh_proj.weight is missing"):
        open_mtp(_with_stored(target, incomplete))


@pytest.fixture(scope="module")
def gguf_file(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and its layer for drafts as a GGUF file, with the names of llama.cpp."""
    layout = DEEPSEEK_V2.gguf
    assert layout and layout.draft_layers
    plain = replace(layout, tensors={**layout.tensors, **layout.alternatives[0]})
    weights = stored_values(target.spec, plain, target.tensors)
    drafter = open_mtp(target)
    own = {
        ours: TensorSource(f"blk.0.{name}") for ours, name in layout.draft_layers.tensors.items()
    }
    own["target_norm"] = layout.tensors["norm"]
    with_layer = replace(plain, tensors={**plain.tensors, **own})
    for name, values in stored_values(drafter.spec, with_layer, drafter.tensors).items():
        weights[name.replace("blk.0.", f"blk.{LAYERS}.")] = values
    file = tmp_path_factory.mktemp("gguf") / "mtp.gguf"
    other = dict.fromkeys(tiny_tensors(target.spec.vocab_size, False))
    return write_tiny_gguf(file, keys_of(target.spec), other | weights, "deepseek2")


def stored_values(spec: ModelSpec, layout: Layout, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a file, from ours."""
    stored = {
        name: np.zeros(shape, np.float32) for name, shape in stored_shapes(spec, layout).items()
    }
    for name, (shape, place, numbers) in locate_tensors(spec, layout).items():
        rows = place.rows(spec, numbers) if place.rows else slice(None)
        stored[place.name][rows] = tensors[name].dequantise().reshape(shape)
    return stored


def keys_of(spec: ModelSpec) -> dict[str, Any]:
    """The metadata of a GGUF file of the model."""
    mla, experts = spec.mla, spec.experts
    assert mla and experts
    keys = {
        "block_count": spec.num_layers + 1,
        "nextn_predict_layers": 1,
        "context_length": spec.max_context,
        "embedding_length": spec.dim,
        "feed_forward_length": spec.ffn_dim,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": mla.value_dim,
        "attention.q_lora_rank": mla.query_rank,
        "attention.kv_lora_rank": mla.kv_rank,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.dimension_count": spec.rotary_dim,
        "rope.freq_base": spec.rope.theta if spec.rope else 0.0,
        "leading_dense_block_count": len(experts.dense_layers),
        "expert_count": experts.num_experts,
        "expert_used_count": experts.top_k,
        "expert_feed_forward_length": experts.ffn_dim,
        "expert_shared_count": experts.shared_ffn_dim // experts.ffn_dim,
        "expert_weights_scale": experts.factor,
        "expert_weights_norm": experts.normalised,
        "expert_gating_func": 2,
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.top_groups,
    }
    tokens = [f"<{i}>" for i in range(spec.vocab_size)]
    return {f"deepseek2.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
    }


def test_mtp_layers_of_a_gguf_file_draft_the_same_tokens(
    target: Checkpoint, gguf_file: Path
) -> None:
    opened = open_checkpoint(gguf_file)
    assert opened.spec.num_layers == LAYERS and num_draft_layers(opened) == 1
    expected, found = open_mtp(target), open_mtp(opened)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[name].dequantise(), tensor.dequantise())

    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    results = []
    for each, drafter in ((target, expected), (opened, found)):
        engine, _ = draft_engine((each.spec, dict(each.tensors)), "draft_model", drafter=drafter)
        results.append([result.outputs[0].token_ids for result in run_all(engine, requests)])
        stats = engine.stats()
        assert stats.drafted > 0 and stats.proposer_failures == 0
    assert results[0] == results[1]


@pytest.mark.parametrize("removed", ["embed_tokens", "shared_head_head"])
def test_mtp_layers_may_share_the_embedding_and_the_head(gguf_file: Path, removed: str) -> None:
    opened = open_checkpoint(gguf_file)
    name = f"blk.{LAYERS}.nextn.{removed}.weight"
    without = {key: value for key, value in opened.stored.items() if key != name}
    drafter = open_mtp(_with_stored(opened, without))
    ours = "embed" if removed == "embed_tokens" else "head"
    assert drafter.tensors[ours] is opened.tensors[ours]


def test_a_gguf_file_without_the_tensors_of_its_mtp_layer_loads(gguf_file: Path) -> None:
    """Some quantisers keep the key, and drop the layer."""
    file = read_gguf_model(gguf_file)
    kept = {name: t for name, t in file.tensors.items() if not name.startswith(f"blk.{LAYERS}.")}
    layout = DEEPSEEK_V2.gguf
    assert layout
    spec = layout.spec(file.metadata, kept)
    assert spec.num_layers == LAYERS
    assert assemble(spec, layout, kept, "a.gguf").keys() == tensor_shapes(spec).keys()


def test_mtp_layers_of_families_without_equations_are_left_out(tmp_path: Path) -> None:
    dim = SHAPE["dim"]
    own = {f"blk.2.nextn.{name}.weight": np.ones(dim, np.float32) for name in ("enorm", "hnorm")}
    own["blk.2.nextn.eh_proj.weight"] = np.ones((dim, 2 * dim), np.float32)
    keys = {"llama.block_count": 3, "llama.nextn_predict_layers": 1}
    opened = open_checkpoint(write_tiny_gguf(tmp_path / "a.gguf", keys, own))
    assert opened.spec.num_layers == 2 and num_draft_layers(opened) == 1
    with pytest.raises(RequestError, match="has layers for drafts, but Headrace has no equations"):
        open_mtp(opened)
    note = unused_layers(engine_config({"backend": "cpu"}), opened)
    assert note.startswith("a.gguf: 1 layer for drafts (multi-token prediction) in the files, not")
    used = engine_config({"backend": "cpu", "proposer": "auto", "draft_model": "mtp"})
    assert not unused_layers(used, opened)
    with LLM(str(tmp_path / "a.gguf"), max_model_len=32) as llm:
        assert llm.generate("hello", GREEDY)[0].outputs[0].token_ids


class MimoLayer:
    """The layer for drafts of MiMo-7B (`modeling_mimo.py`), over transformers' layer of Qwen2."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        config = transformers.Qwen2Config(**SIZE)
        self.model = transformers.Qwen2ForCausalLM(config).eval()
        self.layer = Qwen2DecoderLayer(config, 0).eval()
        dim = config.hidden_size
        parameters = [*self.model.parameters(), *self.layer.parameters()]
        with torch.no_grad():
            for parameter in parameters:
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.2)
        self.own = {
            "token_layernorm.weight": 1 + 0.1 * torch.randn(dim),
            "hidden_layernorm.weight": 1 + 0.1 * torch.randn(dim),
            "input_proj.weight": torch.randn(dim, 2 * dim) / dim**0.5,
            "final_layernorm.weight": 1 + 0.1 * torch.randn(dim),
        }
        self.model.save_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        stored |= {
            f"model.mtp_layers.0.{name}": tensor.contiguous()
            for name, tensor in (self.layer.state_dict() | self.own).items()
        }
        save_file(stored, folder / "model.safetensors")
        values = json.loads((folder / "config.json").read_text())
        values |= {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
        }
        (folder / "config.json").write_text(json.dumps(values))

    @torch.no_grad()
    def draft(self, known: Sequence[int], depth: int) -> list[int]:
        """The likeliest tokens after `known`."""
        own, body = self.own, self.model.model
        rows = body(torch.tensor([known[:-1]])).last_hidden_state[0]
        tokens, inputs, drafted = list(known[1:]), list[torch.Tensor](), list[int]()
        for _ in range(depth):
            for token, row in zip(tokens[len(inputs) :], rows, strict=True):
                embedded = body.embed_tokens.weight[token]
                parts = (
                    _norm(row, own["hidden_layernorm.weight"]),
                    _norm(embedded, own["token_layernorm.weight"]),
                )
                inputs.append(own["input_proj.weight"] @ torch.cat(parts))
            x = torch.stack(inputs)[None]
            x = self.layer(x, **_causal(body, x, torch.arange(len(inputs))[None]))
            last = _norm(x[0, -1], own["final_layernorm.weight"])
            drafted.append(int((self.model.lm_head.weight @ last).argmax()))
            tokens.append(drafted[-1])
            rows = last[None]
        return drafted


def test_mimo_drafts_equal_the_published_equations(tmp_path: Path) -> None:
    made = MimoLayer(tmp_path)
    target = open_checkpoint(tmp_path)
    assert target.spec.architecture == "qwen2" and num_draft_layers(target) == 1
    checked, drafter = (target.spec, dict(target.tensors)), open_mtp(target)
    assert drafter.tensors["embed"] is target.tensors["embed"]
    engine, _ = draft_engine(checked, "draft_model", "reference", drafter=drafter, depth=3)
    guard = engine._speculation._guards["draft_model"]
    guard._proposer = recorder = Recorder(guard._proposer)
    run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    assert engine.stats().proposer_failures == 0 and len(recorder.drafts) > 20
    for known, drafted in recorder.drafts:
        assert drafted == made.draft(known, len(drafted))


def _with_stored(target: Checkpoint, stored: dict[str, Any]) -> Checkpoint:
    return replace(target, stored=stored)
