"""The chat on a terminal: a line from the user, an answer from the model, and so on."""

import sys
from contextlib import suppress

from headrace.cli.session import Session, interrupts
from headrace.cli.terminal import write
from headrace.errors import RequestError
from headrace.request import SamplingParams

HELP = """\
/reset   forget the conversation
/exit    leave, as Ctrl-D does
/help    show this
Ctrl-C stops an answer. A line that ends in \\ continues on the next one."""


class Chat:
    """A conversation that grows; every answer sees all of it."""

    def __init__(self, session: Session, params: SamplingParams, raw: bool, system: str | None) -> None:
        self.session = session
        self.params = params
        self.raw = raw
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)

    def loop(self) -> None:
        """Answer line after line until the user leaves."""
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() a line editor and a history
        print("/help for help; Ctrl-D leaves", file=sys.stderr)
        while (line := _read()) is not None and line.strip() != "/exit":
            match line.strip():
                case "":
                    pass
                case "/help":
                    print(HELP, file=sys.stderr)
                case "/reset":
                    self.messages = list(self.opening)
                case command if command.startswith("/") and " " not in command:
                    print(f"unknown command {command}; /help lists the commands", file=sys.stderr)
                case _:
                    self.turn(line)

    def turn(self, line: str) -> None:
        """Give one answer. A line that does not fit in the context is refused, and the conversation stays as it was."""
        asked = [*self.messages, {"role": "user", "content": line}]
        text = ""
        try:
            with interrupts() as stop:
                for piece in self.session.answer(line if self.raw else asked, self.params, stop):
                    write(piece)
                    text += piece
        except RequestError as error:
            print(f"{error}{'; /reset starts a new conversation' if self.messages else ''}", file=sys.stderr)
            return
        write("\n")
        print(self.session.closing_line(), file=sys.stderr)
        self.messages = [*asked, {"role": "assistant", "content": text}]


def _read() -> str | None:
    """A line, or several joined where they end in a backslash; empty after Ctrl-C, None at the end."""
    line = ""
    try:
        while (more := input("... " if line else "> ")).endswith("\\"):
            line += more[:-1] + "\n"
        return line + more
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None
