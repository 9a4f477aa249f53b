"""Cost of LoRA adapters in a step: decoding sequences with an adapter each, and a prompt with one.

The model has the sizes of Llama 3.2 1B and random weights. The prediction is the time without
adapters, scaled by the bytes that a step reads with the adapters' matrices.
"""

from collections.abc import Mapping

import numpy as np
from harness import Bench, Column, main

from headrace.backend.cpu.executable import CpuExecutable
from headrace.batch import RaggedBatch, ints
from headrace.config import KvConfig
from headrace.model import linear_weights, tensor_shapes, trace_model
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.program.adapter import Adapter, LowRank, adapted
from headrace.program.op import StepSize
from headrace.quant.formats import StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored

SPEC = ModelSpec(
    "llama", 16, 2048, 32, 8, 64, 8192, 128_256, 4096, 1e-5, rope=RopeSpec(64), tied_embeddings=True
)
FORMAT = "Q4_0"
SEQS, CONTEXT, PROMPT = 8, 96, 256
RANK = 16
TARGETS: Mapping[str, tuple[str, ...]] = {
    "q, v": ("q", "v"),
    "all seven": ("q", "k", "v", "o", "gate", "up", "down"),
}
COLUMNS = (
    Column("rows", "rows"),
    Column("targets", "adapters on"),
    Column("milliseconds", "ms", ".1f"),
    Column("to_base", "time to base", ".3f"),
    Column("bytes", "bytes to base", ".3f"),
    Column("to_bytes", "time relative to the prediction by bytes", ".3f"),
)


def adapters(bench: Bench) -> None:
    """One table: decoding and a prompt, by the weights that are adapted."""
    spec = (
        ModelSpec(
            "llama", 2, 64, 4, 2, 16, 128, 100, 4096, 1e-5, rope=RopeSpec(16), tied_embeddings=True
        )
        if bench.quick
        else SPEC
    )
    tensors = {name: _tensor(name, shape) for name, shape in tensor_shapes(spec).items()}
    kv = KvConfig((64,), 32, "bf16")
    executable = CpuExecutable(trace_model(spec, tensors), tensors, kv, bench.threads, "")
    base = executable.program
    lists: dict[str, list[Adapter]] = {
        name: [_adapter(spec, parts, seed) for seed in range(SEQS)]
        for name, parts in TARGETS.items()
    }
    numbers = {
        name: [executable.add_adapter(each) for each in some] for name, some in lists.items()
    }
    decode = batch_of(
        [Sequence(list(range(4 * i, 4 * i + 4)), 32) for i in range(SEQS)],
        [[1]] * SEQS,
        [([], [])] * SEQS,
        False,
        1,
    )
    decode = decode._replace(context_len=ints([CONTEXT] * SEQS), positions=ints([CONTEXT] * SEQS))
    rng = np.random.default_rng(0)
    prompt = batch_of(
        [Sequence(list(range(32, 64)), 32)],
        [rng.integers(0, spec.vocab_size, PROMPT).tolist()],
        [([], [])],
        False,
        1,
    )
    prompt = prompt._replace(logit_rows=prompt.logit_rows[-1:], seq_of=prompt.seq_of[-1:])
    steps = {
        SEQS: StepSize(((CONTEXT, 1),) * SEQS, SEQS, 2.0),
        PROMPT: StepSize(((0, PROMPT),), 1, 2.0),
    }
    table = []
    for rows, batch in ((SEQS, decode), (PROMPT, prompt)):
        batches = {
            name: batch._replace(adapters=ints(some[: len(batch.context_len)]))
            for name, some in numbers.items()
        }
        rounds = bench.rounds({"base": bench.busy(lambda b=batch: _seconds(executable, b))} | {
            name: bench.busy(lambda b=b: _seconds(executable, b)) for name, b in batches.items()
        })  # fmt: skip
        for name in TARGETS:
            program = base
            for each in lists[name][: len(batch.context_len)]:
                program = adapted(program, each)
            nbytes = [sum(op.bytes(steps[rows]) for op in of.ops) for of in (program, base)]
            table.append(
                {
                    "rows": rows,
                    "targets": name,
                    "milliseconds": rounds.spread(lambda seconds: seconds * 1e3, name),
                    "to_base": rounds.spread(lambda seconds, other: seconds / other, name, "base"),
                    "bytes": nbytes[0] / nbytes[1],
                    "to_bytes": rounds.spread(
                        lambda seconds, other, more=nbytes[0] / nbytes[1]: seconds / other / more,
                        name,
                        "base",
                    ),
                }
            )
    title = (
        f"{SEQS} sequences that decode, each with an adapter of rank {RANK} of its own; a "
        f"prompt of {PROMPT} with one; {FORMAT}"
    )
    bench.table("adapters", title, COLUMNS, table, shape=spec, format=FORMAT)


def _tensor(name: str, shape: tuple[int, ...]) -> StoredTensor:
    if len(shape) == 1:
        return StoredTensor.from_floats(name, np.ones(shape, np.float32))
    return random_stored(FORMAT, *shape, seed=0, name=name, scale=0.02)


def _adapter(spec: ModelSpec, parts: tuple[str, ...], seed: int) -> Adapter:
    rng, shapes = np.random.default_rng(seed), tensor_shapes(spec)
    names = [name for name in linear_weights(spec) if name.rpartition(".")[2] in parts]
    random = {
        name: [
            rng.standard_normal(size, np.float32)
            for size in ((RANK, shapes[name][1]), (shapes[name][0], RANK))
        ]
        for name in names
    }
    return {name: LowRank(down, up, 0.01) for name, (down, up) in random.items()}


def _seconds(executable: CpuExecutable, batch: RaggedBatch) -> float:
    return executable.profile(batch).wall


if __name__ == "__main__":
    main(__doc__, adapters)
