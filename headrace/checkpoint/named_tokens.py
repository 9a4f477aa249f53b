"""Names that chat templates use for tokens, such as `pad_token` and `image_token`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.files import find, read_json
from headrace.checkpoint.gguf import Metadata
from headrace.checkpoint.tokenizer import Tokenizer

NamedTokens = Mapping[str, str | list[str]]
_GROUPS = ("extra_special_tokens", "model_specific_special_tokens")
_ADDITIONAL = "additional_special_tokens"
_GGUF_KEYS = {
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def named_tokens(source: Metadata | Path, tokenizer: Tokenizer) -> dict[str, str | list[str]]:
    """Read the names of tokens, as transformers gives them to templates.

    BOS and EOS are empty if the tokenizer has none. Raises FormatError for a malformed file.
    """
    own = _from_folder(source) if isinstance(source, Path) else _from_gguf(source, tokenizer)
    return {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token} | own


def _from_folder(folder: Path) -> dict[str, str | list[str]]:
    config, special = (
        read_json(path) if (path := find(folder, name)) else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    fields: dict[str, Any] = config | special
    for group in _GROUPS:
        if isinstance(config.get(group), dict):
            fields |= config[group]
    named: dict[str, str | list[str]] = {}
    for name, token in fields.items():
        if name.endswith("_token") and (content := _content(token)) is not None:
            named[name] = content
    if isinstance(fields.get(_ADDITIONAL), list):
        contents = map(_content, fields[_ADDITIONAL])
        named[_ADDITIONAL] = [content for content in contents if content is not None]
    return named


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _from_gguf(metadata: Metadata, tokenizer: Tokenizer) -> dict[str, str | list[str]]:
    named: dict[str, str | list[str]] = {}
    for name, key in _GGUF_KEYS.items():
        token_id = metadata.integer(f"tokenizer.ggml.{key}", -1)
        if 0 <= token_id < tokenizer.vocab_size:
            named[name] = tokenizer.token_bytes(token_id).decode(errors="replace")
    return named
