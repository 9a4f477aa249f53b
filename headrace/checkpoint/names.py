"""Finds the text model among the tensor names of a folder.

A checkpoint may lack the prefix of the class with a head (a base model saved alone), or have the
prefixes of a multimodal model around it. transformers adds and strips them, too
(`base_model_prefix` in `modeling_utils.py`, and `conversion_mapping.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from headrace.errors import FormatError
from headrace.model.family import Layout

_PLACES = (
    "",  # a base model alone: Qwen3-Embedding, GPT-2 as first published
    "model.language_model.",  # multimodal models since transformers 4.52
    "language_model.model.",  # before: LLaVA, Gemma 3, Mistral 3, Pixtral
    "language_model.",  # a multimodal base model alone
    "model.text_model.",  # Idefics 2 and 3, SmolVLM
    "text_model.",
    "model.",
    "transformer.",
)
"""Prefixes of the text model in published folders."""
_HEAD_PLACES = ("", "language_model.", "model.", "model.language_model.")

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of names that torch.compile, FSDP and activation checkpointing leave in saved models."""
_OUTER_WRAPPERS = ("module.", "base_model.model.")
"""The same at the beginning of names: DDP and PEFT."""

MEDUSA_PREFIXES = ("medusa_head.", "medusa_heads.")
"""Starts of names of Medusa heads that are saved with their model."""

_Value = TypeVar("_Value")


class TextNames(NamedTuple):
    """The names of a folder's tensors."""

    own: Mapping[str, str]
    """Names in the layout of a text model, by the file's names."""
    others: tuple[str, ...]
    """Names outside the text model: a vision tower, a projector."""


def text_names(names: Iterable[str], layout: Layout) -> TextNames:
    """Rename the text model to the layout's names. Raises FormatError for a double tensor."""
    files_names = {name: _unwrapped(name) for name in sorted(names)}
    found = _text_names(sorted(files_names.values()), layout)
    outside = set(found.others)
    own = {name: found.own[bare] for name, bare in files_names.items() if bare not in outside}
    _check_unique(own)
    return TextNames(own, tuple(name for name, bare in files_names.items() if bare in outside))


def _text_names(names: Sequence[str], layout: Layout) -> TextNames:
    base, layers, firsts = _body(layout)
    if not base:
        return TextNames({name: name for name in names}, ())
    places = dict.fromkeys((base, *_PLACES, f"language_model.{base}"))
    counts = Counter(place for name in names for place in places if name.startswith(place + layers))
    place = max(places, key=lambda place: counts[place])
    head = layout.tensors["head"].name.removesuffix("weight") if "head" in layout.tensors else ""

    own: dict[str, str] = {}
    others = []
    for name in names:
        rest = name.removeprefix(place)
        if head and (outer := _outer(name, head)) is not None:
            own[name] = name.removeprefix(outer)
        elif name.startswith(place) and rest.partition(".")[0] in firsts:
            own[name] = base + rest
        elif place and name.startswith(place):
            own[name] = name  # a part of the text model that the layout does not have
        else:
            others.append(name)
    return TextNames(own, tuple(others))


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    while outer := next((place for place in _OUTER_WRAPPERS if name.startswith(place)), None):
        name = name.removeprefix(outer)
    return name


def renamed(tensors: Mapping[str, _Value], names: Mapping[str, str]) -> dict[str, _Value]:
    """Select and rename tensors, or other values by the file's names."""
    return {own: tensors[name] for name, own in names.items()}


def modules(names: Iterable[str]) -> list[str]:
    """The outermost modules of tensors, without the prefix of the whole model."""
    return sorted({name.removeprefix("model.").partition(".")[0] for name in names})


def _body(layout: Layout) -> tuple[str, str, set[str]]:
    """The prefix of the layout, the prefix of layers after it, and all first parts after it."""
    sources = [source.name for source in layout.tensors.values()]
    layered = next((name for name in sources if "{}" in name), "")
    base, dot, layers = layered.partition("{}")[0].partition(".")
    if not layers:
        return "", "", set()
    base += dot
    inside = [name.removeprefix(base) for name in sources if name.startswith(base)]
    return base, layers, {name.partition(".")[0] for name in inside}


def _outer(name: str, head: str) -> str | None:
    return next((place for place in _HEAD_PLACES if name.startswith(place + head)), None)


def _check_unique(own: Mapping[str, str]) -> None:
    by_own: dict[str, str] = {}
    for name, mine in own.items():
        if (other := by_own.setdefault(mine, name)) != name:
            raise FormatError(
                f"tensors {other[:100]} and {name[:100]} are both the model's {mine[:100]}; "
                "remove either"
            )
