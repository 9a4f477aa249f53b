"""Checks of the GPU backend: a request has the same bits in any batch, and the GPU draws the same
tokens as the host.

    python benchmarks/cuda/checks.py  writes benchmarks/cuda/results/<name of the GPU>.json
    python benchmarks/cuda/checks.py --parts premises products
    python benchmarks/cuda/checks.py --parts models --models "8b Q4_0"
    python benchmarks/cuda/checks.py --smoke       whether it runs at all, in Triton's interpreter

Premises are what the design takes for granted: that instructions of tensor cores sum alike. A check
that raises an exception has failed, and the others go on. Exit code 1 if a check failed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import programs  # before torch, which must know where kernels run
import torch
from figures import SMOKE as SMOKE_SIZES
from figures import Sizes, copy_bandwidth
from numpy.typing import NDArray
from premises import cache_bandwidth, equal_bits, small_numbers
from programs import BLOCK_SIZE, draws, executable_of, step_of
from results import Results

from headrace.backend.cuda.compile_kernels import compile_kernels
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.quantise_rows import quantise_rows
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.layout import WeightLayout, layout_of
from headrace.backend.cuda.random_weight import random_weight
from headrace.backend.cuda.step_shape import StepShape, shape_of
from headrace.backend_traits import KvDtype
from headrace.batch import RaggedBatch
from headrace.logit_ops import SampleOp
from headrace.quant.formats import FORMATS
from headrace.sampling.host import run_logit_ops
from tests.backend.batches import Sequence, batch_of
from tests.backend.cuda.hollow import SPECS, hollow_tensor

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Scale:
    """Sizes of the checks."""

    rows: tuple[int, ...] = (
        1,
        2,
        3,
        4,
        7,
        8,
        15,
        16,
        17,
        31,
        32,
        33,
        48,
        63,
        64,
        65,
        100,
        127,
        128,
        129,
        192,
        255,
        256,
        300,
        511,
    )
    max_rows: int = 512
    outputs: int = 1000
    cols: int = 4096
    prompt: int = 300
    chunks: tuple[int, ...] = (1, 7, 33, 64, 128)
    decoded: int = 20
    crowd: int = 63
    repeats: int = 1000
    models: tuple[tuple[str, str, KvDtype], ...] = (
        *(("8b", name, "bf16") for name in ("BF16", "Q8_0", "Q4_0")),
        *(("8b", "Q4_0", kind) for kind in ("int8", "fp8")),
        *(("8b", name, "bf16") for name in ("I8_MIXED", "Q4_K", "e4m3")),
        *(("experts", "BF16", kind) for kind in ("bf16", "int8")),
        *(("latent", "Q8_0", kind) for kind in ("bf16", "fp8", "int8")),
    )


SMOKE = Scale(
    (1, 3),
    20,
    40,
    256,
    9,
    (4,),
    2,
    2,
    2,
    (
        ("tiny", "Q8_0", "bf16"),
        ("tiny", "e4m3", "fp8"),
        ("tiny experts", "BF16", "bf16"),
        ("tiny latent", "Q4_0", "int8"),
    ),
)


Check = tuple[str, Callable[[], str]]
"""A name, and a function that returns the failure, if any."""


def premises(smoke: bool) -> Iterator[tuple[str, str]]:
    """Compare instructions of tensor cores; print the bandwidths that figures are shares of."""
    yield from equal_bits(256 if smoke else 4096)
    yield from small_numbers(256 if smoke else 4096)
    copied = copy_bandwidth(SMOKE_SIZES if smoke else Sizes()).value
    print(f"{copied:,.0f} GB/s copied", flush=True)
    for megabytes in (1,) if smoke else (8, 16, 32):
        read = cache_bandwidth(megabytes, 1 if smoke else 5)
        print(f"{1e-9 * median(read):,.0f} GB/s read of {megabytes} MB again and again", flush=True)


class Product:
    """A weight in one layout, with activations of one type and products of some of its rows."""

    def __init__(self, name: str, layout: WeightLayout, kind: torch.dtype, scale: Scale) -> None:
        self.name = f"products: {name}, {str(kind)[6:]}"
        weight = random_weight(layout, scale.outputs, scale.cols, DEVICE)
        x = torch.randn(scale.max_rows, scale.cols, device=DEVICE).to(kind)
        x[:, ::97] *= 20  # outliers
        codes = torch.empty(len(x), layout.padded_cols(scale.cols), dtype=torch.int8, device=DEVICE)
        scales = torch.empty(len(x), device=DEVICE)
        self.first = [quantise_rows(codes, scales, x, layout.outliers)] * layout.rows_in_int8
        self.out = torch.empty(scale.max_rows, scale.outputs, device=DEVICE)
        self.rows = [
            slice(first, first + n) for n in scale.rows for first in {0, (scale.max_rows - n) // 2}
        ]

        def launch_of(rows: slice) -> Launch:
            in_int8 = (codes[rows], scales[rows]) if layout.rows_in_int8 else None
            return linear(self.out[rows], x[rows], weight, quantised=in_int8)

        self.whole = launch_of(slice(None))
        self.parts = [launch_of(rows) for rows in self.rows]

    @property
    def launches(self) -> list[Launch]:
        return [*self.first, self.whole, *self.parts]

    def check(self) -> str:
        """Compare rows alone with the same rows of a larger step."""
        for launch in (*self.first, self.whole):
            launch()
        whole, wrong = self.out.clone(), set()
        for rows, launch in zip(self.rows, self.parts, strict=True):
            self.out.fill_(torch.nan)
            launch()
            if not torch.equal(whole[rows], self.out[rows]):
                wrong.add(rows.stop - rows.start)
        return f"other bits with {sorted(wrong)} rows" if wrong else ""


FP8 = ("e4m3", "e5m2-row")


def products(scale: Scale) -> Iterator[Check]:
    """Products with weights in each layout, whose kernels are compiled together."""
    names = [*reversed(FORMATS), *FP8]
    layouts = {layout_of(hollow_tensor("w", name, (256, 256))): name for name in names}
    found = []
    for layout, name in reversed(layouts.items()):
        is_plain = layout.store in ("bf16", "f32")
        for kind in (torch.bfloat16, torch.float32) if is_plain else (torch.bfloat16,):
            try:
                found.append(Product(name, layout, kind, scale))
            except Exception as error:
                yield f"products: {name}, {str(kind)[6:]}", raises(error)
    with suppress(Exception):  # the check of its layout raises it again
        compile_kernels(launch for one in found for launch in one.launches)
    for one in found:
        yield one.name, one.check


def raises(error: Exception) -> Callable[[], str]:
    """A check that raises an error."""

    def check() -> str:
        raise error

    return check


DRAWS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_p": 0.9, "top_k": 50},
    {"min_p": 0.05, "presence_penalty": 0.5},
)


class Model:
    """An executable with a few layers. Each check has its own sequences."""

    def __init__(self, name: str, format: str, kv: KvDtype, scale: Scale) -> None:
        spec = SPECS[name].with_layers(range(min(2, SPECS[name].num_layers)))
        self.spec = replace(spec, vocab_size=min(4096, spec.vocab_size), tied_embeddings=False)
        self.scale, self.most_tokens = scale, scale.prompt + 64
        experts = "MXFP4_PAIRS" if name.endswith("experts") else ""
        self.executable: CudaExecutable = executable_of(
            self.spec,
            format,
            kv,
            slots=(scale.crowd + 6) * (self.most_tokens + 64),
            experts=experts,
        )
        self.compiled: set[StepShape] = set()
        rng = np.random.default_rng(1)
        self.prompt: list[int] = rng.integers(0, self.spec.vocab_size, scale.prompt).tolist()
        lengths = rng.integers(1, 2 + scale.prompt // 64, scale.crowd).tolist()
        self.others = [rng.integers(0, self.spec.vocab_size, length).tolist() for length in lengths]

    def sequence(self, number: int) -> Sequence:
        """An empty sequence; the same number gives the same blocks."""
        each = -(-self.most_tokens // BLOCK_SIZE)
        return Sequence(list(range(number * each, (number + 1) * each)), BLOCK_SIZE)

    def logits(self, batch: RaggedBatch) -> Rows:
        shape = shape_of(batch)
        if shape not in self.compiled:
            compile_kernels(self.executable._plan(shape).launches)
            self.compiled.add(shape)
        found = self.executable.launch(batch, logits=True).wait().logits
        assert found is not None
        return found.copy()

    def run(self, sequence: Sequence, tokens: list[int]) -> Rows:
        """Logits of the next tokens of a sequence, in a step alone."""
        logits = self.logits(step_of(self.executable, [sequence], [tokens]))
        sequence.computed += len(tokens)
        return logits

    def checks(self) -> Iterator[Check]:
        """Each check of the model."""
        self.whole = self.run(self.sequence(0), self.prompt)
        yield "finite", lambda: "" if np.isfinite(self.whole).all() else "logits are not finite"
        for size in self.scale.chunks:
            yield f"chunks of {size}", partial(self.in_chunks, size)
        first = len(self.prompt) - self.scale.decoded
        last = self.whole[first:]
        yield "graphs", lambda: differences(last, self.decoded(first))
        yield "without logits before", lambda: differences(last, self.silent(first))
        yield "in a crowd", lambda: differences(self.whole, self.in_a_crowd())
        yield "trees", lambda: self.tree(self.whole, first)
        yield f"{self.scale.repeats} repeats", self.repeats
        for params in DRAWS:
            yield f"draws with {params}", partial(self.drawn, params)

    def in_chunks(self, size: int) -> str:
        sequence = self.sequence(1)
        parts = [
            self.run(sequence, self.prompt[first : first + size])
            for first in range(0, len(self.prompt), size)
        ]
        return differences(self.whole, np.concatenate(parts))

    def decoded(self, first: int) -> Rows:
        """Logits of the last tokens, one at a time, from graphs."""
        sequence = self.sequence(2)
        self.run(sequence, self.prompt[:first])
        shape = shape_of(step_of(self.executable, [sequence], [[0]]))
        self.executable._captured.add(shape)
        self.executable._capture(self.executable._plan(shape))
        return np.concatenate([self.run(sequence, [token]) for token in self.prompt[first:]])

    def silent(self, first: int) -> Rows:
        """Logits of the last tokens, after a chunk without logits."""
        sequence, none = self.sequence(1), np.zeros(0, np.int32)
        batch = step_of(self.executable, [sequence], [self.prompt[:first]])
        self.executable.launch(batch._replace(logit_rows=none, seq_of=none)).wait()
        sequence.computed = first
        return self.run(sequence, self.prompt[first:])

    def crowd(self) -> tuple[list[Sequence], list[list[int]]]:
        return [self.sequence(4 + i) for i in range(len(self.others))], self.others

    def in_a_crowd(self) -> Rows:
        """Logits of the prompt, in two steps, among other sequences."""
        mine, parts = self.sequence(3), []
        others, tokens = self.crowd()
        half = len(others) // 2
        for first, last in pairwise((0, len(self.prompt) // 3, len(self.prompt))):
            batch = step_of(
                self.executable,
                [*others[:half], mine, *others[half:]],
                [*tokens[:half], self.prompt[first:last], *tokens[half:]],
            )
            at = int(batch.row_start[half])
            parts.append(self.logits(batch)[at : at + last - first])
            mine.computed += last - first
        return np.concatenate(parts)

    def tree(self, whole: Rows, first: int) -> str:
        """A draft tree with the true tokens and others, after a context."""
        sequence, depth = self.sequence(2), self.scale.decoded - 1
        self.run(sequence, self.prompt[:first])
        tokens, parents, mine = [], [], [-1]
        for token in self.prompt[first + 1 : first + 1 + depth]:
            tokens += [(token + 1) % self.spec.vocab_size, token]
            parents += [mine[-1], mine[-1]]
            mine.append(len(tokens) - 1)
        batch = batch_of(
            [sequence],
            [[self.prompt[first]]],
            [(tokens, parents)],
            True,
            len(self.executable.kv_groups),
        )
        return differences(whole[first:], self.logits(batch)[[1 + node for node in mine]])

    def repeats(self) -> str:
        """The same step several times."""
        others, tokens = self.crowd()
        batch = step_of(self.executable, others, tokens)
        first = self.logits(batch)
        plan = self.executable._plan(shape_of(batch))
        assert self.executable.program.logits
        value = plan.value(self.executable.program.logits)[: len(first)]
        kept, wrong = value.clone(), 0
        for _ in range(self.scale.repeats):
            self.executable._run(plan)
            wrong += not torch.equal(kept, value)
        return f"{wrong} have other bits" if wrong else ""

    def drawn(self, params: dict[str, float]) -> str:
        """Compare tokens that the GPU draws with those of the host, from the same logits."""
        others, tokens = self.crowd()
        batch = step_of(self.executable, others, tokens, all_logits=False)
        mine, its = (self.draws(batch, params) for _ in range(2))
        result = self.executable.launch(batch, mine, logits=True).wait()
        assert result.logits is not None
        theirs = run_logit_ops(its, result.logits.copy())
        wrong = sum(a.tokens != b.tokens for a, b in zip(result.values, theirs, strict=True))
        return f"{wrong} of {len(mine)} tokens are not those of the host" if wrong else ""

    def draws(self, batch: RaggedBatch, params: dict[str, float]) -> list[SampleOp]:
        return draws(
            batch._replace(positions=batch.positions[batch.logit_rows]),
            self.spec.vocab_size,
            **params,
        )


def differences(one: Rows, other: Rows) -> str:
    """The rows whose bits differ."""
    rows = np.flatnonzero((one.view(np.int32) != other.view(np.int32)).any(axis=1))
    if not len(rows):
        return ""
    return (
        f"{len(rows)} of {len(one)} rows have other bits, the first is {rows[0]}, by up to "
        f"{np.abs(one - other).max():.2g}"
    )


class Notes:
    """Results of checks, printed and written as they come."""

    def __init__(self, results: Results) -> None:
        self._results, self._begun = results, time.perf_counter()
        self.rows = list[dict[str, Any]]()

    def note(self, name: str, wrong: str) -> None:
        self.rows.append({"check": name, "holds": not wrong, "wrong": wrong})
        verdict = f"FAILS  {name}: {wrong}" if wrong else f"holds  {name}"
        print(f"{time.perf_counter() - self._begun:6.0f} s  {verdict}", flush=True)
        self._results.write("checks", self.rows)

    def run(self, prefix: str, checks: Callable[[], Iterable[Check]]) -> None:
        """Run checks; one that raises has failed."""
        try:
            for name, check in checks():
                try:
                    wrong = check()
                except Exception as error:  # the others may hold
                    wrong = described(error)
                self.note(prefix + name, wrong)
        except Exception as error:
            self.note(f"{prefix}to the end", described(error))


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


PARTS = ("premises", "products", "models")


def main() -> None:
    """Run all checks, and print the failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="kinds of checks (default: all)"
    )
    parser.add_argument("--models", nargs="+", help="models whose names begin so (default: all)")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="sizes that are small enough for the interpreter"
    )
    args = parser.parse_args()
    scale = SMOKE if args.smoke else Scale()
    notes = Notes(Results(args.out))

    if "premises" in args.parts:
        notes.run("", lambda: ((name, lambda w=wrong: w) for name, wrong in premises(args.smoke)))
    if "products" in args.parts:
        notes.run("", lambda: products(scale))
        programs.forget()
    for model, number, kv in scale.models if "models" in args.parts else ():
        name = f"{model} {number}, KV in {kv}: "
        if not args.models or name.startswith(tuple(args.models)):
            notes.run(name, lambda m=model, n=number, k=kv: Model(m, n, k, scale).checks())
            programs.forget()
    wrong = sum(not row["holds"] for row in notes.rows)
    print(f"{len(notes.rows) - wrong} of {len(notes.rows)} hold")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
