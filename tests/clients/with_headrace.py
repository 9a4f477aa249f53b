"""`LLM` itself, without HTTP: the scores that lm-eval must get over HTTP."""

import json

from checks import MODEL, run
from scored import PAIRS, TEXTS, WINDOW

from headrace import LLM, SamplingParams

llm = LLM(MODEL, kv_blocks=256)
tokenizer = llm.get_tokenizer()
PREFIX = tokenizer.bos_id
SCORES = SamplingParams(max_tokens=1, prompt_logprobs=1)


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=True)


def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the sum of the log-probabilities of a continuation, and whether it is greedy."""
    prompt = {"prompt_token_ids": context + continuation}
    found = llm.generate(prompt, SCORES)[0].prompt_logprobs[len(context) :]
    entries = [one[token] for one, token in zip(found, continuation, strict=True)]
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


def loglikelihood() -> str:
    """A space at the end of a context belongs to the continuation."""
    scores = []
    for context, continuation in PAIRS:
        known = encode(context.rstrip()) if context else [PREFIX]
        whole = encode(context + continuation) if context else [PREFIX, *encode(continuation)]
        scores.append(score(known, whole[len(known) :]))
    return json.dumps([list(pair) for pair in scores])


def rolling() -> str:
    """Each window predicts the tokens after the window before it."""
    sums = []
    for text in TEXTS:
        tokens = [PREFIX, *encode(text)]
        found = []
        for start in range(1, len(tokens), WINDOW):
            end = min(start + WINDOW, len(tokens))
            found.append(score(tokens[max(0, end - WINDOW - 1) : start], tokens[start:end])[0])
        sums.append(sum(found))
    return json.dumps(sums)


run(
    {
        "prefix token": lambda: str(PREFIX),
        "loglikelihoods": loglikelihood,
        "rolling loglikelihoods": rolling,
    }
)
