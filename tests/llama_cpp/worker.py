"""Computes logits with llama.cpp, in the interpreter that has llama-cpp-python:
`worker.py MODEL TOKENS OUT` saves [tokens, vocab].

KV is float32, without flash attention, which rounds.
"""

import json
import sys

import llama_cpp as c
import numpy as np

FLOAT32 = 0


def logits(model: str, tokens: list[int]) -> np.ndarray:
    c.llama_backend_init()
    loaded = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
    if not loaded:
        sys.exit("llama.cpp does not load it")
    params = c.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = FLOAT32
    params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = c.llama_init_from_model(loaded, params)
    batch = c.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i], batch.n_seq_id[i], batch.seq_id[i][0] = (
            token,
            i,
            True,
            1,
            0,
        )
    if not context or c.llama_decode(context, batch):
        sys.exit("llama.cpp does not run it")
    vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(loaded))
    return np.ctypeslib.as_array(
        c.llama_get_logits(context), shape=(len(tokens), vocab_size)
    ).copy()


if __name__ == "__main__":
    model, tokens, out = sys.argv[1:]
    np.save(out, logits(model, json.loads(tokens)))
