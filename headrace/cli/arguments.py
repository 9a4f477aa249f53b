"""Arguments that several commands share."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from headrace.backend_traits import BackendName, KvChoice
from headrace.config import LOSSY_OPTIONS, Activations, EngineConfig

if TYPE_CHECKING:
    from headrace.measure.options import EngineOptions, ModelOptions, ModeOptions

DEFAULT_MODEL = "smollm2"
METHODS = ("rtn", "imatrix", "gptq", "awq", "smoothquant")
"""The methods of `convert/methods.py`, whose import is slow."""
MAX_TOKENS = 2**20
MAX_COUNT = 2**20
MAX_SECONDS = 10**7
MAX_PRICE = 10**6
_MAX_DIGITS = 40
_MAX_DEPTH = 64

Arguments = argparse._ActionsContainer


def add_model(parser: Arguments, *, optional: bool) -> None:
    text = "alias, GGUF file, folder with safetensors, hf:ORG/REPO[:FILE] or pypi:PACKAGE/PATH"
    if optional:
        parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=text)
    else:
        parser.add_argument("model", metavar="MODEL", help=text)


def add_backend(parser: Arguments) -> None:
    parser.add_argument(
        "--backend",
        choices=get_args(BackendName),
        default=EngineConfig.backend,
        help="compute backend: cpu, cuda (a GPU) or reference (NumPy, slow); auto uses the GPU if "
        "there is one and the model fits",
    )


def add_sanitize_control_tokens(group: Arguments) -> None:
    group.add_argument(
        "--sanitize-control-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="control tokens in messages and tools as text, so that only the template opens turns",
    )


def add_seed(group: Arguments, default: int | None, text: str) -> None:
    group.add_argument("--seed", type=int, default=default, metavar="N", help=text)


def add_chat_template(group: Arguments) -> None:
    group.add_argument(
        "--chat-template",
        default=EngineConfig.chat_template,
        metavar="FILE",
        help="Jinja file with a chat template, in place of the model's own",
    )


def add_speculative_config(group: Arguments) -> None:
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        default="",
        help="options of drafts in the form of vLLM, with method, model and num_speculative_tokens",
    )


def add_threads(parser: Arguments) -> None:
    parser.add_argument(
        "--threads",
        type=int,
        default=EngineConfig.threads,
        metavar="N",
        help="number of compute threads; 0: one for each usable core",
    )


def add_kv_dtype(parser: Arguments) -> None:
    parser.add_argument(
        "--kv-dtype",
        choices=get_args(KvChoice),
        default=EngineConfig.kv_dtype,
        help="number format of the KV cache; auto: f16 if key biases are large, else bf16; "
        "fp8 is for a GPU only, int4 and k8v4 (keys in int8, values in int4) for the CPU only",
    )


def add_activations(parser: Arguments) -> None:
    parser.add_argument(
        "--activations",
        choices=get_args(Activations),
        default=EngineConfig.activations,
        help="number format of activations next to quantised weights: int8, or f32 (exact, slower)",
    )
    parser.add_argument(
        "--skip-zeros",
        action="store_true",
        help="read only the weights that ReLU activations need, from copies (cpu)",
    )


ROPE = ("rope_scaling", "rope_scale", "rope_theta", "yarn_orig_ctx")


_MODES: dict[str, tuple[str, type, str]] = {
    "attention_window": (
        "N",
        int,
        "lossy: number of last tokens that layers see, next to the attention sinks, in bounded KV "
        "memory; 0: all tokens",
    ),
    "attention_sinks": (
        "N",
        int,
        "number of first tokens that all tokens see next to the attention window",
    ),
    "attention_top_blocks": (
        "N",
        int,
        "lossy: number of blocks of 32 tokens that layers choose for each token, besides the "
        "first block and the last two; 0: all blocks",
    ),
    "early_exit": (
        "FILE",
        str,
        "lossy: calibration file of an early exit, of `headrace calibrate --early-exit`; the "
        "proposer self_draft or auto makes it faster",
    ),
    "activation_sparsity": (
        "FILE",
        str,
        "lossy: file of thresholds up to which activations become 0, of `headrace calibrate "
        "--sparsity`",
    ),
}
"""Metavar, type and help of each of `LOSSY_OPTIONS`."""


_DEFAULT_MODES = argparse.Namespace(**{name: getattr(EngineConfig, name) for name in _MODES})


def add_modes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "lossy modes",
        "Each mode is another model, with other tokens. Its price, the loss against the full\n"
        "model, is printed with it; `headrace eval` with the same options measures it.",
    )
    for name, (metavar, kind, text) in _MODES.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=metavar,
            default=getattr(EngineConfig, name),
            help=text,
        )


def add_rope(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "context", "They change the rotary embedding, and so the tokens."
    )
    group.add_argument(
        "--rope-scaling",
        default=EngineConfig.rope_scaling,
        metavar="RULE",
        help="rule that stretches the context: yarn, linear or none, or JSON as in a config.json "
        "(default: the model's own)",
    )
    group.add_argument(
        "--rope-scale",
        type=float,
        default=EngineConfig.rope_scale,
        metavar="F",
        help="factor of the context; 0: the model's own",
    )
    group.add_argument(
        "--rope-theta",
        type=float,
        default=EngineConfig.rope_theta,
        metavar="B",
        help="base of the rotary frequencies; 0: the model's own",
    )
    group.add_argument(
        "--yarn-orig-ctx",
        type=int,
        default=EngineConfig.yarn_orig_ctx,
        metavar="N",
        help="context before YaRN stretches it, in tokens; 0: the model's trained context",
    )


_MODEL_OPTIONS = ("backend", "threads", "kv_dtype", "activations", *ROPE, *LOSSY_OPTIONS)


def add_compute(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("compute")
    add_backend(group)
    add_threads(group)
    add_kv_dtype(group)
    add_activations(group)
    add_rope(parser)


PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pipeline_layers",
    "enable_expert_parallel",
    "enable_sequence_parallel",
)


def add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "parallelism", "Processes on this machine, or started by torchrun. Tokens stay the same."
    )
    group.add_argument(
        "-tp",
        "--tensor-parallel-size",
        type=int,
        default=EngineConfig.tensor_parallel_size,
        metavar="N",
        help="number of processes that share each matrix",
    )
    group.add_argument(
        "-pp",
        "--pipeline-parallel-size",
        type=int,
        default=EngineConfig.pipeline_parallel_size,
        metavar="N",
        help="number of pipeline stages",
    )
    group.add_argument(
        "--pipeline-layers",
        type=whole_numbers(1, 1 << 16),
        default=EngineConfig.pipeline_layers,
        metavar="N,...",
        help="number of layers of each stage (default: balanced by bytes)",
    )
    group.add_argument(
        "-ep",
        "--enable-expert-parallel",
        action=argparse.BooleanOptionalAction,
        default=EngineConfig.enable_expert_parallel,
        help="distribution of whole experts over the processes of a stage",
    )
    group.add_argument(
        "--enable-sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=EngineConfig.enable_sequence_parallel,
        help="sharding of the residual stream and norms across ranks (Megatron sequence "
        "parallelism)",
    )


def engine_options(args: argparse.Namespace) -> "EngineOptions":
    names = (*_MODEL_OPTIONS, "chat_template", *PARALLEL)
    return cast("EngineOptions", _given(args, names))


def mode_options(args: argparse.Namespace | None = None) -> "ModeOptions":
    """The lossy options of `args`, or their defaults."""
    return cast("ModeOptions", _given(args or _DEFAULT_MODES, LOSSY_OPTIONS))


def model_options(args: argparse.Namespace) -> "ModelOptions":
    return cast("ModelOptions", _given(args, _MODEL_OPTIONS))


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def add_strict_schemas(group: Arguments) -> None:
    group.add_argument(
        "--strict-schemas",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="error for schema keywords that no grammar enforces, unless a request has strict; "
        "otherwise they are dropped",
    )


def add_calibration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quantisation method")
    group.add_argument(
        "--method",
        choices=METHODS,
        default="rtn",
        help="rtn rounds to nearest; the others read a calibration text",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="calibration text (default: a part of Python's language reference)",
    )
    tokens = whole_number(2, MAX_TOKENS)
    group.add_argument(
        "--calibration-tokens",
        type=tokens,
        default=16384,
        metavar="N",
        help="length of the calibration text, in tokens",
    )
    group.add_argument(
        "--length",
        type=tokens,
        default=512,
        metavar="N",
        help="length of a piece of text, in tokens; each piece starts from an empty KV cache",
    )


def add_price(parser: Arguments, thing: str = "this machine", note: str = "") -> None:
    """Add `--price`; `thing` is what one rents."""
    parser.add_argument(
        "--price",
        type=number(0, MAX_PRICE),
        metavar="D",
        help=f"price of {thing}, in dollars per hour{note}",
    )


def add_json(parser: Arguments) -> None:
    parser.add_argument("--json", action="store_true", help="JSON with raw numbers as output")


def whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        message = f"{text[:_MAX_DIGITS]!r} is not a whole number from {minimum:,} to {maximum:,}"
        (number,) = _parse([text], message, minimum, maximum)
        return number

    return parse


def number(minimum: float, maximum: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(
                f"{text[:_MAX_DIGITS]!r} is not a number from {minimum:g} to {maximum:,.0f}"
            )
        return value

    return parse


def draft_chain(text: str) -> tuple[int, float]:
    """An argument type: draft tokens in a step, and the share of them that is accepted."""
    depth, colon, acceptance = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not DEPTH:ACCEPTANCE, such as 4:0.7")
    return whole_number(1, _MAX_DEPTH)(depth), number(0, 1)(acceptance)


def whole_numbers(minimum: int, maximum: int) -> Callable[[str], tuple[int, ...]]:
    """An argument type: whole numbers separated by commas."""

    def parse(text: str) -> tuple[int, ...]:
        message = (
            f"{text[:_MAX_DIGITS]!r} is not a list of whole numbers from {minimum:,} to "
            f"{maximum:,}, such as 8,12"
        )
        return _parse(text.split(","), message, minimum, maximum)

    return parse


def _parse(words: Sequence[str], message: str, minimum: int, maximum: int) -> tuple[int, ...]:
    for word in words:
        is_number = word.strip().isdecimal() and len(word) < _MAX_DIGITS
        if not is_number or not minimum <= int(word) <= maximum:
            raise argparse.ArgumentTypeError(message)
    return tuple(map(int, words))
