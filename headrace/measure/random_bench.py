"""Requests to an engine with a random model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import MappingProxyType
from typing import Any

from headrace.batch import RaggedBatch
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import OFFLINE
from headrace.loader.load import load_engine
from headrace.loader.options import engine_config
from headrace.measure.bench import Bench
from headrace.measure.placed_model import open_model
from headrace.measure.tiny_model import write_tiny_model


class RandomBench(Bench):
    """An engine on this CPU for requests (number, prompt tokens, output tokens).

    `modes`: lossy options, and the format of KV.

    `run_seconds` counts the time of the executable's runs; the rest of a run is the engine's.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        requests: Sequence[tuple[int, int, int]],
        threads: int = 0,
        modes: Mapping[str, Any] = MappingProxyType({}),
        **options: float,
    ) -> None:
        length = max(prompt + output for _, prompt, output in requests)
        fields = {
            "backend": "cpu",
            "threads": threads,
            "max_model_len": length,
            "max_num_seqs": 2 * max(batch for batch, _, _ in requests),
        }
        config = engine_config({**fields, **options, **modes}, OFFLINE)
        self.max_rows = config.max_rows
        self.kv_format = config.kv_format
        self.run_seconds = 0.0
        engine = load_engine(checkpoint.spec.name, config, checkpoint, lambda: tokenizer)
        self._prepare(engine, tokenizer.prefix_ids, checkpoint, config.seed)
        executable: Any = engine._loop.executable
        run = executable.run

        def timed_run(batch: RaggedBatch, tokens: Any) -> None:
            started = perf_counter()
            run(batch, tokens)
            self.run_seconds += perf_counter() - started

        executable.run = timed_run


def tiny_tokenizer() -> Tokenizer:
    """A tokenizer for random models: it has no token of most numbers, which gives empty text."""
    with TemporaryDirectory() as name:
        write_tiny_model(Path(name), 512)
        return open_model(name).load_tokenizer()
