"""Speed of beam search by width, free and among items that are token sequences.

    python benchmarks/beams.py [--model smollm2] [--widths 4,16,64,128,256,512] [--prompt 128]
                               [--tokens 4] [--items 50000] [--searches 1] [--threads 2]
                               [--rounds 3] [--peer bfloat16]

A figure is tokens per second: beams times tokens of a beam, divided by the seconds of the search
with its prompt, of which nothing is cached. The share of the host is the time outside the model and
the ranking of its beams. `--peer` measures transformers too, on a random model with the shape of
SmolLM2-135M in that type; both take turns in one run. An item has `--tokens` levels of 256 codes,
as the semantic ids of recommenders have.
"""

import argparse
import random
from collections.abc import Callable
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

from headrace import LLM, SamplingParams, StructuredOutputs

Items = list[list[int]]
Search = Callable[[int, bool], object]
"""Searches with a width; freely, or among the items."""

_FIRST_CODE = 1000
_CODES = 256
_salts = map(str, count())


def random_items(num_items: int, length: int) -> Items:
    """Distinct items whose last token makes equal codes differ."""
    rng = random.Random(0)
    levels = range(_FIRST_CODE, _FIRST_CODE + _CODES)
    items = set[tuple[int, ...]]()
    while len(items) < num_items:
        items.add(tuple(rng.choices(levels, k=length)))
    return [list(item) for item in sorted(items)]


class Ours:
    """Headrace, with the seconds that its launches take, and the bytes of KV that it copies."""

    def __init__(self, args: argparse.Namespace, prompts: Items, items: Items) -> None:
        widest = max(args.widths) * args.searches
        self.llm = LLM(
            args.model,
            threads=args.threads,
            max_num_seqs=widest,
            max_num_batched_tokens=max(widest, 512),
            max_model_len=args.prompt + args.tokens + 1,
        )
        self._prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        self._tokens = args.tokens
        self._among_items = StructuredOutputs(allowed_sequences=items)
        self.launch_seconds = 0.0
        executable = self.llm._engine._loop.executable
        launch = executable.launch

        def timed_launch(*given: Any, **options: Any) -> Any:
            started = perf_counter()
            ticket = launch(*given, **options)
            self.launch_seconds += perf_counter() - started
            return ticket

        executable.launch = timed_launch  # type: ignore[method-assign]

        limits = self.llm._engine.limits
        size = limits.kv.block_size
        self.copied_bytes = 0.0
        move_slots = executable.move_slots

        def counted_moves(group: int, source: Any, target: Any) -> None:
            slot_bytes = limits.kv_groups[group].block_bytes(limits.kv.dtype, size) / size
            self.copied_bytes += slot_bytes * len(source)
            move_slots(group, source, target)

        executable.move_slots = counted_moves  # type: ignore[method-assign]

    def search(self, width: int, is_free: bool) -> None:
        params = SamplingParams(
            beam_width=width,
            n=width,
            max_tokens=self._tokens,
            ignore_eos=True,
            structured_outputs=None if is_free else self._among_items,
        )
        results = self.llm.generate(self._prompts, params, cache_salt=next(_salts))
        if any(len(result.outputs) != width for result in results):
            raise RuntimeError("a search has fewer outputs than beams")


class Peer:
    """transformers, whose model has random weights and the shape of SmolLM2-135M."""

    def __init__(self, args: argparse.Namespace, prompts: Items, items: Items) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
        self._torch = torch
        self._model = LlamaForCausalLM(config).eval().to(getattr(torch, args.peer))
        self._prompts = torch.tensor(prompts)
        self._tokens = args.tokens
        self._trie: dict[Any, Any] = {}
        for item in items:
            node = self._trie
            for token in item:
                node = node.setdefault(token, {})

    def _allowed(self, batch: int, ids: Any) -> list[int]:
        node = self._trie
        for token in ids[self._prompts.shape[1] :].tolist():
            node = node.get(token, {})
        return list(node) or [0]

    def search(self, width: int, is_free: bool) -> None:
        with self._torch.inference_mode():
            self._model.generate(
                self._prompts,
                attention_mask=self._torch.ones_like(self._prompts),
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=self._tokens,
                pad_token_id=0,
                prefix_allowed_tokens_fn=None if is_free else self._allowed,
            )


def spread(values: list[float], form: str) -> str:
    low, high = min(values), max(values)
    return f"{median(values):{form}} ({low:{form}}-{high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="beams.py", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--widths",
        type=lambda text: [int(width) for width in text.split(",")],
        default=[4, 16, 64, 128, 256, 512],
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of an item")
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--searches", type=int, default=1, help="searches in one batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", choices=("float32", "bfloat16"), help="measure transformers")
    args = parser.parse_args()

    rng = random.Random(1)
    prompts = [rng.choices(range(2000, 40_000), k=args.prompt) for _ in range(args.searches)]
    items = random_items(args.items, args.tokens)
    ours = Ours(args, prompts, items)
    peer = Peer(args, prompts, items) if args.peer else None
    print(ours.llm)
    print(
        f"{args.searches} searches, prompt {args.prompt}, {args.tokens} tokens, "
        f"{len(items):,} items"
    )
    ours.search(4, is_free=False)
    for width in args.widths:
        for is_free in (True, False):
            measure(ours, peer, width, is_free, args)
    ours.llm.close()


def measure(
    ours: Ours, peer: Peer | None, width: int, is_free: bool, args: argparse.Namespace
) -> None:
    num_tokens = width * args.tokens * args.searches
    speeds, shares, peer_speeds = [], [], []
    for _ in range(args.rounds):
        ours.launch_seconds, ours.copied_bytes, started = 0.0, 0.0, perf_counter()
        ours.search(width, is_free)
        seconds = perf_counter() - started
        speeds.append(num_tokens / seconds)
        shares.append(100 * (1 - ours.launch_seconds / seconds))
        if peer:
            started = perf_counter()
            peer.search(width, is_free)
            peer_speeds.append(num_tokens / (perf_counter() - started))
    line = f"width {width}, {'free' if is_free else 'items'}: {spread(speeds, ',.0f')} tokens/s"
    megabytes = ours.copied_bytes / args.searches / args.tokens / 1e6
    line += (
        f", host {spread(shares, '.0f')} %, {megabytes:.1f} MB of KV copied per step of a search"
    )
    if peer:
        ratios = [own / other for own, other in zip(speeds, peer_speeds, strict=True)]
        line += f"; transformers {spread(peer_speeds, ',.0f')}, ratio {spread(ratios, '.2f')}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
