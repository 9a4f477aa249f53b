"""Processes that are killed while they write KV blocks: `python -m tests.kv.kills FOLDER KILLS`."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from headrace.kv.folder import BlockLabel, Bytes, KvFolder
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.engine.toy import VOCAB, plain_decoding, toy_engine
from tests.tiny import drain

MODEL, OTHER_MODEL = bytes(range(16)), bytes(16)
SIZE = 1000
"""Bytes of the content of a block."""


def label(number: int, group: int = 0, parent: int = 0) -> BlockLabel:
    def key(n: int) -> bytes:
        return blake2b(str(n).encode(), digest_size=20).digest()

    return BlockLabel(key(number), key(parent), group, np.arange(number, number + 32).tobytes())


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, SIZE).astype(np.uint8)


def opened(path: Path, max_bytes: int = 1 << 30, model: bytes = MODEL) -> KvFolder:
    return KvFolder(path, model, {"model": "toy", "kv_dtype": "int8"}, max_bytes)


def has(folder: KvFolder, block: BlockLabel, number: int, size: int = SIZE) -> bool:
    """Whether the folder has the block; its content must be the one that was written."""
    found = folder.read(block, size)
    assert found is None or np.array_equal(found, content(number))
    return found is not None


_BOUND = 60 * 1200
"""Bytes of a folder for about 60 blocks."""
_PROMPTS = [[(7 * i + j) % VOCAB for j in range(25)] for i in range(12)]
_PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=5)


def kill_writers(path: Path, num_kills: int) -> int:
    """Kill processes that write blocks, check all blocks after each, and return the number read."""
    rng, num_read = random.Random(0), 0

    def write(kill: int, begin: Callable[[], object]) -> None:
        folder = opened(path, _BOUND)
        begin()
        for number in range(13 * kill, 1 << 30):
            folder.write(label(number % 100), number % 7, content(number % 100))

    for kill in range(num_kills):
        _kill(partial(write, kill), rng.random() / 5)
        reader = opened(path, _BOUND)
        for number in range(100):
            if reader.has(label(number).key, 0):
                assert has(reader, label(number), number), "a file is not whole"
                num_read += 1
    return num_read


def kill_engines(path: Path, num_kills: int) -> int:
    """Kill engines, check the tokens of another engine after each, and return its cached tokens."""
    rng, num_cached = random.Random(0), 0

    def serve(first: int, begin: Callable[[], object]) -> None:
        engine = toy_engine(num_blocks=20, folder=path, max_bytes=20_000)
        begin()
        for number in range(first, 1 << 30):
            engine.add_request(_PROMPTS[number % len(_PROMPTS)], _PARAMS)
            drain(engine)

    for kill in range(num_kills):
        _kill(partial(serve, kill), rng.random() / 5)
        engine = toy_engine(num_blocks=20, folder=path, max_bytes=20_000)
        for prompt in _PROMPTS:
            engine.add_request(prompt, _PARAMS, RequestOptions())
            (result,) = [update.result for update in drain(engine) if update.result]
            tokens = prompt + result.outputs[0].token_ids
            assert tokens == plain_decoding(prompt, _PARAMS, 0), "a wrong hit"
        num_cached += engine.stats().cached_tokens
        engine.close()
    return num_cached


def _kill(work: Callable[[Callable[[], object]], None], seconds: float) -> None:
    """Run a function in a forked process, which is killed some seconds after it calls its
    argument.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            work(lambda: os.write(writer, b"."))
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1), "the process ended before it began"
    os.close(reader)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the process ended by itself"


if __name__ == "__main__":
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    print(f"{kill_writers(folder / 'writers', kills):,} blocks read")
    print(f"{kill_engines(folder / 'engines', kills):,} tokens cached")
