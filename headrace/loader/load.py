"""Loads a model: opens its files, checks the options, sizes the KV cache, compiles, makes an
engine.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from headrace.backend import Executable, compile_program
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import cache_folder, resolve
from headrace.checkpoint.templates import Renderer
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.errors import RequestError
from headrace.loader.activation_sparsity import check_activation_sparsity, whole_matrices
from headrace.loader.backend_choice import with_backend
from headrace.loader.chat_template import read_chat_template
from headrace.loader.drafts import (
    DraftCheckpoints,
    compile_draft_models,
    open_draft_checkpoints,
    target_program,
    unused_layers,
)
from headrace.loader.early_exit import check_early_exit, with_exit_map
from headrace.loader.kv_size import Memory
from headrace.loader.memory import default_logit_rows, draft_rows, fit_memory, step_rows
from headrace.loader.mode_price import losses, mode_price
from headrace.loader.ranks import compile_ranks, follow_if_not_rank_0
from headrace.loader.rope import with_rope_options
from headrace.model.spec import ModelSpec
from headrace.parallel.config import mesh_of, threads_per_rank
from headrace.planner.host import release_free_memory
from headrace.program.trace import Program
from headrace.prompts import PromptReader
from headrace.proposer import Proposer
from headrace.speculation.proposers import make_proposers
from headrace.speculation.recorder import RowRecorder

if TYPE_CHECKING:
    from headrace.kv.disk import DiskTier
    from headrace.loader.learn_drafts import Learning
    from headrace.parallel.launch import Launcher


_log = logging.getLogger("headrace.loader")


class LoadedModel(NamedTuple):
    engine: Engine
    prompts: PromptReader
    tokenizer: Tokenizer
    checkpoint: Checkpoint


def load_model(
    model: str, config: EngineConfig, recorder: RowRecorder | None = None
) -> LoadedModel:
    """Find a model, download it if necessary, and load it into an engine.

    `recorder` sees the rows of all steps; it needs one rank and no proposer.

    If a launcher such as torchrun gives this process a rank other than 0, the call runs
    as a worker and exits the process. Raises ModelError if the model is missing,
    malformed or unknown, RequestError if an option does not suit the model, and
    MemoryLimitError if it does not fit.
    """
    follow_if_not_rank_0(config)
    checkpoint = open_model(model, config)
    # The renderer compiles the chat template in its own process, while this one loads the weights.
    renderer = _start_renderer(checkpoint)
    try:
        load_tokenizer = cache(checkpoint.load_tokenizer)
        engine = load_engine(model, config, checkpoint, load_tokenizer, recorder=recorder)
        tokenizer = load_tokenizer()
        prompts = _prompt_reader(model, checkpoint, tokenizer, renderer)
        prompts.max_model_len = engine.limits.max_model_len
        return LoadedModel(engine, prompts, tokenizer, checkpoint)
    except BaseException:
        renderer.close()
        raise


def open_files(model: str, config: EngineConfig) -> Checkpoint:
    """Open a model with the options that change its specification. Raises as `load_model`."""
    checkpoint = open_checkpoint(resolve(model), is_absorbed=config.latent_attention == "absorbed")
    check_early_exit(config, checkpoint)
    check_activation_sparsity(config, checkpoint)
    checkpoint = with_exit_map(checkpoint, config)
    return replace(checkpoint, spec=with_rope_options(checkpoint.spec, config))


def open_model(model: str, config: EngineConfig) -> Checkpoint:
    """Find a model, download it if necessary, and open it without reading weights.

    The checkpoint's `spec.context` is `max_model_len`, which `load_engine` may shorten to fit
    on a GPU. Raises as `load_model`.
    """
    checkpoint = open_files(model, config)
    spec = checkpoint.spec
    if config.max_model_len > spec.max_context:
        raise RequestError(
            f"max_model_len is {config.max_model_len:,}, but the model's context has "
            f"{spec.max_context:,} tokens; set max_model_len to {spec.max_context:,} or less, or "
            "stretch the context with rope_scaling and rope_scale if the model's card advises it"
        )
    if config.chat_template:
        checkpoint = replace(
            checkpoint,
            chat_template=read_chat_template(config.chat_template),
            tool_template=None,
            other_templates={},
        )
    return _with_context(checkpoint, config)


def _with_context(checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
    # Some models scale their rotary frequencies by the context.
    spec = checkpoint.spec
    return replace(checkpoint, spec=replace(spec, context=config.max_model_len or spec.max_context))


def open_prompt_reader(model: str, checkpoint: Checkpoint, tokenizer: Tokenizer) -> PromptReader:
    """Return the model's prompt reader, for a process without an engine."""
    return _prompt_reader(model, checkpoint, tokenizer, _start_renderer(checkpoint))


