"""Opens, checks and compiles draft models, self-drafting layers and Medusa heads."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.backend import Executable, lower_program
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.safetensors import read_safetensors
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KvConfig
from headrace.errors import FormatError, ModelNotFoundError, RequestError
from headrace.kv.manager import KvManager
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program.trace import Program, trace
from headrace.quant.formats import StoredTensor
from headrace.record import frozen
from headrace.speculation.proposers import DraftModel, DraftModels, enabled_methods
from headrace.speculation.proposers.draft_model import max_rows
from headrace.speculation.proposers.medusa import head_forward

_MAX_HEADS = 16
_NEVER = -1e9
"""Logit bias of tokens that a model does not have; finite, because samplers check logits."""


class Attachable(Protocol):
    """An executable, or a rank's share of one, that other programs can be attached to."""

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> Executable:
        """See `Executable.attach`."""


@frozen
class DraftCheckpoints:
    """Draft model and Medusa heads of a configuration, opened but not compiled."""

    draft: Checkpoint | None = None
    heads: Mapping[str, StoredTensor] | None = None

    def weight_bytes(self, backend: str, target: ModelSpec) -> int:
        """Return the bytes of their weights in the backend's memory, without the target's."""
        total = 0
        if self.draft:
            program = trace_model(self.draft.spec, self.draft.tensors)
            total += lower_program(backend, program, self.draft.tensors).weight_bytes
        if self.heads:
            for program in _head_programs(target, self.heads):
                total += lower_program(backend, program, self.heads).weight_bytes
        return total


def open_draft_checkpoints(
    config: EngineConfig, target: Checkpoint, load_tokenizer: Callable[[], Tokenizer]
) -> DraftCheckpoints:
    """Open the draft model and the Medusa heads of `target`, if they are configured.

    `load_tokenizer` returns the target's tokenizer; without drafts it is not called.
    Raises ModelError as `open_checkpoint` does. Raises RequestError if the draft model
    has another vocabulary, the heads belong to another model, or `draft_layers` exceeds
    the model's layers.
    """
    layers, max_layers = config.draft_layers, target.spec.num_layers - 1
    methods = enabled_methods(config)
    if "self_draft" in methods and not 1 <= layers <= max_layers:
        raise RequestError(
            f"draft_layers is {layers}, but must be 1 to {max_layers} for this model; `headrace "
            "calibrate` suggests a number"
        )
    draft = heads = None
    if "draft_model" in methods and config.draft_model:
        draft = open_checkpoint(
            resolve(config.draft_model), is_absorbed=config.latent_attention == "absorbed"
        )
        if not draft.spec.has_head:
            raise RequestError(
                f"draft_model '{config.draft_model}' only computes embeddings: its files have no "
                "head (lm_head.weight); choose a model that generates text"
            )
        _check_vocabulary(config.draft_model, draft, load_tokenizer())
        draft = _with_vocab_size(draft, target.spec.vocab_size)
    if "medusa" in methods and config.medusa_heads:
        heads = read_heads(Path(config.medusa_heads), target.spec, load_tokenizer().vocab_size)
    return DraftCheckpoints(draft, heads)


def model_program(config: EngineConfig, checkpoint: Checkpoint) -> Program:
    """Trace a model, with the attention window of the configuration."""
    return trace_model(checkpoint.spec, checkpoint.tensors).with_window(
        config.attention_window, config.attention_sinks
    )


def target_program(config: EngineConfig, target: Checkpoint) -> Program:
    """Trace the target model with row pooling, and with its hidden rows as output for heads."""
    program = model_program(config, target).with_pooled()
    return program.with_hidden() if "medusa" in enabled_methods(config) else program


def compile_draft_models(
    config: EngineConfig,
    draft_checkpoints: DraftCheckpoints,
    target: Checkpoint,
    executable: Attachable,
    kv: KvConfig | None,
) -> DraftModels:
    """Compile all draft programs on the threads of the target's `executable`.

    `kv` is the KV size of the draft model; without it, no draft model is compiled.
    """
    draft_models = DraftModels(block_size=config.traits.kv_block_size)
    if kv and (checkpoint := draft_checkpoints.draft):
        program = model_program(config, checkpoint)
        manager = KvManager(program.kv_groups, kv, max_rows(config.draft_depth))
        compiled = executable.attach(program, checkpoint.tensors, kv)
        draft_models = replace(
            draft_models, draft=DraftModel(compiled, manager, checkpoint.spec.max_context)
        )
    if "self_draft" in enabled_methods(config):
        short = first_layers(target, config.draft_layers).with_window(
            config.attention_window, config.attention_sinks
        )
        draft_models = replace(draft_models, first_layers=executable.attach(short, target.tensors))
    if tensors := draft_checkpoints.heads:
        programs = _head_programs(target.spec, tensors)
        draft_models = replace(
            draft_models, heads=[executable.attach(program, tensors) for program in programs]
        )
    return draft_models


