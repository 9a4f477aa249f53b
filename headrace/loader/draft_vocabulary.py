"""Makes the vocabulary of a draft model equal to the target's, or refuses it."""

from dataclasses import replace

import numpy as np

from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.quant.formats import StoredTensor

_NEVER = -1e9
"""Logit bias of tokens that a model does not have; finite, because samplers check logits."""


def check_vocabulary(option: str, name: str, draft: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise RequestError unless the model `name`, the value of `option`, has the target's tokens.

    Control tokens may differ: the target verifies drafts, so they only cost acceptance.
    """
    other = draft.load_tokenizer()
    control = tokenizer.special_ids & other.special_ids
    for token in range(min(tokenizer.vocab_size, other.vocab_size)):
        drafted, own = other.token_bytes(token), tokenizer.token_bytes(token)
        if drafted != own and token not in control:
            raise RequestError(
                f"{option} '{name}' has another vocabulary: its token {token:,} is {drafted!r}, "
                f"in the model {own!r}; choose a smaller model with the tokenizer of this one, or "
                "the proposer suffix, which needs no model"
            )


def with_vocab_size(draft: Checkpoint, size: int) -> Checkpoint:
    """Cut or pad the embedding and the head to `size` rows.

    Models of one family pad the same tokens to different sizes (Qwen2.5: 151,936 or 152,064).
    A bias keeps padding out of drafts.
    """
    own_size = draft.spec.vocab_size
    if size == own_size:
        return draft
    tensors = dict(draft.tensors)
    rows = np.minimum(np.arange(size), own_size - 1)
    for name in ("embed", "head"):
        if name in tensors:
            stored = tensors[name]
            order = rows if stored.row_order is None else stored.row_order[rows]
            tensors[name] = stored.take(name, order)
    spec = replace(draft.spec, vocab_size=size)
    if draft.spec.head_bias or size > own_size:
        bias = np.full(size, _NEVER, np.float32)
        own_bias = tensors["head_bias"].dequantise() if draft.spec.head_bias else 0.0
        bias[:own_size] = own_bias[:size] if isinstance(own_bias, np.ndarray) else own_bias
        tensors["head_bias"] = StoredTensor.from_floats("head_bias", bias)
        spec = replace(spec, head_bias=True)
    return replace(draft, spec=spec, tensors=tensors)
