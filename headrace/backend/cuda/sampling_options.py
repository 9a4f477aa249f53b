"""Native samplers on the device: options as table rows, and the state of penalties.

The native sampler stays the reference. Each launch adds its tokens to the device's copy
of the state, so the next launch need not wait for the host. If other code appends tokens,
the state is uploaded again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
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
    sampler: "ref[Sampler]"
    row: Ints  # Columns that are the same in every step
    is_noisy: bool
    is_filtered: bool
    has_penalties: bool
    biases: dict[int, float]
    banned: list[int]
    banned_until: int
    bias_entries: Ints
    slot: int = -1  # Row of the state; -1 before the first upload
    # tokens of the sampler in the device's copy, without launches in flight
    num_appended: int = -1
    num_in_flight: int = 0  # Unread launches that sample with it

    def max_shift(self, position: int) -> float:
        """How many positions after `position` the entries stay the same."""
        bans = self.banned and position < self.banned_until
        return self.banned_until - 1 - position if bans else inf

    def entries(self, position: int, path: list[int]) -> Ints:  # [entries, 4]
        """Tokens whose logits are adjusted after a draft path, in addition to the state."""
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


def _make_record(sampler: Sampler, vocab: int, died: Callable[..., None]) -> SamplerRecord:
    # Raises ValueError for an option that no kernel implements.
    options: dict[str, Any] = dict(sampler.options)
    if options.pop("vocab") != vocab:
        raise ValueError(f"sampler vocabulary differs from the logits' width {vocab}")
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
    """Records of all live samplers, and their penalty state."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        # [slots, vocab], reallocated as it grows: 0 for an unseen token, else twice its
        # count in the output, or one more
        self.state = torch.zeros((0, vocab), dtype=torch.int32, device=device)
        self._records: dict[int, SamplerRecord] = {}
        self._free: list[int] = []
        # keys of freed samplers; the garbage collector may append at any time
        self._dead: list[int] = []

    def record(self, sampler: Sampler) -> SamplerRecord:
        key = id(sampler)
        record = self._records.get(key)
        if record is None or record.sampler() is not sampler:
            if record is not None:
                self._forget(record)
            dead = self._dead
            record = self._records[key] = _make_record(
                sampler, self.state.shape[1], lambda _: dead.append(key)
            )
        return record

    def must_wait(self, sampler: Sampler) -> bool:
        """Whether launches must be read first: tokens were appended while they were in
        flight.
        """
        record = self.record(sampler)
        return (
            record.has_penalties
            and record.num_in_flight > 0
            and sampler.num_appended != record.num_appended
        )

    def start_launch(self, sampler: Sampler) -> SamplerRecord:
        """The record of a sampler, with its state on the device."""
        self._sweep()
        record = self.record(sampler)
        if record.has_penalties:
            if sampler.num_appended != record.num_appended:
                if record.num_in_flight:
                    raise RuntimeError(
                        "tokens were appended to a sampler with a launch in flight; "
                        "read the launch first"
                    )
                self._upload(sampler, record)
            record.num_in_flight += 1
        return record

    def finish_launch(self, sampler: Sampler, tokens: list[int], is_known: bool = True) -> None:
        """Append a launch's tokens. The device's copy is valid only if `is_known`."""
        record = self.record(sampler)
        for token in tokens:
            sampler.append(token)
        if record.has_penalties:
            record.num_in_flight -= 1
            record.num_appended = record.num_appended + len(tokens) if is_known else -1

    def _upload(self, sampler: Sampler, record: SamplerRecord) -> None:
        if record.slot < 0:
            if not self._free:
                self._grow()
            record.slot = self._free.pop()
        seen: NDArray[np.int32] = sampler.seen()  # [2, tokens]
        row = self.state[record.slot]
        row.zero_()
        counts = torch.from_numpy(seen).to(row.device)
        row[counts[0].long()] = table.ONCE.value * counts[1] + 1
        record.num_appended = sampler.num_appended

    def _grow(self) -> None:
        old, (slots, vocab) = self.state, self.state.shape
        self.state = torch.zeros((max(4, 2 * slots), vocab), dtype=torch.int32, device=old.device)
        self.state[:slots] = old
        self._free += range(len(self.state) - 1, slots - 1, -1)

    def _sweep(self) -> None:
        while self._dead:
            key = self._dead.pop()
            record = self._records.get(key)
            if record is not None and record.sampler() is None:
                del self._records[key]
                self._forget(record)

    def _forget(self, record: SamplerRecord) -> None:
        # Launches in flight precede the next upload to the row in the stream.
        if record.slot >= 0:
            self._free.append(record.slot)
            record.slot = -1
