"""Folders of published layouts (`tests/data/layouts`), with random weights in small sizes."""

import json
import math
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tests.checkpoint.conftest import SHAPE, byte_alphabet, sentencepiece_parts, write_tiny_gguf

DATA = Path(__file__).parent / "data" / "layouts"
VOCAB = 320
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
}
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_PARTS = ("text_config", "vision_config")
_DTYPES = {"F16": np.float16, "F32": np.float32}


class Raw(NamedTuple):
    """A tensor as safetensors stores it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@cache
def read(name: str) -> Any:
    """Read a file of facts. The text "null" stands for JSON's null."""
    return _with_nulls(tomllib.loads((DATA / f"{name}.toml").read_text()))


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_nulls(entry) for entry in value]
    return None if value == "null" else value


def write_layout(folder: Path, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Write the folder of a layout. Return its tokenizer's facts."""
    facts: dict[str, Any] = read("tokenizers")[layout["tokenizer"]]
    ids = _write_tokenizer(folder, facts)
    config = _sized(layout["config"]) | _by_id(facts.get("config", {}), ids)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", facts["tokenizer_config"] | _template(facts))
    if "generation" in facts:
        _write_json(folder / "generation_config.json", _by_id(facts["generation"], ids))

    tensors = _tensors(layout, config)
    if layout.get("files") == "consolidated":
        other = {"tok_embeddings.weight": tensors["model.embed_tokens.weight"]}
        _write_tensors(folder / "consolidated.safetensors", other)
    _write_tensors(folder / "model.safetensors", tensors)
    return facts


def write_quantised(folder: Path, layout: Mapping[str, Any]) -> None:
    """Write a folder whose linear layers are stored by a method; Llama 2 if it names no base."""
    layouts = read("loaded")["layout"]
    base = next((one for one in layouts if layout.get("base") in one["repositories"]), layouts[0])
    config = SIZES | base["config"] | layout.get("config", {})
    config |= dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
    config["num_key_value_heads"] = 4
    _write_json(folder / "config.json", config)
    for name, content in layout.get("files", {}).items():
        _write_json(folder / name, content)

    names = [part for part in base["tensors"] if part != "inv_freq"]
    sizes = _sizes(config, base.get("sizes", {}) | {"m": 128})
    plain = _shaped(_patterns(names) | layout.get("more", {}), sizes)
    tensors = {}
    for name, tensor in plain.items():
        layer = name.removesuffix("weight")
        if (
            "_proj.weight" in name
            or "_proj_with_mqa.weight" in name
            or ("embed" in name and layout["method"] == "mlx")
        ):
            rows, cols = tensor.shape
            parts = QUANTISED[layout["method"]](rows, cols)
            tensors |= {layer + part: value for part, value in parts.items()}
            if "biases" in layout:
                tensors[f"{layer}bias"] = filled(layout["biases"], (rows,))
        else:
            tensors[name] = tensor
    _write_tensors(folder / "model.safetensors", tensors)


def filled(value: float, shape: tuple[int, ...], dtype: str = "F16") -> Raw:
    return Raw(dtype, shape, np.full(shape, value, _DTYPES[dtype]).tobytes())


def _codes(dtype: str, shape: tuple[int, ...]) -> Raw:
    size = {"U8": 1, "I8": 1, "I32": 4, "U32": 4, "F8_E4M3": 1}[dtype]
    # Random, and finite as e4m3.
    data = _noise(math.prod(shape) * size).view(np.uint32).astype(np.uint8) & 0x77
    return Raw(dtype, shape, data.tobytes())


def _eights(rows: int, cols: int, **scales: Raw) -> dict[str, Raw]:
    return {"weight": _codes("F8_E4M3", (rows, cols)), **scales}


def _nf4(rows: int, cols: int) -> dict[str, Raw]:
    from headrace.quant.spec import CODEBOOKS

    state: dict[str, Any] = {"blocksize": 64, "quant_type": "nf4", "shape": [rows, cols]}
    state |= {"dtype": "bfloat16", "nested_blocksize": 256, "nested_offset": 0.1}
    state |= {"nested_dtype": "float32"}
    text = json.dumps(state).encode()
    values = np.asarray(CODEBOOKS["nf4"], np.float32)
    return {
        "weight": _codes("U8", (rows * cols // 2, 1)),
        "weight.absmax": _codes("U8", (rows * cols // 64,)),
        "weight.nested_absmax": filled(0.01, (-(-rows * cols // (64 * 256)),), "F32"),
        "weight.nested_quant_map": filled(0.5, (256,), "F32"),
        "weight.quant_map": Raw("F32", (16,), values.tobytes()),
        "weight.quant_state.bitsandbytes__nf4": Raw("U8", (len(text),), text),
    }


QUANTISED: dict[str, Any] = {
    "gptq": lambda rows, cols: {
        "qweight": _codes("I32", (cols // 8, rows)),
        "qzeros": _codes("I32", (cols // 128, rows // 8)),
        "scales": filled(0.01, (cols // 128, rows)),
        "g_idx": Raw("I32", (cols,), (np.arange(cols, dtype=np.int32) // 128).tobytes()),
    },
    "awq": lambda rows, cols: {
        "qweight": _codes("I32", (cols, rows // 8)),
        "qzeros": _codes("I32", (cols // 128, rows // 8)),
        "scales": filled(0.01, (cols // 128, rows)),
    },
    "fp8_blocks": lambda rows, cols: _eights(
        rows, cols, weight_scale_inv=filled(0.01, (-(-rows // 128), -(-cols // 128)), "F32")
    ),
    "fp8_tensor": lambda rows, cols: _eights(
        rows,
        cols,
        weight_scale=filled(0.01, (), "F32"),
        input_scale=filled(0.5, (), "F32"),
    ),
    "fp8_ministral": lambda rows, cols: _eights(
        rows,
        cols,
        weight_scale_inv=filled(0.01, ()),
        activation_scale=filled(0.5, ()),
    ),
    "fp8_rows": lambda rows, cols: _eights(rows, cols, weight_scale=filled(0.01, (rows, 1))),
    "packed_int4": lambda rows, cols: {
        "weight_packed": _codes("I32", (rows, cols // 8)),
        "weight_scale": filled(0.01, (rows, cols // 128)),
        "weight_shape": Raw("I64", (2,), np.array([rows, cols], np.int64).tobytes()),
    },
    "int8_rows": lambda rows, cols: {
        "weight": _codes("I8", (rows, cols)),
        "weight_scale": filled(0.01, (rows, 1)),
    },
    "nvfp4": lambda rows, cols: {
        "weight_packed": _codes("U8", (rows, cols // 2)),
        "weight_scale": _codes("F8_E4M3", (rows, cols // 16)),
        "weight_global_scale": filled(100.0, (1,), "F32"),
        "input_global_scale": filled(100.0, (1,), "F32"),
    },
    "nvfp4_modelopt": lambda rows, cols: {
        "weight": _codes("U8", (rows, cols // 2)),
        "weight_scale": _codes("F8_E4M3", (rows, cols // 16)),
        "weight_scale_2": filled(0.01, (), "F32"),
        "input_scale": filled(0.5, (), "F32"),
    },
    "nf4": _nf4,
    "mlx": lambda rows, cols: {
        "weight": _codes("U32", (rows, cols // 8)),
        "scales": filled(0.01, (rows, cols // 64)),
        "biases": filled(-0.08, (rows, cols // 64)),
    },
}
"""Parts of a matrix, [rows, cols], by the end of their names."""


def write_stub(folder: Path, layout: Mapping[str, Any]) -> None:
    """Write a folder that is refused: its fields and the names of a few tensors."""
    _write_json(folder / "config.json", layout["config"])
    names = layout.get("tensors", [])
    _write_tensors(folder / "model.safetensors", {name: filled(1.0, (2,)) for name in names})


def write_gguf_layout(path: Path, layout: Mapping[str, Any]) -> Path:
    """Write a GGUF file of a layout, with two layers."""
    architecture, values = layout["architecture"], _gguf_vocabulary(layout)
    tokens = values["tokenizer.ggml.tokens"]
    values |= {
        f"tokenizer.ggml.{name}_token_id": tokens.index(token)
        for name, token in layout["tokens"].items()
    }
    values |= {f"tokenizer.ggml.{name}": flag for name, flag in layout.get("flags", {}).items()}
    values |= {f"{architecture}.{name}": value for name, value in layout["keys"].items()}

    sizes = {"h": SHAPE["dim"], "f": SHAPE["ffn"], "d": SHAPE["head_dim"], "heads": SHAPE["heads"]}
    sizes |= {"q": SHAPE["dim"], "k": SHAPE["kv_heads"] * SHAPE["head_dim"], "n": len(tokens)}
    patterns = {"token_embd.weight": "n h", **layout["tensors"]}
    weights: dict[str, NDArray[np.float32] | None] = {}
    for name, pattern in patterns.items():
        for own in {name, name.replace("blk.0.", "blk.1.")}:
            raw = _tensor(pattern, sizes, seed=1009 * len(weights))
            weights[own] = np.frombuffer(raw.data, np.float16).astype(np.float32)
            weights[own] = weights[own].reshape(raw.shape) if pattern else None
    return write_tiny_gguf(path, values, weights, architecture)


def _gguf_vocabulary(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a byte-level vocabulary if the layout names a rule, else of SentencePiece."""
    control = layout.get("control", [])
    no_ids = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos")}
    if "pre" in layout:
        values = {
            "tokens": [*byte_alphabet(), "hi", *control],
            "token_type": [1] * 257 + [3] * len(control),
            "merges": ["h i"],
            "pre": layout["pre"],
        }
        return {f"tokenizer.ggml.{name}": value for name, value in values.items()} | no_ids
    made: dict[str, Any] = sentencepiece_parts()["change"]
    for name, more in (("tokens", control), ("scores", [0.0]), ("token_type", [3])):
        made[f"tokenizer.ggml.{name}"] += more * (1 if name == "tokens" else len(control))
    return made | no_ids


def _sized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file with small sizes, in the part that has the text model's."""
    if "text_config" in config:
        return {**config, "text_config": SIZES | config["text_config"]}
    has_own_names = not SIZES.keys().isdisjoint(config) or not any(
        name in config for name in (*_HIDDEN, *_LAYERS)
    )
    return (SIZES if has_own_names else {"vocab_size": VOCAB}) | dict(config)


def _sizes(config: Mapping[str, Any], more: Mapping[str, int]) -> dict[str, int]:
    """Sizes by the letters of tensors.toml."""
    config = config.get("text_config", config)
    hidden, heads = (
        next(config[name] for name in names if config.get(name)) for names in (_HIDDEN, _HEADS)
    )
    head_dim = config.get("head_dim") or hidden // heads
    return {
        "h": hidden,
        "f": config.get("intermediate_size") or 4 * hidden,
        "v": VOCAB,
        "heads": heads,
        "d": head_dim,
        "q": heads * head_dim,
        "k": (config.get("num_key_value_heads") or heads) * head_dim,
        "context": config.get("n_positions", config.get("max_position_embeddings", 0)),
        **more,
    }


def _tensors(layout: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Raw]:
    sizes = _sizes(config, layout.get("sizes", {}))
    prefixes = layout.get("prefixes", {})
    tensors = {}
    for name, tensor in _shaped(_patterns(layout["tensors"]), sizes).items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    for name, pattern in layout.get("more", {}).items():
        tensors[name] = tensors[pattern.removeprefix("= ")]
    return tensors


def _patterns(parts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        found |= read("tensors")[part]
    return {name: pattern for name, pattern in found.items() if pattern}


def _shaped(patterns: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, Raw]:
    tensors: dict[str, Raw] = {}
    for name, pattern in patterns.items():
        if pattern.startswith("= "):
            tensors[name] = tensors[pattern.removeprefix("= ")]
            continue
        numbers = range(sizes["e"]) if "*" in name else [0]
        for number in numbers:
            own = name.replace("*", str(number))
            tensors[own] = _tensor(pattern, sizes, seed=1009 * len(tensors))
    return tensors


def _tensor(pattern: str, sizes: Mapping[str, int], seed: int) -> Raw:
    words = [word for word in pattern.split() if word != "scalar"]
    kind = words.pop() if words and words[-1] in ("U8", "BOOL", "F32") else "F16"
    shape = tuple(sum(_product(term, sizes) for term in word.split("+")) for word in words)
    if kind == "F32" or not words:
        return filled(1.0, shape, "F32")
    if kind != "F16":
        return _codes("U8", shape) if kind == "U8" else Raw("BOOL", shape, bytes(math.prod(shape)))
    noise = _noise(math.prod(shape), seed) / 8 + (1.0 if len(shape) == 1 else 0.0)
    return Raw("F16", shape, noise.astype(np.float16).tobytes())


def _product(term: str, sizes: Mapping[str, int]) -> int:
    factors, _, divisor = term.partition("/")
    product = math.prod(sizes.get(word) or int(word) for word in factors.split("*"))
    return product // int(divisor or 1)


_NOISE = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)


def _noise(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.resize(_NOISE[seed:], count)


def _write_tensors(path: Path, tensors: Mapping[str, Raw]) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        place = [end, end := end + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    data = b"".join(tensor.data for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _template(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"chat_template": facts["template"]} if "template" in facts else {}


def _by_id(fields: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Fields that name tokens, with their ids."""
    return {
        key: [ids[name] for name in value] if isinstance(value, list) else ids[value]
        for key, value in fields.items()
    }


def _write_tokenizer(folder: Path, facts: Mapping[str, Any]) -> dict[str, int]:
    backend = _bytes() if facts["kind"] == "bytes" else _spaces(facts["kind"])
    names = facts.get("control", [])
    if facts["kind"] != "bytes":
        names = [*(["<unk>", "<s>", "</s>"] if facts["kind"] == "sentencepiece" else []), *names]
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    texts = facts.get("text", [])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in texts])
    ids = backend.get_vocab()
    if begins := facts.get("begins"):
        backend.post_processor = processors.TemplateProcessing(
            single=[begins, "$A"], special_tokens=[(begins, ids[begins])]
        )
    assert len(ids) <= VOCAB
    backend.save(str(folder / "tokenizer.json"))
    return ids


def _bytes() -> tokenizers.Tokenizer:
    vocab = {letter: i for i, letter in enumerate([*byte_alphabet(), "hi"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _spaces(kind: str) -> tokenizers.Tokenizer:
    """SentencePiece BPE with bytes; with a space before the text, except in Gemma."""
    names = ["<unk>", "<s>", "</s>"] if kind == "sentencepiece" else ["<unk>"]
    pieces = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    merges = [("h", "i"), ("▁", "hi")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    if kind == "sentencepiece":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(steps)
    return backend
