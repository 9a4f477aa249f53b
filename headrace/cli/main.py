"""The `headrace` command: finds the command, and turns an error into one line and an exit code.

Exit codes: 0 success, 1 failure, 2 usage, 3 model missing or unsupported, 4 out of memory,
5 address in use, 128 + n ended by signal n (130: Ctrl-C). This module imports nothing heavy.
"""

import argparse
import difflib
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

from headrace.cli.terminal import print_stderr
from headrace.errors import HeadraceError, MemoryLimitError, RequestError

COMMANDS = {
    "run": "answer a prompt, or chat",
    "serve": "serve a model over HTTP with OpenAI's API",
    "route": "serve a model on several workers as one server",
    "batch": "run the requests of a file",
    "audit": "audit a server: does load, caching or streaming change an answer?",
    "pull": "download a model",
    "rm": "remove a downloaded model",
    "cache": "list or delete the KV that a folder keeps",
    "ls": "list the downloaded models and the aliases",
    "show": "show the shape, the memory and the maximum speed of a model",
    "plan": "predict memory, time and cost of a model on any machine",
    "climb": "measure a model from naive inference to all techniques",
    "simulate": "predict throughput and latencies under load on any machine",
    "profile": "profile prefill and decode op by op",
    "bench": "measure latency or throughput of a model",
    "eval": "evaluate the quality of a model and of its quantised formats",
    "convert": "quantise a model to a GGUF file or to a folder of safetensors",
    "distil": "train a drafter for a model from its own answers",
    "top": "watch the running engines: KV memory, rows, speed, requests",
    "calibrate": "measure whether speculative decoding saves time for a model",
    "tune": "tune the matrix products of a model on the GPU",
    "doctor": "measure this machine, and test the engine on it",
    "completion": "print a completion script for bash, zsh or fish",
}
"""Modules of this package with `EXAMPLES`, `configure(parser)` and `run(args)`, which returns
the exit code.
"""

HELP = f"""usage: headrace COMMAND ...

Run transformer language models on your own hardware.

{chr(10).join(f"  {command:12}{text}" for command, text in COMMANDS.items())}

  headrace run smollm2 "Why is the sky blue?"     one answer on stdout
  headrace run                                    chat with the default model
  headrace COMMAND --help                         all options of a command
  headrace --version                              version, build and backends
"""

_MAX_MESSAGE = 1000
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_OUT_OF_MEMORY = (
    "out of memory: lower --max-model-len, use a smaller model or a smaller --kv-dtype, or raise "
    "the limit (ulimit -v, or the limit of the container)"
)


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors become one line on stderr."""
    code, message = 0, ""
    try:
        code = _dispatch(argv)
    except SystemExit as exit_:  # argparse has printed a help text
        code = int(exit_.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        code, message = _explain(_interrupt_before(error) or error)
    if (lost := _settle(sys.stdout)) and code in (0, 1):
        # The reader of a closed pipe, such as `head`, needs no message.
        code, message = 1, "" if isinstance(lost, BrokenPipeError) else f"stdout: {lost.strerror}"
    return fail(message, code) if message else _settle_stderr(code)


def fail(message: str, code: int) -> int:
    """Print an error as one clean line on stderr, and return the exit code."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    if len(line) >= _MAX_MESSAGE:
        line = f"{line[: _MAX_MESSAGE // 2]} [...] {line[-_MAX_MESSAGE // 2 :]}"
    print_stderr(f"headrace: {line}")
    return _settle_stderr(code)


def _settle_stderr(code: int) -> int:
    _settle(sys.stderr)
    return code


def _settle(stream: TextIO) -> OSError | None:
    """Flush a stream; returns its error.

    A failed stream is redirected to /dev/null, so that the interpreter can exit.
    """
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _interrupt_before(error: BaseException) -> BaseException | None:
    before: BaseException | None = error
    while before and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before


def _explain(error: BaseException) -> tuple[int, str]:
    match error:
        case HeadraceError():
            return error.exit_code, str(error)
        case MemoryError() | OSError(errno=errno.ENOMEM):
            return MemoryLimitError.exit_code, _OUT_OF_MEMORY
        case ImportError() if "map segment" in str(error):
            # The dynamic loader reports a lack of memory in these words.
            return MemoryLimitError.exit_code, _OUT_OF_MEMORY
        case KeyboardInterrupt():
            return getattr(error, "code", 130), ""
        case BrokenPipeError():
            return 1, ""
        case OSError():
            # An error without a file name that concerns writing comes from our output.
            place = error.filename or ("stdout" if error.errno in _OUTPUT_ERRORS else "the system")
            return 1, f"{place}: {error.strerror or error}"
    if sys.flags.dev_mode:
        raise error
    from traceback import walk_tb

    *_, (frame, line) = walk_tb(error.__traceback__)
    place = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return (
        1,
        f"internal error: {type(error).__name__} at {place}: {error}; run `python -X dev -m "
        "headrace ...` for a traceback",
    )


def _dispatch(argv: Sequence[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command in ("-V", "--version", "version"):
        from headrace.cli.version import print_version

        print_version()
        return 0
    if command not in COMMANDS:
        nearest = _nearest(command, COMMANDS)
        raise RequestError(f"unknown command {command!r}{nearest}; see `headrace --help`")
    parser = make_parser(command)
    return int(import_module(f"headrace.cli.{command}").run(parser.parse(argv[1:])))


def make_parser(command: str) -> "Parser":
    module = import_module(f"headrace.cli.{command}")
    parser = Parser(
        prog=f"headrace {command}",
        description=module.__doc__,
        epilog=f"examples:\n{module.EXAMPLES}",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    module.configure(parser)
    parser.usage = _usage(parser)
    return parser


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [parser.prog, "[OPTION ...]"]
    for action in parser._actions:
        if action.option_strings and action.required:
            words.append(f"{action.option_strings[0]} {action.metavar}")
        elif not action.option_strings:
            words.append(f"[{action.metavar}]" if action.nargs == "?" else f"{action.metavar}")
    return " ".join(words)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions, and adds the default to the help of an option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help
        if default is None or default is False or default in ("", (), [], argparse.SUPPRESS):
            return text
        if text and "(default:" in text:
            return text
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """argparse with suggestions, one-line errors, and options anywhere between arguments."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_intermixed_args(argv)
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if flags and "--" in argv and flags[0] in self._option_string_actions:
            self.error(f"{flags[0]} is after `--`, so it is no option; put it before `--`")
        if flags:
            nearest = _peer_flag(flags[0], self._option_string_actions) or _nearest(
                flags[0], self._option_string_actions
            )
            self.error(f"unknown option {flags[0]}{nearest}")
        if unknown:
            self.error(
                f"more arguments than expected: {unknown[0]!r}; put a prompt of several words in "
                "quotes"
            )
        return args

    def print_help(self, file: Any = None) -> None:
        # argparse would ignore an output that cannot be written.
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see `{self.prog} --help`")


def _peer_flag(word: str, known: Iterable[str]) -> str:
    """Our flag for one of another engine, if the command has it."""
    from headrace.loader.peer_options import PEER_FLAGS

    flag = PEER_FLAGS.get(word, "")
    return f" (here it is {flag})" if flag in set(known) else ""


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]}?)" if match else ""
