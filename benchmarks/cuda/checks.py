"""Checks of the GPU backend: a request has the same bits in any batch, and the GPU draws the same
tokens as the host.

    python benchmarks/cuda/checks.py  writes benchmarks/cuda/results/<name of the GPU>-checks.json
    python benchmarks/cuda/checks.py --smoke       whether it runs at all, in Triton's interpreter

Exit code 1 if a check failed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import programs  # before torch, which must know where kernels run
import torch
from numpy.typing import NDArray
from programs import BLOCK_SIZE, compile_together, draws, executable_of, step_of

from headrace.backend.cuda import CudaExecutable
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.quantise_rows import quantise_rows
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.step_shape import StepShape, shape_of
from headrace.backend_traits import KvDtype
from headrace.batch import RaggedBatch
from headrace.logit_ops import SampleOp
from headrace.quant.formats import FORMATS
from headrace.sampling.host import run_logit_ops
from tests.backend.batches import Sequence, batch_of
from tests.backend.cuda.hollow import SPECS, hollow_tensor, random_weight

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
        *(("8b", name, "bf16") for name in ("I8_MIXED", "Q4_K")),
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
    (("tiny", "Q8_0", "bf16"), ("tiny experts", "BF16", "bf16"), ("tiny latent", "Q4_0", "int8")),
)


def products(scale: Scale) -> Iterator[tuple[str, str]]:
    """Compare rows alone and in larger tiles, with weights in each layout; return the failures."""
    layouts = {layout_of(hollow_tensor("w", name, (256, 256))): name for name in reversed(FORMATS)}
    for layout, name in reversed(layouts.items()):
        weight = random_weight(layout, scale.outputs, scale.cols, DEVICE)
        kinds = (
            (torch.bfloat16, torch.float32)
            if layout.store in ("bf16", "f32")
            else (torch.bfloat16,)
        )
        for kind in kinds:
            x = torch.randn(scale.max_rows, scale.cols, device=DEVICE).to(kind)
            x[:, ::97] *= 20  # outliers
            codes = torch.empty(
                len(x), layout.padded_cols(scale.cols), dtype=torch.int8, device=DEVICE
            )
            scales = torch.empty(len(x), device=DEVICE)
            if layout.rows_in_int8:
                quantise_rows(codes, scales, x, layout.outliers)()

            out = torch.empty(scale.max_rows, scale.outputs, device=DEVICE)

            def launch_of(
                rows: slice,
                out: Any = out,
                x: Any = x,
                weight: Any = weight,
                codes: Any = codes,
                scales: Any = scales,
            ) -> Launch:
                in_int8 = (codes[rows], scales[rows]) if weight.layout.rows_in_int8 else None
                return linear(out[rows], x[rows], weight, quantised=in_int8)

            tried = [
                slice(first, first + n)
                for n in scale.rows
                for first in {0, (scale.max_rows - n) // 2}
            ]
            launches = [launch_of(slice(None)), *map(launch_of, tried)]
            compile_together(launches)
            launches[0]()
            whole, wrong = out.clone(), list[int]()
            for rows, launch in zip(tried, launches[1:], strict=True):
                out.fill_(torch.nan)
                launch()
                if not torch.equal(whole[rows], out[rows]):
                    wrong.append(rows.stop - rows.start)
            yield (
                f"products: {name}, {str(kind)[6:]}",
                f"other bits with {sorted(set(wrong))} rows" if wrong else "",
            )


class Model:
    """An executable with a few layers. Each check has its own sequences."""

    def __init__(self, name: str, format: str, kv: KvDtype, scale: Scale) -> None:
        spec = SPECS[name].first_layers(min(2, SPECS[name].num_layers))
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
            compile_together(self.executable._plan(shape).launches)
            self.compiled.add(shape)
        found = self.executable.launch(batch, logits=True).wait().logits
        assert found is not None
        return found.copy()

    def run(self, sequence: Sequence, tokens: list[int]) -> Rows:
        """Logits of the next tokens of a sequence, in a step alone."""
        logits = self.logits(step_of(self.executable, [sequence], [tokens]))
        sequence.computed += len(tokens)
        return logits

    def checks(self) -> Iterator[tuple[str, str]]:
        """Each check with its failure."""
        whole = self.run(self.sequence(0), self.prompt)
        yield "finite", "" if np.isfinite(whole).all() else "logits are not finite"
        for size in self.scale.chunks:
            sequence = self.sequence(1)
            parts = [
                self.run(sequence, self.prompt[first : first + size])
                for first in range(0, len(self.prompt), size)
            ]
            yield f"chunks of {size}", differences(whole, np.concatenate(parts))
        first = len(self.prompt) - self.scale.decoded
        yield "graphs", differences(whole[first:], self.decoded(first))
        yield "without logits before", differences(whole[first:], self.silent(first))
        yield "in a crowd", differences(whole, self.in_a_crowd())
        yield "trees", self.tree(whole, first)
        yield f"{self.scale.repeats} repeats", self.repeats()
        yield from self.drawn()

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

    def drawn(self) -> Iterator[tuple[str, str]]:
        """Tokens that the GPU draws, and tokens that the host draws from the same logits."""
        others, tokens = self.crowd()
        batch = step_of(self.executable, others, tokens, all_logits=False)
        for params in (
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"top_p": 0.9, "top_k": 50},
            {"min_p": 0.05, "presence_penalty": 0.5},
        ):
            mine, its = (self.draws(batch, params) for _ in range(2))
            result = self.executable.launch(batch, mine, logits=True).wait()
            assert result.logits is not None
            wrong = sum(
                a.tokens != b.tokens
                for a, b in zip(
                    result.values, run_logit_ops(its, result.logits.copy()), strict=True
                )
            )
            yield (
                f"draws with {params}",
                f"{wrong} of {len(mine)} tokens are not those of the host" if wrong else "",
            )

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


def main() -> None:
    """Run all checks, and print the failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="sizes that are small enough for the interpreter"
    )
    args = parser.parse_args()
    scale = SMOKE if args.smoke else Scale()
    gpu = "interpreter" if is_interpreting() else torch.cuda.get_device_name()
    out = args.out or Path(__file__).parent / f"results/{gpu.replace(' ', '-')}-checks.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    begun, results = time.perf_counter(), list[dict[str, Any]]()

    def note(name: str, wrong: str) -> None:
        results.append({"check": name, "holds": not wrong, "wrong": wrong})
        print(
            f"{time.perf_counter() - begun:6.0f} s  {'holds' if not wrong else 'FAILS'}  "
            f"{name}{': ' * bool(wrong)}{wrong}",
            flush=True,
        )
        out.write_text(json.dumps({"gpu": gpu, "checks": results}, indent=1) + "\n")

    def all_of(found: Callable[[], Iterator[tuple[str, str]]], prefix: str) -> None:
        try:
            for name, wrong in found():
                note(prefix + name, wrong)
        except Exception as error:  # the others may hold
            note(f"{prefix}to the end", f"{type(error).__name__}: {error}")

    all_of(lambda: products(scale), "")
    for name, format, kv in scale.models:
        all_of(
            lambda name=name, format=format, kv=kv: Model(name, format, kv, scale).checks(),
            f"{name} {format}, KV in {kv}: ",
        )  # type: ignore[misc]
        programs.forget()
    wrong = sum(not result["holds"] for result in results)
    print(f"{len(results) - wrong} of {len(results)} hold")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
