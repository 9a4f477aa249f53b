"""Ways to search, vote and choose in a session (docs/use/search.md)."""

from headrace.search.best_of import best_of
from headrace.search.choices import Choice, choose
from headrace.search.majority import Vote, last_number, majority
from headrace.search.mcts import mcts
from headrace.search.thoughts import tree_of_thoughts
from headrace.search.values import Value, likelihood

__all__ = [
    "Choice",
    "Value",
    "Vote",
    "best_of",
    "choose",
    "last_number",
    "likelihood",
    "majority",
    "mcts",
    "tree_of_thoughts",
]
