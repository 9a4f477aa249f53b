"""Print a script that lets a shell complete the commands, options and values of `headrace`.

The script calls `headrace completion --words ...` at each Tab, so that it never gets out of date.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

EXAMPLES = """\
  headrace completion bash >> ~/.bashrc
  headrace completion zsh >> ~/.zshrc
  headrace completion fish > ~/.config/fish/completions/headrace.fish"""

_BASH = """\
_headrace() {
    local reply words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    mapfile -t reply < <(headrace completion --words "${words[@]}" 2>/dev/null)
    COMPREPLY=("${reply[@]:1}")
    if [[ ${reply[0]} == files ]]; then
        compopt -o default
    fi
}
complete -F _headrace headrace
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
_headrace() {
    local -a reply
    reply=("${(@f)$(headrace completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -- "${(@)reply[2,-1]}"
    if [[ ${reply[1]} == files ]]; then
        _files
    fi
}
compdef _headrace headrace
"""
_FISH = """\
function __headrace_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l reply (headrace completion --words $words[2..-1] 2>/dev/null)
    printf '%s\\n' $reply[2..-1]
    if test "$reply[1]" = files
        __fish_complete_path (commandline -ct)
    end
end
complete -c headrace -f -a '(__headrace_complete)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", metavar="SHELL", nargs="?", choices=SCRIPTS, help="bash, zsh or fish"
    )
    # For the scripts only.
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from headrace.errors import RequestError

    if args.words is not None:
        candidates, takes_file = complete(args.words or [""])
        print("\n".join(["files" if takes_file else "words", *candidates]))
        return 0
    if args.shell is None:
        raise RequestError("SHELL is missing; write bash, zsh or fish")
    sys.stdout.write(SCRIPTS[args.shell])
    return 0


def complete(words: Sequence[str]) -> tuple[list[str], bool]:
    """Complete the last word.

    Returns the candidates, and whether a file name may be completed as well.
    """
    from headrace.cli.main import COMMANDS, make_parser

    *before, current = words
    if not before:
        return _matching([*COMMANDS, "--help", "--version"], current), False
    if before[0] not in COMMANDS:
        return [], False
    parser = make_parser(before[0])

    # bash splits `--option=value` at the equals sign.
    if current == "=":
        current = ""
    elif before[-1] == "=":
        before = before[:-1]
    options = {flag: action for action in parser._actions for flag in action.option_strings}
    action = options.get(before[-1]) if len(before) > 1 else None
    if action is not None and action.nargs != 0:
        return _values(action, current)
    flag, equals, value = current.partition("=")
    if equals and flag in options:
        candidates, takes_file = _values(options[flag], value)
        return [f"{flag}={candidate}" for candidate in candidates], takes_file
    if current.startswith("-"):
        visible = [flag for flag, action in options.items() if action.help != argparse.SUPPRESS]
        return _matching(visible, current), False
    position = _num_positionals(before[1:], options)
    positionals = [action for action in parser._actions if not action.option_strings]
    if position < len(positionals):
        return _values(positionals[position], current)
    return [], False


def _num_positionals(words: Sequence[str], options: dict[str, argparse.Action]) -> int:
    count = 0
    takes_value = False
    for word in words:
        if word in options:
            takes_value = options[word].nargs != 0
        elif takes_value:
            takes_value = word == "="
        elif not word.startswith("-") or word == "-":
            count += 1
    return count


def _values(action: argparse.Action, current: str) -> tuple[list[str], bool]:
    if action.choices is not None:
        return _matching(action.choices, current), False
    metavar = str(action.metavar)
    if metavar == "MODEL":
        return _matching(_models(), current), True
    return [], action.type is Path or metavar in ("FILE", "NAME=PATH")


def _models() -> Iterator[str]:
    from headrace.checkpoint.source import ALIASES, list_cached

    yield from dict.fromkeys([*ALIASES, *(model.name for model in list_cached())])


def _matching(candidates: Iterable[str], current: str) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(current)]
