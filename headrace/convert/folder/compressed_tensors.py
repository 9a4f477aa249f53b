"""Writes compressed-tensors for vLLM and transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.folder.matrix_writer import Parts, check_groups, pack_bits
from headrace.convert.tensor_writer import PlannedTensor
from headrace.errors import RequestError
from headrace.quant.arrays import Bytes
from headrace.quant.format_names import W8A8
from headrace.quant.spec import NUMBERS, PLAIN, QuantSpec
from headrace.record import frozen

_DTYPES = {number: name for name, number in PLAIN.items()}


@frozen
class CompressedTensors:
    """Writes integers of 2, 3, 4 and 8 bits, W8A8, and e4m3."""

    spec: QuantSpec
    packs: bool = True
    """Whether integers are packed into words; without, those of 8 bits are int8."""
    packs_embeddings = True

    def __post_init__(self) -> None:
        if self.spec.codebook not in ("integer", "e4m3") or self.spec.zero == "minimum":
            raise RequestError(
                f"compressed-tensors has no format for {self.spec.name}; use integers or e4m3"
            )

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        targets: dict[CompressedTensors, list[str]] = {self: ["Linear"]}
        for target, spec in others.items():
            targets.setdefault(CompressedTensors(spec), []).append(target)
        formats = {writer._format for writer in targets}
        config: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": self._format if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{number}": {"targets": names, **writer._group(with_format=len(formats) > 1)}
                for number, (writer, names) in enumerate(targets.items())
            },
            "ignore": list(plain_modules),
            "kv_cache_scheme": None,
        }
        if "Embedding" in others and len(targets) == 1:
            # transformers 5.24 reads packed embeddings only if it dequantises all, by one format.
            config["dequantize"] = True
        return config

    def _group(self, *, with_format: bool) -> dict[str, Any]:
        spec = self.spec
        weights = {
            "num_bits": spec.bits,
            "type": "int" if spec.codebook == "integer" else "float",
            "symmetric": spec.zero == "none",
            "strategy": "group" if spec.group else "channel",
            "group_size": spec.group or None,
            "dynamic": False,
        }
        activations = (
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
            if self._is_w8a8
            else None
        )
        group: dict[str, Any] = {"weights": weights, "input_activations": activations}
        return group | {"format": self._format} if with_format else group

    @property
    def _is_w8a8(self) -> bool:
        return self.spec == W8A8

    @property
    def _is_int8(self) -> bool:
        return self._is_w8a8 or (self.spec.codebook == "integer" and not self.packs)

    @property
    def _format(self) -> str:
        if self._is_int8:
            return "int-quantized"
        return "pack-quantized" if self.spec.codebook == "integer" else "float-quantized"

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        check_groups(self.spec, name, cols)
        assert self.spec.scale in NUMBERS
        per_row, bits = self.spec.num_scales(cols), self.spec.bits
        scales = PlannedTensor(
            name=f"{name}_scale",
            format=_DTYPES[self.spec.scale],
            shape=(rows, per_row),
            nbytes=rows * per_row * NUMBERS[self.spec.scale].itemsize,
        )
        if self._format != "pack-quantized":
            dtype = "I8" if self._is_int8 else "F8_E4M3"
            return [PlannedTensor(name, dtype, (rows, cols), rows * cols), scales]

        shapes = {f"{name}_packed": (rows, -(-cols * bits // 32))}
        if self.spec.zero == "point":
            shapes[f"{name}_zero_point"] = (-(-rows * bits // 32), per_row)
        words = [
            PlannedTensor(part, "I32", shape, 4 * shape[0] * shape[1])
            for part, shape in shapes.items()
        ]
        return [*words, scales, PlannedTensor(f"{name}_shape", "I64", (2,), 16)]

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        if self._is_w8a8:
            return {name: parts["codes"], f"{name}_scale": parts["row_scales"]}
        codes: Bytes = parts["codes"]
        if self._is_int8:
            signed = (codes ^ np.uint8(128)).view(np.int8)
            return {name: signed, f"{name}_scale": parts["scales"]}
        if self._format != "pack-quantized":
            return {name: codes, f"{name}_scale": parts["scales"]}
        result: dict[str, NDArray[Any]] = {
            f"{name}_packed": pack_bits(codes, self.spec.bits),
            f"{name}_scale": parts["scales"],
            f"{name}_shape": np.array(codes.shape, np.int64),
        }
        if "zeros" in parts:
            # Zero points are packed down the rows.
            columns = pack_bits(np.ascontiguousarray(parts["zeros"].T), self.spec.bits)
            result[f"{name}_zero_point"] = np.ascontiguousarray(columns.T)
        return result
