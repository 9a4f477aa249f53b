"""The `headrace` command: finds the verb, and turns errors into one line and an exit code. Imports
nothing heavy.

Exit codes: 0 ok, 1 failure, 2 usage, 3 model missing or unsupported, 4 does not fit in memory, 5
address in use, 128 + n ended by signal n (130: Ctrl-C).
"""

import argparse
import difflib
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

from headrace.cli.terminal import say
from headrace.errors import HeadraceError, MemoryLimitError, RequestError

VERBS = {  # each is a module of this package with `configure(parser)` and `run(args) -> exit code`
    "run": "answer a prompt, or chat",
    "serve": "serve a model over HTTP, as OpenAI's API",
    "route": "serve a model that workers run, here or elsewhere, as one server",
    "batch": "answer many requests from a file, offline",
    "pull": "fetch a model",
    "rm": "remove a model that was fetched",
    "ls": "list the models at hand",
    "show": "what a model is, what it needs, and how fast it can be here",
    "profile": "where the time of prefill and decode goes, op by op, and what limits it",
    "bench": "measure how fast a model runs here, and how close to the limit",
    "eval": "what a model, or a way to quantise it, costs in quality, next to bytes and speed",
    "convert": "quantise a model to a GGUF file or to a folder of safetensors",
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

_LONGEST = 1000
"""Characters of an error message."""
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_NO_MEMORY = (
    "out of memory: lower --max-model-len, take a smaller model or a smaller --kv-dtype, "
    "or raise the limit (that of ulimit -v, or of a container)"
)


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. All errors end here, as one line on stderr."""
    code, message = 0, ""
    try:
        code = _dispatch(argv)
    except SystemExit as done:  # argparse has printed a help text
        code = int(done.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        code, message = _explain(_interrupt_before(error) or error)
    if (lost := _settle(sys.stdout)) and code in (0, 1):
        # A reader of our output that has left, as `head` does, wants to hear nothing.
        code, message = 1, "" if isinstance(lost, BrokenPipeError) else f"stdout: {lost.strerror}"
    return fail(message, code) if message else _settled(code)


def fail(message: str, code: int) -> int:
    """Say why on one line of stderr, and return the exit code. Control characters and endless names
    come from files and arguments.
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    say(
        "headrace: "
        f"{line if len(line) < _LONGEST else f'{line[: _LONGEST // 2]} [...] {line[-_LONGEST // 2 :]}'}"
    )
    return _settled(code)


def _settled(code: int) -> int:
    _settle(sys.stderr)
    return code


def _settle(stream: TextIO) -> OSError | None:
    """Flush a stream. One that takes nothing more is made to swallow the rest, so that the
    interpreter can exit; returns its error.
    """
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _interrupt_before(error: BaseException) -> BaseException | None:
    """The signal that ends the command line, where an error comes of what it left half done:
    argparse, for one, tidies up after itself.
    """
    before: BaseException | None = error
    while before and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit code and message for an error; no message where the user knows."""
    match error:
        case HeadraceError():
            return error.exit_code, str(error)
        case MemoryError() | OSError(errno=errno.ENOMEM):
            return MemoryLimitError.exit_code, _NO_MEMORY
        case ImportError() if "map segment" in str(
            error
        ):  # what the loader of libraries says when there is no memory
            return MemoryLimitError.exit_code, _NO_MEMORY
        case KeyboardInterrupt():
            return getattr(error, "code", 130), ""
        case BrokenPipeError():
            return 1, ""
        case OSError():
            # Files are named in their errors; what has no name and cannot be written is our output.
            where = error.filename or ("stdout" if error.errno in _NOT_WRITTEN else "the system")
            return 1, f"{where}: {error.strerror or error}"
    if sys.flags.dev_mode:
        raise error
    from traceback import walk_tb

    *_, (frame, line) = walk_tb(error.__traceback__)
    where = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return (
        1,
        f"internal error: {type(error).__name__} at {where}: {error}; `python -X dev -m "
        "headrace ...` shows where it came from",
    )


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
        raise RequestError(f"unknown verb {verb!r}{_nearest(verb, VERBS)}; see `headrace --help`")
    module = import_module(f"headrace.cli.{verb}")
    parser = _Parser(
        prog=f"headrace {verb}",
        description=module.__doc__,
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    module.configure(parser)
    return int(module.run(parser.parse(argv[1:])))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and names every default that is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = (
            action.default is None
            or action.default is False
            or action.default in ("", (), [], argparse.SUPPRESS)
        )
        return action.help if plain else f"{action.help} (default: %(default)s)"


class _Parser(argparse.ArgumentParser):
    """argparse, with flags anywhere between the positionals, the nearest name for unknown ones, and
    one-line errors.
    """

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_intermixed_args(argv)
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if flags and "--" in argv and flags[0] in self._option_string_actions:
            self.error(f"{flags[0]} stands behind `--`, where nothing is a flag: put it before it")
        if flags:
            self.error(f"unknown flag {flags[0]}{_nearest(flags[0], self._option_string_actions)}")
        if unknown:
            self.error(
                f"more arguments than expected: {unknown[0]!r}; put a prompt of several "
                "words in quotes"
            )
        return args

    def print_help(self, file: Any = None) -> None:
        print(
            self.format_help(), end="", file=file
        )  # argparse would hide that it cannot be written

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see `{self.prog} --help`")


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]}?)" if match else ""
