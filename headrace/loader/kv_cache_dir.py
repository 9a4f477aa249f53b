"""Opens the folder of `kv_cache_dir`, under an identity that only equal KV shares."""

import os
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.backend import Executable, KvBlockHost, instructions
from headrace.checkpoint.adapter_digest import adapter_digest
from headrace.checkpoint.fingerprint import weights_digest
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.errors import RequestError
from headrace.kv.disk import DiskTier
from headrace.kv.folder import KvFolder, open_private
from headrace.loader.drafts import model_program
from headrace.loader.key_rounding import rounding_digest
from headrace.planner.host import kernels_checksum

_MODEL_BYTES = 16


def check_kv_cache_dir(config: EngineConfig) -> None:
    """Check that a `kv_cache_dir` suits the other options, and make the folder.

    Raises RequestError for other options, CacheError for a folder that cannot be used.
    """
    if not config.prefix_cache:
        raise RequestError(
            "kv_cache_dir keeps the blocks of the prefix cache, which is off; set prefix_cache, or "
            "leave kv_cache_dir empty"
        )
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if not config.traits.gives_kv_blocks or ranks > 1:
        kind = f"{ranks} processes" if ranks > 1 else f"the backend {config.backend}"
        raise RequestError(
            f"kv_cache_dir is for the backend cpu in one process, not for {kind}; leave "
            "kv_cache_dir empty"
        )
    open_private(_folder(config))


def _folder(config: EngineConfig) -> Path:
    return Path(os.path.expanduser(config.kv_cache_dir))


def open_disk_tier(
    model: str, config: EngineConfig, checkpoint: Checkpoint, executable: Executable, kv: KvConfig
) -> DiskTier:
    """Open the folder of `kv_cache_dir` for the KV of an executable.

    Raises CacheError if it cannot be used.
    """
    assert isinstance(executable, KvBlockHost), "check_kv_cache_dir allows no other backend"
    about: dict[str, Any] = {
        "model": model,
        "kv_dtype": kv.dtype,
        "block_tokens": kv.block_size,
        "version": version("headrace"),
    }
    folder = KvFolder(
        _folder(config),
        kv_identity(config, checkpoint, kv),
        about,
        config.kv_cache_dir_bytes,
    )
    return DiskTier(folder, executable.kv_blocks(), kv.block_size, adapter_digest)


def kv_identity(config: EngineConfig, checkpoint: Checkpoint, kv: KvConfig) -> bytes:
    """Hash all that decides the bits of KV besides the tokens: 16 bytes.

    It reads all weights. The program has the equations with each constant, lossy modes included.
    Another version or build of Headrace, or other instructions, may round in another way.
    """
    parts = (
        version("headrace"),
        kernels_checksum(),
        config.backend,
        instructions(config.backend),
        config.activations,
        kv.dtype,
        kv.block_size,
        rounding_digest(kv.key_rounding),
        weights_digest(checkpoint),
        repr(model_program(config, checkpoint)),
    )
    return blake2b(repr(parts).encode(), digest_size=_MODEL_BYTES).digest()
