"""Find out whether speculative decoding with a model's first layers, or with a smaller model, saves
time here, and how deep to draft.

The model writes a text, and each candidate says which token it would have proposed at every place
of it. The speed to expect follows from how often it is right and from what steps cost. The best
candidate is then timed against plain decoding.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import (
    add_backend,
    add_json,
    add_model,
    add_threads,
    whole_number,
    whole_numbers,
)
from headrace.cli.terminal import show_status
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.backend import Executable
    from headrace.checkpoint.load import Checkpoint
    from headrace.config import EngineConfig, KvConfig
    from headrace.loader.drafts import DraftCheckpoints
    from headrace.measure.calibration import Candidate

_PROMPT = "Write a short story about a miller who builds a channel to bring water to the mill.\n\n"
_EIGHTHS = (2, 3, 4, 5, 6, 7)
_RUNS = 3
_LEAST_GAIN = 1.05
"""Expected speed below which nothing is suggested: it would be lost in what the estimate leaves
out.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=True)
    parser.add_argument("--draft", metavar="MODEL", help="a smaller model to measure, too")
    parser.add_argument(
        "--layers",
        metavar="N,N",
        type=whole_numbers(1, 2**12),
        default=(),
        help="how many first layers to try; unless given, eighths of all",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        default=_PROMPT,
        help="how the text begins; take a prompt like those you will use",
    )
    parser.add_argument(
        "--tokens",
        type=whole_number(16, 2**20),
        metavar="N",
        default=192,
        help="length of the text, in tokens",
    )
    parser.add_argument(
        "--depth",
        type=whole_number(1, 64),
        metavar="K",
        default=8,
        help="most draft tokens one after the other",
    )
    add_backend(parser)
    add_threads(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table and a suggestion."""
    for flag in ("prompt", "draft"):
        if getattr(args, flag) == "":
            raise RequestError(f"--{flag} is empty")
    from headrace.cli.table import print_json, print_table

    candidates = _measure(args)
    best = max(candidates, key=lambda c: c.best.speedup)
    trial = _try(args, best) if best.best.speedup >= _LEAST_GAIN else None
    if args.json:
        print_json(
            {
                "candidates": [_facts(c) for c in candidates],
                "suggestion": best.name if trial else None,
                "trial": trial,
            }
        )
        return 0
    print_table(
        ["draft model", ">acceptance", ">cost", ">depth", ">tokens/step", ">speed"],
        [_row(c) for c in candidates],
    )
    print(
        "\nacceptance: share of right draft tokens; cost: of one, in plain steps; depth: "
        "the fastest; tokens/step, speed: expected there"
    )
    if trial is None:
        print(
            "None of these saves time here: leave the proposer off, or try a model that "
            "was trained to exit early, or a smaller one."
        )
        return 0
    speed = f"{trial['speed']:.2f}x ({trial['spread']}, {_RUNS} runs in turns)"
    print(f"{best.name}, measured: {trial['tokens_per_step']:.2f} tokens/step, {speed}")
    print(
        f"Suggestion: {', '.join(f'{name}={value!r}' for name, value in trial['options'].items())}"
    )
    return 0


def _measure(args: argparse.Namespace) -> "list[Candidate]":
    from headrace.backend import compile_program
    from headrace.checkpoint.load import open_checkpoint
    from headrace.checkpoint.source import resolve
    from headrace.loader.backend_choice import with_backend
    from headrace.loader.drafts import open_draft_checkpoints
    from headrace.loader.memory import fit_memory
    from headrace.loader.options import engine_config
    from headrace.measure.calibration import Calibration
    from headrace.model import trace_model
    from headrace.planner.host import usable_cores

    draft = {"proposer": "draft_model", "draft_model": args.draft} if args.draft else {}
    config = engine_config(
        {"backend": args.backend, "threads": args.threads, "max_num_seqs": 1, **draft}
    )
    checkpoint = open_checkpoint(resolve(args.model))
    tokenizer = checkpoint.load_tokenizer()
    prompt = tokenizer.encode(args.prompt)
    length = len(prompt) + args.tokens + args.depth + 1
    if length > checkpoint.spec.max_context:
        raise RequestError(
            f"this needs {length:,} tokens, and the model's context ends at "
            f"{checkpoint.spec.max_context:,}: lower --tokens"
        )
    if checkpoint.spec.num_layers == 1 and not args.draft:
        raise RequestError(
            "the model has one layer, and with none left out nothing is faster: name a "
            "smaller model with --draft"
        )
    draft_checkpoints = open_draft_checkpoints(config, checkpoint, tokenizer)
    config = with_backend(replace(config, max_model_len=length), checkpoint, draft_checkpoints)
    args.backend = config.backend  # also of the trial that follows
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    kv, draft_kv = fit_memory(config, checkpoint, program, draft_checkpoints, length)
    show_status("writing a text")
    target = compile_program(
        config.backend, program, checkpoint.tensors, kv, config.threads or usable_cores()
    )
    try:
        calibration = Calibration(target, prompt, args.tokens, kv.block_size, args.depth)
        return calibration.measure(
            dict(_drafts(args, checkpoint, target, draft_checkpoints, config, draft_kv)),
            show_status,
        )
    finally:
        show_status("")
        target.close()


def _drafts(
    args: argparse.Namespace,
    checkpoint: "Checkpoint",
    target: "Executable",
    draft_checkpoints: "DraftCheckpoints",
    config: "EngineConfig",
    kv: "KvConfig | None",
) -> "Iterator[tuple[str, Executable]]":
    """The executables of the candidates, by name; `kv` is that of a draft model."""
    from headrace.loader.drafts import compile_draft_models, first_layers

    if args.draft:
        draft = compile_draft_models(config, draft_checkpoints, checkpoint, target, kv).draft
        assert draft is not None, "a draft model was asked for"
        yield args.draft, draft.executable
    total = checkpoint.spec.num_layers
    for layers in args.layers or sorted(
        {max(1, total * eighths // 8) for eighths in _EIGHTHS} - {total}
    ):
        if not 1 <= layers < total:
            raise RequestError(
                f"--layers has {layers}, and 1 to {total - 1} of this model's {total} "
                "layers can draft"
            )
        yield (
            f"{layers} of {total} layers",
            target.attach(first_layers(checkpoint, layers), checkpoint.tensors),
        )


def _try(args: argparse.Namespace, best: "Candidate") -> dict[str, Any]:
    """Time the best candidate and plain decoding in turns."""
    import statistics
    import time

    from headrace.config import KvConfig
    from headrace.llm import LLM
    from headrace.request import SamplingParams

    ours = {"proposer": "draft_model", "draft_model": args.draft}
    if best.name != args.draft:
        ours = {"proposer": "self_draft", "draft_layers": int(best.name.partition(" ")[0])}
    options = ours | {"draft_depth": best.best.depth}
    common: dict[str, Any] = {
        "backend": args.backend,
        "threads": args.threads,
        "max_num_seqs": 1,
        "kv_blocks": (len(args.prompt.encode()) + args.tokens) // KvConfig.block_size + 2,
    }
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    ratios = []
    every = options | {
        "adaptive_speculation": False
    }  # the depth is to be measured, and control would change it
    with LLM(args.model, **common) as plain, LLM(args.model, **common, **every) as speculation:
        for turn in range(_RUNS + 1):
            show_status(f"{best.name} against plain decoding, turn {turn + 1} of {_RUNS + 1}")
            times = []
            for llm in (plain, speculation):
                before, started = llm.stats(), time.perf_counter()
                llm.generate(args.prompt, params)
                times.append(time.perf_counter() - started)
            after = llm.stats()
            ratios.append(times[0] / times[1])
        show_status("")
    tokens = args.tokens / (after.steps - before.steps)
    counted = ratios[1:]  # the first warms up
    spread = f"{min(counted):.2f}-{max(counted):.2f}"
    return {
        "options": options,
        "tokens_per_step": tokens,
        "speed": statistics.median(counted),
        "spread": spread,
    }


def _row(candidate: "Candidate") -> list[str]:
    best, cost = candidate.best, candidate.costs.draft / candidate.costs.target[0]
    return [
        candidate.name,
        f"{candidate.acceptance:.0%}",
        f"{cost:.2f}",
        str(best.depth),
        f"{best.tokens:.2f}",
        f"{best.speedup:.2f}x",
    ]


def _facts(candidate: "Candidate") -> dict[str, Any]:
    return {
        "name": candidate.name,
        "acceptance": candidate.acceptance,
        "draft_seconds": candidate.costs.draft,
        "target_seconds": list(candidate.costs.target),
        **candidate.best._asdict(),
    }
