"""Answer a prompt, or chat.

Without a prompt, on a terminal, this is a chat. With a prompt, with `-`, or with something piped
in, it is one answer: the answer alone goes to stdout as it comes, then a line with its speed to
stderr. Text that is piped in beside a prompt is added to the prompt. Several answers (-n) come one
after the other, with a line `---` between them.

The closing line has the tokens of the prompt and of the answer, each with its speed. Its limit is
the speed at which the same steps, drafts included, would have run if they had only read weights and
KV and computed, as fast as this machine was measured to do in the last day; then comes the share of
it that was reached.

With --json each answer is a line with an object: index, text, token_ids, finish_reason (stop,
length or abort), stop_reason, usage (prompt_tokens, cached_tokens, completion_tokens), timing
(queue, prefill and decode, in seconds) and drafts, by method.
"""

import argparse
import os
import stat
import sys
from dataclasses import fields
from typing import Any

from headrace.cli.arguments import (
    DEFAULT_MODEL,
    PARALLEL,
    add_activations,
    add_backend,
    add_kv_dtype,
    add_model,
    add_parallel,
    add_threads,
)
from headrace.config import INTERACTIVE, EngineConfig
from headrace.errors import RequestError
from headrace.sampling_params import SAMPLING_FIELDS, SamplingParams

