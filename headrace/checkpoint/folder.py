"""The configuration of a Hugging Face folder."""

import os
from pathlib import Path
from typing import Any

from headrace.checkpoint.architecture import layout_of
from headrace.checkpoint.files import find, member, read_file, read_json
from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.safetensors import read_folder
from headrace.errors import FormatError
from headrace.model import FAMILIES
from headrace.model.family import ConfigLayout
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_QUANTISATION = "quantization_config"
_MAX_TEMPLATE_BYTES = 1 << 20


@frozen(eq=False)
class Folder:
    path: Path
    config: JsonFields
    layout: ConfigLayout
    spec: ModelSpec

    def tensors(self) -> dict[str, StoredTensor]:
        tensors, quantisation = read_folder(self.path), self.config.get(_QUANTISATION)
        if quantisation is None:
            return tensors
        return method_of(quantisation).assemble(quantisation, tensors, self.path.name)


def open_folder(path: Path) -> Folder:
    """Raises UnsupportedModelError, which names the field, or FormatError."""
    config = JsonFields(read_json(member(path, "config.json")), "config.json")
    layout = layout_of(
        _family_name(config),
        (family.config for family in FAMILIES.values()),
        config.where,
        lambda: read_folder(path),
    )
    if (quantisation := config.get(_QUANTISATION)) is not None:
        method_of(quantisation)
    return Folder(path, config, layout, layout.spec(config.named(layout.fields)))


def chat_template(folder: Path, name: str = "default") -> str | None:
    """Read a template. Raises FormatError."""
    home = folder if name == "default" else find(folder, "additional_chat_templates")
    file_name = "chat_template.jinja" if name == "default" else f"{name}.jinja"
    if home and (path := find(home, file_name)):
        try:
            return read_file(path, _MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{path.name}: {error}") from error
    if not (path := find(folder, "tokenizer_config.json")):
        return None
    template = read_json(path).get("chat_template")
    if isinstance(template, list):
        named = [
            entry.get("template")
            for entry in template
            if isinstance(entry, dict) and entry.get("name") == name
        ]
        template = named[-1] if named else None
    elif name != "default":
        return None
    if template is not None and not isinstance(template, str):
        raise FormatError(
            "tokenizer_config.json: chat_template is not a string or a list of named templates"
        )
    return template


def model_name(folder: Path) -> str:
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return Path(os.path.realpath(folder)).name


def _family_name(config: JsonFields) -> str:
    names: Any = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    return str(config.get("model_type"))
