"""Keys and values on the GPU: the tensors of a group of layers, in blocks, and what each number
format keeps of a token.
"""

from typing import Any, Literal, NamedTuple, cast

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend_traits import KvDtype, check_kv_dtype
from headrace.batch import Ints
from headrace.program.kv import KvGroup

KvFormat = Literal["bf16", "f32", "fp8", "int8"]

_CODES: dict[KvFormat, Any] = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.uint8,
}
_SCALES: dict[KvFormat, tuple[Any, int]] = {"fp8": (torch.float32, 1), "int8": (torch.bfloat16, 2)}
"""Those of a key or a value: one scale, or the least number and the step of the codes
(`quant/kv.py`).
"""


def format_of(dtype: KvDtype) -> KvFormat:
    """The number format of a store. Raises RequestError for one that GPUs have no kernel for."""
    check_kv_dtype("cuda", dtype)
    return cast(KvFormat, dtype)


class KvLayer(NamedTuple):
    """What a layer keeps, views of the tensors of its group. Kernels never look at what is not
    there, which stands as the keys here.
    """

    keys: Any  # [blocks, heads, tokens of a block, key_dim]
    key_scales: Any  # [blocks, heads, tokens of a block, numbers]
    values: Any  # [blocks, heads, tokens of a block, value_dim]
    value_scales: Any


class KvStore:
    """Keys and values of the layers of a group, which begin as zeros.

    A key or value that is not finite is kept as zeros, and the last number of its key, or the scale
    of that, as NaN: so every row that sees the token becomes NaN, and none that does not, although
    it may multiply its value by a weight of zero.
    """

    def __init__(self, group: KvGroup, num_blocks: int, block_size: int, dtype: KvDtype) -> None:
        layout, self.group, self.block_size, self.format = (
            group.layout,
            group,
            block_size,
            format_of(dtype),
        )
        self.padding_slot = num_blocks * block_size
        """The first slot of a block that no sequence has: padding rows write there."""
        shape = (len(group.layers), num_blocks + 1, layout.num_heads, block_size)
        scales, numbers = _SCALES.get(self.format, (torch.float32, 0))

        def zeros(dim: int, kind: Any) -> Any:
            return torch.zeros((*shape, dim), dtype=kind, device=DEVICE) if dim else None

        self.keys, self.values = (
            zeros(layout.key_dim, _CODES[self.format]),
            zeros(layout.value_dim, _CODES[self.format]),
        )
        self.key_scales, self.value_scales = (
            zeros(numbers, scales),
            zeros(numbers if layout.value_dim else 0, scales),
        )

    @property
    def is_turned(self) -> bool:
        """Whether keys and values are turned by a Hadamard matrix."""
        return self.format == "int8"

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, those of the block for padding rows included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def num_blocks(self) -> int:
        """Blocks, that for padding rows not included."""
        return self.padding_slot // self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return sum(tensor[:, 0].nbytes for tensor in self.tensors)

    def layer(self, layer: int) -> KvLayer:
        """What the layer of this number in the program keeps."""
        place = self.group.layers.index(layer)
        keys = self.keys[place]
        return KvLayer(
            *(
                keys if x is None else x[place]
                for x in (self.keys, self.key_scales, self.values, self.value_scales)
            )
        )

    def move_slots(self, source: Ints, target: Ints) -> None:
        """Copy the slots `source[i]` to `target[i]`, in order, all layers and heads.

        A slot may be a target first and a source later: it then passes on what it got. So the host
        follows each target back to the slot whose numbers it ends with, and the device reads all of
        these before it writes any.
        """
        origin: dict[int, int] = {}
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            origin[t] = origin.get(s, s)
        if not origin:
            return
        slots = torch.tensor([list(origin), list(origin.values())], dtype=torch.int64).to(
            DEVICE, non_blocking=True
        )
        (to, come), (to_offset, offset) = slots // self.block_size, slots % self.block_size
        for tensor in self.tensors:
            numbers = (
                tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            )  # torch cannot index floats of 8 bits
            numbers[:, to, :, to_offset] = numbers[:, come, :, offset]

    @property
    def tensors(self) -> list[Any]:
        """All that there are, [layers, blocks, heads, tokens of a block, numbers]."""
        return [
            x for x in (self.keys, self.key_scales, self.values, self.value_scales) if x is not None
        ]
