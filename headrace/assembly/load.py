"""From the name of a model to an engine that runs it: opened, checked against the options, sized, compiled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headrace.assembly.drafts import compile_draft_models, open_draft_checkpoints, target_program
from headrace.backend import compile_program
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.errors import MemoryLimitError, RequestError
from headrace.model.spec import ModelSpec
from headrace.planner.host import available_memory, usable_cores
from headrace.prompts import PromptReader
from headrace.propose import make_proposers


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
    checkpoint = open_checkpoint(resolve(model))
    spec = checkpoint.spec
    if config.max_model_len > spec.max_context:
        raise RequestError(f"max_model_len is {config.max_model_len:,}, and the model's context ends at {spec.max_context:,}")
    max_model_len = config.max_model_len or spec.max_context
    tokenizer = checkpoint.load_tokenizer()
    draft_checkpoints = open_draft_checkpoints(config, checkpoint, tokenizer)
    weights = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) + draft_checkpoints.nbytes
    specs = (spec, draft_checkpoints.draft.spec) if draft_checkpoints.draft else (spec,)
    kv = size_kv(specs, config, max_model_len, weights, available_memory())
    threads = config.threads or usable_cores()
    program = target_program(config, checkpoint)
    executable = compile_program(config.backend, program, checkpoint.tensors, kv, threads)
    draft_models = compile_draft_models(config, draft_checkpoints, checkpoint, executable, kv)
    limits = EngineLimits(spec.vocab_size, max_model_len, kv, spec.widest_window, program.attention_crossover)
    config = replace(config, threads=threads)
    engine = Engine(executable, tokenizer, limits, config, make_proposers(config, draft_models), name=model)
    prompts = PromptReader(model, tokenizer, checkpoint.chat_template, max_model_len)
    return LoadedModel(engine, prompts, tokenizer, checkpoint)


def size_kv(specs: Sequence[ModelSpec], config: EngineConfig, max_model_len: int, weights: int, available: int) -> KvConfig:
    """The KV pool of a model, and of the draft that keeps as much KV beside it, by bytes of weights and bytes of available memory.

    As large as asked for, else with room for `max_num_seqs` sequences of full length, but not over half of what the weights
    leave unless one sequence needs more. Raises MemoryLimitError, with the arithmetic.
    """
    block_size = KvConfig.block_size
    per_block = sum(spec.kv_block_bytes(config.kv_dtype) for spec in specs)
    fitting = max(0, available - weights) // per_block
    for_one = -(-max_model_len // block_size)
    blocks = config.kv_blocks or max(for_one, min(config.max_num_seqs * for_one, fitting // 2))
    if blocks <= fitting:
        return KvConfig(blocks, block_size, config.kv_dtype)
    tokens, kv = blocks * block_size, blocks * per_block
    advice = f"kv_blocks may be {fitting:,}" if config.kv_blocks else f"set max_model_len to {fitting * block_size:,} or less"
    raise MemoryLimitError(
        f"{weights:,} bytes of weights and {kv:,} bytes of KV for {tokens:,} tokens are {weights + kv:,} bytes, "
        f"and {available:,} are available: {advice if fitting else 'the model is too large for this machine'}"
    )
