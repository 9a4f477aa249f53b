"""AWQ checkpoints (Lin et al. 2024) of AutoAWQ 0.2, version GEMM.

A layer X has `X.qweight` I32 [cols, rows / 8], `X.qzeros` I32 [groups, rows / 8] and `X.scales`
[groups, rows]. A word has the codes of rows 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first. A weight
is scale * (code - zero point).
"""

from functools import cache

import numpy as np

from headrace.checkpoint.quantisation.method import Config, Tensors, refusal
from headrace.checkpoint.quantisation.packed_codes import (
    Words,
    check_fields,
    check_group_size,
    check_shapes,
    finite_floats,
    gathered,
    group_of,
    numbers,
)
from headrace.quant.arrays import Bytes
from headrace.quant.dequantise import Parts, Rows
from headrace.quant.formats import Format, StoredTensor, TensorPart, table_format, table_parts
from headrace.quant.spec import QuantSpec, TableRows

_METHOD = "awq"
_PARTS = ("qweight", "qzeros", "scales")
_VERSIONS = ("version", "format", "checkpoint_format")
_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq:
    supported = (
        f"{_METHOD} with 4 bits and zero points in the version gemm, groups of 16, of "
        "multiples of 32 or -1"
    )

    def check(self, config: Config) -> None:
        check_fields(
            config,
            {"bits": (4,), "zero_point": (None, True), "backend": (None, "autoawq", "auto")},
            self.supported,
        )
        for field in _VERSIONS:
            if str(config.get(field, "gemm")).lower() != "gemm":
                raise refusal(field, config[field], self.supported)
        check_group_size(config, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        return gathered(
            tensors,
            _PARTS,
            lambda layer: _matrix(layer, config["group_size"], tensors, where),
            where,
        )


def _matrix(layer: str, group_size: int, tensors: Tensors, where: str) -> StoredTensor:
    name = f"{layer}qweight"
    words = numbers(tensors, name, "I32", 2, where)
    points = numbers(tensors, f"{layer}qzeros", "I32", 2, where)
    kind, scales = finite_floats(tensors, f"{layer}scales", where)
    cols, rows = len(words), 8 * words.shape[1]
    group = group_of(cols, group_size, name, where)
    check_shapes(
        {"qzeros": points, "scales": scales},
        {"qzeros": (cols // group, rows // 8), "scales": (cols // group, rows)},
        layer,
        where,
    )
    spec = QuantSpec(
        bits=4,
        group=group if group < cols else 0,
        scale=kind,
        zero="point",
        zero_type="u8",
    )
    return StoredTensor(
        name=f"{layer}weight",
        format=_format(spec),
        shape=(rows, cols),
        parts={
            "codes": words.T,
            "scales": np.ascontiguousarray(scales.T),
            "zeros": _eights(points.T),
        },
    )


def _eights(words: Words) -> Bytes:  # [8 * words, cols]
    codes = np.empty((len(words), 8, words.shape[1]), np.uint8)
    for place, row in enumerate(_ROWS):
        codes[:, row] = words >> np.uint32(4 * place) & np.uint32(15)
    return codes.reshape(-1, words.shape[1])


@cache
def _format(spec: QuantSpec) -> Format:
    """Codes are words <u4 [rows / 8, cols]."""
    parts = {"codes": TensorPart("<u4", by_row=False)} | table_parts(spec)

    def table_rows(stored: Parts, rows: Rows) -> TableRows:
        indices = np.arange(len(stored["scales"]))[rows]
        words, places = np.unique(indices // 8, return_inverse=True)
        codes = _eights(stored["codes"][words])[8 * places + indices % 8]
        return TableRows(codes, stored["scales"][rows], stored["zeros"][rows])

    return table_format(f"AWQ {spec.name}", spec, parts, table_rows)
