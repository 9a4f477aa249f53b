import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

from headrace.errors import HeadraceError, UnsupportedModelError
from headrace.model.family import Layout

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_OTHER_KINDS = (
    (
        "bert|mpnet|electra|t5encoder",
        "is an encoder, as in folders of sentence-transformers, and Headrace runs decoders; for "
        "embeddings use a decoder that was trained for them, such as Qwen3-Embedding",
    ),
    (
        "^clip|siglip|^vit(for|model|$)|^dinov|^deit|whisper|wav2vec|hubert",
        "reads images or sound, and Headrace reads text; choose a language model",
    ),
    (
        "t5(for|model|$)|bart|marian|pegasus|m2m",
        "has an encoder and a decoder, and Headrace runs decoders; choose a model with a decoder "
        "alone, such as Qwen3",
    ),
    (
        "mamba|rwkv|jamba|zamba|bamba|recurrent|hybrid|(qwen3|glm5)_?next|qwen3_?5|nemotron_?h"
        "|falcon[-_]?h1|kimi_?linear|lfm[23]",
        "is of a family with layers that have a recurrent state or a convolution, which Headrace "
        "does not run; choose a model of a family with attention in all layers, such as Qwen3",
    ),
    (
        "for(sequence|token)classification|forquestionanswering|rewardmodel",
        "gives scores of classes, not text, and Headrace has no such heads; choose the model with "
        "a head of tokens (...ForCausalLM)",
    ),
)
"""Patterns of names, in any case, of models that are no decoders of text, and advice."""
_MAX_SHOWN = 4
_MIN_SAME = 4
"""Letters at the beginning of two names that show a common origin."""
_HEADED = ("ForCausalLM", "LMHeadModel")
_BASES = ("Model", "TextModel")

_Layout = TypeVar("_Layout", bound=Layout)


def layout_of(
    name: str,
    layouts: Iterable[_Layout | None],
    where: str,
    tensor_names: Callable[[], Iterable[str]],
) -> _Layout:
    """Find the layout of architecture `name`, in any case, or of its class without a head.

    Raises UnsupportedModelError, which names the most similar family.
    """
    known, wanted = [], name.casefold()
    for layout in filter(None, layouts):
        if wanted in _names(layout):
            return layout
        known.append(layout)
    raise _unknown(name, known, where, tensor_names)


def _names(layout: Layout) -> set[str]:
    names = {name.casefold() for name in layout.architectures}
    whole = layout.architectures[0]
    # Embedding models are saved without the class of the head: Qwen3Model, GPT2Model.
    for suffix in _HEADED:
        if whole.endswith(suffix):
            names |= {f"{whole.removesuffix(suffix)}{base}".casefold() for base in _BASES}
    return names


def _unknown(
    name: str, layouts: Sequence[Layout], where: str, tensor_names: Callable[[], Iterable[str]]
) -> UnsupportedModelError:
    for pattern, advice in _OTHER_KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return UnsupportedModelError(f"{where}: architecture {name[:80]!r} {advice}")
    try:
        kinds = Counter(_NUMBER.sub("{}", tensor) for tensor in tensor_names())
    except HeadraceError:
        # The folder has no weights, or broken ones.
        kinds = Counter()
    known = ", ".join(sorted({layout.architectures[0] for layout in layouts}))
    error = f"{where}: unknown architecture {name[:80]!r}"
    if not kinds:
        return UnsupportedModelError(f"{error}; known: {known}")

    def nearness(layout: Layout) -> tuple[int, int]:
        """The number of known tensors, then the length of the same beginning of names."""
        letters = zip(name.casefold(), layout.architectures[0].casefold(), strict=False)
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], letters))
        num_tensors = sum(n for kind, n in kinds.items() if kind in _places(layout))
        return num_tensors, num_same if num_same >= _MIN_SAME else 0

    nearest = max(layouts, key=nearness)
    unknown = [
        kind
        for kind in kinds
        if kind not in _places(nearest) and not kind.endswith(nearest.ignored)
    ]
    if len(unknown) == len(kinds):
        return UnsupportedModelError(
            f"{error}, whose tensor names match no known architecture; known: {known}"
        )
    tensors = "has all of its tensors, but may compute other numbers"
    if unknown:
        more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
        shown = ", ".join(kind[:80] for kind in sorted(unknown)[:_MAX_SHOWN])
        tensors = f"does not have {shown}{more}"
    return UnsupportedModelError(
        f"{error}; the nearest known architecture, {nearest.architectures[0]}, {tensors}; "
        "choose a model of that architecture"
    )


def _places(layout: Layout) -> set[str]:
    return {
        place.name for places in (layout.tensors, *layout.alternatives) for place in places.values()
    }
