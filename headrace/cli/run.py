"""Answer a prompt, or chat.

Without a prompt, on a terminal, this is a chat. With a prompt, with `-`, or with something piped in, it is one answer:
alone on stdout as it comes, then one line on stderr with the speed. Text that is piped in beside a prompt follows it.
"""

import argparse
import os
import stat
import sys
from typing import TYPE_CHECKING, get_args

from headrace.cli.arguments import DEFAULT_MODEL, add_model
from headrace.config import INTERACTIVE, EngineConfig, KvDtype
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.cli.session import Session
    from headrace.request import SamplingParams

_SHARED_PARAMS = ("presence_penalty", "seed", "max_tokens")
_DRAW_PARAMS = ("temperature", "top_p", "top_k", "min_p")
_BEAM_PARAMS = ("beam_width", "length_penalty")
_ENGINE_OPTIONS = ("threads", "kv_dtype", "max_model_len")
_SPECULATION_OPTIONS = (
    *("proposer", "max_draft_tokens", "adaptive_speculation", "acceptance_method"),
    *("draft_model", "draft_layers", "medusa_heads", "draft_depth", "draft_width"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb; those of sampling have the names and meanings of `SamplingParams`."""
    add_model(parser, optional=True)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="what to answer; -: read it from stdin")
    parser.add_argument("--system", metavar="TEXT", help="instructions that come before the conversation")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without the chat template")

    # Small models fall into loops. A little warmth without the unlikely tail, and a penalty that does not grow, keep them out:
    # of 24 answers of the default model 4 looped without the penalty, none with it. Prompts are not penalised.
    sampling = parser.add_argument_group("sampling", "The same seed gives the same answer, whatever the temperature.")
    sampling.add_argument("--temperature", type=float, default=0.3, metavar="T", help="0 takes the likeliest token every time")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens that have this probability together"
    )
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0: all")
    sampling.add_argument("--min-p", type=float, default=0.05, metavar="P", help="keep tokens at least P times as likely as the likeliest")
    sampling.add_argument("--presence-penalty", type=float, default=1.0, metavar="X", help="take X from the logits of tokens already used")
    sampling.add_argument("--beam-width", type=int, metavar="B", help="search with B beams: draws nothing, and answers at its end")
    sampling.add_argument("--length-penalty", type=float, default=1.0, metavar="X", help="beams: their sum / length ** X is what counts")
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="what the draws depend on")
    sampling.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="longest answer")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads; 0: as many as may be used")
    engine.add_argument("--kv-dtype", choices=get_args(KvDtype), default=EngineConfig.kv_dtype, help="number format of keys and values")
    engine.add_argument("--max-model-len", type=int, default=0, metavar="N", help="longest conversation in tokens; 0: all the model can")
    _add_speculation(
        parser.add_argument_group("speculative decoding", "As far as it pays. Never changes a token, unless the acceptance method says so.")
    )


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    default = EngineConfig
    group.add_argument(
        "--proposer",
        metavar="NAME",
        default="auto",  # answers often quote; where they do not it rests
        help="auto, off, ngram, online, jacobi, lookahead, draft_model, self_draft or medusa",
    )
    group.add_argument("--max-draft-tokens", type=int, metavar="N", default=default.max_draft_tokens, help="most drafts in a step")
    group.add_argument(
        "--adaptive-speculation",
        action=argparse.BooleanOptionalAction,
        default=default.adaptive_speculation,
        help="draft as much as pays; with --no-adaptive-speculation as much as there is room for",
    )
    group.add_argument("--draft-model", metavar="MODEL", default="", help="for draft_model: a smaller model with the same vocabulary")
    group.add_argument(
        "--draft-layers", type=int, metavar="N", default=0, help="for self_draft: how many first layers draft; see calibrate"
    )
    group.add_argument("--medusa-heads", metavar="FILE", default="", help="for medusa: safetensors with heads made for the model")
    group.add_argument("--draft-depth", type=int, metavar="K", default=default.draft_depth, help="most drafts in a row of these three")
    group.add_argument("--draft-width", type=int, metavar="W", default=default.draft_width, help="drafts at each depth")
    group.add_argument(
        "--acceptance-method", metavar="NAME", default=default.acceptance_method, help="exact, rejection, or typical, which is lossy"
    )


def run(args: argparse.Namespace) -> int:
    """One answer, or a chat."""
    prompt = _prompt(args)

    from headrace.assembly.options import engine_config
    from headrace.request import SamplingParams

    names = _SHARED_PARAMS + (_DRAW_PARAMS if args.beam_width is None else _BEAM_PARAMS)
    params = SamplingParams(**{name: getattr(args, name) for name in names})
    options = {name: getattr(args, name) for name in (*_ENGINE_OPTIONS, *_SPECULATION_OPTIONS)}
    if params.beam_width:
        options["max_num_seqs"] = params.beam_width
    config = engine_config(options, INTERACTIVE)

    from headrace.cli.session import Session

    with Session(args.model, config) as session:
        if prompt is None:
            from headrace.cli.chat import Chat

            Chat(session, params, args.raw, args.system).loop()
        else:
            _answer(session, prompt if args.raw else conversation(prompt, args.system), params)
    return 0


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    """The messages that a prompt and instructions make."""
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]


def _answer(session: "Session", prompt: str | list[dict[str, str]], params: "SamplingParams") -> None:
    from headrace.cli.session import interrupts
    from headrace.cli.terminal import write

    with interrupts() as stop:
        for piece in session.answer(prompt, params, stop):
            write(piece)
        write("\n")
    if stop.is_set():
        raise KeyboardInterrupt
    print(session.closing_line(), file=sys.stderr)


def _prompt(args: argparse.Namespace) -> str | None:
    """What to answer; None for a chat. `headrace run -` is the default model and stdin."""
    prompt: str | None = args.prompt
    if args.model == "-" and prompt is None:
        args.model, prompt = DEFAULT_MODEL, "-"
    if prompt is None and " " in args.model and not os.path.exists(args.model):
        raise RequestError(f"{args.model!r} is no model; to ask the default one: headrace run {DEFAULT_MODEL} {args.model!r}")
    if prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        return None
    if prompt is not None and prompt != "-":
        piped = _read_stdin() if _is_piped() else ""
        return f"{prompt}\n\n{piped}" if piped.strip() else prompt
    text = _read_stdin()
    if not text.strip():
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
