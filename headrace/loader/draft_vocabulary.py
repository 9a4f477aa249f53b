"""Compares the vocabulary of a draft with the target's: equal, translated, or refused."""

from dataclasses import replace

import numpy as np

from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checkpoint.translation import LOOKBEHIND, Translator
from headrace.errors import RequestError
from headrace.quant.formats import StoredTensor
from headrace.sampling.sampler import make_sampler
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.draft_model import OtherVocabulary

_NEVER = -1e9
"""Logit bias of tokens that a model does not have; finite, because samplers check logits."""
_MOST = 0.75
"""Share of the target's tokens that favours drafts of shared tokens for sampled sequences. With 0.8
of the target's they were accepted more often than drafts by text, with 0.26 less often
(docs/internals/draft_vocabulary.md).
"""


def check_vocabulary(option: str, name: str, draft: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise RequestError unless the model `name`, the value of `option`, has the target's tokens.

    Control tokens may differ: the target verifies drafts, so they only cost acceptance.
    """
    other = draft.load_tokenizer()
    token = first_difference(other, tokenizer)
    if token is not None:
        raise RequestError(
            f"{option} '{name}' has another vocabulary: its token {token:,} is "
            f"{other.token_bytes(token)!r}, in the model {tokenizer.token_bytes(token)!r}; choose "
            "another form of the same model"
        )


def first_difference(draft: Tokenizer, target: Tokenizer) -> int | None:
    """The first token that two vocabularies spell differently, besides control tokens."""
    control = target.special_ids & draft.special_ids
    for token in range(min(target.vocab_size, draft.vocab_size)):
        if draft.token_bytes(token) != target.token_bytes(token) and token not in control:
            return token
    return None


def translator_of(draft: Checkpoint, target: Checkpoint, tokenizer: Tokenizer) -> Translator | None:
    """Return how a draft model with other tokens reads the target's; None if it has the same."""
    other = draft.load_tokenizer()
    if first_difference(other, tokenizer) is None:
        return None
    return Translator(tokenizer, other, target.spec.vocab_size, draft.spec.vocab_size)


def other_vocabulary(translator: Translator) -> OtherVocabulary:
    """Make what the proposer needs to draft with another vocabulary."""
    draft_size, target_size = translator.draft.size, translator.target.size
    target_ids = translator.shared_tokens()
    shared = np.flatnonzero(target_ids >= 0)
    own_ids = np.full(target_size, -1, np.int32)
    own_ids[target_ids[shared]] = shared
    likeliest = SamplingParams(temperature=0)
    return OtherVocabulary(
        new_text=translator.new_text,
        lookbehind=LOOKBEHIND,
        sampler=make_sampler(likeliest, [], draft_size, 0, ()),
        target_ids=target_ids,
        own_ids=own_ids if len(shared) >= _MOST * len(translator.target.ids) else None,
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
