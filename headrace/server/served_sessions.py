"""The sessions of a server: their nodes, their time to live and their limits."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.prompts import PromptReader
from headrace.remote.engine import RemoteEngine
from headrace.request import CheckedRequest, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.server.errors import ApiError
from headrace.sessions.tree import BaseNode, BaseSession, SessionOptions

DEFAULT_TTL = 600.0
"""Seconds."""
DEFAULT_NODES = 1000
MAX_TOKENS = 1 << 20
"""Tokens that the nodes of a session may have in all, each node without its parents."""


class ServedNode(BaseNode["ServedSession"]):
    """A node of a `ServedSession`."""


class ServedSession(BaseSession[ServedNode]):
    """A session whose requests an engine in another process checks and runs."""

    def check_tokens(self, count: int) -> None:
        """Raise ApiError if the nodes have too many tokens for `count` more."""
        total = sum(len(node.own_token_ids) for node in self.nodes)
        if total + count > MAX_TOKENS:
            raise ApiError(
                400,
                "invalid_value",
                f"the nodes of a session have at most {MAX_TOKENS:,} tokens; close some nodes",
                param="session",
            )


class SessionEngine:
    """The engine process and the prompt reader, as sessions use them."""

    def __init__(self, engine: RemoteEngine, reader: PromptReader) -> None:
        self.max_model_len = reader.max_model_len
        self.release = engine.release
        self.release_all = engine.release_all
        self.encode = reader.encode_continuation
        self.decode = reader.decode_continuation

    def check(
        self,
        token_ids: list[int],
        params: SamplingParams | None,
        options: RequestOptions,
        pooling: PoolingParams | None = None,
    ) -> CheckedRequest:
        """Return the request; the engine process checks it."""
        return CheckedRequest(
            prompt_token_ids=token_ids,
            params=params or SamplingParams(),
            prompt=None,
            options=options,
            pooling=pooling,
        )


@dataclass(eq=False)
class _Entry:
    session: ServedSession
    key: str
    ttl: float
    num_busy: int = 0
    timer: asyncio.TimerHandle | None = None


class Sessions:
    """The open sessions by id. A session ends `ttl` seconds after its last request."""

    def __init__(self, max_per_key: int) -> None:
        self._max_per_key = max_per_key
        self._entries: dict[str, _Entry] = {}
        self._by_key: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def check_limit(self, key: str) -> None:
        """Raise ApiError if a key may not open another session."""
        if self._by_key[key] >= self._max_per_key:
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"this API key already has {self._max_per_key:,} open sessions; delete one, or "
                "raise --max-sessions of the server",
                kind="rate_limit_error",
                retry_after=1,
            )

    def open(
        self,
        host: SessionEngine,
        key: str,
        prompt_token_ids: Iterable[int],
        options: SessionOptions,
        ttl: float | None,
    ) -> ServedSession:
        """Open a session. Raises ApiError above the limit of its key."""
        self.check_limit(key)
        session = ServedSession(host, ServedNode, prompt_token_ids, options)
        entry = _Entry(session=session, key=key, ttl=DEFAULT_TTL if ttl is None else ttl)
        self._entries[session.id] = entry
        self._by_key[key] += 1
        self._start_timer(entry)
        return session

    @contextmanager
    def using(self, session_id: str, key: str) -> Iterator[ServedSession]:
        """Yield a session of a key, which does not end meanwhile. Raises ApiError."""
        entry = self._find(session_id, key)
        entry.num_busy += 1
        try:
            yield entry.session
        finally:
            entry.num_busy -= 1
            self._start_timer(entry)

    def delete(self, session_id: str, key: str) -> None:
        """End a session. Raises ApiError for an unknown one, or one of another key."""
        self._end(self._find(session_id, key))

    def _find(self, session_id: str, key: str) -> _Entry:
        entry = self._entries.get(session_id)
        if entry is None or entry.key != key:
            raise ApiError(
                404,
                "session_not_found",
                "the session does not exist, or has ended; start another one",
                param="session",
            )
        return entry

    def _start_timer(self, entry: _Entry) -> None:
        if entry.timer:
            entry.timer.cancel()
        if self._entries.get(entry.session.id) is entry:
            loop = asyncio.get_running_loop()
            entry.timer = loop.call_later(entry.ttl, self._expire, entry)

    def _expire(self, entry: _Entry) -> None:
        if not entry.num_busy:
            self._end(entry)

    def _end(self, entry: _Entry) -> None:
        if entry.timer:
            entry.timer.cancel()
        if self._entries.pop(entry.session.id, None):
            self._by_key[entry.key] -= 1
            if not self._by_key[entry.key]:
                del self._by_key[entry.key]
        entry.session.close()
