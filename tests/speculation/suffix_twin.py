"""A twin of `csrc/suffix_tree.cpp`: plain searches over whole texts."""

from collections import defaultdict
from typing import NamedTuple

MAX_MATCH, MAX_MATCHES = 32, 32


class Found(NamedTuple):
    tokens: list[int]
    place: int
    length: int
    serial: int
    is_own: bool


def weight_of(match: Found) -> int:
    return match.length**2 * (16 if match.is_own else 1)


class Corpus:
    """The texts of a tree, each with the number of its context tokens."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[int, list[int]]] = {}

    def find(self, known: list[int], skipped: int, min_length: int, *, is_own: bool) -> list[Found]:
        """The longest matches; of equally long ones those nearest to `known` in the order of
        reversed contexts.
        """
        query = known[::-1][:MAX_MATCH]
        before: list[tuple[list[int], int, int, Found]] = []
        after: list[tuple[list[int], int, int, Found]] = []
        for serial, (first, tokens) in self.texts.items():
            for place in range(max(first, 1), len(tokens)):
                context = tokens[:place][::-1][:MAX_MATCH]
                length = 0
                while length < min(len(context), len(query)) and context[length] == query[length]:
                    length += 1
                found = Found(tokens, place, length, serial, is_own)
                side = before if context <= query else after
                side.append((context, serial, place, found))
        near = [entry[-1] for entry in sorted(before, key=lambda e: e[:3], reverse=True)]
        far = [entry[-1] for entry in sorted(after, key=lambda e: e[:3])]
        matches = sorted([*near, *far], key=lambda found: -found.length)
        matches = [m for m in matches if m.length >= min_length and m.serial != skipped]
        longest = matches[0].length if matches else 0
        return [m for m in matches if 2 * m.length > longest][:MAX_MATCHES]


def twin_draft(
    local: list[int],
    corpus: Corpus | None,
    skipped: int,
    *,
    max_nodes: int,
    max_width: int,
    min_length: int,
    min_value: float,
) -> tuple[list[int], list[int], list[float], int, bool]:
    own = Corpus()
    own.texts[0] = 0, local
    matches = own.find(local, -1, min_length, is_own=True)
    if corpus:
        matches += corpus.find(local, skipped, min_length, is_own=False)
    if not matches:
        return [], [], [], 0, False
    matches.sort(key=lambda m: (m.length, m.is_own, m.serial, m.place), reverse=True)
    longest = matches[0].length
    matches = [m for m in matches[:MAX_MATCHES] if 2 * m.length > longest]

    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    candidates: list[tuple[float, int, float, int, int, int, list[Found]]] = []
    numbers = iter(range(1 << 30))

    def expand(node: int, depth: int, value: float, voters: list[Found]) -> None:
        if depth >= 8 + 2 * longest:
            return
        votes: dict[int, list[Found]] = defaultdict(list)
        for match in voters:
            rest = match.tokens[match.place :]
            if match.is_own or depth < len(rest):
                votes[rest[depth % len(rest)]].append(match)
        total = sum(map(weight_of, voters))
        weights = {token: sum(map(weight_of, who)) for token, who in votes.items()}
        for token in sorted(votes, key=lambda token: -weights[token])[:max_width]:
            share = weights[token] / total
            if value * share >= min_value:
                candidates.append(
                    (-value * share, next(numbers), share, node, depth, token, votes[token])
                )

    expand(-1, 0, 1.0, matches)
    while candidates and len(tokens) < max_nodes:
        taken = min(candidates, key=lambda each: each[:2])
        candidates.remove(taken)
        value, _, share, parent, depth, token, voters = taken
        tokens.append(token)
        parents.append(parent)
        probabilities.append(share)
        expand(len(tokens) - 1, depth + 1, -value, voters)
    return tokens, parents, probabilities, longest, matches[0].is_own
