"""Effect of speculation on the first answer of a new engine: `auto` and `off` in turns.

Each answer comes from a new process without any history. Prompts differ from those in
`speculation.py`, also in length. A ratio compares output tokens per second from the first token to
the last, without loading and prompt. A different answer ends the program.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

_NAMES = "Orla Petra Quentin Rosalind Stellan Tamsin Ulric Verity Wendel Yorick".split()
_TOWNS = "Harl Ostby Wenn Tiller Marrow Crane".split()
_DEVICES = (
    "a canal lock,a steam engine,a compass,an abacus,a sundial,a telescope,a loom,a water "
    "clock,a bicycle"
).split(",")


def passage(rng: random.Random) -> str:
    first, second = rng.sample(_NAMES, 2)
    sentences = [
        f"{first} kept the ferry at {rng.choice(_TOWNS)} for {rng.randint(11, 39)} winters.",
        "The boat was flat, tarred black, and drawn across on a chain by two oxen.",
        f"A crossing cost {rng.randint(2, 9)} pence for a person and "
        f"{rng.randint(10, 19)} for a cart.",
        f"In the year of the great ice {second} walked over the river with a lantern, and "
        "there was no toll at all.",
        "When the bridge was opened, the chain was sold to a smith in "
        f"{rng.choice(_TOWNS)}, and made into gates.",
    ]
    return " ".join(sentences[: rng.randint(3, 5)])


def quote(rng: random.Random) -> str:
    """The answer is a passage that the prompt has three times."""
    text = passage(rng)
    return (
        f"{text}\n\nThe same passage, as the county paper printed it:\n{text}\n\nAnd as "
        f"it was read out in the church:\n{text}\n\n"
        "Write the passage out once more, word for word."
    )


def edit(rng: random.Random) -> str:
    """The answer is a passage with a word changed."""
    return (
        "Replace the word 'oxen' by 'horses' in this text and give the whole text "
        f"back:\n\n{passage(rng)}"
    )


def to_json(rng: random.Random) -> str:
    """The answer is JSON of the prompt in another form."""
    people = [
        {"name": name, "age": rng.randint(20, 80), "town": rng.choice(_TOWNS)}
        for name in rng.sample(_NAMES, rng.randint(3, 7))
    ]
    return f"Print this JSON again, one object per line:\n\n{json.dumps(people)}"


def chat(rng: random.Random) -> str:
    """The answer is new."""
    return (
        f"Explain how {rng.choice(_DEVICES)} works. Write for a reader of "
        f"{rng.randint(8, 80)} years."
    )


WORK: dict[str, Callable[[random.Random], str]] = {
    "quote": quote,
    "edit": edit,
    "json": to_json,
    "chat": chat,
}

_ENGINE = """
import json, sys
from headrace import LLM, SamplingParams
model, proposer, threads, max_tokens, text = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=int(max_tokens))
with LLM(model, proposer=proposer, threads=int(threads), max_num_seqs=1, max_model_len=2048) as llm:
    (result,) = llm.chat([{"role": "user", "content": text}], params)
drafts = {name: stats._asdict() for name, stats in result.drafts.items()}
timing = {"decode": result.timing.decode}
print(json.dumps({"token_ids": result.outputs[0].token_ids, "timing": timing, "drafts": drafts}))
"""


class Answer(NamedTuple):
    """The answer of a new process."""

    token_ids: list[int]
    speed: float
    proposed: int
    accepted: int


def engine(args: argparse.Namespace, proposer: str, text: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        _ENGINE,
        args.model,
        proposer,
        str(args.threads),
        str(args.max_tokens),
        text,
    ]


def run(args: argparse.Namespace, proposer: str, text: str) -> list[str]:
    flags = [
        "--json",
        "--temperature",
        "0",
        "--max-tokens",
        str(args.max_tokens),
        "--proposer",
        proposer,
        "--threads",
        str(args.threads),
    ]
    return [sys.executable, "-m", "headrace", "run", args.model, text, *flags]


FACES = {"engine": engine, "run": run}


def ask(command: list[str]) -> Answer:
    """The answer that a command prints as JSON."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path[1:] if path)
    }
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout)
    drafts = found["drafts"].values()
    num_tokens = len(found["token_ids"])
    speed = (num_tokens - 1) / found["timing"]["decode"]
    return Answer(
        found["token_ids"],
        speed,
        sum(each["proposed"] for each in drafts),
        sum(each["accepted"] for each in drafts),
    )


def measure(args: argparse.Namespace, face: str, work: str) -> dict[str, object]:
    """A line of the result: `args.rounds` prompts, each with and without drafts."""
    ratios, speeds, tokens, proposed, accepted = [], [], 0, 0, 0
    for number in range(args.rounds):
        text = WORK[work](random.Random(f"{work} {number}"))
        answers = {
            way: ask(FACES[face](args, way, text))
            for way in (("off", "auto") if number % 2 else ("auto", "off"))
        }
        plain, drafted = answers["off"], answers["auto"]
        if plain.token_ids != drafted.token_ids:
            sys.exit(f"auto answered otherwise than plain decoding: {text}")
        ratios.append(drafted.speed / plain.speed)
        speeds.append(drafted.speed)
        tokens, proposed, accepted = (
            tokens + len(drafted.token_ids),
            proposed + drafted.proposed,
            accepted + drafted.accepted,
        )
    return {
        "face": face,
        "work": work,
        "ratio": {
            "median": median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "rounds": len(ratios),
        },
        "twice": sum(ratio >= 2 for ratio in ratios),
        "tokens_per_second": median(speeds),
        "tokens": tokens,
        "proposed": proposed,
        "accepted": accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--faces",
        type=lambda text: text.split(","),
        default=list(FACES),
        help=f"interfaces to run: {', '.join(FACES)}",
    )
    parser.add_argument(
        "--work",
        type=lambda text: text.split(","),
        default=list(WORK),
        help=f"kinds of work: {', '.join(WORK)}",
    )
    parser.add_argument("--json", type=Path, help="file for the lines as JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, as a test that does not measure",
    )
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.max_tokens, args.work = 1, 8, ["quote"]
    lines = []
    print(
        f"{'face':8}{'work':8}{'ratio to off':>20}{'2 and more':>12}"
        f"{'tok/s':>9}{'drafted':>9}{'accepted':>10}",
        flush=True,
    )
    for face in args.faces:
        for work in args.work:
            line = measure(args, face, work)
            lines.append(line)
            ratio = line["ratio"]
            assert isinstance(ratio, dict)
            spread = f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
            twice = f"{line['twice']} of {ratio['rounds']}"
            figures = (
                f"{line['tokens_per_second']:>9,.0f}{line['proposed']:>9,}{line['accepted']:>10,}"
            )
            print(f"{face:8}{work:8}{spread:>20}{twice:>12}{figures}", flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
