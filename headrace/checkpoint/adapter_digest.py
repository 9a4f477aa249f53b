"""A digest of an adapter: equal digests mean equal numbers, whatever file they come from."""

from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from headrace.program.adapter import Adapter
from headrace.quant.digest import tensors_digest
from headrace.quant.formats import StoredTensor


def adapter_digest(adapter: Adapter) -> str:
    digest = blake2b(digest_size=16)
    for name, matrices in sorted(adapter.items()):
        digest.update(f"{name}\n".encode())
        _add(digest, matrices)
    return digest.hexdigest()


def _add(digest: "blake2b", value: Any) -> None:
    match value:
        case np.ndarray():
            digest.update(f"{value.dtype} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        case StoredTensor():
            digest.update(tensors_digest({"": value}).encode())
        case tuple():
            for item in value:
                _add(digest, item)
        case _ if is_dataclass(value):
            for field in fields(value):
                _add(digest, getattr(value, field.name))
        case _:
            digest.update(f"{value!r}\n".encode())
