"""Says what a generation_config.json advises about drafts, and which option does it here.

transformers writes its defaults into every such file, so that a default advises nothing. Drafts
change no token, so the advice is never needed.
"""

from pathlib import Path
from typing import Any

from headrace.checkpoint.files import find, read_json

_FILE = "generation_config.json"
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "prompt_lookup_num_tokens": (),
    "num_assistant_tokens": (5, 20),
    "num_assistant_tokens_schedule": ("constant", "heuristic"),
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "target_lookbehind": (10,),
}
"""Fields, and the values that transformers writes without a caller's wish."""
_REMEDIES = {
    "assistant_early_exit": "set proposer to self_draft and draft_layers to {} to draft with the "
    "first layers",
    "prompt_lookup_num_tokens": "set proposer to suffix and max_draft_tokens to {} to draft from "
    "the prompt",
    "num_assistant_tokens": "set draft_depth to {} to draft as many tokens with this model",
}
_NOT_NEEDED = "adaptive speculation and the cutting of texts need no such value"


def draft_notes(folder: Path) -> list[str]:
    """A sentence for each field that advises something. Raises FormatError."""
    path = find(folder, _FILE)
    given = read_json(path) if path else {}
    return [
        f"{folder.name}: {_FILE}: {name} is {given[name]!r}: "
        + _REMEDIES.get(name, _NOT_NEEDED).format(given[name])
        for name, defaults in _DEFAULTS.items()
        if given.get(name) is not None and given[name] not in defaults
    ]
