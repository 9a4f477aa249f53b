"""Acceptance of drafts from earlier text: the initial `ProposerTraits.acceptance` of `suffix`.

The proposer observes the outputs of plain decoding for the prompts of `speculation.py`, token by
token. A draft is right if its first token is the next token of the output.
"""

import argparse
import random
from collections import Counter
from dataclasses import dataclass

from speculation_texts import WORKLOADS, prompts

from headrace import LLM, SamplingParams
from headrace.speculation.proposers.suffix import SuffixProposer


@dataclass(eq=False)
class Recorded:
    """The part of a sequence that the proposer reads."""

    seq_id: tuple[int, int]
    known: list[int]
    prompt_len: int
    scope: None = None


def answers(args: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs, with the kinds of work mixed."""
    with LLM(args.model, proposer="off", max_model_len=2048) as llm:
        texts = [text for work in WORKLOADS for text in prompts(work, 1000, args.answers)]
        random.Random(0).shuffle(texts)
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
        results = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return [(result.prompt_token_ids, result.outputs[0].token_ids) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=int, default=24, help="answers per kind of work")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, as a test that does not measure",
    )
    args = parser.parse_args()
    if args.quick:
        args.answers, args.max_tokens = 1, 8
    found = answers(args)
    print(f"{'confidence':>10}{'drafts':>9}{'right':>8}")
    proposer = SuffixProposer(16)
    drafts, right = Counter[int](), Counter[int]()
    for number, (prompt, output) in enumerate(found):
        seq = Recorded((number, 0), list(prompt), len(prompt))
        for token in output:
            (draft,) = proposer.propose([seq], [proposer.traits.max_nodes])
            if draft.tokens:
                drafts[draft.confidence] += 1
                right[draft.confidence] += draft.tokens[0] == token
            seq.known.append(token)
        del seq  # which ends it for the proposer
    for confidence in sorted(drafts):
        share = right[confidence] / drafts[confidence]
        print(f"{confidence:>10}{drafts[confidence]:>9,}{share:>8.2f}")


if __name__ == "__main__":
    main()
