"""Opens a file or folder as a checkpoint, with tensors by our names."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.advised_sampling import advised_sampling
from headrace.checkpoint.architecture import layout_of
from headrace.checkpoint.assemble import assemble
from headrace.checkpoint.files import find, list_names
from headrace.checkpoint.folder import chat_templates, model_name, open_folder
from headrace.checkpoint.gguf import Metadata, is_adapter
from headrace.checkpoint.gguf_scales import with_scales
from headrace.checkpoint.note import (
    FOLDER_NOTE,
    FOLDER_PRICE,
    GGUF_NOTE,
    GGUF_PRICE,
    note_of,
    price_of,
)
from headrace.checkpoint.split import gguf_of_folder, read_gguf_model
from headrace.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from headrace.model import FAMILIES
from headrace.model.spec import ExpertSpec, MlaSpec, ModelSpec, RopeSpec
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

if TYPE_CHECKING:
    from headrace.checkpoint.tokenizer import Tokenizer

_MAX_LAYERS = 4096
_MAX_EXPERTS = 1 << 16
_MAX_SIZE = 2**31 - 1
_MAX_WIDTH = 1 << 20
"""Limit of query columns, which bounds tables per column."""


@frozen(eq=False)
class Checkpoint:
    """A model on disk: tensors are views of memory maps, rotary rows are interleaved."""

    path: Path
    spec: ModelSpec
    tensors: Mapping[str, StoredTensor]
    chat_template: str | None
    tokenizer_source: Metadata | Path
    tool_template: str | None = None
    other_templates: Mapping[str, str] = field(default_factory=dict)
    """Templates by name, without `default` and `tool_use`."""
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    """By the names of the family's files, in the files' shapes."""
    left_out: tuple[str, ...] = ()
    """Names in the files of tensors that the model does not use."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about the files, with `loss`."""
    loss: str = ""
    """What the weights lost before they were written, in words; empty if the files say nothing."""
    price: Mapping[str, Any] = field(default_factory=dict)
    """The measure of `loss` as the files have it (`planner/prices.py`)."""

    def advised_sampling(self) -> dict[str, Any]:
        """Raises FormatError."""
        return advised_sampling(self.tokenizer_source)

    def named_tokens(self, tokenizer: "Tokenizer") -> dict[str, str | list[str]]:
        """Return the tokens that templates use by name. Raises FormatError."""
        from headrace.checkpoint.named_tokens import named_tokens

        return named_tokens(self.tokenizer_source, tokenizer)

    def load_tokenizer(self) -> "Tokenizer":
        """Build the tokenizer. Raises as the builders."""
        if isinstance(self.tokenizer_source, Path):
            from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder

            return tokenizer_from_folder(self.tokenizer_source)
        from headrace.checkpoint.tokenizer_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(self.tokenizer_source)


def open_checkpoint(path: Path, *, is_absorbed: bool = False) -> Checkpoint:
    """Open a GGUF file, any part of a split one, or a folder; `is_absorbed` chooses the form of
    multi-head latent attention.

    Raises ModelNotFoundError, FormatError, or UnsupportedModelError (architecture, tensor type,
    feature, pickled weights).
    """
    if not os.path.isdir(path):
        return _open_gguf(path, is_absorbed)
    names = list_names(path)
    has_weights = any(name.endswith(".safetensors") for name in names)
    if not has_weights and (file := gguf_of_folder(path)):
        return _open_gguf(file, is_absorbed)
    return _open_folder(path, is_absorbed)


