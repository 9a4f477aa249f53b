"""The figures of docs/arithmetic.md, each computed again by the project's own code."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headrace.backend_traits import KvDtype
from headrace.checkpoint.load import Checkpoint
from headrace.measure.place import find_place
from headrace.measure.placed_model import open_model, stage_programs
from headrace.measure.plan import Plan, plan
from headrace.parallel.mesh import Mesh
from headrace.planner.draft_gain import expected_tokens
from headrace.planner.machine_files import read_machine
from headrace.planner.pipeline_picture import idle_share
from headrace.planner.step_time import StepTimer
from headrace.planner.steps import decode_step
from headrace.program.kv import number_bytes
from headrace.program.moe import Experts
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS
from headrace.stats import StageStep
from tests.planner.models import LLAMA_2_7B_CONFIG, LLAMA_8B_CONFIG, LLAMA_70B_CONFIG

PAGE = Path(__file__).parents[1] / "docs/arithmetic.md"
MODELS: dict[str, dict[str, Any]] = {
    "gpt-3": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 12288,
        "n_layer": 96,
        "n_head": 96,
        "n_positions": 2048,
        "vocab_size": 50257,
    },
    "7b": LLAMA_2_7B_CONFIG,
    "8b": LLAMA_8B_CONFIG,
    "13b": LLAMA_2_7B_CONFIG
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "70b": LLAMA_70B_CONFIG | {"vocab_size": 32000},
    "70b without groups": LLAMA_70B_CONFIG | {"vocab_size": 32000, "num_key_value_heads": 64},
    "yi-34b": LLAMA_8B_CONFIG
    | {
        "hidden_size": 7168,
        "intermediate_size": 20480,
        "num_hidden_layers": 60,
        "num_attention_heads": 56,
        "vocab_size": 64000,
    },
    "100 experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "num_local_experts": 100,
    },
}
GIB = 1 << 30
K = 1024


def with_config(config: dict[str, Any], use: Callable[[str], Any]) -> Any:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"} | config))
        return use(folder)


@cache
def opened(model: str, format: str | None = None) -> Checkpoint:
    return with_config(MODELS[model], lambda folder: open_model(folder, format))


@cache
def program(model: str, format: str | None = None) -> Program:
    return stage_programs(opened(model, format), "cuda", Mesh())[0]


@cache
def planned(model: str, on: str, **options: Any) -> Plan:
    return with_config(MODELS[model], lambda folder: plan(folder, on=on, **options))


def weights(model: str, format: str | None = None) -> float:
    """Decimal gigabytes."""
    return program(model, format).weight_bytes / 1e9


def parameters(model: str) -> int:
    return sum(weight.rows * weight.cols for weight in program(model).weights.values())


def kv(model: str, tokens: int = 1, dtype: KvDtype = "bf16") -> int:
    return sum(group.block_bytes(dtype, tokens) for group in program(model).kv_groups)


def ridge(machine: str) -> float:
    return read_machine(machine).machine().ridge("bf16")


def price_of_rows(rows: int, depth: int) -> float:
    """Time of a step of many sequences over the time of one, for 7B on an A100."""
    place, stage = find_place("a100-80", Mesh()), program("7b")
    timer = StepTimer([stage], place.machine, place.reaches)
    kv_bytes = number_bytes(stage.kv_groups, "bf16")
    one, many = (timer.seconds(decode_step(depth, batch, kv_bytes)) for batch in (1, rows))
    return many / one


def bubble(stages: int, steps: int) -> float:
    """Idle share of stages that pass on steps of one second each."""
    return idle_share(
        [
            StageStep(rank=stage, number=step, begin=stage + step, end=stage + step + 1)
            for stage in range(stages)
            for step in range(steps)
        ]
    )


def untouched(experts: int, chosen: int, rows: int) -> float:
    """Share of experts that no row of a step chooses."""
    config = MODELS["100 experts"] | {
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
    }
    traced = with_config(config, lambda folder: stage_programs(open_model(folder), "cpu", Mesh()))
    op = next(op for op in traced[0].ops if isinstance(op, Experts))
    return 1 - op.distinct_experts(rows) / experts


def smaller(format: str) -> float:
    """Bits of float32 over bits of a format, with its scales."""
    stored = FORMATS[format]
    return 32 / (8 * stored.nbytes / stored.block)


def bound_of_matrices(rows: int) -> str:
    found = planned("8b", "h100-sxm", batch=rows, prompt=512, output=2)
    return next(part.bound for part in found.decode.parts if part.part == "linear")


def shares() -> str:
    found = planned("8b", "h100-sxm", prompt=512, output=256)
    prefill, decode = 1e3 * found.first_token, 256e3 * found.per_token
    return f"{prefill:.0f} and {decode:,.0f} ms: {percent(prefill / (prefill + decode))} prefill"


def speedup_of_drafts(on: str, batch: int, acceptance: float) -> float:
    found = planned("8b", on, batch=batch, draft_depth=4, draft_acceptance=acceptance)
    assert found.draft
    return found.draft.speedup


def percent(*values: float) -> str:
    return " / ".join(f"{100 * value:.3g}" for value in values) + " %"


@cache
def fit_of_13b() -> Plan:
    return planned("13b", "a100-40", context=2048)


FIGURES: dict[str, Callable[[], str]] = {
    # memory
    "GPT-3: parameters": lambda: f"{parameters('gpt-3') / 1e9:.1f} billion",
    "GPT-3: weights in 16 bits": lambda: f"{weights('gpt-3'):.0f} GB",
    "GPT-3: weights in int8": lambda: f"{weights('gpt-3', 'Q8_0'):.0f} GB",
    "Llama 2 7B: weights in 16 bits": lambda: f"{weights('7b'):.1f} GB",
    "Yi 34B: weights in 4 bits": lambda: f"{weights('yi-34b', 'Q4_0'):.1f} GB",
    "int8, smaller than float32": lambda: f"{smaller('Q8_0'):.2f} times",
    "int4, smaller than float32": lambda: f"{smaller('Q4_0'):.2f} times",
    "GPT-3: KV numbers of a token": lambda: f"{kv('gpt-3') / 2 / 1e6:.2f} million",
    "GPT-3: KV of a token": lambda: f"{kv('gpt-3') / 1e6:.2f} MB",
    "GPT-3: KV of 2,048 tokens": lambda: f"{kv('gpt-3', 2048) / 1e9:.1f} GB",
    "Llama 2 7B: KV of 4,096 tokens": lambda: f"{kv('7b', 4096) / GIB:.0f} GiB",
    "Llama 7B: KV of 2K, 32K, 128K tokens": lambda: (
        " / ".join(f"{kv('7b', n * K) / GIB:.0f}" for n in (2, 32, 128)) + " GiB"
    ),
    "Llama 2 70B: KV of 2K, 32K, 128K tokens": lambda: (
        " / ".join(f"{kv('70b', n * K) / GIB:.3g}" for n in (2, 32, 128)) + " GiB"
    ),
    "the same with 64 KV heads": lambda: (
        " / ".join(f"{kv('70b without groups', n * K) / GIB:.0f}" for n in (2, 32, 128)) + " GiB"
    ),
    "Llama 2 70B: KV by hidden size over KV by KV heads": lambda: (
        f"{kv('70b without groups') / kv('70b'):.0f} times"
    ),
    "13B on 40 GB: weights": lambda: f"{fit_of_13b().fit.weights / 1e9:.1f} GB",
    "13B on 40 GB: left for KV": lambda: f"{fit_of_13b().fit.kv_budget / 1e9:.1f} GB",
    "13B on 40 GB: sequences of 2,048 tokens": lambda: f"{fit_of_13b().fit.sequences}",
    # bounds
    "A100: operations per byte": lambda: f"{ridge('a100-80'):.0f}",
    "H100: operations per byte": lambda: f"{ridge('h100-sxm'):.0f}",
    "160 rows, no context: time of one row": lambda: f"{price_of_rows(160, 0):.2f} times",
    "160 rows, 512 tokens each: time of one row": lambda: f"{price_of_rows(160, 512):.2f} times",
    "8B on an H100: bound of matrices at 1 row": lambda: bound_of_matrices(1),
    "8B on an H100: bound of matrices at 512 rows": lambda: bound_of_matrices(512),
    "512 tokens in, 256 out: shares": shares,
    "the article's own times, as shares": lambda: percent(*(ms / 1300 for ms in (200, 1000, 100))),
    # pipelines
    "4 stages, 1 step": lambda: percent(bubble(4, 1)),
    "4 stages, 4 steps": lambda: percent(bubble(4, 4)),
    "4 stages, 16 steps": lambda: percent(bubble(4, 16)),
    "8 stages, 64 steps": lambda: percent(bubble(8, 64)),
    # drafts
    **{
        f"{a}0 % accepted, {depth} drafts": lambda a=a, depth=depth: (  # type: ignore[misc]
            f"{expected_tokens(a / 10, depth):.2f}"
        )
        for a in (7, 8, 9)
        for depth in (4, 8)
    },
    "4 drafts that fail, 8B, batch 1 on an H100": lambda: (
        f"{speedup_of_drafts('h100-sxm', 1, 0.0):.2f} times the speed"
    ),
    "4 drafts that fail, 8B, batch 256 on an H100": lambda: (
        f"{speedup_of_drafts('h100-sxm', 256, 0.0):.2f} times the speed"
    ),
    # sparsity
    "97 % zeros; 1, 2, 4, 8, 16 rows": lambda: percent(
        *(untouched(100, 3, rows) for rows in (1, 2, 4, 8, 16))
    ),
    "90 % zeros; 1, 2, 4, 8, 16 rows": lambda: percent(
        *(untouched(10, 1, rows) for rows in (1, 2, 4, 8, 16))
    ),
    "50 % zeros; 1, 2, 4, 8, 16 rows": lambda: percent(
        *(untouched(2, 1, rows) for rows in (1, 2, 4, 8, 16))
    ),
}


@cache
def rows_of_page() -> dict[str, str]:
    """The last cell of each row of the page's tables of figures, by the first cell."""
    found = {}
    figures = PAGE.read_text().partition("## Slips")[0]
    for row in re.findall(r"^\|(.+)\|$", figures, re.MULTILINE):
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) == 3 and cells[0] != "figure" and "---" not in cells[0]:
            assert cells[0] not in found
            found[cells[0]] = cells[-1]
    return found


def test_each_figure_of_the_page_is_computed() -> None:
    assert set(rows_of_page()) == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_figure(name: str) -> None:
    assert rows_of_page()[name] == FIGURES[name]()
