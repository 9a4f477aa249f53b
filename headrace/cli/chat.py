"""The chat on a terminal: a line from the user, an answer from the model, and so on."""

from headrace.cli import signals
from headrace.cli.keyboard import read_turn, set_up
from headrace.cli.session import Session
from headrace.cli.terminal import say, write
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams

HELP = """\
/reset   forget the conversation
/exit    leave, as Ctrl-D does
/help    show this
Ctrl-C stops an answer. A line that ends in \\ continues on the next one, and lines that are pasted together are one turn."""


class Chat:
    """A conversation that grows; every answer sees all of it."""

    def __init__(
        self,
        session: Session,
        params: SamplingParams,
        raw: bool,
        opening: list[dict[str, str]],
        quiet: bool,
    ) -> None:
        self.session = session
        self.params = params
        self.raw = raw
        self.opening = opening
        self.quiet = quiet
        self.messages = list(self.opening)

    def loop(self) -> None:
        """Answer line after line until the user leaves."""
        set_up()
        say("/help for help; Ctrl-D leaves")
        while (line := read_turn()) is not None and line.strip() != "/exit":
            match line.strip():
                case "":
                    pass
                case "/help":
                    say(HELP)
                case "/reset":
                    self.messages = list(self.opening)
                case command if command.startswith("/") and not any(map(str.isspace, command)):
                    say(f"unknown command {command}; /help lists the commands")
                case _:
                    self.turn(line)

    def turn(self, line: str) -> None:
        """Give one answer. A line that does not fit in the context is refused, and the conversation
        stays as it was.
        """
        asked = [*self.messages, {"role": "user", "content": line}]
        text = ""
        try:
            with signals.held() as stop:
                for update in self.session.answer(line if self.raw else asked, self.params, stop):
                    write(update.text)
                    text += update.text
        except RequestError as error:
            say(f"{error}{'; /reset starts a new conversation' if self.messages else ''}")
            return
        write("\n")
        if stop.ended:
            signals.go_on_after(stop.ended)
        if not self.quiet:
            say(self.session.closing_line())
        self.messages = [*asked, {"role": "assistant", "content": text}]
