"""`headrace run` on the default model: responses in a pipe, and a chat on a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from headrace.cli import main as cli
from headrace.cli import run as command
from headrace.cli.responses import SEPARATOR, in_order
from headrace.outputs import Update

HEADRACE = [sys.executable, "-m", "headrace"]
CLOSING = re.compile(
    r"^\[(\d+) in, [\d,]+ tok/s · (\d+) out(, [\d,]+ tok/s · limit [\d,]+ tok/s, \d+ "
    r"%)?(?: · [\d,]+ accepted from drafts)?\]$"
)
CAPITAL = "What is the capital city of France? Answer in one word."
SHORT = ("--max-tokens", "12", "--temperature", "0")


@pytest.fixture(autouse=True)
def fetched(smollm2: Path) -> None:
    """The model is there before anything is timed or read."""


class TestRun:
    def test_only_the_response_is_on_stdout(self, headrace) -> None:
        result = headrace("run", "smollm2", CAPITAL, *SHORT)
        assert result.returncode == 0 and "Paris" in result.stdout and result.stdout.endswith("\n")
        match = CLOSING.match(result.stderr.strip())
        assert match and int(match[2]) <= 12 and match[3]

    def test_prompt_from_a_pipe(self, headrace) -> None:
        asked = headrace("run", "smollm2", CAPITAL, *SHORT).stdout
        assert headrace("run", "smollm2", *SHORT, stdin=CAPITAL).stdout == asked
        assert headrace("run", "smollm2", "-", *SHORT, stdin=CAPITAL).stdout == asked
        assert headrace("run", "-", *SHORT, stdin=CAPITAL).stdout == asked

    def test_piped_text_follows_the_prompt(self, headrace) -> None:
        one = headrace("run", "smollm2", "Repeat this word:", *SHORT, stdin="mill")
        other = headrace("run", "smollm2", "Repeat this word:\n\nmill", *SHORT)
        assert one.stdout == other.stdout

    def test_one_token_has_no_decode_speed(self, headrace) -> None:
        result = headrace("run", "smollm2", CAPITAL, "--max-tokens", "1")
        assert CLOSING.match(result.stderr.strip())[3] is None

    def test_raw_continues_the_text(self, headrace) -> None:
        result = headrace("run", "smollm2", "The capital of France is", "--raw", *SHORT)
        assert "Paris" in result.stdout and int(CLOSING.match(result.stderr.strip())[1]) == 5

    def test_same_seed_same_response(self, headrace) -> None:
        @cache
        def answer(*flags: str) -> str:
            return headrace(
                "run",
                "smollm2",
                "Name an animal.",
                "--temperature",
                "1",
                "--max-tokens",
                "12",
                *flags,
            ).stdout

        assert (
            answer("--seed", "5")
            == answer("--seed", "5", "--threads", "1")
            == answer("--seed", "5", "--proposer", "off")
        )
        assert answer("--seed", "5") == answer(
            "--seed", "5", "--proposer", "self_draft", "--draft-layers", "20", "--draft-width", "2"
        )
        assert answer("--seed", "5") == answer(
            "--seed",
            "5",
            "--proposer",
            "suffix",
            "--no-adaptive-speculation",
            "--max-draft-tokens",
            "5",
        )
        assert len({answer("--seed", str(seed)) for seed in (5, 6, 7)}) > 1

    def test_beam_search_finds_a_likelier_response(self, headrace) -> None:
        flags = ("The water", "--raw", "--max-tokens", "8", "--presence-penalty", "0")
        kinds = (("--beam-width", "6"), ("--beam-width", "6"), ("--temperature", "0"))
        searched, again, greedy = (headrace("run", "smollm2", *flags, *kind) for kind in kinds)
        assert searched.stdout == again.stdout and CLOSING.match(searched.stderr.strip())
        assert searched.stdout != greedy.stdout

    def test_system_message_reaches_the_model(self, headrace) -> None:
        plain, instructed = (
            headrace("run", "smollm2", CAPITAL, *SHORT, *flags)
            for flags in ((), ("--system", "Speak like a pirate."))
        )
        assert CLOSING.match(plain.stderr.strip())[1] != CLOSING.match(instructed.stderr.strip())[1]


class TestSeveralResponses:
    PROMPT = ("run", "smollm2", "Name an animal.", "--temperature", "1", "--max-tokens", "12")

    def test_json_of_several_responses(self, headrace) -> None:
        result = headrace(*self.PROMPT, "-n", "3", "--json")
        answers = [json.loads(line) for line in result.stdout.splitlines()]
        assert (
            result.returncode == 0
            and not result.stderr
            and [answer["index"] for answer in answers] == [0, 1, 2]
        )
        for answer in answers:
            assert answer["finish_reason"] in ("stop", "length") and answer["text"]
            assert (
                answer["usage"]["completion_tokens"] == len(answer["token_ids"]) <= 12
                and answer["usage"]["prompt_tokens"] > 12
            )
            assert answer["timing"].keys() == {"queue", "prefill", "decode", "detokenise"}
        text = headrace(*self.PROMPT, "-n", "3", "--quiet")
        assert (
            text.stdout == SEPARATOR.join(answer["text"] for answer in answers) + "\n"
            and not text.stderr
        )

    def test_stops_and_penalties_reach_the_sampler(self, headrace) -> None:
        flags = ("run", "smollm2", CAPITAL, *SHORT, "--json")
        plain = json.loads(headrace(*flags).stdout)
        assert "Paris" in plain["text"]
        stopped = json.loads(headrace(*flags, "--stop", "none such", "--stop", "ris").stdout)
        assert stopped["text"].endswith("Pa") and (
            stopped["finish_reason"],
            stopped["stop_reason"],
        ) == ("stop", "ris")
        assert (
            json.loads(headrace(*flags, "--repetition-penalty", "5").stdout)["text"]
            != plain["text"]
        )

    def test_response_ends_when_the_context_is_full(self, headrace) -> None:
        flags = ("--raw", "--json", "--max-model-len", "64", "--temperature", "0")
        result = json.loads(headrace("run", "smollm2", "One, two, three, four,", *flags).stdout)
        assert (
            sum(result["usage"][name] for name in ("prompt_tokens", "completion_tokens")) == 64
            and result["finish_reason"] == "length"
        )

    def test_text_of_several_responses_in_order(self) -> None:
        def update(index: int, text: str, end: bool = False) -> Update:
            return Update("0", index, text, [], [], "stop" if end else None, None, None)

        updates = [
            update(1, "b"),
            update(0, "a"),
            update(0, "A", True),
            update(2, "c", True),
            update(1, "B"),
            update(1, "", True),
        ]
        assert list(in_order(updates, 3)) == ["a", "A", SEPARATOR, "b", "B", SEPARATOR, "c"]
        assert list(in_order(updates[:2], 3)) == ["a", SEPARATOR + "b", SEPARATOR]
        assert list(in_order(updates[1:3], 1)) == ["a", "A"]


class TestRunErrors:
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--temperature", "nan"), "temperature must be a number from 0 to 100"),
            (("--temperature", "-1"), "temperature"),
            (("--top-k", "-5"), "top_k"),
            (("--beam-width", "0"), "beam_width must be a whole number from 1 to 512"),
            (("--beam-width", "2", "--length-penalty", "inf"), "length_penalty must be a number"),
            (("--max-tokens", "0"), "max_tokens"),
            (("--max-model-len", "9000"), "the model's context has 8,192 tokens"),
            (("--max-model-len", "16"), "the prompt has"),
            (("--threads", "-1"), "threads"),
            (("--proposer", "ngrams"), "proposer must be one of"),
            (
                ("--proposer", "suffix", "--max-draft-tokens", "0"),
                "max_draft_tokens must be a whole number from 1",
            ),
            (("--proposer", "draft_model"), "needs a smaller model; set draft_model"),
            (
                ("--draft-model", "smollm2", "--proposer", "off"),
                "is for proposer 'draft_model' or 'auto', and proposer is 'off'",
            ),
            (
                ("--proposer", "self_draft", "--draft-layers", "30"),
                "draft_layers is 30, but must be 1 to 29",
            ),
            (
                ("--acceptance-method", "rejection", "--proposer", "suffix"),
                "acceptance_method 'rejection' needs chains that a model has sampled",
            ),
        ],
    )
    def test_a_value_out_of_range(self, headrace, flags: tuple[str, ...], message: str) -> None:
        result = headrace("run", "smollm2", CAPITAL, *flags)
        assert result.returncode == 2 and not result.stdout
        assert message in result.stderr and len(result.stderr.splitlines()) == 1

    def test_empty_prompt(self, headrace) -> None:
        for words, feed in (
            ((), None),
            ((), ""),
            ((), " \n"),
            (("",), None),
            ((" ",), None),
            (("",), " "),
        ):
            result = headrace("run", "smollm2", *words, stdin=feed)
            assert result.returncode == 2 and "the prompt is empty" in result.stderr

    def test_prompt_in_place_of_the_model(self, headrace) -> None:
        result = headrace("run", CAPITAL)
        assert result.returncode == 2 and f"headrace run smollm2 '{CAPITAL}'" in result.stderr

    def test_stdin_that_is_not_text(self) -> None:
        result = subprocess.run(
            [*HEADRACE, "run", "smollm2"], input=b"ok \xff\xfe", capture_output=True
        )
        assert result.returncode == 2 and b"not UTF-8 text at byte 3" in result.stderr

    def test_prompt_beyond_the_context(self, headrace) -> None:
        for text in ("water " * 9000, "x" * 3_000_000):
            result = headrace("run", "smollm2", stdin=text)
            assert (
                result.returncode == 2
                and "the prompt has" in result.stderr
                and len(result.stderr.splitlines()) == 1
            )

    def test_kv_beyond_memory(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(
            "headrace.loader.memory.available_memory", lambda: 270_000_000
        )  # the weights, and little more than it takes to run them
        monkeypatch.setattr(command, "_is_piped", lambda: False)
        assert cli.main(["run", "smollm2", CAPITAL]) == 4
        assert "max_model_len" in capsys.readouterr().err


class TestInterrupt:
    def test_interrupted_response(self) -> None:
        command = [
            *HEADRACE,
            "run",
            "smollm2",
            "Tell a long story.",
            "--max-tokens",
            "4000",
            "--temperature",
            "1",
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 130 and not errors

    def test_closed_pipe(self) -> None:
        command = [*HEADRACE, "run", "smollm2", "Tell a long story.", "--max-tokens", "4000"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(timeout=150) == 1


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *words: str, **env: str) -> None:
        self.master, slave = pty.openpty()
        env = os.environ | {"TERM": "dumb"} | env
        self.process = subprocess.Popen(
            [*HEADRACE, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """All text up to the first match; it is not looked at again."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            readable, _, _ = select.select(
                [self.master], [], [], max(0, deadline - time.monotonic())
            )
            assert readable, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def close(self) -> int:
        code = self.process.wait(timeout=150)
        os.close(self.master)
        return code