def load_engine(
    model: str,
    config: EngineConfig,
    checkpoint: Checkpoint,
    load_tokenizer: Callable[[], Tokenizer],
    launcher: "Launcher | None" = None,
    recorder: RowRecorder | None = None,
) -> Engine:
    """Compile an opened model, and return its engine, named `model`.

    `load_tokenizer` is called once or more, usually while the threads of the backend pack weights.
    `launcher` starts the processes of other ranks: see `compile_ranks`. `recorder`: see
    `load_model`. Raises as `load_model`.
    """
    drafts = open_draft_checkpoints(config, checkpoint, load_tokenizer)
    own_notes = drafts.draft.notes if drafts.draft else ()
    for note in filter(None, (*checkpoint.notes, unused_layers(config, checkpoint), *own_notes)):
        _log.warning(note)
    config = with_backend(config, checkpoint, drafts)
    drafts.check_ranks(config)
    _check_kv_cache_dir(config)
    learning = _open_learning(config, checkpoint, drafts, load_tokenizer)
    if learning:
        drafts = replace(drafts, drafter=learning.current)
    drafts = drafts.in_format(config)
    checkpoint = _with_context(checkpoint, config)
    spec = checkpoint.spec
    taps = recorder.taps if recorder else drafts.taps
    program = target_program(config, checkpoint, taps, final=recorder is not None)
    kv, draft_kv, memory = fit_memory(config, checkpoint, program, drafts, spec.context)
    kv = _with_key_rounding(kv, config, checkpoint, load_tokenizer)

    _use_kept_kernels(config)
    mesh = mesh_of(config)
    threads = threads_per_rank(config, mesh)
    _log.info("packing %d MB of weights for %s", program.weight_bytes / 1e6, config.backend)
    if note := whole_matrices(config, program, checkpoint.tensors):
        _log.warning(note)
    if mesh.ranks > 1:
        ranks = compile_ranks(model, config, mesh, checkpoint, program, kv, launcher, taps)
        draft_models = compile_draft_models(config, drafts, checkpoint, ranks, draft_kv)
        ranks.connect()
        executable: Executable = ranks
    else:
        executable = compile_program(
            config.backend, program, checkpoint.tensors, kv, threads, config.activations
        )
        load_tokenizer()  # while the weights are packed, which compiling a draft model waits for
        draft_models = compile_draft_models(config, drafts, checkpoint, executable, draft_kv)

    target_rows = step_rows(config, spec.vocab_size)
    executable.prepare(target_rows.rows, target_rows.logit_rows)
    rows = draft_rows(config, target_rows)
    for draft in draft_models.executables:
        draft.prepare(rows.rows, rows.logit_rows)

    release_free_memory()
    config = replace(
        config,
        threads=threads,
        max_logit_rows=config.max_logit_rows or default_logit_rows(spec.vocab_size),
    )
    proposers: dict[str, Proposer] = make_proposers(config, draft_models)
    if recorder:
        proposers["recorder"] = recorder
    learner = None
    if learning and draft_kv:
        from headrace.loader.learn_drafts import make_learner

        learner = make_learner(
            learning, config, checkpoint, drafts, proposers, executable, draft_kv, rows
        )
    return Engine(
        executable,
        load_tokenizer(),
        _limits(spec, program, kv, memory),
        config,
        proposers,
        name=model,
        path=str(checkpoint.path.absolute()),
        losses=losses(config, checkpoint),
        mode_price=mode_price(model, config, checkpoint, load_tokenizer),
        learner=learner,
        disk=_disk_tier(model, config, checkpoint, executable, kv),
    )


def _open_learning(
    config: EngineConfig,
    checkpoint: Checkpoint,
    drafts: DraftCheckpoints,
    load_tokenizer: Callable[[], Tokenizer],
) -> "Learning | None":
    if not config.learn_drafts:
        return None
    from headrace.loader.learn_drafts import open_learning

    return open_learning(config, checkpoint, drafts, load_tokenizer)


def _with_key_rounding(
    kv: KvConfig,
    config: EngineConfig,
    checkpoint: Checkpoint,
    load_tokenizer: Callable[[], Tokenizer],
) -> KvConfig:
    if kv.dtype != "int4":
        return kv
    from headrace.loader.key_rounding import with_key_rounding

    return with_key_rounding(kv, config, checkpoint, load_tokenizer)


def _check_kv_cache_dir(config: EngineConfig) -> None:
    if config.kv_cache_dir:  # or its modules would slow down each start
        from headrace.loader.kv_cache_dir import check_kv_cache_dir

        check_kv_cache_dir(config)


def _disk_tier(
    model: str, config: EngineConfig, checkpoint: Checkpoint, executable: Executable, kv: KvConfig
) -> "DiskTier | None":
    if not config.kv_cache_dir:
        return None
    from headrace.loader.kv_cache_dir import open_disk_tier

    return open_disk_tier(model, config, checkpoint, executable, kv)


def _limits(spec: ModelSpec, program: Program, kv: KvConfig, memory: Memory) -> EngineLimits:
    return EngineLimits(
        vocab_size=spec.vocab_size,
        max_model_len=spec.context,
        kv=kv,
        memory=memory.available,
        runtime=memory.runtime,
        kv_groups=program.kv_groups,
        attention_crossover=program.attention_crossover,
        has_head=spec.has_head,
    )


def _use_kept_kernels(config: EngineConfig) -> None:
    """Keep compiled kernels of a GPU with the models, in one folder that a container can keep."""
    if not config.traits.on_gpu:
        return
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "kernels"))
    from headrace.backend.cuda.tile_table import load_tiles

    load_tiles(cache_folder())


def _start_renderer(checkpoint: Checkpoint) -> Renderer:
    renderer = Renderer()
    if checkpoint.chat_template is not None:
        renderer.prepare(checkpoint.chat_template)
    return renderer


def _prompt_reader(
    model: str, checkpoint: Checkpoint, tokenizer: Tokenizer, renderer: Renderer
) -> PromptReader:
    return PromptReader(
        model=model,
        tokenizer=tokenizer,
        chat_template=checkpoint.chat_template,
        renderer=renderer,
        max_model_len=checkpoint.spec.context,
        tool_template=checkpoint.tool_template,
        other_templates=checkpoint.other_templates,
        named_tokens=checkpoint.named_tokens(tokenizer),
    )
