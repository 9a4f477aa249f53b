"""500 JSON schemas, answered by a model: validity of each answer, and the cost per token.

    python benchmarks/structured [--schemas N] [--model MODEL] [--threads N] [--batch N]

The same requests also run without a schema, to the same lengths, and once more with it, in turns by
batches. The time of a side is the whole call, including prefill and, the first time, compiling the
schemas, without a prefix cache. Exit code 1: an answer was invalid, or 5 % were cut off.
"""

import argparse
import statistics
import sys
from time import perf_counter
from typing import Any

from generator import Schema, fault, schema_of

from headrace import LLM, RequestOutput, SamplingParams, StructuredOutputs

_MAX_TOKENS = 300
_MAX_CUT = 0.05


def timed(
    llm: LLM, prompts: list[Any], params: list[SamplingParams]
) -> tuple[list[RequestOutput], float]:
    begun = perf_counter()
    results = llm.chat(prompts, params)
    return results, perf_counter() - begun


def with_schemas(
    llm: LLM, seeds: range, schemas: list[Schema]
) -> tuple[list[Any], list[SamplingParams]]:
    prompts = [[{"role": "user", "content": f"Invent record {seed}, as JSON."}] for seed in seeds]
    asked = [
        SamplingParams(
            max_tokens=_MAX_TOKENS,
            temperature=0.8,
            seed=seed,
            structured_outputs=StructuredOutputs(json=schema),
        )
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    return prompts, asked


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks/structured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch", type=int, default=25)
    args = parser.parse_args()
    faults, num_cut, tokens = [], 0, 0
    costs: dict[str, list[float]] = {
        "without": [],
        "with a schema": [],
        "with one that is compiled": [],
    }
    with LLM(args.model, threads=args.threads, prefix_cache=False) as llm:
        llm.chat(
            [{"role": "user", "content": "hello"}],
            SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(json_object=True)),
        )
        for begin in range(0, args.schemas, args.batch):
            seeds = range(begin, min(begin + args.batch, args.schemas))
            schemas = list(map(schema_of, seeds))
            prompts, asked = with_schemas(llm, seeds, schemas)
            results, seconds = timed(llm, prompts, asked)
            lengths = [len(one.outputs[0].token_ids) for one in results]
            free = [
                SamplingParams(max_tokens=length, temperature=0.8, seed=seed, ignore_eos=True)
                for seed, length in zip(seeds, lengths, strict=True)
            ]
            before = timed(llm, prompts, free)[1]
            again = timed(llm, prompts, asked)[1]
            tokens += sum(lengths)
            for side, took in zip(costs.values(), (before, seconds, again), strict=True):
                side.append(1000 * took / sum(lengths))
            for seed, schema, result in zip(seeds, schemas, results, strict=True):
                output = result.outputs[0]
                if output.finish_reason == "length":
                    num_cut += 1
                elif message := fault(output.text, schema):
                    faults.append(f"schema {seed}: {message}: {output.text}")
        forced = llm.stats().forced
    print("\n".join(faults))
    valid = args.schemas - num_cut - len(faults)
    print(
        f"{args.schemas} schemas, {tokens:,} tokens: {valid} valid, {len(faults)} not "
        f"valid, {num_cut} cut by max_tokens={_MAX_TOKENS}"
    )
    for name, side in costs.items():
        ratios = [own / free for own, free in zip(side, costs["without"], strict=True)]
        spread = (
            f"{statistics.median(ratios):.2f} times ({min(ratios):.2f}-{max(ratios):.2f}, "
            f"batches of {args.batch})"
        )
        print(f"{statistics.median(side):.2f} ms a token {name}: {spread}")
    print(f"{forced:,} tokens were forced")
    if faults or num_cut > _MAX_CUT * args.schemas:
        sys.exit("benchmarks/structured: not every answer is valid, or too many were cut")


if __name__ == "__main__":
    main()