class TestChat:
    def test_chat_conversation(self) -> None:
        chat = Terminal("run", "smollm2", *SHORT)
        chat.wait_for("Ctrl-D leaves")
        chat.wait_for("> ")
        chat.type(f"{CAPITAL}\n")
        first = chat.wait_for(r"\[(\d+) in.*\]")
        assert "Paris" in first
        chat.wait_for("> ")
        chat.type("And of Italy?\n")
        second = chat.wait_for(r"\[(\d+) in.*\]")
        assert num_in(second) > num_in(first) + 8  # the whole conversation is the prompt
        assert re.search(
            r" in, [1-9]\d* cached, ", second
        )  # and the earlier turns are not computed again
        chat.wait_for("> ")
        chat.type("/reset\n")
        chat.wait_for("> ")
        chat.type(f"{CAPITAL}\n")
        assert num_in(chat.wait_for(r"\[(\d+) in.*\]")) == num_in(first)
        chat.wait_for("> ")
        chat.type("/nonsense\n")
        chat.wait_for("unknown command /nonsense")
        chat.wait_for("> ")
        chat.type("/help\n")
        chat.wait_for("forget the conversation")
        chat.wait_for("> ")
        chat.type("\x04")
        assert chat.close() == 0

    @pytest.mark.parametrize(
        ("terminal", "typed"),
        [
            ("xterm", "What is the capital\n\nof France?\nOne word.\n"),
            ("dumb", "What is the capital\n\nof France?\nOne word.\n"),
            ("xterm", "\x1b[200~What is the capital\r\rof France?\rOne word.\x1b[201~\r"),
        ],
    )
    def test_paste_is_one_turn(self, headrace, terminal: str, typed: str) -> None:
        chat = Terminal("run", "smollm2", *SHORT, TERM=terminal)
        chat.wait_for("> ")
        chat.type(typed)
        shown = chat.wait_for(r"\[\d+ in.*\]")
        chat.wait_for("> ")
        chat.type("/exit\n")
        assert chat.close() == 0
        asked = headrace("run", "smollm2", "What is the capital\n\nof France?\nOne word.", *SHORT)
        assert num_in(shown) == num_in(asked.stderr) and asked.stdout.splitlines()[0] in shown

    def test_chat_interrupts_at_the_prompt(self) -> None:
        chat = Terminal("run", "smollm2", *SHORT)
        for sent in (*[signal.SIGINT] * 3, signal.SIGTERM):
            chat.wait_for("> ")
            time.sleep(
                0.3
                # Python's line editor can miss a signal between its prompt and its waiting for
                # keys, until the next key
            )
            chat.process.send_signal(sent)
        assert chat.close() == 143

    def test_chat_interrupt_stops_only_the_response(self) -> None:
        chat = Terminal("run", "smollm2", "--max-tokens", "4000", "--temperature", "1")
        chat.wait_for("> ")
        chat.type("Tell a very long story.\n")
        chat.wait_for(r"story\.\r\n\w+ \w+")
        chat.process.send_signal(signal.SIGINT)
        assert num_out(chat.wait_for(r"\[\d+ in.*\]")) < 4000
        chat.wait_for("> ")
        chat.type("/exit\n")
        assert chat.close() == 0

    def test_chat_line_beyond_the_context_is_dropped(self) -> None:
        chat = Terminal("run", "smollm2", *SHORT, "--max-model-len", "64")
        chat.wait_for("> ")
        chat.type(f"{CAPITAL}\n")
        chat.wait_for(r"\[\d+ in.*\]")
        chat.wait_for("> ")
        chat.type("And what are the capitals of Italy, Spain, Portugal, Austria and Greece?\n")
        chat.wait_for("the prompt has .* /reset starts a new conversation")
        chat.wait_for("> ")
        chat.type("\\\n")
        chat.wait_for(r"\.\.\. ")  # a line that goes on
        chat.type("/exit\n")
        assert chat.close() == 0


def test_interrupt_at_the_prompt_drops_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["one\\", KeyboardInterrupt, "two\\", "three", EOFError])

    def read(prompt: str) -> str:
        if isinstance(line := next(typed), str):
            return line
        raise line

    from headrace.cli.keyboard import read_turn

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("headrace.cli.keyboard._has_more_input", lambda: False)
    assert [read_turn() for _ in range(3)] == ["", "two\nthree", None]


def num_in(text: str) -> int:
    return int(re.search(r"\[(\d+) in", text)[1])


def num_out(text: str) -> int:
    return int(re.search(r"(\d+) out", text)[1])


def test_control_characters_are_removed_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli import terminal

    text = "a\x1b[2Jb\x07\tc\n\x9b1m \N{ZERO WIDTH JOINER}é"
    terminal.write_stdout(text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.write_stdout(text)
    assert capsys.readouterr().out == text + "a[2Jb\tc\n1m \N{ZERO WIDTH JOINER}é"
