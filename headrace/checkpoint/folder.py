"""What a Hugging Face folder says of its model: which family and how it is quantised, its
specification, its chat template.
"""

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
    """A folder whose `config.json` has been read and checked; of its tensors nothing has been
    opened.
    """

    path: Path
    config: JsonFields
    layout: ConfigLayout
    spec: ModelSpec

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by the file's names, with the parts of quantised ones together. Raises as
        `read_folder` and the method do.
        """
        tensors, quantisation = read_folder(self.path), self.config.get(_QUANTISATION)
        return (
            tensors
            if quantisation is None
            else method_of(quantisation).assemble(quantisation, tensors, self.path.name)
        )


def open_folder(path: Path) -> Folder:
    """Read `config.json`. Raises UnsupportedModelError naming the field, FormatError for a missing
    or malformed one.
    """
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
    """The chat template of this name: in a file of its own, else in `tokenizer_config.json`, which
    has the default one or several.
    """
    home = folder if name == "default" else find(folder, "additional_chat_templates")
    if home and (
        path := find(home, "chat_template.jinja" if name == "default" else f"{name}.jinja")
    ):
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
            "tokenizer_config.json: chat_template must be a string or a list of named ones"
        )
    return template


def model_name(folder: Path) -> str:
    """The folder's name; for the Hugging Face cache (`models--ORG--NAME/snapshots/REVISION`) that
    of the repository.
    """
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return Path(os.path.realpath(folder)).name


def _family_name(config: JsonFields) -> str:
    named: Any = config.get("architectures")
    return (
        named[0]
        if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str)
        else str(config.get("model_type"))
    )
