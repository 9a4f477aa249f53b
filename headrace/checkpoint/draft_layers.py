"""Counts the layers for drafts that a model has in its own files."""

from headrace.checkpoint.gguf import Metadata
from headrace.checkpoint.load import Checkpoint
from headrace.model import FAMILIES
from headrace.model.family import Layout


def num_draft_layers(target: Checkpoint) -> int:
    """Return the number of layers for drafts in a model's files."""
    layout = layout_of(target)
    layers = layout.draft_layers if layout else None
    if not layers:
        return 0
    found = {
        name.removeprefix(layers.prefix).partition(".")[0]
        for name in target.stored
        if layers.has(name, target.spec.num_layers)
    }
    return len(found)


def layout_of(target: Checkpoint) -> Layout | None:
    """Return the published names of a model's files; None if its family is unknown in them."""
    family = FAMILIES[target.spec.architecture]
    return family.gguf if isinstance(target.tokenizer_source, Metadata) else family.config
