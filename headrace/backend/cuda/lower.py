"""Programs for GPUs: fused ops, and weights with their bytes in GPU memory. Imports no torch, so
that a machine without a GPU can plan for one.
"""

from collections.abc import Mapping
from dataclasses import replace

from headrace.backend.cuda.layout import layout_of
from headrace.program.fuse import fuse
from headrace.program.op import Kind
from headrace.program.sparsity import dense
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor


def lower(program: Program, tensors: Mapping[str, StoredTensor]) -> Program:
    """Fuse the ops of a program and set the bytes of its weights on a GPU."""
    program = fuse(dense(program))
    matrices = {
        w.name: layout_of(tensors[w.name]).nbytes(w.rows, w.cols)
        for op in program.ops
        for w in op.matrices()
    }
    vectors = {
        w.name: 4 * w.cols for op in program.ops for w in op.vectors() if w.name not in matrices
    }
    kinds: dict[str, Kind] = {
        name: "f32" if layout_of(tensors[name]).is_wide else "bf16" for name in matrices
    }
    weights = program.weights
    new = {
        name: replace(weights[name], nbytes=nbytes, kind=kinds.get(name, "f32"))
        for name, nbytes in (matrices | vectors).items()
    }
    return program.with_weights(new)
