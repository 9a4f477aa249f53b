"""Answer a prompt, or chat.

Without a prompt, on a terminal, this is a chat. With a prompt, with `-` or with piped text it
prints one response on stdout as it is generated, and a closing line on stderr. Piped text is added
to the prompt. Several responses (-n) follow one another, with a line `---` between them.

The closing line has the tokens of the prompt and of the response, each with its speed. The limit is
the speed of the same steps, drafts included, if they only read weights and KV and computed, at the
rates measured on this machine in the last day. The percentage is the share of the limit.

With --json each response is a line with an object: index, text, token_ids, finish_reason (stop,
length or abort), stop_reason, usage (prompt_tokens, cached_tokens, completion_tokens), timing
(queue, prefill and decode, in seconds) and drafts, by method.
"""

import argparse
import os
import stat
import sys
from dataclasses import fields
from typing import Any, get_args

from headrace.cli.arguments import (
    DEFAULT_MODEL,
    PARALLEL,
    ROPE,
    Arguments,
    add_activations,
    add_backend,
    add_chat_template,
    add_kv_dtype,
    add_model,
    add_modes,
    add_parallel,
    add_rope,
    add_sanitize_control_tokens,
    add_speculative_config,
    add_threads,
)
from headrace.config import (
    INTERACTIVE,
    LOSSY_OPTIONS,
    AcceptanceMethod,
    DraftFormat,
    EngineConfig,
)
from headrace.errors import RequestError
from headrace.sampling_params import SAMPLING_FIELDS, SamplingParams

EXAMPLES = """\
  headrace run smollm2 "Why is the sky blue?"
  headrace run smollm2 --temperature 0 --max-tokens 100 --json "Name a river."
  git diff | headrace run smollm2 "Write a commit message:"
  headrace run                                              (a chat)"""

_DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for record in (EngineConfig, SamplingParams)
    for field in fields(record)
}
_DEFAULTS |= {**INTERACTIVE.engine, **INTERACTIVE.sampling}
"""Default of each option. `--seed` sets the seed in `SamplingParams`."""
_SAMPLING_OPTIONS = [field for field in SAMPLING_FIELDS.values() if field.metavar]
_ENGINE_OPTIONS = (
    "backend",
    "threads",
    "kv_dtype",
    "activations",
    "skip_zeros",
    "chat_template",
    "max_model_len",
    "kv_cache_dir",
    "kv_cache_dir_bytes",
    *LOSSY_OPTIONS,
    *ROPE,
    *PARALLEL,
    "proposer",
    "max_draft_tokens",
    "adaptive_speculation",
    "acceptance_method",
    "draft_model",
    "draft_format",
    "draft_layers",
    "draft_top_blocks",
    "draft_weights",
    "draft_sparsity",
    "learn_drafts",
    "medusa_heads",
    "draft_depth",
    "draft_width",
    "speculative_config",
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="prompt, or `-` to read stdin")
    _add_prompt_options(parser.add_argument_group("prompt and output"))
    _add_sampling(
        parser.add_argument_group("sampling", "The same seed always gives the same response.")
    )
    compute = parser.add_argument_group("compute")
    add_backend(compute)
    add_threads(compute)
    add_activations(compute)
    _add_memory(parser.add_argument_group("memory"))
    add_modes(parser)
    add_rope(parser)
    add_parallel(parser)
    _add_speculation(
        parser.add_argument_group(
            "speculative decoding",
            "Several draft tokens are verified in one step, as long as that saves time.\n"
            "Tokens stay the same, except with --acceptance-method rejection or typical.",
        )
    )


def _add(group: Arguments, name: str, metavar: str, text: str, kind: type = str) -> None:
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=kind,
        metavar=metavar,
        default=_DEFAULTS[name],
        help=text,
    )


def _add_prompt_options(group: Arguments) -> None:
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument(
        "--raw", action="store_true", help="continuation of the plain prompt, without chat template"
    )
    for name, text in (
        ("--add-special-tokens", "with --raw: the model's first tokens, usually BOS"),
        ("--parse-special", "with --raw: names of control tokens in the prompt as these tokens"),
    ):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=True, help=text)
    add_chat_template(group)
    add_sanitize_control_tokens(group)
    group.add_argument(
        "--json",
        action="store_true",
        help="one line of JSON for each response, after its last token",
    )
    group.add_argument("--quiet", action="store_true", help="no closing line")
    group.add_argument(
        "--lora",
        metavar="NAME=PATH",
        help="adapter: a folder of PEFT or mlx-lm, a GGUF file, or hf:ORG/REPO",
    )


def _add_sampling(group: Arguments) -> None:
    for field in _SAMPLING_OPTIONS:
        _add(group, field.name, field.metavar, field.help, field.kind)
    group.add_argument(
        "-n", "--n", type=int, metavar="N", default=_DEFAULTS["n"], help="number of responses"
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=[],
        help="text before which the response ends; may be repeated",
    )


def _add_memory(group: Arguments) -> None:
    add_kv_dtype(group)
    text = "maximum length of the conversation, in tokens; 0: the model's context"
    _add(group, "max_model_len", "N", text, int)
    text = "folder that keeps the KV of the conversation for later runs"
    _add(group, "kv_cache_dir", "FOLDER", text, str)
    text = "maximum bytes of the folder, for all models together"
    _add(group, "kv_cache_dir_bytes", "N", text, int)


