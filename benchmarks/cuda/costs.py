"""Bytes that launches must move, from the launches themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headrace.backend.cuda.executable import Plan
from headrace.backend.cuda.launch import Launch


@dataclass(frozen=True)
class Context:
    """What a step reads of the KV: tokens of all its sequences, bytes of a token in a layer."""

    tokens: int
    token_bytes: int


def arguments(launch: Launch) -> dict[str, Any]:
    """The arguments of a launch by name."""
    return dict(zip(launch.kernel.arg_names, launch.args, strict=False))


def label(launch: Launch, op: str) -> str:
    """An op, with the outputs and columns of its product."""
    named = arguments(launch)
    if launch.name != "linear_kernel":
        return launch.name.removesuffix("_kernel")
    return f"{op} {named['N']} x {named['K']}"


def launch_bytes(launch: Launch, context: Context) -> int:
    """Bytes that a launch reads and writes in the memory of the GPU, each once."""
    named = arguments(launch)
    match launch.name:
        case "attention_kernel":
            return context.tokens * context.token_bytes + 2 * nbytes(named["q"])
        case "attention_merge_kernel" | "embed_kernel" | "gather_rows_kernel":
            return 2 * nbytes(named["out"])
        case "kv_write_kernel":
            return 2 * nbytes(next(iter(tensors(launch.args))))
    # Tensors that stand in for absent ones are arguments twice.
    each = {id(tensor): tensor for tensor in tensors(launch.args)}
    return sum(map(nbytes, each.values()))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors(value)


@dataclass
class Kernels:
    """Launches of a step that do the same work: their number, bytes, and seconds."""

    name: str
    launches: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def share(self, copied: float) -> float:
        """Share of the copy bandwidth, in bytes per second, that they reach."""
        return self.bytes / self.seconds / copied if self.seconds else 0.0


def by_kernel(plan: Plan, seconds: list[float], context: Context) -> list[Kernels]:
    """The launches of a plan by work, the longest first; `seconds` of each launch."""
    found: dict[str, Kernels] = {}
    for launch, op, took in zip(plan.launches, plan.names, seconds, strict=True):
        kernels = found.setdefault(label(launch, op), Kernels(label(launch, op)))
        kernels.launches += 1
        kernels.bytes += launch_bytes(launch, context)
        kernels.seconds += took
    return sorted(found.values(), key=lambda kernels: -kernels.seconds)
