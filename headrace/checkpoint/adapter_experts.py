"""Low-rank matrices of experts that a file stacks: one tensor for all experts of a layer.

PEFT's `target_parameters` (0.17 and newer), mlx-lm's `switch_mlp`, llama.cpp's `ffn_gate_exps`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from itertools import permutations

import numpy as np

from headrace.checkpoint.adapter_parts import Floats, Stack, Stacks
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model.family import Layout
from headrace.model.spec import ModelSpec
from headrace.program.adapter import LowRank

_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate|up|down)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d{1,8})\.")
_PARAMETERS = {"gate_up_proj": "gate_up", "down_proj": "down"}
"""PEFT's parameters in the order of transformers' modules: the first wrapper is the innermost."""
_NESTED = ".base_layer"


def layer_of(module: str, where: str) -> int:
    """The layer of a module. Raises UnsupportedModelError."""
    match = _LAYER.search(module)
    if match is None:
        raise UnsupportedModelError(
            f"{where}: {module[:200]} is in no layer; merge the adapter with its own tools and "
            "load the merged model"
        )
    return int(match[1])


def expert_parameters(given: object, module: str, where: str) -> list[str]:
    """The parts of `target_parameters` that are of this module. Raises UnsupportedModelError."""
    names = given if isinstance(given, list) else []
    found = set()
    for name in names:
        path, _, parameter = str(name).rpartition(".")
        if f".{module}".endswith(f".{path}") or not path:
            found.add(parameter)
    if not found or not found <= _PARAMETERS.keys():
        odd = min(found - _PARAMETERS.keys(), default="no parameter")
        raise UnsupportedModelError(
            f"{where}: target_parameters has {odd[:100]} for {module[:200]}, and only "
            f"{' and '.join(_PARAMETERS)} are supported; merge the adapter with PEFT "
            "(merge_and_unload) and load the merged model"
        )
    return [name for name in _PARAMETERS if name in found]


def peft_stacks(
    pairs: Mapping[str, tuple[Floats, Floats]],
    parameters: Mapping[str, list[str]],
    scale: Callable[[str, int], float],
    spec: ModelSpec,
    where: str,
) -> Stacks:
    """The stacks of PEFT's `parameters` of modules; `scale` is of a name and a rank.

    `pairs` by module has A [experts * rank, cols] and B [rows, rank * experts]; several parameters
    of one module are nested (`X.base_layer`). Raises FormatError for other shapes.
    """
    assert spec.experts
    count, stacks = spec.experts.num_experts, Stacks()
    for module, names in parameters.items():
        nested = [module + depth * _NESTED for depth in reversed(range(len(names)))]
        if any(name not in pairs for name in nested):
            raise FormatError(
                f"{where}: {module[:200]} lacks matrices of {' or '.join(names)}; save the adapter "
                "again"
            )
        for order in permutations(names):
            made = [
                _split(*pairs[name], _PARAMETERS[parameter], spec)
                for name, parameter in zip(nested, order, strict=True)
            ]
            if all(each is not None for each in made):
                break
        else:
            a, b = pairs[nested[0]]
            raise FormatError(
                f"{where}: {nested[0][:200]} has matrices {list(a.shape)} and {list(b.shape)}, "
                f"which are not of {' or '.join(names)} of {count:,} experts of {spec.dim:,} by "
                f"{spec.experts.ffn_dim:,}; load the model that it was trained for"
            )
        layer = layer_of(module, where)
        for parameter, each in zip(order, made, strict=True):
            assert each is not None
            name, (down, up) = f"{module}.{parameter}", each
            stack = Stack(name, down, up, scale(name, down.shape[1]))
            stacks[layer, _PARAMETERS[parameter]] = stack
    return stacks


def _split(a: Floats, b: Floats, part: str, spec: ModelSpec) -> tuple[Floats, Floats] | None:
    """A and B by expert; None if they are not of this part."""
    assert spec.experts
    count = spec.experts.num_experts
    if len(a) % count or len(a) != b.shape[1]:
        return None
    down = a.reshape(count, -1, a.shape[1])
    up = b.reshape(len(b), -1, count).transpose(2, 0, 1)
    rows, cols = _size(part, spec)
    if (a.shape[1], len(b)) == (cols, rows):
        return down, up
    if (a.shape[1], len(b)) == (rows, cols):  # versions that take stored columns for rows
        return up.transpose(0, 2, 1), down.transpose(0, 2, 1)
    return None


def _size(part: str, spec: ModelSpec) -> tuple[int, int]:
    assert spec.experts
    ffn_dim = spec.experts.ffn_dim
    return {"gate_up": (2 * ffn_dim, spec.dim), "down": (spec.dim, ffn_dim)}.get(
        part, (ffn_dim, spec.dim)
    )


def add_stacks(
    stacks: Stacks,
    halves: Mapping[tuple[str, str], Mapping[str, Floats]],
    scale: Callable[[int], float],
    where: str,
) -> None:
    """Add the halves `a` [experts, rank, cols], or [experts * rank, cols], and `b` [experts,
    rows, rank], by module and part; `scale` is of a rank. Raises FormatError.
    """
    for (module, part), both in halves.items():
        a, b = both.get("a"), both.get("b")
        fits = a is not None and b is not None and b.ndim == 3 and len(a) and len(b)
        if not fits or a is None or b is None or a.size != len(b) * b.shape[2] * a.shape[-1]:
            shapes = ", ".join(f"{name} {list(half.shape)}" for name, half in sorted(both.items()))
            raise FormatError(
                f"{where}: {module[:200]} has {shapes}; expected both matrices of all experts; "
                "save the adapter again"
            )
        down = a.reshape(len(b), -1, a.shape[-1])
        stack = Stack(name=module, down=down, up=b, scale=scale(down.shape[1]))
        stacks[layer_of(module, where), part] = stack


def expert_delta(
    name: str, stacks: Stacks, layout: Layout, spec: ModelSpec, where: str
) -> tuple[tuple[int, str], LowRank] | None:
    """The stack that changes our weight `name`, and its matrices. Raises FormatError."""
    match = _EXPERT.fullmatch(name)
    if match is None or not stacks:
        return None
    layer, expert, part = int(match[1]), int(match[2]), match[3]
    keys: Collection[tuple[int, str]] = [(layer, part), (layer, "gate_up")]
    key = next((key for key in keys if key in stacks and (key[1] == part or part != "down")), None)
    if key is None:
        return None
    stack = stacks[key]
    rows, cols = _size(key[1], spec)
    if (stack.down.shape[2], stack.up.shape[1]) != (cols, rows) or expert >= len(stack.down):
        raise FormatError(
            f"{where}: {stack.name[:200]} has matrices {list(stack.down.shape)} and "
            f"{list(stack.up.shape)}, but the model's experts are {rows:,} by {cols:,}; "
            "load the model that it was trained for"
        )
    up = stack.up[expert]
    if key[1] == "gate_up":
        half = rows // 2
        is_interleaved = "gate_up_proj" in layout.tensors["layers.{}.experts.{}.gate"].name
        first = 0 if part == "gate" else 1
        up = up[first::2] if is_interleaved else up[first * half : (first + 1) * half]
    return key, LowRank(
        np.ascontiguousarray(stack.down[expert]), np.ascontiguousarray(up), stack.scale
    )