def _open_gguf(path: Path, is_absorbed: bool) -> Checkpoint:
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise UnsupportedModelError(
            f"{path.name}: pickles can run code and are never loaded; convert the model "
            "to safetensors or GGUF"
        )
    if path.suffix == ".safetensors":
        raise FormatError(
            f"{path.name}: a safetensors file has no configuration; name its folder, which has "
            "config.json too"
        )
    file = read_gguf_model(path)
    if is_adapter(file.metadata):
        raise UnsupportedModelError(
            f"{path.name}: the file is a LoRA adapter; name its model, and the adapter with --lora "
            f"NAME={path.name}"
        )
    architecture = file.metadata.string("general.architecture")
    if architecture == "clip":
        raise UnsupportedModelError(
            f"{path.name}: the file is the vision tower of a multimodal model (mmproj); name the "
            "GGUF file of its text model"
        )
    layout = layout_of(
        architecture,
        (family.gguf for family in FAMILIES.values()),
        file.metadata.where,
        lambda: file.tensors,
    )
    stored = with_scales(file.tensors, path.name)
    spec = checked_spec(layout.spec(file.metadata, stored), path.name)
    spec = _with_form(spec, is_absorbed)
    tensors = assemble(spec, layout, stored, path.name)
    templates = _gguf_templates(file.metadata)
    loss = note_of(file.metadata, GGUF_NOTE)
    return Checkpoint(
        path=file.path,
        spec=replace(spec, name=file.metadata.string("general.name", path.stem)),
        tensors=tensors,
        stored=stored,
        chat_template=templates.pop("default", None),
        tokenizer_source=file.metadata,
        tool_template=templates.pop("tool_use", None),
        other_templates=templates,
        notes=(f"{path.name}: {loss}",) if loss else (),
        loss=loss,
        price=price_of(file.metadata, GGUF_PRICE),
    )


def _gguf_templates(metadata: Metadata) -> dict[str, str]:
    key, names = "tokenizer.chat_template", ["tool_use"]
    if f"{key}s" in metadata:
        names += metadata.strings(f"{key}s")
    keys = {"default": key} | {name: f"{key}.{name}" for name in names}
    templates = {name: metadata.string(key, "") for name, key in keys.items()}
    return {name: text for name, text in templates.items() if text}


def _open_folder(path: Path, is_absorbed: bool) -> Checkpoint:
    if not find(path, "config.json"):
        if find(path, "adapter_config.json"):
            raise ModelNotFoundError(
                f"{path}: no config.json; the folder is a LoRA adapter: name its model, and the "
                f"adapter with --lora NAME={path.name}"
            )
        raise ModelNotFoundError(f"{path}: no config.json, and no GGUF file")
    folder = open_folder(path)
    checked_spec(folder.spec, path.name)
    parts = folder.read()
    spec = _with_form(parts.spec, is_absorbed)
    tensors = assemble(spec, folder.layout, parts.tensors, path.name)
    templates = chat_templates(path)
    loss = "; ".join(filter(None, (parts.loss, note_of(folder.config, FOLDER_NOTE))))
    return Checkpoint(
        path=path,
        spec=replace(spec, name=model_name(path)),
        tensors=tensors,
        stored=parts.tensors,
        chat_template=templates.pop("default", None),
        tokenizer_source=path,
        tool_template=templates.pop("tool_use", None),
        other_templates=templates,
        left_out=parts.left_out,
        notes=(*parts.notes, f"{path.name}: {loss}") if loss else parts.notes,
        loss=loss,
        price=price_of(folder.config, FOLDER_PRICE),
    )


def _with_form(spec: ModelSpec, is_absorbed: bool) -> ModelSpec:
    return replace(spec, mla=replace(spec.mla, is_absorbed=is_absorbed)) if spec.mla else spec


