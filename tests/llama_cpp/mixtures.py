"""The formats of tensors in llama.cpp's mixtures, from files of zeros with real names
and layer counts.
"""

import json
import lzma
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from headrace.checkpoint.gguf import read_gguf
from headrace.convert.gguf.header import gguf_file_layout, u32
from headrace.convert.gguf.mixtures import MIXTURES, MixtureFacts, mixture_facts, tensor_types
from headrace.convert.tensor_writer import PlannedTensor, TensorWriter
from tests.llama_cpp.fixtures import FOLDER, unpack

WORKER = Path(__file__).with_name("quantise_worker.py")
FILE = FOLDER / "mixtures.json.xz"
_OUR_OWN = "MXFP4"


class Model(NamedTuple):
    """A kept file, whose second layer stands for all layers of this model."""

    file: str
    layers: int
    heads: int
    kv_heads: int
    cols: int
    experts: int = 0
    tied: bool = False


MODELS = {
    "llama": Model(file="llama3-gqa", layers=20, heads=8, kv_heads=2, cols=256),
    "llama-tied": Model(file="llama3-gqa", layers=32, heads=8, kv_heads=8, cols=256, tied=True),
    "llama-70b": Model(file="llama3-gqa", layers=80, heads=8, kv_heads=1, cols=256),
    "narrow": Model(file="qwen2", layers=17, heads=4, kv_heads=2, cols=320),
    "odd": Model(file="qwen2", layers=8, heads=4, kv_heads=2, cols=40, tied=True),
    "mixtral": Model(file="mixtral", layers=33, heads=8, kv_heads=2, cols=256, experts=8),
    "qwen3-moe": Model(file="qwen3-moe", layers=16, heads=8, kv_heads=4, cols=512, experts=4),
    "deepseek": Model(file="deepseek-v2", layers=12, heads=4, kv_heads=4, cols=256, experts=4),
    "gpt2": Model(file="gpt2", layers=24, heads=4, kv_heads=4, cols=256, tied=True),
    "phi3": Model(file="phi3-longrope", layers=40, heads=4, kv_heads=4, cols=256),
    "falcon": Model(file="falcon-7b", layers=32, heads=8, kv_heads=1, cols=256),
    "gpt-oss": Model(file="gpt-oss", layers=24, heads=8, kv_heads=2, cols=96, experts=4),
}


class Found(NamedTuple):
    """llama.cpp's results for a model."""

    facts: MixtureFacts
    shapes: dict[str, tuple[int, ...]]
    types: dict[str, dict[str, str]]
    """The type of each tensor, by mixture."""


def differences(found: Found) -> list[str]:
    """Differences from our rules."""
    return [
        f"{mixture} {name}: {ours} for {types[name]}"
        for mixture, types in found.types.items()
        for name, ours in tensor_types(mixture, found.shapes, found.facts).items()
        if ours != types[name]
    ]


def find(model: Model, python: str, environment: Mapping[str, str], scratch: Path) -> Found:
    """Run all mixtures with llama.cpp; some models have no Q2_K without an importance
    matrix.
    """
    source = scratch / "mixed.gguf"
    shapes = _write(model, source, scratch)
    results = {name: scratch / f"mixed-{name}.gguf" for name in MIXTURES if name != _OUR_OWN}
    jobs = [
        [str(source), str(result), MIXTURES[name].file_type] for name, result in results.items()
    ]
    command = [python, str(WORKER), "models", json.dumps(jobs)]
    made = json.loads(
        subprocess.run(
            command, capture_output=True, env=environment, timeout=300, check=True
        ).stdout
    )
    types = {
        name: _types(result)
        for (name, result), done in zip(results.items(), made, strict=True)
        if done
    }
    assert types.keys() >= results.keys() - {"Q2_K_S"}, types.keys()
    return Found(mixture_facts(read_gguf(source).metadata), shapes, types)


def keep(package: str, found: Mapping[str, Found]) -> None:
    """Keep the results of a package, for the short form in `make test`."""
    models = {
        name: {
            "facts": vars(of.facts),
            "shapes": of.shapes,
            "types": {mixture: _by_type(types) for mixture, types in of.types.items()},
        }
        for name, of in found.items()
    }
    FILE.write_bytes(
        lzma.compress(
            json.dumps({"package": package, "models": models}).encode(),
            preset=9 | lzma.PRESET_EXTREME,
        )
    )


def kept() -> dict[str, Found]:
    models = json.loads(lzma.decompress(FILE.read_bytes()))["models"]
    return {name: _found(**of) for name, of in models.items()}


def _found(
    facts: dict[str, Any], shapes: dict[str, list[int]], types: dict[str, dict[str, list[str]]]
) -> Found:
    by_name = {
        mixture: {name: kind for kind, names in of.items() for name in names}
        for mixture, of in types.items()
    }
    return Found(
        MixtureFacts(**facts), {name: tuple(shape) for name, shape in shapes.items()}, by_name
    )


def _by_type(types: Mapping[str, str]) -> dict[str, list[str]]:
    return {
        kind: [name for name in types if types[name] == kind]
        for kind in sorted(set(types.values()))
    }


def _write(model: Model, path: Path, scratch: Path) -> dict[str, tuple[int, ...]]:
    """Write the model with rows of zeros; returns the shapes of its tensors."""
    source = read_gguf(unpack(model.file, scratch))
    name = source.metadata.string("general.architecture")
    changed = {
        "block_count": model.layers,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
    }
    changed |= {"embedding_length": 16 * model.heads} | (
        {"expert_count": model.experts} if model.experts else {}
    )
    metadata = {key: source.metadata.raw(key) for key in source.metadata} | {
        f"{name}.{key}": u32(n) for key, n in changed.items()
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, stored in source.tensors.items():
        shape = (
            (model.cols,)
            if len(stored.shape) == 1
            else (*(2,) * (len(stored.shape) - 1), model.cols)
        )
        if tensor.startswith("blk.1."):
            shapes |= {
                tensor.replace("blk.1.", f"blk.{layer}."): shape for layer in range(model.layers)
            }
        elif not tensor.startswith("blk.") and not (model.tied and tensor == "output.weight"):
            shapes[tensor] = shape
    tensors = [
        PlannedTensor(tensor, "F32", shape, 4 * int(np.prod(shape)))
        for tensor, shape in shapes.items()
    ]
    path.unlink(missing_ok=True)
    file = TensorWriter(path, gguf_file_layout(metadata, tensors))
    for each in tensors:
        file.write(each.name, [np.zeros(each.nbytes, np.uint8)])
    file.close()
    return shapes


def _types(path: Path) -> dict[str, str]:
    return {record.name: record.tensor_type.name for record in gguf.GGUFReader(path).tensors}
