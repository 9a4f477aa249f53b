"""From the name of a model to an engine that runs it: opened, checked against the options, sized, compiled."""

from dataclasses import replace
from typing import NamedTuple

from headrace.assembly.drafts import DraftCheckpoints, compile_draft_models, open_draft_checkpoints, own_program, target_program
from headrace.assembly.kv_size import KvUse, size_kv
from headrace.backend import compile_program, lower_program
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.templates import Renderer
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.errors import RequestError
from headrace.planner.host import available_memory, usable_cores
from headrace.program.trace import Program
from headrace.prompts import PromptReader
from headrace.propose import make_proposers
from headrace.propose.draft_model import max_rows


class LoadedModel(NamedTuple):
    """A model, ready to run."""

    engine: Engine
    prompts: PromptReader
    tokenizer: Tokenizer
    checkpoint: Checkpoint


def load_model(model: str, config: EngineConfig) -> LoadedModel:
    """Find a model, download it if need be, and make an engine of it.

    Raises ModelError (missing, malformed, unknown), RequestError (an option the model cannot have) or MemoryLimitError.
    """
    checkpoint = open_checkpoint(resolve(model), is_absorbed=config.latent_attention == "absorbed")
    renderer = Renderer()
    try:
        if checkpoint.chat_template is not None:
            renderer.prepare(checkpoint.chat_template)  # in a process of its own, beside all that follows
        return _assemble(model, config, checkpoint, renderer)
    except BaseException:
        renderer.close()
        raise


def _assemble(model: str, config: EngineConfig, checkpoint: Checkpoint, renderer: Renderer) -> LoadedModel:
    spec = checkpoint.spec
    if config.max_model_len > spec.max_context:
        raise RequestError(f"max_model_len is {config.max_model_len:,}, and the model's context ends at {spec.max_context:,}")
    max_model_len = config.max_model_len or spec.max_context
    checkpoint = replace(checkpoint, spec=replace(spec, context=max_model_len))  # which decides how far rotary frequencies are stretched
    tokenizer = checkpoint.load_tokenizer()
    draft_checkpoints = open_draft_checkpoints(config, checkpoint, tokenizer)
    program = target_program(config, checkpoint)
    kv, draft_kv = fit_memory(config, checkpoint, program, draft_checkpoints, max_model_len)
    threads = config.threads or usable_cores()
    executable = compile_program(config.backend, program, checkpoint.tensors, kv, threads)
    draft_models = compile_draft_models(config, draft_checkpoints, checkpoint, executable, draft_kv)
    limits = EngineLimits(spec.vocab_size, max_model_len, kv, program.kv_groups, program.attention_crossover)
    config = replace(config, threads=threads)
    engine = Engine(executable, tokenizer, limits, config, make_proposers(config, draft_models), name=model)
    prompts = PromptReader(model, tokenizer, checkpoint.chat_template, renderer, max_model_len, checkpoint.tool_template)
    return LoadedModel(engine, prompts, tokenizer, checkpoint)


def fit_memory(
    config: EngineConfig, checkpoint: Checkpoint, program: Program, draft_checkpoints: DraftCheckpoints, max_model_len: int
) -> tuple[KvConfig, KvConfig | None]:
    """The KV of a model, which runs this program, and of its draft model, beside the weights of all that runs, as the backend holds them.

    No weight is read. Raises MemoryLimitError where they do not fit in the memory that is available.
    """
    lowered = lower_program(config.backend, program, checkpoint.tensors)
    weights = lowered.weight_bytes + draft_checkpoints.weight_bytes(config.backend, checkpoint.spec)
    models = [KvUse(program.kv_groups, config.max_num_batched_tokens)]
    if draft := draft_checkpoints.draft:
        models.append(KvUse(own_program(config, draft).kv_groups, max_rows(config.draft_depth)))
    kv, *draft_kv = size_kv(models, config, max_model_len, weights, available_memory())
    return kv, draft_kv[0] if draft_kv else None