def checked_spec(spec: ModelSpec, where: str) -> ModelSpec:
    """Return the specification. Raises FormatError for unusable sizes and constants."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise FormatError(f"{where}: {message}")

    sizes = (
        "num_layers",
        "dim",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_dim",
        "vocab_size",
        "max_context",
    )
    for size in sizes:
        require(0 < getattr(spec, size) <= _MAX_SIZE, f"{size} is {getattr(spec, size)}")
    require(
        spec.num_layers <= _MAX_LAYERS, f"{spec.num_layers:,} layers, more than {_MAX_LAYERS:,}"
    )
    require(
        spec.num_heads * spec.head_dim <= _MAX_WIDTH,
        f"{spec.num_heads:,} heads of {spec.head_dim:,}",
    )
    require(
        spec.num_heads % spec.num_kv_heads == 0,
        f"{spec.num_heads} heads do not share {spec.num_kv_heads} KV heads evenly",
    )
    require(0 <= spec.norm_eps < 1, f"the norm's epsilon is {spec.norm_eps}")
    require(
        all(0 <= window <= _MAX_SIZE for window in spec.windows), "a sliding window is negative"
    )
    constants = [value for value in vars(spec).values() if isinstance(value, float)]
    require(all(math.isfinite(value) for value in constants), "a constant is not finite")
    require(spec.logit_softcap >= 0 and spec.attention_softcap >= 0, "a cap is negative")
    require(
        len(spec.windows) in (0, spec.num_layers) and len(spec.rotated) in (0, spec.num_layers),
        "a layer has no window or rotation",
    )
    require(0 <= spec.learned_positions <= _MAX_SIZE, f"{spec.learned_positions} positions")
    for rope in spec.ropes:
        _check_rope(rope, spec.head_dim, require)
    if spec.mla:
        _check_latent(spec, spec.mla, require)
    if spec.experts:
        _check_experts(spec.experts, spec.num_layers, require)
    return spec


def _check_rope(rope: RopeSpec, head_dim: int, require: Callable[[bool, str], None]) -> None:
    require(
        rope.dim % 2 == 0 and 0 < rope.dim <= head_dim,
        f"{rope.dim} rotary dimensions in heads of {head_dim}",
    )
    require(rope.theta > 1, f"the rotary base is {rope.theta}")
    require(rope.factor > 0, f"the rotary factor is {rope.factor}")
    require(
        0 <= rope.original_context <= _MAX_SIZE, f"the original context is {rope.original_context}"
    )
    require(
        rope.low_freq_factor < rope.high_freq_factor,
        "low_freq_factor is not below high_freq_factor",
    )
    require(rope.beta_fast > 0 and rope.beta_slow > 0, "beta_fast and beta_slow must be positive")
    require(
        rope.scaling != "dynamic" or rope.dim > 2,
        "dynamic scaling needs more than 2 rotary dimensions",
    )
    require(
        rope.scaling != "longrope" or len(rope.factors) == len(rope.long_factors) > 0,
        "longrope needs factors of both kinds",
    )
    for factors in (rope.factors, rope.long_factors):
        require(
            len(factors) in (0, rope.dim // 2),
            f"{len(factors)} rotary factors for {rope.dim // 2} pairs",
        )
        require(
            all(math.isfinite(factor) and factor > 0 for factor in factors),
            "a rotary factor is not a positive number",
        )
    require(
        all(math.isfinite(value) for value in astuple(rope) if isinstance(value, float)),
        "a rotary constant is not finite",
    )


def _check_latent(spec: ModelSpec, latent: MlaSpec, require: Callable[[bool, str], None]) -> None:
    require(
        spec.num_heads * spec.num_layers <= _MAX_EXPERTS,
        f"{spec.num_heads:,} heads in {spec.num_layers:,} layers",
    )
    for size in ("kv_rank", "value_dim"):
        require(0 < getattr(latent, size) <= _MAX_SIZE, f"{size} is {getattr(latent, size)}")
    require(0 <= latent.query_rank <= _MAX_SIZE, f"query_rank is {latent.query_rank}")
    require(0 <= latent.norm_eps < 1, f"the epsilon of a latent norm is {latent.norm_eps}")
    require(
        0 < spec.rotary_dim < spec.head_dim,
        f"{spec.rotary_dim} rotated numbers in queries of {spec.head_dim}",
    )
    width = spec.num_heads * max(latent.kv_rank + spec.rotary_dim, latent.value_dim)
    require(width <= _MAX_WIDTH, f"{spec.num_heads:,} heads over latent rows of {latent.kv_rank:,}")


def _check_experts(
    experts: ExpertSpec, num_layers: int, require: Callable[[bool, str], None]
) -> None:
    require(
        0 < experts.num_experts * num_layers <= _MAX_EXPERTS,
        f"{experts.num_experts:,} experts in {num_layers:,} layers",
    )
    require(
        0 < experts.top_k <= experts.num_experts,
        f"a row goes to {experts.top_k} of {experts.num_experts} experts",
    )
    require(0 < experts.ffn_dim <= _MAX_SIZE, f"the width of an expert is {experts.ffn_dim}")
    require(
        0 <= experts.shared_ffn_dim <= _MAX_SIZE,
        f"the width of the shared expert is {experts.shared_ffn_dim}",
    )
    groups, chosen = experts.groups, experts.top_groups
    require(
        0 < chosen <= groups and experts.num_experts % groups == 0,
        f"{chosen} of {groups} groups of {experts.num_experts} experts",
    )
    require(
        experts.top_k <= experts.num_experts // groups * chosen,
        f"{chosen} groups have fewer than {experts.top_k} experts",
    )
