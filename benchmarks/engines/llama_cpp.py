"""llama.cpp, through the C functions of llama-cpp-python, with contexts and batches like
llama-batched-bench.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import llama_cpp as c
import numpy as np

from engines import Times

Row = tuple[int, int, int, bool]  # sequence, position, token, whether logits are wanted
_BATCH = 2048  # rows of one call, of which it computes 512 at a time: its defaults


class Engine:
    """A context with a sequence for each request. Sampling is an argmax in NumPy, without
    detokenisation.
    """

    version = c.__version__

    def __init__(self, model: Path, threads: int, num_requests: int, longest: int) -> None:
        c.llama_log_set(_silence, None)
        c.llama_backend_init()
        self._model = c.llama_model_load_from_file(
            str(model).encode(), c.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model.name}")
        params = c.llama_context_default_params()
        params.n_ctx = num_requests * -(-longest // 256) * 256
        params.n_seq_max = num_requests
        params.n_threads = params.n_threads_batch = threads
        self._context = c.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(
                f"llama.cpp has no room for {num_requests} sequences of {longest} tokens"
            )
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(_BATCH, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Times]:
        c.llama_memory_clear(c.llama_get_memory(self._context), False)
        start, first, last = perf_counter(), {}, {}
        rows = [
            (i, at, token, at == len(ids) - 1)
            for i, ids in enumerate(prompts)
            for at, token in enumerate(ids)
        ]
        for step in range(num_tokens):
            drawn = list(self._run(rows))
            for sequence, _, _, now in drawn:
                first.setdefault(sequence, now - start)
                last[sequence] = now - start
            if step < num_tokens - 1:
                rows = [(sequence, at + 1, token, True) for sequence, at, token, _ in drawn]
        return [Times(first[i], last[i]) for i in range(len(prompts))]

    def _run(self, rows: list[Row]) -> Iterator[tuple[int, int, int, float]]:
        """Sequence, position, token and time of each logit row."""
        for begin in range(0, len(rows), _BATCH):
            part = rows[begin : begin + _BATCH]
            self._fill(part)
            if c.llama_decode(self._context, self._batch):
                raise RuntimeError("llama_decode failed")
            for i, (sequence, at, _, wanted) in enumerate(part):
                if wanted:
                    logits = np.ctypeslib.as_array(
                        c.llama_get_logits_ith(self._context, i), shape=(self._vocab_size,)
                    )
                    yield sequence, at, int(logits.argmax()), perf_counter()

    def _fill(self, rows: list[Row]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, at, token, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, at, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence


@c.llama_log_callback
def _silence(level: int, text: bytes, user_data: object) -> None:
    """Suppresses messages about the model."""
