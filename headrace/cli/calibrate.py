"""Find out whether a model's first layers, or a smaller model, can draft for it, and how many drafts pay here.

The model writes a text; the drafts say what they would have written, token by token. From how often they are right and from
what steps cost follows the speed to expect. The best is then run beside plain decoding.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_json, add_model
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.backend import Executable
    from headrace.checkpoint.load import Checkpoint
    from headrace.cli.calibration import Candidate
    from headrace.config import EngineConfig

_PROMPT = "Write a short story about a miller who builds a channel to bring water to the mill.\n\n"
_EIGHTHS = (2, 3, 4, 5, 6, 7)
_RUNS = 3
_LEAST_GAIN = 1.05
"""Expected speed below which nothing is suggested: it would be lost in what the estimate leaves out."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=True)
    parser.add_argument("--draft", metavar="MODEL", help="measure this smaller model, too")
    parser.add_argument("--layers", metavar="N,N", type=_layers, default=(), help="how many first layers to try; otherwise eighths of all")
    parser.add_argument("--prompt", metavar="TEXT", default=_PROMPT, help="what the text begins with; take one like those you will use")
    parser.add_argument("--tokens", type=int, metavar="N", default=192, help="how much the model writes")
    parser.add_argument("--depth", type=int, metavar="K", default=8, help="most drafts in a row")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads; 0: as many as may be used")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table and a suggestion."""
    if args.tokens < 16 or args.depth < 1:
        raise RequestError("--tokens must be at least 16, and --depth at least 1")
    from headrace.cli.table import print_json, print_table

    candidates = _measure(args)
    best = max(candidates, key=lambda c: c.best.speedup)
    trial = _try(args, best) if best.best.speedup >= _LEAST_GAIN else None
    if args.json:
        print_json({"candidates": [_facts(c) for c in candidates], "suggestion": best.name if trial else None, "trial": trial})
        return 0
    print_table(["draft", ">right", ">cost", ">drafts", ">tokens/step", ">speed"], [_row(c) for c in candidates])
    print("\ncost: of a draft, in plain steps; drafts: how many in a row are fastest; tokens/step and speed: to be expected with these")
    if trial is None:
        print("None of these pays here: leave proposer off, or take a model that was trained to exit early, or a smaller draft.")
        return 0
    speed = f"{trial['speed']:.2f}x ({trial['spread']}, {_RUNS} runs in turns)"
    print(f"{best.name}, measured: {trial['tokens_per_step']:.2f} tokens/step, {speed}")
    print(f"Suggestion: {', '.join(f'{name}={value!r}' for name, value in trial['options'].items())}")
    return 0


def _measure(args: argparse.Namespace) -> "list[Candidate]":
    from headrace.backend import compile_program
    from headrace.checkpoint.load import open_checkpoint
    from headrace.checkpoint.source import resolve
    from headrace.cli.calibration import Calibration
    from headrace.config import KvConfig
    from headrace.llm import engine_config
    from headrace.model import trace_model
    from headrace.planner.host import usable_cores

    config = engine_config({"threads": args.threads})
    checkpoint = open_checkpoint(resolve(args.model))
    prompt = checkpoint.load_tokenizer().encode(args.prompt)
    length = len(prompt) + args.tokens + args.depth + 1
    if length > checkpoint.spec.max_context:
        raise RequestError(f"this needs {length:,} tokens, and the model's context ends at {checkpoint.spec.max_context:,}: give less")
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    blocks = -(-length // KvConfig.block_size)
    kv = KvConfig((blocks,) * len(program.kv_groups))
    _tell("writing a text")
    target = compile_program(config.backend, program, checkpoint.tensors, kv, config.threads or usable_cores())
    try:
        calibration = Calibration(target, prompt, args.tokens, kv.block_size, args.depth)
        return calibration.measure(dict(_drafts(args, checkpoint, target, config, blocks)), _tell)
    finally:
        _tell("")
        target.close()


def _drafts(
    args: argparse.Namespace, checkpoint: "Checkpoint", target: "Executable", config: "EngineConfig", blocks: int
) -> "Iterator[tuple[str, Executable]]":
    """What is to be measured, by name."""
    from dataclasses import replace

    from headrace.config import KvConfig
    from headrace.drafts import compile_draft_models, first_layers, open_draft_checkpoints
    from headrace.model import trace_model

    if args.draft:
        config = replace(config, proposer="draft_model", draft_model=args.draft)
        draft_checkpoints = open_draft_checkpoints(config, checkpoint, checkpoint.load_tokenizer())
        assert draft_checkpoints.draft is not None, "a draft was asked for"
        groups = trace_model(draft_checkpoints.draft.spec, draft_checkpoints.draft.tensors).kv_groups
        draft = compile_draft_models(config, draft_checkpoints, checkpoint, target, KvConfig((blocks,) * len(groups))).draft
        assert draft is not None
        yield args.draft, draft.executable
    total = checkpoint.spec.num_layers
    for layers in args.layers or sorted({max(1, total * eighths // 8) for eighths in _EIGHTHS} - {total}):
        if not 1 <= layers < total:
            raise RequestError(f"--layers has {layers}, and of this model's {total} layers 1 to {total - 1} can draft")
        yield f"{layers} of {total} layers", target.attach(first_layers(checkpoint, layers), checkpoint.tensors)


def _try(args: argparse.Namespace, best: "Candidate") -> dict[str, Any]:
    """The best draft beside plain decoding, in turns."""
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
        "threads": args.threads,
        "max_num_seqs": 1,
        "kv_blocks": (len(args.prompt.encode()) + args.tokens) // KvConfig.block_size + 2,
    }
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    ratios = []
    every = options | {"adaptive_speculation": False}  # the depth is to be measured, and control would change it
    with LLM(args.model, **common) as plain, LLM(args.model, **common, **every) as speculation:
        for turn in range(_RUNS + 1):
            _tell(f"{best.name} beside plain decoding, turn {turn + 1} of {_RUNS + 1}")
            times = []
            for llm in (plain, speculation):
                before, started = llm.stats(), time.perf_counter()
                llm.generate(args.prompt, params)
                times.append(time.perf_counter() - started)
            after = llm.stats()
            ratios.append(times[0] / times[1])
        _tell("")
    tokens = args.tokens / (after.steps - before.steps)
    counted = ratios[1:]  # the first warms up
    spread = f"{min(counted):.2f}-{max(counted):.2f}"
    return {"options": options, "tokens_per_step": tokens, "speed": statistics.median(counted), "spread": spread}


def _row(candidate: "Candidate") -> list[str]:
    best, cost = candidate.best, candidate.costs.draft / candidate.costs.target[0]
    return [candidate.name, f"{candidate.acceptance:.0%}", f"{cost:.2f}", str(best.depth), f"{best.tokens:.2f}", f"{best.speedup:.2f}x"]


def _facts(candidate: "Candidate") -> dict[str, Any]:
    return {
        "name": candidate.name,
        "acceptance": candidate.acceptance,
        "draft_seconds": candidate.costs.draft,
        "target_seconds": list(candidate.costs.target),
        **candidate.best._asdict(),
    }


def _layers(text: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and int(word) for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 8,12")
    return tuple(map(int, text.split(",")))


def _tell(what: str) -> None:
    """Say what is going on, to a terminal only; the next message takes its place, and an empty one clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()
