"""The command line as a shell sees it: words in; stdout, stderr and exit code out."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import main as cli
from headrace.cli.signals import Ended
from headrace.errors import MemoryLimitError, RequestError

ELSEWHERE = {
    *(
        "rich",
        "torch",
        "triton",
        "transformers",
        "jinja2",
        "huggingface_hub",
        "msgspec",
        "llguidance",
        "uvicorn",
    ),
    *(
        "email",
        "importlib.metadata",
        "hashlib",
        "statistics",
        "asyncio",
        "multiprocessing",
        "urllib.request",
    ),
    *(
        "headrace.server",
        "headrace.llm",
        "headrace.backend.reference.executable",
        "headrace.backend.cuda",
        "headrace.cli.chat",
        "headrace.checkpoint.tokenizer_hf",
    ),
    *(
        f"headrace.checkpoint.{file}"
        for file in ("adapter", "adapter_gguf", "translation", "drafter", "eagle1", "eagle3", "mtp")
    ),
    *(f"headrace.loader.{file}" for file in ("draft_format", "draft_vocabulary", "self_draft")),
    "headrace.loader.learn_drafts",
    "headrace.speculation.learning",
    *(
        f"headrace.speculation.proposers.{file}"
        for file in ("draft_model", "eagle", "jacobi", "lookahead", "medusa", "self_draft")
    ),
    *(
        f"headrace.model.{file}"
        for file in ("mistral", "qwen2", "qwen_moe", "gemma", "gpt2", "deepseek", "gpt_oss")
    ),
}
"""Modules that a response of a Llama in a GGUF file does not need."""
HEAVY = {
    "numpy",
    "rich",
    "torch",
    "triton",
    "transformers",
    "jinja2",
    "tokenizers",
    "huggingface_hub",
    "headrace._native",
}


class TestStart:
    def test_help(self, headrace) -> None:
        for words in ((), ("--help",), ("help",)):
            result = headrace(*words)
            assert result.returncode == 0 and not result.stderr
            assert all(command in result.stdout for command in cli.COMMANDS)

    @pytest.mark.parametrize("command", cli.COMMANDS)
    def test_help_of_a_command(self, headrace, command: str) -> None:
        result = headrace(command, "--help")
        assert result.returncode == 0 and f"headrace {command}" in result.stdout

    def test_version(self, headrace) -> None:
        result = headrace("--version")
        version, kernels, backends = result.stdout.splitlines()[:3]
        assert result.returncode == 0 and version.startswith("headrace 0.")
        assert kernels.startswith("kernels: portable") and "; in use: " in kernels
        assert backends.startswith("backends: cpu, reference")

    def test_version_names_the_chosen_kernels(self, headrace) -> None:
        result = headrace("--version", HEADRACE_ISA="portable")
        assert result.stdout.splitlines()[1].endswith("; in use: portable")

    @pytest.mark.parametrize(
        "code",
        [
            "main(['--help'])",
            "main(['--version'])",
            "main(['rum'])",
            *(
                f"\ntry: main(['{command}', '--help'])\nexcept SystemExit: pass"
                for command in cli.COMMANDS
            ),
        ],
    )
    def test_starts_without_heavy_modules(self, code: str) -> None:
        script = (
            f"import sys; from headrace.cli.main import main; {code}\nprint('\\n', *sys.modules)"
        )
        output = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        # The version needs the native module, which is small.
        heavy = HEAVY - {"headrace._native"} if "--version" in code else HEAVY
        assert not heavy & set(output.splitlines()[-1].split())

    def test_run_imports_no_unneeded_module(self, smollm2: Path) -> None:
        words = ["run", str(smollm2), "Hi", "--max-tokens", "1", "--quiet"]
        script = (
            f"import sys; from headrace.cli.main import main; assert not main({words}); "
            "print('\\n', *sys.modules)"
        )
        output = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        imported = set(output.splitlines()[-1].split())
        assert "headrace.model.llama" in imported and not ELSEWHERE & imported

    def test_import_headrace_needs_no_torch(self) -> None:
        script = (
            "import sys, headrace; print('torch' in sys.modules, 'transformers' in sys.modules)"
        )
        assert (
            subprocess.run(
                [sys.executable, "-c", script], capture_output=True, text=True, check=True
            ).stdout
            == "False False\n"
        )


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("rnu",), "unknown command 'rnu' (did you mean run?)"),
            (("xyzzy",), "unknown command 'xyzzy'; see"),
            (("--hlep",), "unknown command '--hlep'"),
            (
                ("run", "--max-token", "3", "hello"),
                "unknown option --max-token (did you mean --max-tokens?)",
            ),
            (
                ("run", "--temprature=0.5"),
                "unknown option --temprature (did you mean --temperature?)",
            ),
            (("run", "smollm2", "one", "two"), "more arguments than expected: 'two'"),
            (("run", "--max-tokens", "many"), "argument --max-tokens: invalid int value: 'many'"),
            (("run", "--kv-dtype", "fp4"), "argument --kv-dtype: invalid choice: 'fp4'"),
            (("show", "--jsn"), "unknown option --jsn (did you mean --json?)"),
            (("pull",), "the following arguments are required: MODEL"),
        ],
    )
    def test_usage_error_is_one_line(self, headrace, words: tuple[str, ...], message: str) -> None:
        result = headrace(*words)
        assert result.returncode == 2 and not result.stdout
        assert message in result.stderr and len(result.stderr.splitlines()) == 1

    def test_options_between_arguments(self) -> None:
        from headrace.cli import run

        parser = cli.Parser("headrace run")
        run.configure(parser)
        for words in (
            ["a", "--seed", "3", "b"],
            ["--seed", "3", "a", "b"],
            ["a", "b", "--seed", "3"],
            ["--seed=3", "a", "--", "b"],
        ):
            args = parser.parse(words)
            assert (args.model, args.prompt, args.seed) == ("a", "b", 3)


class TestFailure:
    @pytest.mark.parametrize("command", ["run", "show", "pull"])
    def test_no_such_model(self, headrace, command: str) -> None:
        result = headrace(command, "no-such-model", stdin="hello")
        assert result.returncode == 3 and not result.stdout
        assert result.stderr.startswith("headrace: ") and len(result.stderr.splitlines()) == 1

    def test_file_that_is_not_a_model(self, headrace, tmp_path: Path) -> None:
        file = tmp_path / "broken.gguf"
        file.write_bytes(b"GGUF" + bytes(100))
        for command in ("run", "show"):
            result = headrace(command, str(file), stdin="hello")
            assert (
                result.returncode == 3
                and "broken.gguf" in result.stderr
                and len(result.stderr.splitlines()) == 1
            )

    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [
            (RequestError("no"), 2, "headrace: no"),
            (RequestError("two\nlines \x1b[31m"), 2, r"headrace: two lines \x1b[31m"),
            (MemoryLimitError("no"), 4, "headrace: no"),
            (MemoryError(), 4, "headrace: out of memory: lower --max-model-len"),
            (OSError(errno.ENOMEM, "Cannot allocate memory"), 4, "headrace: out of memory"),
            (
                ImportError("x.so: failed to map segment from shared object"),
                4,
                "headrace: out of memory",
            ),
            (
                OSError(errno.EACCES, "Permission denied", "/a/file"),
                1,
                "headrace: /a/file: Permission denied",
            ),
            (
                ValueError("a mistake of ours"),
                1,
                "headrace: internal error: ValueError at test_main.py:",
            ),
            (RequestError("x" * 10_000), 2, "x [...] x"),
            (KeyboardInterrupt(), 130, ""),
            (Ended(signal.SIGTERM), 143, ""),
        ],
    )
    def test_error_is_one_line(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        error: BaseException,
        code: int,
        message: str,
    ) -> None:
        def fail(args: object) -> int:
            raise error

        monkeypatch.setattr("headrace.cli.ls.run", fail)
        assert cli.main(["ls"]) == code
        said = capsys.readouterr().err
        assert message in said and len(said) < 1100 and said.count("\n") == bool(message)

    def test_error_during_a_signal_is_the_signal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(args: object) -> int:
            try:
                raise Ended(signal.SIGHUP)
            finally:
                raise AttributeError("never set")

        monkeypatch.setattr("headrace.cli.ls.run", fail)
        assert cli.main(["ls"]) == 129 and capsys.readouterr().err == ""

    def test_closed_pipe_of_help(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "--help"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1
