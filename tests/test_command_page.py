"""docs/reference/cli.md has the help of every command: `python -m tests.test_command_page` writes
it.
"""

import os
import subprocess
import sys
from functools import cache

from tests.texts import ROOT

PAGE = ROOT / "docs/reference/cli.md"
INTRODUCTION = """\
# Commands

The help of every command, as `headrace COMMAND --help` prints it.
"""


@cache
def help_of(*command: str) -> str:
    """The help of a command, at the width of a page."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", *command, "--help"],
        env=os.environ | {"COLUMNS": "88"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def commands() -> list[str]:
    """The names that `headrace --help` lists, in its order."""
    listed = [line.split()[0] for line in help_of().splitlines() if line.startswith("  ")]
    return [name for name in listed if name != "headrace"]


def page() -> str:
    sections = [f"## headrace {name}\n\n```\n{help_of(name)}```\n" for name in commands()]
    return "\n".join([INTRODUCTION, f"```\n{help_of()}```\n", *sections])


def test_the_page_has_the_help_of_every_command() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
