"""Sessions over a bare engine, whose blocks are checked after each step."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.engine.engine import Engine
from headrace.outputs import RequestOutput
from headrace.request import CheckedRequest, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.sessions.session import Node, Session
from headrace.sessions.tree import BaseNode, SessionOptions
from tests.tiny import TinyVocabulary


class BareHost:
    """Gives an engine to sessions, without a thread and without a tokenizer's file."""

    def __init__(
        self, engine: Engine, before_step: Callable[["BareHost"], None] = lambda host: None
    ) -> None:
        """`before_step` may add requests to the engine, or park paths."""
        self.engine = engine
        self.max_model_len = engine.limits.max_model_len
        self.release = engine.release
        self.release_all = engine.release_all
        self.results: dict[str, RequestOutput] = {}
        self._before_step = before_step
        self._vocabulary = TinyVocabulary(engine.limits.vocab_size)

    def encode(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(list(token_ids))

    def check(
        self,
        token_ids: list[int],
        params: SamplingParams | None,
        options: RequestOptions,
        pooling: PoolingParams | None = None,
    ) -> CheckedRequest:
        return self.engine.check(token_ids, params, options, pooling=pooling)

    def run(self, requests: list[CheckedRequest]) -> list[RequestOutput]:
        ids = [self.engine.add(request) for request in requests]
        while self.engine.has_work:
            self._before_step(self)
            for update in self.engine.step():
                if update.result:
                    self.results[update.request_id] = update.result
            self.check_blocks()
        return [self.results.pop(request_id) for request_id in ids]

    def check_blocks(self) -> None:
        scheduler = self.engine._scheduler
        held = [seq.tables for seq in (*scheduler.running, *scheduler._dropped)]
        self.engine._kv.check([*held, *scheduler.kept.tables])

    def session(self, prompt: Iterable[int], **options: Any) -> Session:
        return Session(self, self.run, prompt, SessionOptions(**options))

    def kept(self, nodes: Iterable[BaseNode[Any]]) -> dict[Node, list[int]]:
        """The kept nodes among these, with the tokens whose KV is kept."""
        paths = self.engine._scheduler.kept._paths
        found: dict[Any, list[int]] = {}
        for node in nodes:
            path = paths.get(f"{node.session.id}/{node.name}")
            if path is not None:
                num_tokens = path.node.depth * self.engine._kv.block_size + len(path.tail) // 4
                found[node] = node.token_ids[:num_tokens]
        return found


def num_block_ends(texts: Iterable[Sequence[int]], block_size: int) -> int:
    """The fewest blocks for the KV of these texts: a block for each run of tokens between two
    multiples of `block_size` that does not begin a longer run after the same tokens.
    """
    runs: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for text in texts:
        for start in range(0, len(text), block_size):
            run = tuple(text[start : start + block_size])
            runs.setdefault(tuple(text[:start]), set()).add(run)
    return sum(
        not any(other != run and other[: len(run)] == run for other in group)
        for group in runs.values()
        for run in group
    )
