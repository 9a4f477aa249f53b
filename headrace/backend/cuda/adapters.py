"""LoRA adapters in GPU memory: their matrices, and a table per weight that locates the
matrices of each adapter.
"""

from collections.abc import Mapping
from itertools import count

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels.align_experts import Aligned, align_adapters, empty_aligned
from headrace.backend.cuda.kernels.lora import BLOCK_M, hidden_shape, lora, stored, table_row
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.workspace import Workspace
from headrace.program.adapter import LowRank

_MIN_SLOTS = 8


class Adapters:
    """The adapters of an executable, by number. `changed` counts changes of tables and of
    the max rank.
    """

    def __init__(self) -> None:
        self.tables: dict[str, torch.Tensor] = {}  # By weight name: int64 [slots, 4]
        self.max_rank = 0
        self.changed = 0
        self._slots = _MIN_SLOTS
        self._matrices: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, adapter: Mapping[str, LowRank]) -> int:
        """Copy an adapter to the device and return its number. After an error nothing is kept."""
        number = next(number for number in count() if number not in self._matrices)
        if number >= self._slots:
            self._double_slots()
        self._matrices[number] = []
        try:
            self._copy(adapter, number)
        except BaseException:
            self.remove(number)
            raise
        return number

    def _copy(self, adapter: Mapping[str, LowRank], number: int) -> None:
        kept = self._matrices[number]
        for name, matrices in adapter.items():
            if name not in self.tables:
                self.tables[name] = torch.zeros(self._slots, 4, dtype=torch.int64, device=DEVICE)
                self.changed += 1
            down, up = stored(matrices, DEVICE)
            kept.append((down, up))
            self.tables[name][number] = torch.tensor(
                table_row(down, up, matrices.scale), device=DEVICE
            )
            if len(down) > self.max_rank:
                self.max_rank = len(down)
                self.changed += 1

    def _double_slots(self) -> None:
        self.tables = {
            name: torch.cat([table, torch.zeros_like(table)]) for name, table in self.tables.items()
        }
        self._slots *= 2
        self.changed += 1

    def remove(self, number: int) -> None:
        for table in self.tables.values():
            table[number] = 0
        del self._matrices[number]

    def aligned(
        self, adapters: torch.Tensor, num_rows: torch.Tensor, workspace: Workspace
    ) -> tuple[Aligned, list[Launch]]:
        """Tiles of rows that share an adapter, and the launches that fill them.
        `adapters` is [rows].
        """
        key = f"aligned adapters {len(adapters)} {self._slots}"
        to = workspace.once(
            key, lambda: empty_aligned(len(adapters), 1, self._slots + 1, BLOCK_M, DEVICE)
        )
        return to, align_adapters(to, adapters, self._slots, num_rows)

    def launches(
        self,
        delta: torch.Tensor,
        x: torch.Tensor,
        name: str,
        aligned: Aligned,
        workspace: Workspace,
    ) -> list[Launch]:
        """Launches that write the adapters' part of a product to `delta`; zero without
        adapters.
        """
        splits, places, max_rank = hidden_shape(aligned, x.shape[1], self.max_rank)
        hidden = workspace.take("adapted hidden", splits * places, max_rank)
        table = self.tables.get(name)
        if table is None:
            table = workspace.once(
                f"no adapters {self._slots}",
                lambda: torch.zeros(self._slots, 4, dtype=torch.int64, device=DEVICE),
            )
        return lora(delta, hidden.reshape(splits, places, max_rank), x, aligned, table)
