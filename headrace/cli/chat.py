"""The chat on a terminal: the user and the model take turns."""

from headrace.cli import signals
from headrace.cli.keyboard import enable_line_editor, read_turn
from headrace.cli.session import Session
from headrace.cli.terminal import print_stderr, write_stdout
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams

HELP = """\
/reset   forget the conversation
/exit    leave, as Ctrl-D does
/help    show this help
Ctrl-C stops a response. A line that ends in \\ continues on the next line, and pasted lines are one
turn."""


class Chat:
    def __init__(
        self,
        session: Session,
        params: SamplingParams,
        raw: bool,
        opening: list[dict[str, str]],
        quiet: bool,
    ) -> None:
        """`opening` has the first messages; `raw` sends lines without the chat template."""
        self.session = session
        self.params = params
        self.raw = raw
        self.opening = opening
        self.quiet = quiet
        self.messages = list(self.opening)

    def loop(self) -> None:
        enable_line_editor()
        print_stderr("/help for help; Ctrl-D leaves")
        while (line := read_turn()) is not None and line.strip() != "/exit":
            match line.strip():
                case "":
                    pass
                case "/help":
                    print_stderr(HELP)
                case "/reset":
                    self.messages = list(self.opening)
                case command if command.startswith("/") and not any(map(str.isspace, command)):
                    print_stderr(f"unknown command {command}; /help lists the commands")
                case _:
                    self.respond(line)

    def respond(self, line: str) -> None:
        """Print one response. A line that exceeds the context leaves the conversation unchanged."""
        messages = [*self.messages, {"role": "user", "content": line}]
        prompt = line if self.raw else messages
        text = ""
        try:
            with signals.deferred() as stop:
                for update in self.session.generate(prompt, self.params, stop):
                    write_stdout(update.text)
                    text += update.text
        except RequestError as error:
            advice = "; /reset starts a new conversation" if self.messages else ""
            print_stderr(f"{error}{advice}")
            return
        write_stdout("\n")
        if stop.ended:
            signals.resume_after(stop.ended)
        if not self.quiet:
            print_stderr(self.session.closing_line())
        self.messages = [*messages, {"role": "assistant", "content": text}]
