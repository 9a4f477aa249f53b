"""Recorded answers of tiny models: random texts with the rows of the `cpu` backend."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.backend import compile_program
from headrace.checkpoint.load import Checkpoint
from headrace.config import KvConfig
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.distil.answers import AnswerSet, AnswerWriter, Bits, Meta, NewAnswer, open_answers
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.arrays import Floats
from tests.tiny import Tensors


def tiny_target(model: tuple[ModelSpec, Tensors]) -> Checkpoint:
    spec, tensors = model
    return Checkpoint(
        path=Path("target"),
        spec=spec,
        tensors=tensors,
        chat_template=None,
        tokenizer_source=Path("target"),
    )


def write_answers(
    folder: Path, target: Checkpoint, taps: tuple[int, ...], count: int = 24, seed: int = 0
) -> AnswerSet:
    """Let a model write `count` greedy answers of 8 to 40 tokens to random prompts."""
    rng = np.random.default_rng(seed)
    spec = replace(target.spec, keeps_rows=True)
    program = trace_model(spec, target.tensors).with_taps(taps).with_hidden()
    blocks = num_blocks(spec.max_context)
    kv = KvConfig((blocks,) * len(program.kv_groups))
    executable = compile_program("cpu", program, target.tensors, kv, 1)
    meta = Meta(
        fingerprint="tiny",
        taps=taps,
        dim=spec.dim,
        prompts="",
        seed=seed,
        temperature=0.0,
        max_tokens=40,
        wanted_tokens=10**6,
    )
    writer = AnswerWriter(folder, meta)
    for prompt in range(count):
        start, length = int(rng.integers(2, 8)), int(rng.integers(16, 48))
        tokens = rng.integers(0, spec.vocab_size, start).tolist()
        while True:
            batch = sequence_batch(
                tokens, 0, len(tokens), len(tokens), blocks, len(program.kv_groups)
            )
            result = executable.launch(batch, logits=True, hidden=True).wait()
            assert result.logits is not None and result.taps is not None
            assert result.hidden is not None
            next_token = int(np.argmax(result.logits[-1]))
            if len(tokens) == length:
                break
            tokens.append(next_token)
        writer.add(
            NewAnswer(
                prompt=prompt,
                tokens=np.array(tokens, np.int32),
                answer_start=start,
                next_token=next_token,
                taps=bf16_bits(result.taps),
                final=bf16_bits(result.hidden),
            )
        )
    writer.finish()
    executable.close()
    return open_answers(folder)


def bf16_bits(rows: Floats) -> Bits:
    """Round to bf16."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
