"""Cost of a drafted token: one depth of an EAGLE-3 drafter relative to a plain step of the model.

c = (seconds of a chain of `depth` - seconds of a chain of 1) / (depth - 1) / seconds of a plain
step, with the same number of sequences. It decides how deep a draft pays. The parts are the
drafter's program, the sampler, and the rest, which is Python. The drafter is a folder, or one with
random weights whose layer has the shape of the model's: it costs as much as a trained drafter, and
drafts nothing useful. Chains of both depths, formats and plain steps take turns; medians are
printed.

    python benchmarks/draft_cost.py --batch 1 4 16 64 --format mixed q4_1 q8_0 file
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headrace import LLM, SamplingParams
from headrace.backend.cpu import executable as cpu
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.speculation.proposers.eagle import EagleProposer

PROMPT = "Write a long story about a water mill and the people who live near it."


@dataclass
class Times:
    """Seconds of calls."""

    steps: list[float] = field(default_factory=list)
    """Steps of the model, without proposers."""
    chains: list[float] = field(default_factory=list)
    programs: list[float] = field(default_factory=list)
    """The drafter's programs in each chain."""
    samplers: list[float] = field(default_factory=list)
    observations: list[float] = field(default_factory=list)


def write_random_drafter(folder: Path, model: str, vocab: int) -> str:
    """Write a drafter in the layout of its authors, with `vocab` of the model's tokens."""
    spec, rng = open_checkpoint(resolve(model)).spec, np.random.default_rng(0)
    dim, kv_dim = spec.dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "fc": (dim, 3 * dim),
        "midlayer.self_attn.q_proj": (spec.num_heads * spec.head_dim, 2 * dim),
        "midlayer.self_attn.k_proj": (kv_dim, 2 * dim),
        "midlayer.self_attn.v_proj": (kv_dim, 2 * dim),
        "midlayer.self_attn.o_proj": (dim, spec.num_heads * spec.head_dim),
        "midlayer.mlp.gate_proj": (spec.ffn_dim, dim),
        "midlayer.mlp.up_proj": (spec.ffn_dim, dim),
        "midlayer.mlp.down_proj": (dim, spec.ffn_dim),
        "lm_head": (vocab, dim),
    }
    tensors: dict[str, Any] = {
        f"{name}.weight": (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float16)
        for name, shape in shapes.items()
    }
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{norm}.weight"] = np.ones(dim, np.float16)
    tensors["norm.weight"] = np.ones(dim, np.float16)
    tokens = np.sort(rng.choice(spec.vocab_size, vocab, replace=False))
    tensors["d2t"] = tokens - np.arange(vocab)
    tensors["t2d"] = np.isin(np.arange(spec.vocab_size), tokens)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": vocab,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@contextmanager
def timed(owner: Any, name: str, record: Callable[[float], None]) -> Iterator[None]:
    """Time each call of a function while the context is open."""
    function = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        start = perf_counter()
        result = function(*args, **options)
        record(perf_counter() - start)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)


@contextmanager
def measured(times: Times) -> Iterator[None]:
    """Record the times of proposers, and of the programs and samplers inside and outside them."""
    inside: list[float] = [0.0, 0.0]

    def end_chain(seconds: float) -> None:
        times.chains.append(seconds)
        times.programs.append(inside[0])
        times.samplers.append(inside[1])

    def program(seconds: float) -> None:
        inside[0] += seconds

    def sampler(seconds: float) -> None:
        inside[1] += seconds

    propose = EagleProposer.propose

    def begin_chain(*args: Any) -> Any:
        inside[:] = [0.0, 0.0]
        return propose(*args)

    EagleProposer.propose = begin_chain  # type: ignore[method-assign]
    try:
        with (
            timed(EagleProposer, "propose", end_chain),
            timed(EagleProposer, "observe", times.observations.append),
            timed(cpu.CpuExecutable, "run", program),
            timed(cpu, "run_logit_ops", sampler),
        ):
            yield
    finally:
        EagleProposer.propose = propose  # type: ignore[method-assign]


def run(llm: LLM, batch: int, params: SamplingParams) -> float:
    """Answer `batch` prompts, and return the mean seconds of a step after the first token."""
    before = llm.stats().steps
    start = perf_counter()
    llm.generate([f"{PROMPT} ({i})" for i in range(batch)], params)
    return (perf_counter() - start) / (llm.stats().steps - before)


def measure(args: argparse.Namespace, drafter: str) -> Iterator[dict[str, object]]:
    """Return a line for each batch and format."""
    for batch in args.batch:
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True, seed=1
        )
        options: dict[str, Any] = {"max_num_seqs": batch, "prefix_cache": False}
        plain = LLM(args.model, **options)
        own = {"proposer": "draft_model", "draft_model": drafter, "adaptive_speculation": False}
        engines = {
            (form, depth): LLM(args.model, **options, **own, draft_format=form, draft_depth=depth)
            for form in args.format
            for depth in (1, args.depth)
        }
        times = {key: Times() for key in engines}
        steps: list[float] = []
        for round_number in range(args.rounds + 1):
            seconds = run(plain, batch, params)
            for key, llm in engines.items():
                record = times[key] if round_number else Times()  # the first round warms up
                with measured(record):
                    run(llm, batch, params)
            if round_number:
                steps.append(seconds)
        step = median(steps)
        for form in args.format:
            one, deep = times[form, 1], times[form, args.depth]
            chain, program, sampler = (
                (median(getattr(deep, part)) - median(getattr(one, part))) / (args.depth - 1)
                for part in ("chains", "programs", "samplers")
            )
            yield {
                "batch": batch,
                "format": form,
                "step_ms": round(1e3 * step, 3),
                "c": round(chain / step, 4),
                "program": round(program / step, 4),
                "sampler": round(sampler / step, 4),
                "python": round((chain - program - sampler) / step, 4),
                "first_ms": round(1e3 * median(one.chains), 3),
                "observe_ms": round(1e3 * median(deep.observations), 4),
            }
        for llm in (plain, *engines.values()):
            llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", default="", help="folder of a drafter; default: random")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens of the random drafter")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--format", nargs="+", default=["mixed"])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        drafter = args.draft_model or write_random_drafter(Path(folder), args.model, args.vocab)
        for line in measure(args, drafter):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