_DEFAULTS = {
    field.name: field.default
    for record in (EngineConfig, SamplingParams)
    for field in fields(record)
}
_DEFAULTS |= {**INTERACTIVE.engine, **INTERACTIVE.sampling}
"""The default of each flag, by field. Both records have a `seed`; the flag is for that of
`SamplingParams`.
"""
_FLAGS = [row for row in SAMPLING_FIELDS.values() if row.metavar]
_ENGINE_OPTIONS = (
    "backend",
    "threads",
    "kv_dtype",
    "activations",
    "max_model_len",
    "attention_window",
    "attention_sinks",
    *PARALLEL,
)
_SPECULATION_OPTIONS = (
    *("proposer", "max_draft_tokens", "adaptive_speculation", "acceptance_method"),
    *("draft_model", "draft_layers", "medusa_heads", "draft_depth", "draft_width"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb; those of sampling have the names and meanings of
    `SamplingParams`.
    """
    add_model(parser, optional=True)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="what to answer; -: read it from stdin"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message, which comes before the conversation"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompt as plain text, without the chat template",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a line with a JSON object for each answer, when it is whole",
    )
    parser.add_argument("--quiet", action="store_true", help="no closing line")

    _add_sampling(parser.add_argument_group("sampling", "The same seed gives the same answer."))
    engine = parser.add_argument_group("engine")
    add_backend(engine)
    add_threads(engine)
    add_kv_dtype(engine)
    add_activations(engine)
    _add(
        engine,
        "max_model_len",
        "N",
        "longest conversation, in tokens; 0: the model's whole context",
        int,
    )
    engine.add_argument(
        "--lora",
        metavar="NAME=PATH",
        help="answer with this LoRA adapter: a folder as PEFT saves it, or hf:ORG/REPOSITORY",
    )
    _add(
        engine,
        "attention_window",
        "N",
        "lossy: layers see the last N tokens and the sinks alone, in bounded KV memory; 0: all",
        int,
    )
    _add(
        engine,
        "attention_sinks",
        "N",
        "the first tokens, which all see beside an attention window",
        int,
    )
    add_parallel(parser)
    about = (
        "Draft tokens are proposed, and several are verified in one step, as far as that "
        "saves time.\n"
        "This never changes a token, unless the acceptance method says so."
    )
    _add_speculation(parser.add_argument_group("speculative decoding", about))


def _add(group: Any, name: str, metavar: str, text: str, kind: type = str) -> None:
    """A flag for a field of `SamplingParams` or `EngineConfig`, with the default that it has
    here.
    """
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=kind,
        metavar=metavar,
        default=_DEFAULTS[name],
        help=text,
    )


def _add_sampling(group: Any) -> None:
    for row in _FLAGS:
        _add(group, row.name, row.metavar, row.help, row.kind)
    group.add_argument(
        "-n", "--n", type=int, metavar="N", default=_DEFAULTS["n"], help="how many answers"
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=[],
        help="end the answer before this text; may be given several times",
    )


def _add_speculation(group: Any) -> None:
    _add(
        group,
        "proposer",
        "NAME",
        "what drafts: auto, off, ngram, online, jacobi, lookahead, draft_model, "
        "self_draft or medusa",
    )
    _add(group, "max_draft_tokens", "N", "most draft tokens in a step", int)
    group.add_argument(
        "--adaptive-speculation",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS["adaptive_speculation"],
        help="draft as much as saves time; with --no-adaptive-speculation, as much as fits",
    )
    _add(group, "draft_model", "MODEL", "for draft_model: a smaller model with the same vocabulary")
    _add(
        group,
        "draft_layers",
        "N",
        "for self_draft: how many of the model's first layers draft; `headrace calibrate` "
        "suggests a number",
        int,
    )
    _add(
        group,
        "medusa_heads",
        "FILE",
        "for medusa: a safetensors file with heads that were trained for the model",
    )
    _add(group, "draft_depth", "K", "for these three: most draft tokens one after the other", int)
    _add(
        group,
        "draft_width",
        "W",
        "for these three: draft tokens at each depth; more than 1 make a tree",
        int,
    )
    _add(
        group,
        "acceptance_method",
        "NAME",
        "how drafts are verified: exact (changes no token), rejection (same distribution) "
        "or typical (lossy)",
    )


def run(args: argparse.Namespace) -> int:
    """One prompt and its answers, or a chat."""
    if args.raw and args.system is not None:
        raise RequestError(
            "--raw leaves out the chat template, which is what --system is for: give one of the two"
        )
    prompt = _prompt(args)
    if prompt is None and (args.json or args.n > 1):
        raise RequestError(
            "--json and -n are for the answers to one prompt, and this is a chat: give a prompt"
        )

    from headrace.loader.options import engine_config

    # A beam search refuses the defaults of the flags that shape the distribution.
    names = [row.name for row in _FLAGS if args.beam_width is None or not row.neutral]
    params = SamplingParams(**{name: getattr(args, name) for name in ("n", "stop", *names)})
    options = {name: getattr(args, name) for name in (*_ENGINE_OPTIONS, *_SPECULATION_OPTIONS)}
    options["max_num_seqs"] = params.beam_width or params.n
    config = engine_config(options, INTERACTIVE)
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]

    from headrace.cli.session import Session

    with Session(args.model, config, _adapter(args.lora)) as session:
        if prompt is None:
            from headrace.cli.chat import Chat

            Chat(session, params, args.raw, opening, args.quiet).loop()
        else:
            from headrace.cli.answer import print_answers

            asked = prompt if args.raw else [*opening, {"role": "user", "content": prompt}]
            print_answers(session, asked, params, as_json=args.json, quiet=args.quiet)
    return 0


def _adapter(lora: str | None) -> tuple[str, str] | None:
    """Name and path of the adapter that is asked for."""
    if lora is None:
        return None
    name, _, path = lora.partition("=")
    if not name or not path:
        raise RequestError(f"--lora takes a name and a path, NAME=PATH, not {lora!r}")
    return name, path


def _prompt(args: argparse.Namespace) -> str | None:
    """What to answer; None for a chat. `headrace run -` is the default model and stdin."""
    prompt: str | None = args.prompt
    if args.model == "-" and prompt is None:
        args.model, prompt = DEFAULT_MODEL, "-"
    if prompt is None and " " in args.model and not os.path.exists(args.model):
        raise RequestError(
            f"{args.model!r} is not a model; to ask the default one: headrace run "
            f"{DEFAULT_MODEL} {args.model!r}"
        )
    if prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        return None
    parts = [] if prompt in (None, "-") else [prompt]
    if not parts or _is_piped():
        parts.append(_read_stdin())
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise RequestError("there is nothing to answer: give a prompt, or pipe one in")
    return text


def _is_piped() -> bool:
    """Whether stdin is a pipe or a file that was put there, and not the terminal or nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: byte {error.start:,}") from None
    except OSError as error:
        raise RequestError(f"stdin cannot be read: {error.strerror}") from None
