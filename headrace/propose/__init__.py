"""Ways of guessing by name."""

from collections.abc import Callable

from headrace.batch import Proposer
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.propose.guard import Guard
from headrace.propose.jacobi import Jacobi
from headrace.propose.lookahead import Lookahead
from headrace.propose.ngram import Ngram
from headrace.propose.online import Online
from headrace.propose.trees import prune

__all__ = ["AUTO", "METHODS", "PROPOSERS", "Guard", "make_proposers", "prune"]

METHODS: dict[str, Callable[[EngineConfig], Proposer]] = {
    "ngram": lambda config: Ngram(config.max_guess_nodes),
    "online": lambda config: Online(config.max_guess_nodes),
    "jacobi": lambda config: Jacobi(config.max_guess_nodes),
    "lookahead": lambda config: Lookahead(config.max_guess_nodes),
}
"""Each way of guessing by its name."""
AUTO = ("ngram", "online")
"""Those that `auto` has at hand: they cost microseconds, and nothing where they have nothing to say."""
PROPOSERS = ("off", "auto", *METHODS)
"""What `EngineConfig.proposer` may be."""


def make_proposers(config: EngineConfig) -> dict[str, Proposer]:
    """New proposers, by name: those that the configuration asks for. Raises RequestError for a name that is not in PROPOSERS."""
    name = config.proposer
    if name not in PROPOSERS:
        raise RequestError(f"unknown proposer {name!r}; there are: {', '.join(PROPOSERS)}")
    names = {"off": (), "auto": AUTO}.get(name, (name,))
    return {name: METHODS[name](config) for name in names}
