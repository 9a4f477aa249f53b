"""KV on the GPU: the tensors of a group of layers, in blocks."""

from typing import Any, Literal, NamedTuple, cast

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend_traits import KvDtype, check_kv_dtype
from headrace.batch import Ints
from headrace.program.kv import KvGroup

KvFormat = Literal["bf16", "f16", "f32", "fp8", "int8"]

_CODES: dict[KvFormat, Any] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.uint8,
}
# One scale per key or value, or min and step of the codes (`quant/kv.py`)
_SCALES: dict[KvFormat, tuple[Any, int]] = {"fp8": (torch.float32, 1), "int8": (torch.bfloat16, 2)}


def format_of(dtype: KvDtype) -> KvFormat:
    """The KV format of a dtype. Raises RequestError if GPUs have no kernel for it."""
    check_kv_dtype("cuda", dtype)
    return cast(KvFormat, dtype)


class KvLayer(NamedTuple):
    """KV of one layer, as views. `keys` stands in for a tensor that the format lacks."""

    keys: Any  # [blocks, heads, tokens of a block, key_dim]
    key_scales: Any  # [blocks, heads, tokens of a block, numbers]
    values: Any  # [blocks, heads, tokens of a block, value_dim]
    value_scales: Any


class KvStore:
    """KV of a group of layers, initially zeros.

    A key or value that is not finite is stored as zeros, with NaN in the key's last
    number or scale. So every row that sees the token becomes NaN, and no other row does.
    """

    def __init__(self, group: KvGroup, num_blocks: int, block_size: int, dtype: KvDtype) -> None:
        self.group, self.block_size, self.format = group, block_size, format_of(dtype)
        layout = group.layout
        # First slot of an extra block, which padding rows write to
        self.padding_slot = num_blocks * block_size
        shape = (len(group.layers), num_blocks + 1, layout.num_heads, block_size)
        scales, numbers = _SCALES.get(self.format, (torch.float32, 0))

        def zeros(dim: int, kind: Any) -> Any:
            return torch.zeros((*shape, dim), dtype=kind, device=DEVICE) if dim else None

        self.keys = zeros(layout.key_dim, _CODES[self.format])
        self.values = zeros(layout.value_dim, _CODES[self.format])
        self.key_scales = zeros(numbers, scales)
        self.value_scales = zeros(numbers if layout.value_dim else 0, scales)

    @property
    def uses_hadamard(self) -> bool:
        """Whether keys and values are stored after a Hadamard transform."""
        return self.format == "int8"

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, including the padding block."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, without the padding block."""
        return self.padding_slot // self.block_size

    @property
    def block_bytes(self) -> int:
        return sum(tensor[:, 0].nbytes for tensor in self.tensors)

    def layer(self, layer: int) -> KvLayer:
        index = self.group.layers.index(layer)
        keys = self.keys[index]

        def part(tensor: Any) -> Any:
            return keys if tensor is None else tensor[index]

        return KvLayer(
            keys=keys,
            key_scales=part(self.key_scales),
            values=part(self.values),
            value_scales=part(self.value_scales),
        )

    def move_slots(self, source: Ints, target: Ints) -> None:
        """Copy slot `source[i]` to `target[i]`, in order, in all layers and heads.

        A slot may be a target first and a source later. So the host traces each target to
        the slot with its final contents, and the device reads before it writes.
        """
        origin: dict[int, int] = {}
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            origin[t] = origin.get(s, s)
        if not origin:
            return

        pairs = torch.tensor([list(origin), list(origin.values())], dtype=torch.int64)
        slots = pairs.to(DEVICE, non_blocking=True)
        to_block, from_block = slots // self.block_size
        to_offset, from_offset = slots % self.block_size
        for tensor in self.tensors:
            # torch cannot index 8-bit floats
            numbers = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            numbers[:, to_block, :, to_offset] = numbers[:, from_block, :, from_offset]

    @property
    def tensors(self) -> list[Any]:
        """Existing tensors, each [layers, blocks, heads, tokens of a block, numbers]."""
        return [
            x for x in (self.keys, self.key_scales, self.values, self.value_scales) if x is not None
        ]
