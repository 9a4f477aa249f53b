"""Tokenizers from Hugging Face folders."""

import codecs
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from headrace.checkpoint.files import find, read_file, read_json
from headrace.checkpoint.tokenizer import Tokenizer, Vocabulary, library_calls
from headrace.checkpoint.tokenizer_growth import check_growth
from headrace.errors import ModelNotFoundError, UnsupportedModelError

_OTHERS = ("tekken.json", "tokenizer.model", "tokenizer.model.v3", "vocab.json", "vocab.txt")
"""Files of other tokenizers, of which errors name the first."""
_FILE = "tokenizer.json"
_MAX_BYTES = 256 << 20


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Raises ModelNotFoundError, FormatError or UnsupportedModelError."""
    path = find(folder, _FILE)
    if path is None:
        other = next((f"{name} is not read; " for name in _OTHERS if find(folder, name)), "")
        raise ModelNotFoundError(
            f"{folder}: no {_FILE}; {other}download {_FILE} from the repository, or save it with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    text = read_file(path, _MAX_BYTES).removeprefix(codecs.BOM_UTF8)
    config, model_config, generation = (
        read_json(path) if (path := find(folder, name)) else {}
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    model_config = _with_text_config(model_config)
    with library_calls(_FILE):
        backend = tokenizers.Tokenizer.from_buffer(text)
        check_growth(backend, _FILE)
        _make_deterministic(backend)
        spelling = _spelling(backend)
        size = backend.get_vocab_size()
        bos_id = _named_token(backend, config, model_config, "bos")
        eos_id = _named_token(backend, config, model_config, "eos")
    ends = [source.get("eos_token_id") for source in (model_config, generation)]
    vocabulary = replace(
        spelling,
        bos_id=bos_id,
        eos_id=eos_id,
        end_ids=frozenset(end for value in ends for end in _ids(value, size)),
        has_end_list=any(isinstance(value, list) and _ids(value, size) for value in ends),
    )
    return Tokenizer(backend, vocabulary, _FILE)


def _with_text_config(model_config: dict[str, Any]) -> dict[str, Any]:
    """Add the fields of the text part of a multimodal model, which its own fields precede."""
    text_config = model_config.get("text_config")
    if not isinstance(text_config, dict):
        return model_config
    own = {key: value for key, value in model_config.items() if value is not None}
    return text_config | own


def _make_deterministic(backend: tokenizers.Tokenizer) -> None:
    """Drop training settings: truncation, padding, dropout of merges (Provilkov et al.
    2020).
    """
    backend.no_truncation()
    backend.no_padding()
    if isinstance(backend.model, models.BPE):
        backend.model.dropout = None


def _spelling(backend: tokenizers.Tokenizer) -> Vocabulary:
    """Return a vocabulary without ids."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    decoders: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = {decoder.get("type") for decoder in decoders}
    if "ByteLevel" in kinds:
        return Vocabulary(byte_level=True)
    if state.get("type") == "WordPiece":
        return Vocabulary(byte_level=False, strip_space=True, word_part=state["prefix"])
    if not kinds & {"ByteFallback", "Metaspace"}:
        raise UnsupportedModelError(f"{_FILE}: decoder {state.get('type')} is not supported")
    strips = any(decoder.get("type") == "Strip" and decoder.get("start") for decoder in decoders)
    metaspace = any(
        decoder.get("type") == "Metaspace" and decoder.get("prepend_scheme") != "never"
        for decoder in decoders
    )
    return Vocabulary(byte_level=False, strip_space=strips or metaspace)


def _named_token(
    backend: tokenizers.Tokenizer, config: dict[str, Any], model_config: dict[str, Any], name: str
) -> int | None:
    """Return the id of a token that `tokenizer_config.json` names, or `config.json` by id.

    A null in `tokenizer_config.json` says that the tokenizer has no such token, although the model
    may have an id for it (Qwen2.5).
    """
    key = f"{name}_token"
    if key in config and config[key] is None:
        return None
    content = config[key].get("content") if isinstance(config.get(key), dict) else config.get(key)
    token_id = backend.token_to_id(content) if isinstance(content, str) else None
    if token_id is None:
        ids = _ids(model_config.get(f"{key}_id"), backend.get_vocab_size())
        return ids[0] if ids else None
    added = backend.get_added_tokens_decoder().get(token_id)
    if added is None or not added.special:
        backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
    return token_id


def _ids(value: Any, size: int) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if type(token_id) is int and 0 <= token_id < size]
