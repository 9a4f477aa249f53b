"""A sampler in NumPy that is easy to read: the reference for csrc/sampler.cpp."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-5
SLACK = 1e-6
"""Share of a nucleus by which its end may be missed: native weights are floats, so a share that is
so near to `top_p` may be below it.
"""


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def gumbel(vocab: int, position: int, seq_index: int, seed: int) -> NDArray[np.float64]:
    """Gumbel noise of every token at a position: [vocab]."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    words = [
        word
        for quad in range(-(-vocab // 4))
        for word in philox((quad, position, seq_index, 0), key)
    ][:vocab]
    return -np.log(-np.log((np.array(words, np.float64) + 0.5) * 2.0**-32))


def logprobs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def order(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """All token ids, best first; of equal logits the lower id is better."""
    return np.lexsort((np.arange(len(logits)), -logits))


@dataclass
class SamplerTwin:
    vocab: int
    prompt: list[int]
    seq_index: int = 0
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)
    banned_until: int = 0
    output: list[int] = field(default_factory=list)

    def draw(
        self, logits: NDArray[np.float32], position: int, mask: NDArray[np.uint32] | None = None
    ) -> int:
        token = self._best(self.adjusted(logits, position, mask), position, self.top_p)
        self.output.append(token)
        return token

    def draws(
        self, logits: NDArray[np.float32], position: int, mask: NDArray[np.uint32] | None = None
    ) -> set[int]:
        """The tokens that a sample may have: rarely two, if a nucleus ends within rounding of
        `top_p`.
        """
        x, slack = self.adjusted(logits, position, mask), SLACK if self.top_p < 1 else 0
        return {self._best(x, position, self.top_p * factor) for factor in (1 - slack, 1 + slack)}

    def _best(self, x: NDArray[np.float32], position: int, top_p: float) -> int:
        if self.temperature < GREEDY_BELOW:
            return int(np.argmax(x))
        kept = self.filtered(x, top_p)
        scores = (x.astype(np.float64) - x.max()) / self.temperature + gumbel(
            self.vocab, position, self.seq_index, self.seed
        )
        return int(kept[np.argmax(scores[kept])])

    def adjusted(
        self, logits: NDArray[np.float32], position: int, mask: NDArray[np.uint32] | None = None
    ) -> NDArray[np.float32]:
        x = logits.copy()
        for token, bias in self.logit_bias:
            x[token] += np.float32(bias)
        repetition, presence, frequency = map(
            np.float32, (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        )
        for token in {*self.prompt, *self.output}:
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        for token in set(self.output):
            x[token] -= frequency * np.float32(self.output.count(token)) + presence
        if position < self.banned_until:
            x[self.banned] = -np.inf
        if mask is not None:
            x[
                [not mask[token // 32] >> np.uint32(token % 32) & 1 for token in range(self.vocab)]
            ] = -np.inf
        return x

    def filtered(self, x: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
        """The tokens that min_p, then top_k, then top_p keep, in ascending order."""
        kept = order(x)
        if self.min_p > 0:
            kept = kept[
                x[kept] >= np.float32(float(x.max()) + self.temperature * np.log(self.min_p))
            ]
        if self.top_k:
            kept = kept[: self.top_k]
        if top_p < 1:
            weights = np.exp((x[kept].astype(np.float64) - x.max()) / self.temperature)
            kept = kept[: int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1]
        return np.sort(kept)