def _head_programs(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> Iterator[Program]:
    return (
        trace(partial(head_forward, i, spec.dim, spec.vocab_size), tensors)
        for i in range(len(tensors) // 3)
    )


def first_layers(target: Checkpoint, layers: int) -> Program:
    """Trace a model's first layers, with its final norm and its head."""
    return trace_model(target.spec.first_layers(layers), target.tensors)


def read_heads(path: Path, spec: ModelSpec, num_tokens: int) -> dict[str, StoredTensor]:
    """Read Medusa heads from a safetensors file, under the names of this engine.

    Each head i has `{i}.0.linear.weight` [dim, dim], `{i}.0.linear.bias` [dim] and
    `{i}.1.weight` [vocab, dim], which may be padded to another number of rows, from `num_tokens`
    on. The names in the file may start with `medusa_head.`.
    Raises ModelNotFoundError if there is no file, and FormatError if a tensor is
    missing, unknown or of a wrong shape.
    """
    if not path.is_file():
        raise ModelNotFoundError(
            f"medusa_heads '{path}' is not a file; set the path of a safetensors file"
        )
    stored = {
        name.removeprefix("medusa_head."): tensor for name, tensor in read_safetensors(path).items()
    }
    shapes = {
        "0.linear.weight": (spec.dim, spec.dim),
        "0.linear.bias": (spec.dim,),
        "1.weight": (spec.vocab_size, spec.dim),
    }
    count = -(-len(stored) // len(shapes))
    expected = {
        f"{i}.{name}": shape
        for i in range(min(count, _MAX_HEADS))
        for name, shape in shapes.items()
    }
    if not expected or stored.keys() != expected.keys():
        known = expected or {f"0.{name}": () for name in shapes}
        wrong = sorted(stored.keys() ^ known.keys())[:3]
        raise FormatError(
            f"{path.name}: not Medusa heads with one layer each: missing or unknown tensors "
            f"{', '.join(wrong)}; choose heads of Medusa-1 for this model"
        )
    for name, shape in expected.items():
        if name.endswith(".1.weight"):
            stored[name] = _padded_head(stored[name], num_tokens, spec.vocab_size)
        if stored[name].shape != shape:
            raise FormatError(
                f"{path.name}: tensor {name} has shape {list(stored[name].shape)}, but this "
                f"model needs {list(shape)}; choose heads that were trained for this model"
            )
    return {
        f"medusa.{name}": replace(tensor, name=f"medusa.{name}") for name, tensor in stored.items()
    }


def _padded_head(tensor: StoredTensor, num_tokens: int, size: int) -> StoredTensor:
    """Cut or pad the matrix of a head to `size` rows; padding draws no accepted token."""
    if len(tensor.shape) != 2 or not num_tokens <= tensor.rows != size:
        return tensor
    return tensor.take(tensor.name, np.minimum(np.arange(size), tensor.rows - 1))


def _check_vocabulary(name: str, draft: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise RequestError unless the draft model named `name` has the target's tokens.

    Control tokens may differ: the target verifies drafts, so they only cost acceptance.
    """
    other = draft.load_tokenizer()
    control = tokenizer.special_ids & other.special_ids
    for token in range(min(tokenizer.vocab_size, other.vocab_size)):
        drafted, own = other.token_bytes(token), tokenizer.token_bytes(token)
        if drafted != own and token not in control:
            raise RequestError(
                f"draft_model '{name}' has another vocabulary: its token {token:,} is {drafted!r}, "
                f"in the model {own!r}; choose a smaller model with the tokenizer of this one, or "
                "the proposer ngram, which needs no model"
            )


def _with_vocab_size(draft: Checkpoint, size: int) -> Checkpoint:
    """Cut or pad the embedding and the head to `size` rows.

    Models of one family pad the same tokens to different sizes (Qwen2.5: 151,936 or 152,064).
    A bias keeps padding out of drafts.
    """
    own_size = draft.spec.vocab_size
    if size == own_size:
        return draft
    tensors = dict(draft.tensors)
    rows = np.minimum(np.arange(size), own_size - 1)
    for name in ("embed", "head"):
        if name in tensors:
            stored = tensors[name]
            order = rows if stored.row_order is None else stored.row_order[rows]
            tensors[name] = stored.take(name, order)
    spec = replace(draft.spec, vocab_size=size)
    if draft.spec.head_bias or size > own_size:
        bias = np.full(size, _NEVER, np.float32)
        own_bias = tensors["head_bias"].dequantise() if draft.spec.head_bias else 0.0
        bias[:own_size] = own_bias[:size] if isinstance(own_bias, np.ndarray) else own_bias
        tensors["head_bias"] = StoredTensor.from_floats("head_bias", bias)
        spec = replace(spec, head_bias=True)
    return replace(draft, spec=spec, tensors=tensors)
