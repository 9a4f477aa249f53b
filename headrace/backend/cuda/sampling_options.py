"""What the device knows of each native sampler: its options as a row of a table, and the state of
its penalties.

The native sampler stays the truth. Its state is uploaded when it first draws; after that each
launch adds what it draws to the copy on the device, so that the next can be issued before the host
knows the tokens, which it appends to the native sampler when it reads them. A copy is out of date
where tokens were appended to the sampler by anything else: it is then uploaded anew.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backend.cuda.kernels import sample_table as table
from headrace.batch import Ints
from headrace.sampling.sampler import Sampler

_NO_ENTRIES = np.zeros((0, 4), np.int32)


@dataclass(slots=True, eq=False)
class SamplerRecord:
    """A native sampler, as draws on the device need it."""

    sampler: "ref[Sampler]"
    row: Ints
    """The columns that no step changes."""
    is_noisy: bool
    is_filtered: bool
    has_penalties: bool
    biases: dict[int, float]
    banned: list[int]
    banned_until: int
    bias_entries: Ints
    slot: int = -1
    """Row of the state; -1: none yet."""
    num_appended: int = -1
    """Tokens that had been appended to the sampler, without those of launches in flight, by the
    copy on the device.
    """
    num_in_flight: int = 0
    """Launches that draw with it and have not been read."""

    def entries(self, position: int, path: list[int]) -> Ints:  # [entries, 4]
        """The tokens whose logits are adjusted at a position, behind draft tokens, beyond what the
        state on the device says.
        """
        bans = self.banned if position < self.banned_until else []
        if not (bans or (path and self.has_penalties)):
            return self.bias_entries
        return _entries(self.biases, path if self.has_penalties else [], bans)


def _entries(biases: dict[int, float], path: list[int], bans: list[int]) -> Ints:
    tokens = list(dict.fromkeys([*biases, *path, *bans]))
    if not tokens:
        return _NO_ENTRIES
    entries = np.zeros((len(tokens), 4), np.int32)
    entries[:, table.ENTRY_TOKEN.value] = tokens
    entries.view(np.float32)[:, table.ENTRY_BIAS.value] = [
        biases.get(token, 0.0) for token in tokens
    ]
    entries[:, table.ENTRY_COUNT.value] = [path.count(token) for token in tokens]
    entries[:, table.ENTRY_BAN.value] = [token in bans for token in tokens]
    return entries


def _record(sampler: Sampler, vocab: int, died: Callable[..., None]) -> SamplerRecord:
    """The record of a sampler. Raises ValueError for an option that no kernel implements."""
    options: dict[str, Any] = dict(sampler.options)
    if options.pop("vocab") != vocab:
        raise ValueError("the rows of logits are not as wide as the vocabulary")
    row = table.take_options(options, vocab)
    biases = dict(options.pop("logit_bias"))
    banned, banned_until = options.pop("banned"), options.pop("banned_until")
    for name in options:
        raise ValueError(
            f"sampler option {name!r} is not implemented on a GPU; add it to "
            "backend/cuda/kernels/sample_table.py"
        )
    return SamplerRecord(
        sampler=ref(sampler, died),
        row=row,
        is_noisy=bool(row[table.IS_NOISY.value]),
        is_filtered=bool(row[table.IS_FILTERED.value]),
        has_penalties=sampler.has_penalties,
        biases=biases,
        banned=banned,
        banned_until=banned_until,
        bias_entries=_entries(biases, [], []),
    )


class DeviceSamplers:
    """The records of all samplers that have drawn and are still there, and the state of their
    penalties, [slots, vocab] on the device.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.state = torch.zeros((0, vocab), dtype=torch.int32, device=device)
        """Twice the number of times that a token is in the output, or more by 1; 0: the prompt has
        it not either. It moves as it grows.
        """
        self._records: dict[int, SamplerRecord] = {}
        self._free: list[int] = []
        self._dead: list[int] = []
        """Keys of records whose samplers are gone; the collector may add to it at any time."""

    def record(self, sampler: Sampler) -> SamplerRecord:
        """The record of a sampler."""
        key = id(sampler)
        found = self._records.get(key)
        if found is None or found.sampler() is not sampler:
            if found is not None:
                self._forget(found)
            dead = self._dead
            found = self._records[key] = _record(
                sampler, self.state.shape[1], lambda _: dead.append(key)
            )
        return found

    def must_wait(self, sampler: Sampler) -> bool:
        """Whether tokens were appended to a sampler while launches that draw with it are in flight:
        these must be read before the next.
        """
        found = self.record(sampler)
        return (
            found.has_penalties
            and found.num_in_flight > 0
            and sampler.num_appended != found.num_appended
        )

    def draws(self, sampler: Sampler) -> SamplerRecord:
        """The record of a sampler that the next launch draws with, whose state is now on the
        device.
        """
        self._sweep()
        found = self.record(sampler)
        if found.has_penalties:
            if sampler.num_appended != found.num_appended:
                if found.num_in_flight:
                    raise RuntimeError(
                        "tokens were appended to a sampler while a launch that draws with "
                        "it was in flight"
                    )
                self._upload(sampler, found)
            found.num_in_flight += 1
        return found

    def drawn(self, sampler: Sampler, tokens: list[int], is_known: bool = True) -> None:
        """Append what a launch has drawn with a sampler; unless `is_known`, what is on the device
        is something else.
        """
        found = self.record(sampler)
        for token in tokens:
            sampler.append(token)
        if found.has_penalties:
            found.num_in_flight -= 1
            found.num_appended = found.num_appended + len(tokens) if is_known else -1

    def _upload(self, sampler: Sampler, found: SamplerRecord) -> None:
        if found.slot < 0:
            if not self._free:
                self._grow()
            found.slot = self._free.pop()
        seen: NDArray[np.int32] = sampler.seen()  # [2, tokens]
        row = self.state[found.slot]
        row.zero_()
        given = torch.from_numpy(seen).to(row.device)
        row[given[0].long()] = table.ONCE.value * given[1] + 1
        found.num_appended = sampler.num_appended

    def _grow(self) -> None:
        old, (slots, vocab) = self.state, self.state.shape
        self.state = torch.zeros((max(4, 2 * slots), vocab), dtype=torch.int32, device=old.device)
        self.state[:slots] = old
        self._free += range(len(self.state) - 1, slots - 1, -1)

    def _sweep(self) -> None:
        while self._dead:
            key = self._dead.pop()
            found = self._records.get(key)
            if found is not None and found.sampler() is None:
                del self._records[key]
                self._forget(found)

    def _forget(self, found: SamplerRecord) -> None:
        """Give the row of a sampler that is gone to another: what is in flight is in the stream
        before the upload of its state.
        """
        if found.slot >= 0:
            self._free.append(found.slot)
            found.slot = -1
