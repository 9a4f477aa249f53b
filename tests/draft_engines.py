"""Engines over tiny models with each way to draft, for tests of speculation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headrace.backend import Executable, compile_program
from headrace.backend_traits import KvDtype
from headrace.checkpoint.drafter import Drafter
from headrace.checkpoint.translation import Translator
from headrace.config import LOSSY_OPTIONS, EngineConfig, KvConfig
from headrace.engine.engine import Engine
from headrace.kv.manager import KvManager
from headrace.loader.draft_vocabulary import other_vocabulary
from headrace.loader.drafts import compile_drafter
from headrace.model.spec import ModelSpec
from headrace.program.trace import Program, trace
from headrace.proposer import Proposer
from headrace.quant.formats import StoredTensor
from headrace.speculation.proposers import (
    REQUIRED_OPTIONS,
    DraftModel,
    DraftModels,
    enabled_methods,
    make_proposers,
)
from headrace.speculation.proposers.draft_model import OtherVocabulary, max_rows
from headrace.speculation.proposers.medusa import head_forward
from tests.key_roundings import roundings
from tests.tiny import (
    BLOCK_SIZE,
    Compile,
    OtherTinyVocabulary,
    Tensors,
    TinyVocabulary,
    mode_program,
    tiny_engine,
)

Model = tuple[ModelSpec, Tensors]


def draft_engine(
    model: Model,
    how: str,
    backend: str = "cpu",
    *,
    enabled: Collection[str] = tuple(REQUIRED_OPTIONS),
    draft: Model | None = None,
    draft_tokens: str = "",
    drafter: Drafter | None = None,
    layers: Sequence[int] = (0,),
    weights: Model | None = None,
    draft_top_blocks: int = 0,
    draft_sparsity: str = "",
    depth: int = 4,
    width: int = 1,
    slots: int = 256,
    draft_slots: int = 0,
    max_length: int = 0,
    kv_dtype: KvDtype = "f32",
    compile: Compile = compile_program,
    **config: Any,
) -> tuple[Engine, dict[str, Proposer]]:
    """An engine that drafts by `how`, a proposer's name or `auto`, and its proposers.

    `auto` has the methods of `enabled` that need a program, and those that need none.
    Without `draft` the model itself is the draft model; a `drafter` takes its place. It has other
    tokens if `draft_tokens` is `shared`, most of them the model's too, or `other`. For
    `self_draft`, `weights` replace the model's.
    """
    spec, tensors = model
    size = BLOCK_SIZE[backend]
    chosen = enabled if how == "auto" else (how,)
    required: dict[str, Any] = {
        options[0]: 1 for method, options in REQUIRED_OPTIONS.items() if method in chosen
    }
    draft_config = EngineConfig(
        proposer=how,
        draft_depth=depth,
        draft_width=width,
        max_draft_tokens=128,
        acceptance_method=config.get("acceptance_method", "exact"),
        **required,
    )
    methods = enabled_methods(draft_config)
    modes = (*LOSSY_OPTIONS, "skip_zeros")
    mode = EngineConfig(**{name: value for name, value in config.items() if name in modes})
    taps = drafter.spec.drafter.taps if drafter and drafter.spec.drafter else ()
    keeps_rows = spec.num_layers in taps
    program = mode_program((replace(spec, keeps_rows=keeps_rows), tensors), mode).with_pooled()
    if draft_top_blocks:
        program = program.with_key_bounds()
    if taps:
        program = program.with_taps(taps)
    kv = _kv_config(program, slots, size, kv_dtype)
    target = compile(
        backend,
        program.with_hidden() if "medusa" in methods else program,
        tensors,
        kv,
        config.get("threads", 1),
    )
    draft_models = DraftModels(block_size=size)
    draft_slots = draft_slots or slots
    if "draft_model" in methods and drafter:
        draft_kv = replace(kv, num_blocks=(-(-draft_slots // size),), key_rounding=())
        programs = compile_drafter(drafter, spec, target, draft_kv, depth * width)
        draft_models = replace(draft_models, drafter=programs)
    elif "draft_model" in methods:
        draft_spec, draft_tensors = draft or model
        without_files = replace(mode, early_exit="", activation_sparsity="")
        draft_program = mode_program((draft_spec, draft_tensors), without_files)
        draft_kv = replace(_kv_config(draft_program, draft_slots, size, kv_dtype), key_rounding=())
        compiled = target.attach(draft_program, draft_tensors, draft_kv)
        manager = KvManager(draft_program.kv_groups, draft_kv, max_rows(depth * width))
        draft_models = replace(
            draft_models,
            draft=DraftModel(
                compiled,
                manager,
                max_length or spec.max_context,
                other_tokens(spec.vocab_size, draft_tokens, config) if draft_tokens else None,
            ),
        )
    if "self_draft" in methods:
        short_mode = replace(mode, activation_sparsity=draft_sparsity or mode.activation_sparsity)
        short = mode_program(
            (spec.with_layers(layers), weights[1] if weights else tensors), short_mode
        ).with_top_blocks(draft_top_blocks)
        attached = attach_short(target, short, tensors, weights[1] if weights else {})
        draft_models = replace(draft_models, self_draft=attached)
    if "medusa" in methods:
        draft_models = replace(draft_models, heads=medusa_heads(target, spec, depth))
    proposers = make_proposers(draft_config, draft_models)
    return tiny_engine(
        model,
        backend,
        proposer=proposers,
        executable=target,
        slots=slots,
        kv_dtype=kv_dtype,
        **config,
    ), proposers


def _kv_config(program: Program, slots: int, block_size: int, dtype: KvDtype) -> KvConfig:
    num_blocks = (-(-slots // block_size),) * len(program.kv_groups)
    rounding = roundings(program) if dtype == "int4" else ()
    return KvConfig(num_blocks, block_size, dtype, rounding)


def other_tokens(vocab_size: int, kind: str, config: Mapping[str, Any]) -> OtherVocabulary:
    """A vocabulary of the same size for the draft model, with the model's end tokens."""
    target = config.get("vocabulary") or TinyVocabulary(vocab_size, config.get("eos_ids", ()))
    own = OtherTinyVocabulary(vocab_size, config.get("eos_ids", ()), shared=kind == "shared")
    found = other_vocabulary(Translator(target, own, vocab_size, vocab_size))
    assert (found.own_ids is not None) == (kind == "shared")
    return found


