"""The models that draft for a model: found, checked and compiled."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

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
from headrace.speculation.proposers import DraftModel, DraftModels, asked_for
from headrace.speculation.proposers.draft_model import max_rows
from headrace.speculation.proposers.medusa import head_forward

_MOST_HEADS = 16


class Attachable(Protocol):
    """What programs can be attached to: an executable, or the part of one that a process has."""

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> Executable:
        """See `Executable.attach`."""


@frozen
class DraftCheckpoints:
    """What a configuration asks for beside the model itself, opened and not yet compiled."""

    draft: Checkpoint | None = None
    heads: Mapping[str, StoredTensor] | None = None

    def weight_bytes(self, backend: str, target: ModelSpec) -> int:
        """Bytes of the weights of a draft model and of heads, beside those of the target, in the
        memory of the named backend.
        """
        programs = (
            [(trace_model(self.draft.spec, self.draft.tensors), self.draft.tensors)]
            if self.draft
            else []
        )
        programs += (
            [(program, self.heads) for program in _head_programs(target, self.heads)]
            if self.heads
            else []
        )
        return sum(
            lower_program(backend, program, tensors).weight_bytes for program, tensors in programs
        )


def open_draft_checkpoints(
    config: EngineConfig, target: Checkpoint, tokenizer: Tokenizer
) -> DraftCheckpoints:
    """Open what drafts for `target`.

    Raises ModelError as `open_checkpoint` does, and RequestError for a draft with another
    vocabulary, heads of another model or more layers than there are.
    """
    layers, most = config.draft_layers, target.spec.num_layers - 1
    methods = asked_for(config)
    if "self_draft" in methods and not 1 <= layers <= most:
        raise RequestError(
            f"draft_layers is {layers}, and must be 1 to {most} for this model; `headrace "
            "calibrate` suggests a number"
        )
    draft = heads = None
    if "draft_model" in methods and config.draft_model:
        draft = open_checkpoint(
            resolve(config.draft_model), is_absorbed=config.latent_attention == "absorbed"
        )
        _check_vocabulary(config.draft_model, draft, target, tokenizer)
    if "medusa" in methods and config.medusa_heads:
        heads = read_heads(Path(config.medusa_heads), target.spec)
    return DraftCheckpoints(draft, heads)


def own_program(config: EngineConfig, checkpoint: Checkpoint) -> Program:
    """The program of a model, of which all see as far as the configuration lets them."""
    return trace_model(checkpoint.spec, checkpoint.tensors).with_window(
        config.attention_window, config.attention_sinks
    )


def target_program(config: EngineConfig, target: Checkpoint) -> Program:
    """The program of the model that others draft for, which pools rows; for heads it gives back its
    hidden rows.
    """
    program = own_program(config, target).with_pooled()
    return program.with_hidden() if "medusa" in asked_for(config) else program


def compile_draft_models(
    config: EngineConfig,
    draft_checkpoints: DraftCheckpoints,
    target: Checkpoint,
    executable: Attachable,
    kv: KvConfig | None,
) -> DraftModels:
    """Compile what drafts, on the threads of the target's `executable`; `kv` is that of a draft
    model, where there is one.
    """
    draft_models = DraftModels(block_size=config.traits.kv_block_size)
    if kv and (checkpoint := draft_checkpoints.draft):
        program = own_program(config, checkpoint)
        manager = KvManager(program.kv_groups, kv, max_rows(config.draft_depth))
        compiled = executable.attach(program, checkpoint.tensors, kv)
        draft_models = replace(
            draft_models, draft=DraftModel(compiled, manager, checkpoint.spec.max_context)
        )
    if "self_draft" in asked_for(config):
        short = first_layers(target, config.draft_layers).with_window(
            config.attention_window, config.attention_sinks
        )
        draft_models = replace(draft_models, short=executable.attach(short, target.tensors))
    if tensors := draft_checkpoints.heads:
        programs = _head_programs(target.spec, tensors)
        draft_models = replace(
            draft_models, heads=[executable.attach(program, tensors) for program in programs]
        )
    return draft_models


def _head_programs(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> Iterator[Program]:
    """The program of each Medusa head."""
    return (
        trace(partial(head_forward, i, spec.dim, spec.vocab_size), tensors)
        for i in range(len(tensors) // 3)
    )


def first_layers(target: Checkpoint, layers: int) -> Program:
    """The program of a model's first layers, its last norm and its head."""
    return trace_model(target.spec.first_layers(layers), target.tensors)


def read_heads(path: Path, spec: ModelSpec) -> dict[str, StoredTensor]:
    """Medusa heads in the published format, under our names, [dim, dim], [dim] and [vocab, dim] of
    each.

    The file has `{i}.0.linear.weight`, `{i}.0.linear.bias` and `{i}.1.weight` for heads i = 0, 1,
    ..., with or without `medusa_head.` in front. Raises ModelNotFoundError, or FormatError for
    anything else that is in it.
    """
    if not path.is_file():
        raise ModelNotFoundError(
            f"{path}: no such file; medusa_heads is the safetensors file of the heads"
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
        for i in range(min(count, _MOST_HEADS))
        for name, shape in shapes.items()
    }
    if not expected or stored.keys() != expected.keys():
        odd = sorted(stored.keys() ^ (expected or {f"0.{name}": () for name in shapes}).keys())[:3]
        raise FormatError(
            f"{path.name}: not Medusa heads with one layer each: {', '.join(odd)} is "
            "missing or has no place"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise FormatError(
                f"{path.name}: tensor {name} has shape {list(stored[name].shape)}, and "
                f"heads of this model {list(shape)}"
            )
    return {
        f"medusa.{name}": replace(tensor, name=f"medusa.{name}") for name, tensor in stored.items()
    }


def _check_vocabulary(
    name: str, draft: Checkpoint, target: Checkpoint, tokenizer: Tokenizer
) -> None:
    sizes, other = (draft.spec.vocab_size, target.spec.vocab_size), draft.load_tokenizer()
    if sizes[0] != sizes[1]:
        why = f"it has {sizes[0]:,} tokens, the model {sizes[1]:,}"
    else:
        common = range(min(tokenizer.vocab_size, other.vocab_size))
        differing = next(
            (token for token in common if tokenizer.token_bytes(token) != other.token_bytes(token)),
            None,
        )
        if differing is None:
            return
        pieces = other.token_bytes(differing), tokenizer.token_bytes(differing)
        why = f"token {differing:,} is {pieces[0]!r} there and {pieces[1]!r} in the model"
    raise RequestError(
        f"{name} cannot draft for this model: {why}; choose a smaller model of the same family"
    )
