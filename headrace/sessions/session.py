"""Sessions of `LLM`, whose calls block until their results are complete."""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RequestError
from headrace.outputs import RequestOutput
from headrace.request import CheckedRequest, Pooling
from headrace.sampling_params import SamplingParams
from headrace.sessions.tree import (
    BaseNode,
    BaseSession,
    Continuation,
    Score,
    SessionHost,
    SessionOptions,
    embedding_of,
    score_of,
)

Run = Callable[[list[CheckedRequest]], list[RequestOutput]]
"""Runs requests together, and returns their results in order. Raises RequestFailedError."""


class Node(BaseNode["Session"]):
    """A node of a `Session`."""

    def sample(
        self,
        k: int = 1,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> list["Node"]:
        """Sample `k` continuations, and return them as children. See `Session.sample`."""
        (children,) = self.session.sample(
            [self], k, params, priority=priority, timeout=timeout, adapter=adapter
        )
        return children

    def score(
        self,
        continuations: Sequence[Continuation],
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> list[Score]:
        """Return the log-probabilities of each continuation. See `Session.score`."""
        (scores,) = self.session.score(
            [self], [continuations], priority=priority, timeout=timeout, adapter=adapter
        )
        return scores

    def embed(
        self,
        pooling: Pooling = "last",
        *,
        normalise: bool = False,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> NDArray[np.float32]:  # [dim]
        """Return the embedding of the path. Arguments and errors are as for `LLM.embed`."""
        session = self.session
        options = session.request_options(priority, timeout, adapter)
        (result,) = session.run([session.embedding(self, pooling, normalise, options)])
        return embedding_of(result)


class Session(BaseSession[Node]):
    """A tree of texts that begins with a prompt; `LLM.session` makes one.

    `close()`, or the end of a `with` block, closes all nodes. Several threads may share a session
    if each of them works on other nodes.
    """

    def __init__(
        self,
        host: SessionHost,
        run: Run,
        prompt_token_ids: Iterable[int],
        options: SessionOptions,
    ) -> None:
        super().__init__(host, Node, prompt_token_ids, options)
        self.run = run
        self._prefill([self.root], None)

    def sample(
        self,
        nodes: Sequence[Node],
        k: int = 1,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> list[list[Node]]:
        """Sample `k` continuations of each node, and return them as children, by node.

        All continuations run together. The seed of a child comes from the seed of the session
        (`params.seed` replaces it) and from its name. With `beam_width`, the children are the
        best `k` beams. Raises as `LLM.generate` does, and RequestError if the session gets more
        than `max_nodes` nodes.
        """
        self.check_limit(len(nodes) * k if isinstance(k, int) else 0)
        options = self.request_options(priority, timeout, adapter)
        samplings = [self.sampling(node, k, params, options) for node in nodes]
        try:
            results = self.run([sampling.request for sampling in samplings])
        except BaseException:
            for sampling in samplings:
                sampling.abandon()
            raise
        return [
            sampling.children(result.outputs)
            for sampling, result in zip(samplings, results, strict=True)
        ]

    def score(
        self,
        nodes: Sequence[Node],
        continuations: Sequence[Sequence[Continuation]],
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> list[list[Score]]:
        """Return the log-probabilities of continuations of each node, by node.

        Each path is computed once, then all continuations together. They make no nodes. Raises
        as `LLM.generate` does, and RequestFailedError after a timeout.
        """
        if len(nodes) != len(continuations):
            raise RequestError(
                f"continuations has {len(continuations)} lists for {len(nodes)} nodes; give one "
                "list for each node"
            )
        options = self.request_options(priority, timeout, adapter)
        requests = [
            self.scoring(node, texts, options)
            for node, texts in zip(nodes, continuations, strict=True)
        ]
        shared = [node for node, group in zip(nodes, requests, strict=True) if len(group) > 1]
        self._prefill(shared, adapter)
        results = iter(self.run([request for group in requests for request in group]))
        return [
            [score_of(next(results), node.num_tokens) for _ in group]
            for node, group in zip(nodes, requests, strict=True)
        ]

    def _prefill(self, nodes: Iterable[Node], adapter: str | None) -> None:
        options = self.request_options(adapter=adapter)
        requests = [self.prefill(node, options) for node in nodes]
        if found := [request for request in requests if request is not None]:
            self.run(found)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
