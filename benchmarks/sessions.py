"""The price of scoring and sampling many continuations of one prompt in a session.

    python benchmarks/sessions.py [--model smollm2] [--prompt 2048] [--count 64] [--tokens 16]
                                  [--threads 2] [--rounds 3]

Scoring is compared with the prefill of one prompt with as many rows, and with plain requests, each
of which scores its own prompt. Sampling is compared with a plain request of `count` outputs. All
begin without cached KV and take turns; the ratios are medians, with the lowest and the highest.
`--cpu-time` counts the seconds of the processor: on a busy machine, with one thread, the ratio of
these is that of the work.
"""

import argparse
import random
from collections.abc import Callable
from itertools import count
from statistics import median
from time import perf_counter, process_time

from headrace import LLM, SamplingParams
from headrace.request import PathOptions, RequestOptions

_salts = map(str, count())


def seconds(work: Callable[[str], object], clock: Callable[[], float]) -> float:
    """Run `work` with a new cache salt, which finds nothing in the prefix cache."""
    salt = next(_salts)
    started = clock()
    work(salt)
    return clock() - started


class Measurement:
    def __init__(self, llm: LLM, num_prompt: int, num_texts: int, num_tokens: int) -> None:
        rng = random.Random(0)
        vocabulary = range(1000, llm.spec.vocab_size)
        self.llm = llm
        self.prompt = rng.choices(vocabulary, k=num_prompt)
        self.texts = [rng.choices(vocabulary, k=num_tokens) for _ in range(num_texts)]
        self.drawn = SamplingParams(
            n=num_texts, temperature=1, max_tokens=num_tokens, ignore_eos=True
        )

    def score_in_session(self, salt: str) -> None:
        prompt = {"prompt_token_ids": self.prompt}
        with self.llm.session(prompt, cache_salt=salt) as session:
            session.root.score(self.texts)

    def prefill_once(self, salt: str) -> None:
        """Compute one prompt with the tokens of all texts, and no logits."""
        tokens = self.prompt + [token for text in self.texts for token in text]
        path = PathOptions(score_from=len(tokens))
        options = RequestOptions(cache_salt=salt, path=path)
        self.llm._run([self.llm._engine.check(tokens, None, options)])

    def score_apart(self, salt: str) -> None:
        prompts = [{"prompt_token_ids": self.prompt + text} for text in self.texts]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        self.llm.generate(prompts, params, cache_salt=salt)

    def sample_in_session(self, salt: str) -> None:
        prompt = {"prompt_token_ids": self.prompt}
        params = SamplingParams(temperature=1, max_tokens=self.drawn.max_tokens, ignore_eos=True)
        with self.llm.session(prompt, cache_salt=salt) as session:
            session.root.sample(self.drawn.n, params)

    def sample_plain(self, salt: str) -> None:
        self.llm.generate([{"prompt_token_ids": self.prompt}], self.drawn, cache_salt=salt)


def report(name: str, pairs: list[tuple[float, float]]) -> None:
    ratios = [own / other for own, other in pairs]
    print(
        f"{name}: {median(own for own, _ in pairs):.3f} s and "
        f"{median(other for _, other in pairs):.3f} s, ratio {median(ratios):.3f} "
        f"({min(ratios):.3f}-{max(ratios):.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="sessions.py", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--count", type=int, default=64, help="continuations")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a continuation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="also score in plain requests")
    parser.add_argument("--cpu-time", action="store_true", help="count seconds of the processor")
    args = parser.parse_args()
    clock = process_time if args.cpu_time else perf_counter
    context = args.prompt + args.count * args.tokens + 1
    with LLM(args.model, threads=args.threads, max_model_len=context) as llm:
        measured = Measurement(llm, args.prompt, args.count, args.tokens)
        print(llm)
        seconds(measured.score_in_session, clock)  # a first run, which does not count
        turns: dict[str, tuple[Callable[[str], None], Callable[[str], None]]] = {
            "scores, and one prefill of as many rows": (
                measured.score_in_session,
                measured.prefill_once,
            ),
            "samples, and a plain request": (measured.sample_in_session, measured.sample_plain),
        }
        for name, (own, other) in turns.items():
            rounds = range(args.rounds)
            report(name, [(seconds(own, clock), seconds(other, clock)) for _ in rounds])
        if args.apart:
            own, other = measured.score_in_session, measured.score_apart
            report("scores, and plain requests", [(seconds(own, clock), seconds(other, clock))])


if __name__ == "__main__":
    main()
