"""A fingerprint of a model, and a digest of all its weights."""

from dataclasses import replace
from hashlib import blake2b

import numpy as np

from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.quant.digest import tensors_digest


def fingerprint(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    """Hash the specification without a run's options, the vocabulary, and three rows of tensors.

    It detects mistakes, not forgeries, and reads little of the model.
    """
    digest = blake2b(digest_size=16)
    digest.update(repr(replace(checkpoint.spec, context=0, early_exit=None)).encode())
    digest.update(
        repr((sorted(tokenizer.eos_ids), sorted(tokenizer.special_ids), tokenizer.bos_id)).encode()
    )
    for token in range(tokenizer.vocab_size):
        digest.update(tokenizer.token_bytes(token) + b"\0")
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(repr((name, tensor.format.name, tensor.shape)).encode())
        for part in tensor.parts.values():
            rows = np.atleast_1d(part)
            for row in sorted({0, len(rows) // 2, len(rows) - 1}) if len(rows) else ():
                digest.update(np.ascontiguousarray(rows[row]).tobytes())
    return digest.hexdigest()


def weights_digest(checkpoint: Checkpoint) -> str:
    """Hash all weights, which reads the whole model."""
    return tensors_digest(checkpoint.tensors)
