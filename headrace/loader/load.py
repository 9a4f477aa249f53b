"""From the name of a model to an engine that runs it: opened, checked against the options, sized,
compiled.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from headrace.backend import compile_program
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.templates import Renderer
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.errors import RequestError
from headrace.loader.backend_choice import with_backend
from headrace.loader.drafts import compile_draft_models, open_draft_checkpoints, target_program
from headrace.loader.memory import draft_rows, fit_memory, most_logit_rows, step_rows
from headrace.loader.ranks import compile_ranks, follow_if_not_rank_0
from headrace.parallel.config import mesh_of, threads_per_rank
from headrace.prompts import PromptReader
from headrace.speculation.proposers import make_proposers

if TYPE_CHECKING:
    from headrace.parallel.launch import Launcher


class LoadedModel(NamedTuple):
    """A model, ready to run."""

    engine: Engine
    prompts: PromptReader
    tokenizer: Tokenizer
    checkpoint: Checkpoint


def load_model(model: str, config: EngineConfig) -> LoadedModel:
    """Find a model, download it if need be, and make an engine of it, and a reader of its prompts.

    In a process that the environment makes another rank than the first it does not return: see
    `ranks.follow_if_not_rank_0`. Raises ModelError (missing, malformed, unknown), RequestError
    (an option the model cannot have) or MemoryLimitError.
    """
    follow_if_not_rank_0(config)
    checkpoint = open_model(model, config)
    renderer = _renderer(checkpoint)  # in a process of its own, beside all that follows
    try:
        tokenizer = checkpoint.load_tokenizer()
        engine = load_engine(model, config, checkpoint, tokenizer)
        return LoadedModel(
            engine, _reader(model, checkpoint, tokenizer, renderer), tokenizer, checkpoint
        )
    except BaseException:
        renderer.close()
        raise


def open_model(model: str, config: EngineConfig) -> Checkpoint:
    """Find a model, download it if need be, and open it for the context that is asked for; no
    weight is read. Raises as `load_model`.
    """
    checkpoint = open_checkpoint(resolve(model), is_absorbed=config.latent_attention == "absorbed")
    spec = checkpoint.spec
    if config.max_model_len > spec.max_context:
        raise RequestError(
            f"max_model_len is {config.max_model_len:,}, and the model's context ends at "
            f"{spec.max_context:,}"
        )
    # The context decides how far rotary frequencies are stretched.
    return replace(checkpoint, spec=replace(spec, context=config.max_model_len or spec.max_context))


def read_prompts(model: str, checkpoint: Checkpoint, tokenizer: Tokenizer) -> PromptReader:
    """The reader of a model's prompts alone, for a process that has no engine."""
    return _reader(model, checkpoint, tokenizer, _renderer(checkpoint))


def _renderer(checkpoint: Checkpoint) -> Renderer:
    renderer = Renderer()
    if checkpoint.chat_template is not None:
        renderer.prepare(checkpoint.chat_template)
    return renderer


def _reader(
    model: str, checkpoint: Checkpoint, tokenizer: Tokenizer, renderer: Renderer
) -> PromptReader:
    return PromptReader(
        model,
        tokenizer,
        checkpoint.chat_template,
        renderer,
        checkpoint.spec.context,
        checkpoint.tool_template,
    )


def load_engine(
    model: str,
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    launcher: "Launcher | None" = None,
) -> Engine:
    """The engine of an opened model, which messages and `headrace top` call `model`. `launcher`:
    see `compile_ranks`. Raises as `load_model`.
    """
    spec, max_model_len, mesh = checkpoint.spec, checkpoint.spec.context, mesh_of(config)
    draft_checkpoints = open_draft_checkpoints(config, checkpoint, tokenizer)
    config = with_backend(config, checkpoint, draft_checkpoints)
    program = target_program(config, checkpoint)
    kv, draft_kv = fit_memory(config, checkpoint, program, draft_checkpoints, max_model_len)
    threads = threads_per_rank(config, mesh)
    ranks = (
        compile_ranks(model, config, mesh, checkpoint, program, kv, launcher)
        if mesh.ranks > 1
        else None
    )
    executable = ranks or compile_program(
        config.backend, program, checkpoint.tensors, kv, threads, config.activations
    )
    draft_models = compile_draft_models(config, draft_checkpoints, checkpoint, executable, draft_kv)
    if ranks:
        ranks.connect()
    rows = step_rows(config, spec.vocab_size)
    for one, its_rows in (
        (executable, rows),
        *((one, draft_rows(config, rows)) for one in draft_models.executables),
    ):
        one.prepare(*its_rows)
    limits = EngineLimits(
        spec.vocab_size, max_model_len, kv, program.kv_groups, program.attention_crossover
    )
    config = replace(
        config,
        threads=threads,
        max_logit_rows=config.max_logit_rows or most_logit_rows(spec.vocab_size),
    )
    return Engine(
        executable, tokenizer, limits, config, make_proposers(config, draft_models), name=model
    )