def attach_short(target: Executable, short: Program, tensors: Tensors, own: Tensors) -> Executable:
    """Attach a shortened program, with tensors of its own in place of the model's."""
    if not own:
        return target.attach(short, tensors)
    short = short.with_weights(
        {name: replace(weight, name=f"own.{name}") for name, weight in short.weights.items()}
    )
    named = {f"own.{name}": replace(tensor, name=f"own.{name}") for name, tensor in own.items()}
    return target.attach(short, {**tensors, **named})


def medusa_heads(
    target: Executable, spec: ModelSpec, count: int, seed: int = 0
) -> list[Executable]:
    """Random Medusa heads, attached to the executable of the model."""
    tensors = head_tensors(spec, count, seed)
    programs = [
        trace(partial(head_forward, i, spec.dim, spec.vocab_size), tensors) for i in range(count)
    ]
    return [target.attach(program, tensors) for program in programs]


def head_tensors(spec: ModelSpec, count: int, seed: int = 0) -> Tensors:
    """Tensors of random Medusa heads."""
    rng = np.random.default_rng(seed)
    shapes = {
        "0.linear.weight": (spec.dim, spec.dim),
        "0.linear.bias": (spec.dim,),
        "1.weight": (spec.vocab_size, spec.dim),
    }
    tensors = {}
    for i in range(count):
        for part, shape in shapes.items():
            values = rng.normal(0, 0.3, shape).astype(np.float32)
            name = f"medusa.{i}.{part}"
            tensors[name] = StoredTensor.from_floats(name, values)
    return tensors
