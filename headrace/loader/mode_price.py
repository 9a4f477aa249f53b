"""The price of an engine's lossy options and of its files, wherever they are printed."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import LOSSY_FILES, LOSSY_OPTIONS, EngineConfig
from headrace.loader.early_exit import read_exit_file
from headrace.planner.prices import Price, kept_price, parse_price


def mode_price(
    model: str,
    config: EngineConfig,
    checkpoint: Checkpoint,
    load_tokenizer: Callable[[], Tokenizer],
) -> str:
    """The prices of the files' own loss and of the lossy options in one line; empty without both.

    Files, and a single option with a calibration file, hold their price. Every other mode has the
    price that `headrace eval` kept for this model, or the command that measures it.
    """
    lines = []
    if checkpoint.loss:
        found = parse_price(checkpoint.price)
        found = found or _kept(without_modes(config), checkpoint, load_tokenizer)
        lines.append(_line(found, [model, "--reference", "ORIGINAL"]))
    if config.lossy:
        found = _price_in_file(config) or _kept(config, checkpoint, load_tokenizer)
        lines.append(_line(found, [model, *mode_flags(config)]))
    return "; ".join(lines)


def losses(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """Descriptions of the files' own loss and of the lossy options; empty without both."""
    return "; ".join(filter(None, (checkpoint.loss, config.lossy)))


def _kept(
    config: EngineConfig, checkpoint: Checkpoint, load_tokenizer: Callable[[], Tokenizer]
) -> Price | None:
    from headrace.checkpoint.fingerprint import fingerprint

    return kept_price(fingerprint(checkpoint, load_tokenizer()), mode_key(config))


def _line(price: Price | None, arguments: list[str]) -> str:
    if price is None:
        return f"price not measured: run `{shlex.join(['headrace', 'eval', *arguments])}`"
    return price.line


def mode_key(config: EngineConfig) -> str:
    """The lossy options in use, with digests of their files, as a key of kept prices."""
    values = {name: getattr(config, name) for name in _used(config)}
    for name in LOSSY_FILES:
        if name in values:
            values[name] = _digest(Path(values[name]))
    return json.dumps(values)


def without_modes(config: EngineConfig) -> EngineConfig:
    """The configuration of the full model."""
    defaults = {name: getattr(EngineConfig, name) for name in LOSSY_OPTIONS}
    return replace(config, **defaults)


def mode_flags(config: EngineConfig) -> list[str]:
    """The lossy options in use as arguments of a command."""
    return [
        word
        for name in _used(config)
        for word in (f"--{name.replace('_', '-')}", str(getattr(config, name)))
    ]


def _used(config: EngineConfig) -> list[str]:
    """Options that differ from their defaults, and the sinks of a window."""
    return [
        name
        for name in LOSSY_OPTIONS
        if (name != "attention_sinks" or config.attention_window)
        and (name == "attention_sinks" or getattr(config, name) != getattr(EngineConfig, name))
    ]


def _price_in_file(config: EngineConfig) -> Price | None:
    files = [getattr(config, name) for name in LOSSY_FILES if getattr(config, name)]
    if len(files) != 1 or len(config.lossy_modes) != 1:
        return None
    if config.early_exit:
        return read_exit_file(config.early_exit).price
    try:
        facts = json.loads(Path(files[0]).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return parse_price(facts.get("price")) if isinstance(facts, dict) else None


def _digest(file: Path) -> str:
    from hashlib import blake2b

    try:
        return blake2b(file.read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""