def _add_speculation(group: Arguments) -> None:
    _add(
        group,
        "proposer",
        "NAME",
        "source of draft tokens: auto, off, suffix, jacobi, lookahead, draft_model, "
        "self_draft or medusa",
    )
    _add(group, "max_draft_tokens", "N", "maximum draft tokens in a step", int)
    group.add_argument(
        "--adaptive-speculation",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS["adaptive_speculation"],
        help="drafts as long as they save time; otherwise always the maximum",
    )
    _add(
        group,
        "draft_model",
        "MODEL",
        "smaller model, best with the same vocabulary, folder of an EAGLE drafter of the model, "
        "or mtp for the layer for drafts in the model's own files (for the proposer draft_model)",
    )
    group.add_argument(
        "--draft-format",
        choices=get_args(DraftFormat),
        default=_DEFAULTS["draft_format"],
        help="format on cpu of a drafter's matrices of 16 or 32 bits; file: as they are",
    )
    text = (
        "number of the model's first layers that draft (for the proposer self_draft), or a list of "
        "layers such as 0-9,14,29; `headrace calibrate` suggests them"
    )
    _add(group, "draft_layers", "LAYERS", text)
    text = "number of blocks of 32 tokens of context that drafts attend to (for self_draft)"
    _add(group, "draft_top_blocks", "N", text, int)
    text = "the same model in fewer bytes, which drafts with its weights (for self_draft)"
    _add(group, "draft_weights", "MODEL", text)
    text = "file of thresholds, of `headrace calibrate --sparsity`, for drafts (for self_draft)"
    _add(group, "draft_sparsity", "FILE", text)
    text = (
        "on: the EAGLE-3 drafter of --draft-model learns from the responses (extra train); or a "
        "folder that keeps what it learned"
    )
    _add(group, "learn_drafts", "FOLDER", text)
    _add(
        group,
        "medusa_heads",
        "FILE",
        "safetensors file or folder with heads that were trained for the model (for medusa)",
    )
    text = "maximum draft tokens in a row, for draft_model, self_draft and medusa"
    _add(group, "draft_depth", "K", text, int)
    text = "nodes that continue at each depth, for these three proposers; more than 1 makes a tree"
    _add(group, "draft_width", "W", text, int)
    add_speculative_config(group)
    group.add_argument(
        "--acceptance-method",
        choices=get_args(AcceptanceMethod),
        default=_DEFAULTS["acceptance_method"],
        help="verification of drafts: exact keeps every token, rejection keeps the distribution, "
        "typical is lossy",
    )


def run(args: argparse.Namespace) -> int:
    if args.raw and args.system is not None:
        raise RequestError(
            "--system needs the chat template, and --raw leaves it out; drop --system or --raw"
        )
    if not (args.raw or (args.add_special_tokens and args.parse_special)):
        raise RequestError(
            "--no-add-special-tokens and --no-parse-special need a plain prompt, and the chat "
            "template writes control tokens; add --raw"
        )
    prompt = _prompt(args)
    if prompt is None and (args.json or args.n > 1):
        raise RequestError("--json and -n need a prompt, and this is a chat; add a prompt")

    from headrace.loader.options import engine_config

    # A beam search refuses the defaults of the options that shape the distribution.
    names = [
        field.name for field in _SAMPLING_OPTIONS if args.beam_width is None or not field.neutral
    ]
    params = SamplingParams(**{name: getattr(args, name) for name in ("n", "stop", *names)})
    options = {name: getattr(args, name) for name in _ENGINE_OPTIONS}
    options["max_num_seqs"] = params.beam_width or params.n
    config = engine_config(options, INTERACTIVE)
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]

    from headrace.cli.session import Session

    with Session(
        args.model,
        config,
        _adapter(args.lora),
        add_special_tokens=args.add_special_tokens,
        parse_special=args.parse_special,
        sanitize_control_tokens=args.sanitize_control_tokens,
    ) as session:
        if prompt is None:
            from headrace.cli.chat import Chat

            Chat(session, params, args.raw, opening, args.quiet).loop()
        else:
            from headrace.cli.responses import print_responses

            messages = [*opening, {"role": "user", "content": prompt}]
            print_responses(
                session,
                prompt if args.raw else messages,
                params,
                as_json=args.json,
                quiet=args.quiet,
            )
    return 0


def _adapter(lora: str | None) -> tuple[str, str] | None:
    if lora is None:
        return None
    name, _, path = lora.partition("=")
    if not name or not path:
        raise RequestError(f"--lora {lora!r} lacks a name or a path; write NAME=PATH")
    return name, path


def _prompt(args: argparse.Namespace) -> str | None:
    prompt: str | None = args.prompt
    if args.model == "-" and prompt is None:
        args.model, prompt = DEFAULT_MODEL, "-"
    if prompt is None and " " in args.model and not os.path.exists(args.model):
        raise RequestError(
            f"{args.model!r} is not a model; to send it to the default model: headrace run "
            f"{DEFAULT_MODEL} {args.model!r}"
        )
    if prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        return None
    parts = [] if prompt in (None, "-") else [prompt]
    if not parts or _is_piped():
        parts.append(_read_stdin())
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise RequestError("the prompt is empty; write one, or pipe one in")
    return text


def _is_piped() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is not UTF-8 text at byte {error.start:,}; convert it to UTF-8"
        ) from None
    except OSError as error:
        raise RequestError(f"stdin cannot be read: {error.strerror}") from None
