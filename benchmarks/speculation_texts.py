"""Conversations for `speculation.py`: six kinds of work, each with any number of different
variants.
"""

import random
from collections.abc import Callable

_NAMES = (
    "Aldermoor Brackley Carter Dunmore Easterby Fallow Garrick Holme Ingleby Jarrow Kelston "
    "Lambley Marden Norwell"
).split()
_RIVERS = "Senn Dunne Morrow Ashe Tarrant Wick Leven Orrin Calder Brue".split()
_PLACES = (
    "Lisbon Oslo Kraków Valencia Ghent Ljubljana Turin Bergen Porto Tallinn Graz Split".split()
)
_SUBJECTS = (
    "rivers meander,glass breaks,bread rises,the sky is blue,iron rusts,ice floats,leaves "
    "turn red,metal feels cold"
).split(",")
_PEOPLE = "miller,ferryman,clockmaker,lighthouse keeper,shepherd,carpenter,baker,weaver".split(",")


def copy(rng: random.Random) -> str:
    """The answer quotes a document."""
    first, second, third = rng.sample(_NAMES, 3)
    river, year, tooth = rng.choice(_RIVERS), rng.randint(1600, 1880), rng.randint(24, 60)
    task = rng.choice(
        [
            "Copy the following text word for word.",
            "Repeat this document exactly as it is:",
            "Quote the text below in full, then say in one sentence what it is about.",
        ]
    )
    return (
        f"{task}\n\nThe {first} mill stands on the left bank of the river {river}, about "
        f"{rng.randint(2, 9)} kilometres above the town of "
        f"{second}. It was built in {year} by the miller Josef Harding, who had bought "
        "the right to the water from the abbey. The wheel "
        f"has a diameter of six metres and carries {tooth} buckets. The headrace is "
        f"{rng.randint(2, 9)}00 metres long and takes its "
        "water from a weir of oak beams. In dry summers the mill stood still for weeks, "
        "and the farmers carried their grain to the "
        f"windmill on {third} Hill. After the flood of {year + 60} the weir was rebuilt "
        "in stone, and the wheel was moved two metres to "
        "the north."
    )


def edit(rng: random.Random) -> str:
    """The answer is a program from the prompt with a small change."""
    thing, field = (
        rng.choice(["level", "price", "score", "speed", "weight", "depth"]),
        rng.choice(["name", "label", "station", "title"]),
    )
    task = rng.choice(
        [
            "Add type annotations to this Python code. Give the complete code back.",
            "Here is a Python file. Print the whole file again, with the comment `# "
            "checked` above the last function.",
            "Rename `best` to `found` in this Python code. Give the complete code back "
            f"and do not change read_{thing}s.",
        ]
    )
    code = f"""def read_{thing}s(path):
    {thing}s = []
    with open(path) as file:
        for line in file.readlines()[{rng.randint(1, 9)}:]:
            {field}, value = line.split(",")
            {thing}s.append(({field}, float(value)))
    return {thing}s


def mean_{thing}({thing}s):
    total = 0.0
    for {field}, value in {thing}s:
        total += value
    return total / len({thing}s)


def highest_{thing}({thing}s):
    best = {thing}s[0]
    for {field}, value in {thing}s:
        if value > best[1]:
            best = ({field}, value)
    return best
"""
    return f"{task}\n\n```python\n{code}```"


def transform(rng: random.Random) -> str:
    """The answer is JSON from the prompt in another form."""
    task = rng.choice(
        [
            "Write this JSON again with every object on several lines.",
            "Convert this JSON list to CSV.",
            'Copy this JSON, but leave out "open".',
        ]
    )
    rows = []
    for name in rng.sample(_NAMES, 5):
        river, level, is_open = (
            rng.choice(_RIVERS),
            rng.randint(40, 400),
            rng.choice(["true", "false"]),
        )
        rows.append(
            f'  {{"station": "{name}", "river": "{river}", "level_cm": {level}, "open": {is_open}}}'
        )
    return f"{task}\n\n```json\n[\n" + ",\n".join(rows) + "\n]\n```"


def chat(rng: random.Random) -> str:
    """The answer is new."""
    return rng.choice(
        [
            f"Why is it that {rng.choice(_SUBJECTS)}? Answer as for a child of "
            f"{rng.randint(6, 14)}.",
            f"Tell me a short story about a {rng.choice(_PEOPLE)} and a "
            f"{rng.choice(_PEOPLE)} in {rng.choice(_PLACES)}.",
            f"What should I see in {rng.choice(_PLACES)} in {rng.randint(2, 6)} days? I "
            f"like the work of a {rng.choice(_PEOPLE)}.",
        ]
    )


def summary(rng: random.Random) -> str:
    """The answer is new, with words and phrases of a document."""
    document = copy(rng).split("\n\n", 1)[1]
    return f"Summarise this text in {rng.randint(2, 4)} sentences.\n\n{document}"


def agent(rng: random.Random) -> str:
    """The answer is the next of few calls of an agent, which repeats its instructions."""
    river, place = rng.choice(_RIVERS[:3]), rng.choice(_PLACES[:3])
    task = rng.choice(
        [
            f"Find the present level of the river {river} at {place}.",
            f"Warn the people of {place} of a flood of the river {river}.",
            f"Write a report on the river {river} and send it to the office in {place}.",
        ]
    )
    return f"""You are an agent of the water board. You have three tools:

1. read_gauge(river, station): the present level in centimetres.
2. send_message(recipient, subject, body): sends a message.
3. write_report(title, river, sections): writes a report.

Answer with a plan as a numbered list, then with the calls as JSON, one object for each call:
{{"tool": "read_gauge", "arguments": {{"river": "Ashe", "station": "Split"}}}}

Task: {task}"""


WORKLOADS: dict[str, Callable[[random.Random], str]] = {
    "copy": copy,
    "edit": edit,
    "transform": transform,
    "chat": chat,
    "summary": summary,
    "agent": agent,
}


def prompts(workload: str, start: int, count: int) -> list[str]:
    """Variants `start` to `start + count`, the same in every run."""
    return [
        WORKLOADS[workload](random.Random(f"{workload} {number}"))
        for number in range(start, start + count)
    ]
