"""The `headrace` command: finds the verb, and turns errors into one line and an exit code. Imports nothing heavy.

Exit codes: 0 ok, 1 failure, 2 usage, 3 model missing or unsupported, 4 does not fit in memory, 130 interrupted.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from headrace.errors import HeadraceError, MemoryLimitError

VERBS = {  # each is a module of this package with `configure(parser)` and `run(args) -> exit code`
    "run": "answer a prompt, or chat",
    "pull": "fetch a model",
    "ls": "list the models at hand",
    "show": "what a model is, what it needs, and how fast it can be here",
    "profile": "where the time of prefill and decode goes, op by op, and what limits it",
    "bench": "measure how fast a model runs here, and how close to the limit",
    "top": "what your engines on this machine are doing: KV memory, rows, speed, requests",
    "calibrate": "find out whether speculative decoding saves time for a model here, and with what",
    "doctor": "measure this machine, and test that the engine computes correctly on it",
}

HELP = f"""usage: headrace VERB ...

Runs transformer language models on the hardware you have.

{chr(10).join(f"  {verb:10}{what}" for verb, what in VERBS.items())}

  headrace run smollm2 "Why is the sky blue?"     one answer, on stdout
  headrace run                                    a chat with the default model
  headrace VERB --help                            all that a verb can do
"""


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except HeadraceError as error:
        return _fail(str(error), error.exit_code)
    except MemoryError:
        return _fail("out of memory", MemoryLimitError.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left; the interpreter must not complain at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(argv: Sequence[str]) -> int:
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if verb in ("-V", "--version", "version"):
        from importlib.metadata import version

        print(f"headrace {version('headrace')}")
        return 0
    if verb not in VERBS:
        return _fail(f"unknown verb {verb!r}{_nearest(verb, VERBS)}; see `headrace --help`", 2)
    module = import_module(f"headrace.cli.{verb}")
    parser = _Parser(prog=f"headrace {verb}", description=module.__doc__, allow_abbrev=False, formatter_class=_Formatter)
    module.configure(parser)
    return int(module.run(parser.parse(argv[1:])))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and names every default that is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or action.default is False or action.default in ("", (), argparse.SUPPRESS)
        return action.help if plain else f"{action.help} (default: %(default)s)"


class _Parser(argparse.ArgumentParser):
    """argparse, with flags anywhere between the positionals, the nearest name for unknown ones, and one-line errors."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_intermixed_args(argv)
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if flags:
            self.error(f"unknown flag {flags[0]}{_nearest(flags[0], self._option_string_actions)}")
        if unknown:
            self.error(f"more arguments than expected: {unknown[0]!r}; put a prompt of several words in quotes")
        return args

    def error(self, message: str) -> NoReturn:
        sys.exit(_fail(f"{message}; see `{self.prog} --help`", 2))


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]}?)" if match else ""


def _fail(message: str, code: int) -> int:
    print(f"headrace: {message}", file=sys.stderr)
    return code
