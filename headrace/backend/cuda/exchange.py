"""Exchanges with other ranks, as launches of a plan."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from headrace.backend.cuda.launch import Launch


class Transport(Protocol):
    """Carries tensors between the ranks of a stage, and between stages.

    A call takes its place in the stream: it comes after all earlier work there, and later work
    comes after it. On a GPU the host does not wait. All ranks make the same calls in the same
    order. Tensors are contiguous. In the interpreter a call raises RankLostError if a rank does
    not respond.
    """

    share: int
    """Number of this rank in its stage."""

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write x of each rank to `out`, in order of the ranks; `out` is as long as all of them."""

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        """Send `sent[r]` numbers of x to rank r; receive `received[r]` from it. Both are flat."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy x of the first rank of the stage to the others."""

    def send(self, x: torch.Tensor, stage: int) -> None:
        """Send x to the rank with this share in another stage."""

    def receive(self, out: torch.Tensor, stage: int) -> None: ...


class Exchange(Launch):
    """A launch that is no kernel of ours. It needs no compilation."""

    __slots__ = ("_name",)

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        super().__init__(None, (), (), {})
        self._name, self._run = name, run

    def compile(self) -> None: ...

    @property
    def name(self) -> str:
        return self._name
