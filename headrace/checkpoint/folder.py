"""The configuration of a Hugging Face folder."""

import os
from pathlib import Path
from typing import Any

from headrace.checkpoint.advised_drafts import draft_notes
from headrace.checkpoint.architecture import layout_of
from headrace.checkpoint.files import find, list_names, member, read_file, read_json
from headrace.checkpoint.head import settle_head
from headrace.checkpoint.names import MEDUSA_PREFIXES, modules, renamed, text_names
from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.quantisation.sparse import sparse_loss
from headrace.checkpoint.quantisation.stated import stated_quantisation
from headrace.checkpoint.safetensors import read_folder
from headrace.checkpoint.text_part import TextPart, text_part
from headrace.errors import FormatError
from headrace.model import FAMILIES
from headrace.model.family import ConfigLayout
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_MAX_TEMPLATE_BYTES = 1 << 20
_MORE_TEMPLATES = "additional_chat_templates"


@frozen(eq=False)
class Folder:
    path: Path
    config: JsonFields
    layout: ConfigLayout
    spec: ModelSpec
    """As the configuration says; `settle_head` compares it with the tensors."""
    text_part: TextPart | None
    """Set if the folder has a multimodal model, and `config` is of its text model."""

    def read(self) -> "FolderTensors":
        """Raises as `read_folder`, and FormatError for a double tensor."""
        stored, quantisation = read_folder(self.path), stated_quantisation(self.config, self.path)
        names = text_names(stored, self.layout)
        own = dict(names.own)
        heads_for_drafts = [name for name in names.others if name.startswith(MEDUSA_PREFIXES)]
        if self.text_part is None:
            own |= {name: name for name in names.others if name not in heads_for_drafts}
        tensors = renamed(stored, own)
        if quantisation is not None:
            tensors = method_of(quantisation).assemble(quantisation, tensors, self.path.name)
        is_stated = self.text_part is None or self.text_part.is_tie_stated
        heads = settle_head(self.spec, self.layout, tensors, is_stated=is_stated)
        left_out = tuple(name for name in names.others if name not in own)
        notes = [f"{self.path.name}: {heads.note}"] if heads.note else []
        if heads_for_drafts:
            notes.append(
                f"{self.path.name}: the folder has Medusa heads; set medusa_heads to the folder to "
                "draft with them"
            )
        notes += draft_notes(self.path)
        if self.text_part:
            notes.insert(0, self._text_note(self.text_part, left_out))
        if heads.equal_head:
            left_out += (heads.equal_head,)
        return FolderTensors(
            spec=heads.spec,
            tensors=heads.tensors,
            left_out=left_out,
            notes=tuple(notes),
            loss=sparse_loss(quantisation),
        )

    def _text_note(self, part: TextPart, left_out: tuple[str, ...]) -> str:
        note = f"{self.path.name}: only the text model of {part.whole} is used"
        if not left_out:
            return note
        number = f"{len(left_out):,} tensor{'s' if len(left_out) > 1 else ''}"
        return f"{note}; left out: {', '.join(modules(left_out))} ({number})"


@frozen(eq=False)
class FolderTensors:
    spec: ModelSpec
    tensors: dict[str, StoredTensor]
    """By the layout's names, in the shapes of an unquantised model."""
    left_out: tuple[str, ...]
    """Names in the files of tensors that the model does not use."""
    notes: tuple[str, ...]
    """Sentences for the user."""
    loss: str
    """What pruning took from the weights, in words; empty if they are dense."""


def open_folder(path: Path) -> Folder:
    """Raises UnsupportedModelError, which names the field, or FormatError."""
    values = read_json(member(path, "config.json"))
    part = text_part(values)
    config = JsonFields(part.config if part else values, "config.json")
    layout = layout_of(
        _family_name(config),
        (family.config for family in FAMILIES.values()),
        config.where,
        lambda: _usual_names(path, is_multimodal="text_config" in values),
    )
    if (quantisation := stated_quantisation(config, path)) is not None:
        method_of(quantisation)
    spec = layout.spec(config.named(layout.fields))
    return Folder(path=path, config=config, layout=layout, spec=spec, text_part=part)


def _usual_names(path: Path, *, is_multimodal: bool) -> list[str]:
    """The names of an unknown model's tensors, with the prefix that most families have."""
    usual = FAMILIES["llama"].config
    assert usual
    names = text_names(read_folder(path), usual)
    return [*names.own.values(), *(() if is_multimodal else names.others)]


def chat_template(folder: Path, name: str = "default") -> str | None:
    """Read one of `chat_templates`. Raises FormatError."""
    return chat_templates(folder).get(name)


def chat_templates(folder: Path) -> dict[str, str]:
    """Read all templates by name; a single one is `default`. Raises FormatError.

    A file `chat_template.jinja` replaces the templates in `tokenizer_config.json`.
    """
    files = {"default": find(folder, "chat_template.jinja")}
    if home := find(folder, _MORE_TEMPLATES):
        for name in list_names(home):
            if name.endswith(".jinja"):
                files[name.removesuffix(".jinja")] = find(home, name)
    templates = {} if files["default"] else _listed_templates(folder)
    for name, path in files.items():
        if path is not None:
            try:
                templates[name] = read_file(path, _MAX_TEMPLATE_BYTES).decode()
            except UnicodeDecodeError as error:
                raise FormatError(f"{path.name}: {error}") from error
    return templates


def _listed_templates(folder: Path) -> dict[str, str]:
    """Read the templates in `tokenizer_config.json`, or else in `chat_template.json`."""
    for file_name in ("tokenizer_config.json", "chat_template.json"):
        path = find(folder, file_name)
        given = read_json(path).get("chat_template") if path else None
        if given is None:
            continue
        templates: dict[str, str] = {}
        for entry in given if isinstance(given, list) else [{"name": "default", "template": given}]:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                continue
            template = entry.get("template")
            if template is None:
                continue
            if not isinstance(template, str):
                raise FormatError(
                    f"{file_name}: chat_template is not a string or a list of named templates"
                )
            templates[entry["name"]] = template
        return templates
    return {}


def model_name(folder: Path) -> str:
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return Path(os.path.realpath(folder)).name


def _family_name(config: JsonFields) -> str:
    names: Any = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    kind: Any = config.get("model_type")
    if not kind:
        raise FormatError(
            "config.json: it names no architecture (architectures or model_type); name the folder "
            "of the model itself, which may be a subfolder"
        )
    return str(kind)
