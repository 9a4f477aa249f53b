"""Tokens a step of a drafter in the engine, on held-out answers of a recording.

    headrace distil draft smollm2 smollm2-draft --answers recorded
    python benchmarks/held_out_drafts.py smollm2 smollm2-draft recorded

The engine answers the prompts that the training held out, greedily, once without drafts and once
with all chains of four drafts. The result should be near the tokens a step that the training
printed, which it counts without an engine. Answers that differ between both runs end the program.
The recorded answers may differ, because they end at loops and at their own maximum; the program
prints how many tokens are equal before the first difference. A step of a prompt writes one token.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from headrace import LLM, SamplingParams
from headrace.distil.answers import AnswerSet, open_answers
from headrace.outputs import RequestOutput

Answers = list[list[int]]


def recorded(answers: AnswerSet, count: int) -> tuple[Answers, Answers]:
    """The first held-out prompts, and the answers to them."""
    chosen = answers.held_out[:count]
    starts = [answers.answer_start(i) for i in chosen]
    tokens = [answers.tokens(i).tolist() for i in chosen]
    pairs = list(zip(tokens, starts, strict=True))
    return [each[:start] for each, start in pairs], [each[start:] for each, start in pairs]


def answer(
    model: str, prompts: Answers, max_tokens: Sequence[int], threads: int, drafter: str = ""
) -> list[RequestOutput]:
    """Greedy answers, with all drafts of a drafter, or without drafts."""
    with LLM(
        model,
        threads=threads,
        proposer="draft_model" if drafter else "off",
        draft_model=drafter,
        adaptive_speculation=False,
    ) as llm:
        params = [SamplingParams(temperature=0, max_tokens=limit) for limit in max_tokens]
        results = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params)
        if llm.stats().proposer_failures:
            sys.exit("the drafter failed, as the log says; repeat it on a machine with less work")
        return results


def equal_tokens(first: list[int], second: list[int]) -> int:
    """The number of equal tokens before the first difference."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("drafter", help="folder of a drafter")
    parser.add_argument("answers", type=Path, help="folder of recorded answers")
    parser.add_argument("--count", type=int, default=48, help="number of answers")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()

    prompts, written = recorded(open_answers(args.answers), args.count)
    # As many tokens as are recorded: the training counts no others.
    limits = [max(2, len(tokens)) for tokens in written]
    plain, drafted = (
        answer(args.model, prompts, limits, args.threads, name) for name in ("", args.drafter)
    )
    found = [result.outputs[0].token_ids for result in drafted]
    if [result.outputs[0].token_ids for result in plain] != found:
        sys.exit("answers with drafts differ from those of plain decoding")

    num_tokens = sum(map(len, found))
    books = [book for result in drafted for book in result.drafts.values()]
    accepted = sum(book.accepted for book in books)
    equal = sum(map(equal_tokens, found, written))
    facts = {
        "answers": len(found),
        "tokens": num_tokens,
        "tokens_as_recorded": equal,
        "proposed": sum(book.proposed for book in books),
        "accepted": accepted,
        "tokens_per_step": num_tokens / (num_tokens - accepted),
    }
    curve = Path(args.drafter) / "curve.json"
    if curve.exists():
        points = [point for point in json.loads(curve.read_text()) if point["held_out"]]
        facts["tokens_per_step_of_training"] = points[-1]["held_out"]["tokens_per_step"]
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
