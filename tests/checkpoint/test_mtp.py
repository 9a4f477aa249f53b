"""Layers for drafts in a model's own files, against transformers' layer of DeepSeek-V3."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.backend import compile_program
from headrace.batch import DraftTree
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.mtp import open_mtp
from headrace.config import KvConfig
from headrace.errors import FormatError, RequestError
from headrace.loader.drafts import compile_draft_models, open_draft_checkpoints, target_program
from headrace.loader.options import engine_config
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import make_proposers
from tests.draft_engines import draft_engine
from tests.engine.test_promise import same
from tests.families import LATENT, V3_GROUPS
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


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_mtp_changes_no_token(target: Checkpoint, params: SamplingParams) -> None:
    checked, requests = (target.spec, dict(target.tensors)), [(p, params) for p in PROMPTS]
    plain = run_all(tiny_engine(checked, "cpu", kv_dtype="f32"), requests)
    engine, _ = draft_engine(checked, "draft_model", drafter=open_mtp(target), width=2)
    for one, other in zip(run_all(engine, requests), plain, strict=True):
        same(one, other, exact=True)
    stats = engine.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0


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


def _with_stored(target: Checkpoint, stored: dict[str, Any]) -> Checkpoint:
    return Checkpoint(
        path=target.path,
        spec=target.spec,
        tensors=target.tensors,
        chat_template=None,
        tokenizer_source=target.tokenizer_source,
        stored=stored,
    )
