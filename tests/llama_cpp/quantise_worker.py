"""Quantises with llama.cpp, in the interpreter that has llama-cpp-python.

`quantise_worker.py models JOBS` makes files of mixtures from a JSON list of [source,
result, file type], and reports the success of each.

`quantise_worker.py rows ROWS TYPES OUT` quantises the float32 rows [rows, cols] of a
.npy file to ggml's types, {name: number} in JSON, and saves the bytes by name.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

import llama_cpp as c
import numpy as np


def models(jobs: list[tuple[str, str, int]]) -> list[bool]:
    made = []
    for source, result, file_type in jobs:
        params = c.llama_model_quantize_default_params()
        params.ftype, params.nthread = file_type, 1
        made.append(
            c.llama_model_quantize(source.encode(), result.encode(), ctypes.byref(params)) == 0
        )
    return made


def rows(values: np.ndarray, types: dict[str, int]) -> dict[str, np.ndarray]:
    ggml = ctypes.CDLL(str(Path(c.__file__).with_name("lib") / "libggml-base.so"))
    ggml.ggml_quantize_chunk.restype = ggml.ggml_row_size.restype = ctypes.c_size_t
    ggml.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    count, cols = values.shape
    quantised = {}
    for name, number in types.items():
        out = np.zeros((count, ggml.ggml_row_size(number, cols)), np.uint8)
        ggml.ggml_quantize_chunk(number, values.ctypes.data, out.ctypes.data, 0, count, cols, None)
        quantised[name] = out
    return quantised


if __name__ == "__main__":
    if sys.argv[1] == "models":
        told, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
        told.write(json.dumps(models(json.loads(sys.argv[2]))))
        told.close()
    else:
        np.savez(sys.argv[4], **rows(np.load(sys.argv[2]), json.loads(sys.argv[3])))
