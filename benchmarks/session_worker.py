"""One way to search a tree of texts, in a process of its own, for `session_peers.py`.

Every way gets the same prompt and the same continuations. It scores the continuations, and samples
a tree of two levels. The output is a line of JSON: the version, seconds by job, seconds of the
processor by job, and the mean log-probability of the scores, by which the ways are held together.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from itertools import count
from time import perf_counter, process_time
from typing import Any, NamedTuple, Protocol


class Work(NamedTuple):
    """Token ids of the prompt and of the continuations, and the shape of the tree."""

    prompt: list[int]
    texts: list[list[int]]
    width: int
    """Children of a node, on both levels."""
    tokens: int
    """Tokens of a node."""


class Way(Protocol):
    version: str

    def __init__(self, model: str, threads: int, work: Work) -> None: ...

    def score(self) -> float:
        """Score all continuations after an uncached prompt; returns the mean of a token."""

    def tree(self) -> int:
        """Sample the tree after an uncached prompt; returns its sampled tokens."""


class _Headrace:
    def __init__(self, model: str, threads: int, work: Work) -> None:
        import headrace

        self._module = headrace
        self.version = headrace.__version__
        self.work = work
        length = len(work.prompt) + 2 * work.tokens + 1
        blocks = -(-(length + len(work.texts) * (work.tokens + 64)) // 32) + 64
        self.llm = headrace.LLM(
            model, threads=threads, max_model_len=length, kv_blocks=2 * blocks, max_num_seqs=64
        )
        self._salts = map(str, count())

    def params(self, n: int = 1) -> Any:
        return self._module.SamplingParams(
            n=n, temperature=1, max_tokens=self.work.tokens, ignore_eos=True
        )

    def salt(self) -> str:
        """A cache salt that finds nothing in the prefix cache."""
        return next(self._salts)


class Session(_Headrace):
    """A session of Headrace."""

    def score(self) -> float:
        prompt = {"prompt_token_ids": self.work.prompt}
        with self.llm.session(prompt, cache_salt=self.salt()) as session:
            return _mean(score.total for score in session.root.score(self.work.texts)) / len(
                self.work.texts[0]
            )

    def tree(self) -> int:
        prompt = {"prompt_token_ids": self.work.prompt}
        with self.llm.session(prompt, cache_salt=self.salt()) as session:
            first = session.root.sample(self.work.width, self.params())
            second = session.sample(first, self.work.width, self.params())
            nodes = [*first, *(node for nodes in second for node in nodes)]
            return sum(len(node.own_token_ids) for node in nodes)


class Requests(_Headrace):
    """Requests of Headrace without a session, over its prefix cache."""

    def score(self) -> float:
        prompts = [{"prompt_token_ids": self.work.prompt + text} for text in self.work.texts]
        params = self._module.SamplingParams(max_tokens=1, prompt_logprobs=0)
        results = self.llm.generate(prompts, params, cache_salt=self.salt())
        begin = len(self.work.prompt)
        return _mean(
            entry[token].logprob
            for result, text in zip(results, self.work.texts, strict=True)
            for entry, token in zip(result.prompt_logprobs[begin:], text, strict=True)
        )

    def tree(self) -> int:
        salt, params = self.salt(), self.params(self.work.width)
        prompts = [{"prompt_token_ids": self.work.prompt}]
        first = self.llm.generate(prompts, params, cache_salt=salt)[0].outputs
        prompts = [
            {"prompt_token_ids": self.work.prompt + list(output.token_ids)} for output in first
        ]
        second = self.llm.generate(prompts, params, cache_salt=salt)
        outputs = [*first, *(output for result in second for output in result.outputs)]
        return sum(len(output.token_ids) for output in outputs)


class LlamaCpp:
    """The C functions of llama-cpp-python: a sequence for each text, whose KV is shared with the
    sequence of the prompt by `llama_memory_seq_cp`.
    """

    _BATCH = 2048  # rows of one call, of which it computes 512 at a time: its defaults

    def __init__(self, model: str, threads: int, work: Work) -> None:
        import llama_cpp as c
        import numpy as np

        self._c, self._np = c, np
        self.version, self.work = c.__version__, work
        self._silence = c.llama_log_callback(lambda level, text, data: None)
        c.llama_log_set(self._silence, None)
        c.llama_backend_init()
        self._model = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        leaves = max(len(work.texts), work.width * work.width)
        params.n_seq_max = 1 + work.width + leaves
        cells = len(work.prompt) + (work.width + leaves) * work.tokens
        params.n_ctx = -(-cells // 256) * 256
        params.kv_unified = True  # sequences share the cells of the prompt
        params.n_threads = params.n_threads_batch = threads
        self._context = c.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp has no memory for this context"
        self._memory = c.llama_get_memory(self._context)
        self._vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(self._BATCH, 0, 1)

    def score(self) -> float:
        last = self._prefill()
        total, begin = 0.0, len(self.work.prompt)
        for number, text in enumerate(self.work.texts, 1):
            self._c.llama_memory_seq_cp(self._memory, 0, number, 0, -1)
            total += self._logprob(last, text[0])
        rows = [
            (number, begin + at, token)
            for number, text in enumerate(self.work.texts, 1)
            for at, token in enumerate(text[:-1])
        ]
        targets = [token for text in self.work.texts for token in text[1:]]
        for index, found in self._decode(rows):
            total += self._logprob(found, targets[index])
        return total / len(self.work.texts) / self.work.tokens

    def tree(self) -> int:
        self._prefill()
        width, begin = self.work.width, len(self.work.prompt)
        samplers = [self._sampler(seed) for seed in range(width + width * width)]
        first = list(range(1, width + 1))
        for number in first:
            self._c.llama_memory_seq_cp(self._memory, 0, number, 0, -1)
        drawn = [self._draw(samplers[i], -1) for i in range(width)]
        drawn, count = self._grow(first, drawn, samplers, begin)
        begin += self.work.tokens
        rows = [(s, begin - 1, token) for s, token in zip(first, drawn, strict=True)]
        for _ in self._decode(rows):
            pass
        second = [width + 1 + i for i in range(width * width)]
        for i, number in enumerate(second):
            self._c.llama_memory_seq_cp(self._memory, first[i // width], number, 0, -1)
        samplers = samplers[width:]
        drawn = [self._draw(samplers[i], i // width) for i in range(width * width)]
        _, more = self._grow(second, drawn, samplers, begin)
        return count + more

    def _grow(
        self, sequences: Sequence[int], drawn: list[int], samplers: Sequence[Any], begin: int
    ) -> tuple[list[int], int]:
        """Sample the further tokens of sequences; returns the last ones and the number of all."""
        for at in range(self.work.tokens - 1):
            rows = [(s, begin + at, token) for s, token in zip(sequences, drawn, strict=True)]
            for _ in self._decode(rows):
                pass
            drawn = [self._draw(samplers[i], i) for i in range(len(rows))]
        return drawn, len(sequences) * self.work.tokens

    def _prefill(self) -> Any:
        """Compute the prompt as sequence 0; returns the logits of its last row."""
        self._c.llama_memory_clear(self._memory, False)
        *rows, (sequence, at, token) = [(0, at, t) for at, t in enumerate(self.work.prompt)]
        for _ in self._decode(rows, wanted=False):
            pass
        ((_, found),) = self._decode([(sequence, at, token)])
        return found.copy()

    def _decode(
        self, rows: Sequence[tuple[int, int, int]], *, wanted: bool = True
    ) -> Iterator[tuple[int, Any]]:
        """The number and the logits of each row, if they are wanted."""
        batch = self._batch
        for begin in range(0, len(rows), self._BATCH):
            part = rows[begin : begin + self._BATCH]
            batch.n_tokens = len(part)
            for i, (sequence, at, token) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, at, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if self._c.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            for i in range(len(part) if wanted else 0):
                pointer = self._c.llama_get_logits_ith(self._context, i)
                yield (
                    begin + i,
                    self._np.ctypeslib.as_array(pointer, shape=(self._vocabulary,)),
                )

    def _logprob(self, logits: Any, token: int) -> float:
        largest = logits.max()
        return float(logits[token] - largest - self._np.log(self._np.exp(logits - largest).sum()))

    def _sampler(self, seed: int) -> Any:
        chain = self._c.llama_sampler_chain_init(self._c.llama_sampler_chain_default_params())
        self._c.llama_sampler_chain_add(chain, self._c.llama_sampler_init_dist(seed))
        return chain

    def _draw(self, sampler: Any, row: int) -> int:
        return int(self._c.llama_sampler_sample(sampler, self._context, row))


WAYS: dict[str, type[Way]] = {"session": Session, "requests": Requests, "llama.cpp": LlamaCpp}


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="session_worker.py", description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("model")
    parser.add_argument("--jobs", default="score,tree")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=40_000)
    args = parser.parse_args()

    rng = random.Random(0)
    draw = range(args.vocabulary // 8, args.vocabulary)
    work = Work(
        rng.choices(draw, k=args.prompt),
        [rng.choices(draw, k=args.tokens) for _ in range(args.count)],
        args.width,
        args.tokens,
    )
    way = WAYS[args.way](args.model, args.threads, work)
    seconds, cpu_seconds, mean = {}, {}, None
    for job in args.jobs.split(","):
        started, cpu_started = perf_counter(), process_time()
        result = way.score() if job == "score" else way.tree()
        seconds[job] = perf_counter() - started
        cpu_seconds[job] = process_time() - cpu_started
        if job == "score":
            mean = result
        else:
            assert result == (args.width + args.width**2) * args.tokens, "the tree is not whole"
    found = {"version": way.version, "seconds": seconds, "cpu_seconds": cpu_seconds, "mean": mean}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
