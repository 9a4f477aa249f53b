"""Sessions: trees of texts over one model, whose nodes share their KV (docs/use/sessions.md)."""

import os
import reprlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ClosedError, RequestError, RequestFailedError
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.record import frozen
from headrace.request import (
    CheckedRequest,
    PathOptions,
    Pooling,
    PoolingParams,
    RequestOptions,
)
from headrace.sampling.sampler import derive_seed, random_seed
from headrace.sampling_params import SAMPLING_FIELDS, SamplingParams
from headrace.validation import MAX_INTEGER, integer, token_ids

MAX_NODES = 10_000
"""Max nodes of a session, unless the caller sets another number."""

Continuation = str | Sequence[int]
"""Text, or token ids."""

_PREFILL = SamplingParams(max_tokens=1)
_SCORING = SamplingParams(max_tokens=1, prompt_logprobs=0)


class Score(NamedTuple):
    """Log-probabilities of a continuation, one for each of its tokens."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        """Their sum, added in order, as `CompletionOutput.cumulative_logprob` is."""
        total = 0.0
        for logprob in self.logprobs:
            total += logprob
        return total

    @property
    def mean(self) -> float:
        return self.total / len(self.logprobs)


class SessionHost(Protocol):
    """The model and the engine of a session."""

    max_model_len: int

    def encode(self, text: str) -> list[int]:
        """Encode text that continues other text. Raises RequestError if it is empty."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def check(
        self,
        token_ids: list[int],
        params: SamplingParams | None,
        options: RequestOptions,
        pooling: PoolingParams | None = None,
    ) -> CheckedRequest:
        """Check a request. Raises RequestError."""

    def release(self, names: Iterable[str]) -> None:
        """Stop keeping the KV of paths, without waiting; never raises."""

    def release_all(self, prefix: str) -> None:
        """Stop keeping the KV of all paths whose names begin with `prefix`."""


@frozen(kw_only=True)
class SessionOptions:
    """Options of a session. Raises RequestError, which names the field."""

    seed: int | None = None
    """Base seed, from which each node derives its own; None: a random seed."""
    max_nodes: int = MAX_NODES
    """Max nodes that are not closed."""
    cache_salt: str | None = None
    """As in `RequestOptions`, for all requests of the session."""
    adapter: str | None = None
    """Adapter of the calls that name none."""

    def __post_init__(self) -> None:
        integer("max_nodes", self.max_nodes, 1, MAX_INTEGER)
        if self.seed is not None:
            integer("seed", self.seed, 0, 2**64 - 1)


AnySession = TypeVar("AnySession", bound="BaseSession[Any]")
AnyNode = TypeVar("AnyNode", bound="BaseNode[Any]")


@frozen(eq=False, kw_only=True)
class BaseNode(Generic[AnySession]):
    """A node of a session: a text, which continues the text of its parent.

    A node is a value and never changes. Its path is the token ids from the root to its end.
    """

    session: AnySession
    name: str
    """Numbers of the children on the way from the root, such as `0.3.1`; `0` is the root."""
    parent: Self | None
    own_token_ids: tuple[int, ...]
    """Token ids after the path of the parent."""
    num_tokens: int
    """Tokens of the path."""
    seed: int | None = None
    """Seed of a sampled node. A request for the path of its parent with this seed gives the same
    tokens, to the bit.
    """
    output: CompletionOutput | None = None
    """Result of a sampled node: text, log-probabilities and finish reason."""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the path."""
        pieces: list[tuple[int, ...]] = []
        for node in (self, *self._ancestors):
            pieces.append(node.own_token_ids)
        return list(chain.from_iterable(reversed(pieces)))

    @property
    def text(self) -> str:
        """Text of the node without the text of its parent."""
        if self.output is not None:
            return self.output.text
        return self.session.host.decode(self.own_token_ids)

    @property
    def is_open(self) -> bool:
        return self.session.holds(self)

    def extend(self, continuation: Continuation) -> Self:
        """Return a child with this text, or with these token ids.

        Text is tokenised by itself: names of control tokens become these tokens, and no token
        comes before it. Nothing is computed before the first use of the child.
        """
        ids = self.session.read(continuation)
        child: Self = self.session.add(self, tuple(ids))
        return child

    def fork(self, n: int) -> list[Self]:
        """Return `n` children with the same path, which draw different tokens."""
        integer("n", n, 1, MAX_INTEGER)
        self.session.check_limit(n)
        return [self.session.add(self, ()) for _ in range(n)]

    def rollback(self, to: "int | Self") -> Self:
        """Close this node, and return a node whose path is a beginning of its path.

        `to` is a node on the path, or a number of tokens, at least 1. Nodes below this one are
        closed, too. Raises RequestError for another node.
        """
        self.session.check_open(self)
        ancestors = self._ancestors
        if isinstance(to, BaseNode):
            if to not in ancestors:
                raise RequestError(
                    f"node {to.name} is not above node {self.name}; roll back to a node on its path"
                )
            self.session.check_open(to)
            self.close()
            return to
        num_tokens = integer("to", to, 1, self.num_tokens)
        above = next((node for node in ancestors if node.num_tokens <= num_tokens), None)
        if above is None:
            raise RequestError(
                f"to is {num_tokens}, but the root of the session has "
                f"{self.session.root.num_tokens} tokens; start another session for less"
            )
        tokens = self.token_ids[above.num_tokens : num_tokens]
        self.session.check_open(above)
        self.close()
        return self.session.add(above, tuple(tokens)) if tokens else above

    @property
    def _ancestors(self) -> list[Self]:
        """The nodes above this one, the root last."""
        ancestors: list[Self] = []
        parent = self.parent
        while parent is not None:
            ancestors.append(parent)
            parent = parent.parent
        return ancestors

    def close(self) -> None:
        """Close the node and all nodes below it. The engine stops keeping their KV."""
        self.session.forget(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {self.num_tokens} tokens, {self.text!r})"


class BaseSession(Generic[AnyNode]):
    """The nodes of a session and their requests. `Session` and `AsyncSession` run them."""

    root: AnyNode

    def __init__(
        self,
        host: SessionHost,
        make_node: type[AnyNode],
        prompt_token_ids: Iterable[int],
        options: SessionOptions,
    ) -> None:
        """Start a session without computing anything."""
        self.host = host
        self.options = options
        self.seed = random_seed() if options.seed is None else int(options.seed)
        """Base seed of the session."""
        self.id = os.urandom(16).hex()
        self._nodes: dict[str, AnyNode] = {}  # open nodes by name
        self._children: dict[str, list[str]] = {}  # by name of each open node
        self._num_children: dict[str, int] = {}  # closed ones included
        self._make_node = make_node
        self._finalizer = weakref.finalize(self, host.release_all, f"{self.id}/")
        ids = tuple(token_ids("prompt_token_ids", prompt_token_ids, host.max_model_len))
        host.check(list(ids), _PREFILL, RequestOptions(cache_salt=options.cache_salt))
        self.root = make_node(
            session=self, name="0", parent=None, own_token_ids=ids, num_tokens=len(ids)
        )
        self._nodes["0"] = self.root
        self._children["0"] = []
        self._num_children["0"] = 0

    # Nodes

    @property
    def nodes(self) -> list[AnyNode]:
        """The nodes that are not closed."""
        return list(self._nodes.values())

    @property
    def num_nodes(self) -> int:
        """Number of nodes that are not closed."""
        return len(self._nodes)

    def node(self, name: str) -> AnyNode:
        """Return an open node by its name. Raises RequestError if there is none."""
        if name not in self._nodes:
            raise RequestError(
                f"the session has no open node {reprlib.repr(name)}; use an open node"
            )
        return self._nodes[name]

    def holds(self, node: AnyNode) -> bool:
        return node.session is self and node.name in self._children

    def check_open(self, node: AnyNode) -> None:
        """Raise ClosedError after `close`, and RequestError for a closed or foreign node."""
        if not self._finalizer.alive:
            raise ClosedError("the session is closed; start another one")
        if not isinstance(node, BaseNode):
            raise RequestError(f"a node is needed, not {type(node).__name__}")
        if node.session is not self:
            raise RequestError(f"node {node.name} belongs to another session")
        if node.name not in self._children:
            raise RequestError(f"node {node.name} is closed; use an open node of its path")

    def check_limit(self, num_nodes: int) -> None:
        """Raise RequestError if so many new nodes are more than `max_nodes` allows."""
        limit = self.options.max_nodes
        if len(self._children) + num_nodes > limit:
            raise RequestError(
                f"the session has {len(self._children):,} nodes, and {num_nodes:,} more exceed "
                f"max_nodes {limit:,}; close nodes that are not needed or raise max_nodes"
            )

    def read(self, continuation: Continuation) -> list[int]:
        """Return the token ids of a continuation. Raises RequestError if it has none."""
        if isinstance(continuation, str):
            return self.host.encode(continuation)
        ids = token_ids("continuation", continuation, self.host.max_model_len)
        if not ids:
            raise RequestError("the continuation is empty; give at least one token")
        return ids

    def add(self, parent: AnyNode, own_token_ids: tuple[int, ...]) -> AnyNode:
        """Return a new child."""
        (name,) = self._new_names(parent, 1)
        self._num_children[parent.name] += 1
        return self._add(parent, name, own_token_ids)

    def _add(
        self,
        parent: AnyNode,
        name: str,
        own_token_ids: tuple[int, ...],
        seed: int | None = None,
        output: CompletionOutput | None = None,
    ) -> AnyNode:
        node = self._make_node(
            session=self,
            name=name,
            parent=parent,
            own_token_ids=own_token_ids,
            num_tokens=parent.num_tokens + len(own_token_ids),
            seed=seed,
            output=output,
        )
        if parent.name in self._children:  # else it was closed while the child was sampled
            self._children[parent.name].append(name)
            self._nodes[name] = node
            self._children[name] = []
            self._num_children[name] = 0
        else:
            self.host.release([self._path_name(name)])
        return node

    def forget(self, node: AnyNode) -> None:
        """Close a node and all nodes below it; a closed node is ignored."""
        if not self.holds(node):
            return
        if node.parent is not None and node.parent.name in self._children:
            self._children[node.parent.name].remove(node.name)
        names = [node.name]
        for name in names:  # which grows
            names += self._children.pop(name)
            del self._num_children[name], self._nodes[name]
        self.host.release([self._path_name(name) for name in names])

    def close(self) -> None:
        """Close all nodes, and stop keeping their KV. A second call does nothing."""
        self._nodes.clear()
        self._children.clear()
        self._num_children.clear()
        self._finalizer()

    def _new_names(self, parent: AnyNode, count: int) -> list[str]:
        self.check_open(parent)
        self.check_limit(count)
        first = self._num_children[parent.name]
        return [f"{parent.name}.{number}" for number in range(first, first + count)]

    def _path_name(self, name: str) -> str:
        return f"{self.id}/{name}"

    # Requests

    def request_options(
        self,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> RequestOptions:
        """Return the options of a call."""
        return RequestOptions(
            priority=priority,
            timeout=timeout,
            cache_salt=self.options.cache_salt,
            adapter=self.options.adapter if adapter is None else adapter,
        )

    def prefill(self, node: AnyNode, options: RequestOptions) -> CheckedRequest | None:
        """Return the request that computes and keeps the KV of a path; None for one token."""
        self.check_open(node)
        if node.num_tokens < 2:
            return None
        path = PathOptions(keep=(self._path_name(node.name),), score_from=node.num_tokens)
        return self.host.check(node.token_ids, _PREFILL, replace(options, path=path))

    def sampling(
        self, node: AnyNode, k: int, params: SamplingParams | None, options: RequestOptions
    ) -> "Sampling[AnyNode]":
        """Return the request for `k` children of a node. Raises RequestError."""
        k = integer("k", k, 1, int(SAMPLING_FIELDS["n"].bounds[1]))  # type: ignore[index]
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        if params.n not in (1, k):
            raise RequestError(f"n is {params.n}, but k is {k}; leave n out")
        names = self._new_names(node, k)
        base = self.seed if params.seed is None else params.seed
        seeds = [derive_seed(base, name) for name in names]
        path = PathOptions()
        if params.beam_width is None:
            path = PathOptions(keep=tuple(map(self._path_name, names)), seeds=tuple(seeds))
        request = self.host.check(node.token_ids, replace(params, n=k), replace(options, path=path))
        self._num_children[node.name] += k
        return Sampling(self, node, names, seeds, request)

    def scoring(
        self, node: AnyNode, continuations: Sequence[Continuation], options: RequestOptions
    ) -> list[CheckedRequest]:
        """Return a request for each continuation. Raises RequestError."""
        self.check_open(node)
        if isinstance(continuations, str | Mapping) or not isinstance(continuations, Sequence):
            raise RequestError(
                f"continuations must be a list of texts, not {type(continuations).__name__}"
            )
        prefix = node.token_ids
        options = replace(options, path=PathOptions(score_from=len(prefix)))
        return [
            self.host.check(prefix + self.read(continuation), _SCORING, options)
            for continuation in continuations
        ]

    def embedding(
        self, node: AnyNode, pooling: Pooling, normalise: bool, options: RequestOptions
    ) -> CheckedRequest:
        """Return the request for the embedding of a path. Raises RequestError."""
        self.check_open(node)
        params = PoolingParams(pooling=pooling, normalise=normalise)
        return self.host.check(node.token_ids, None, options, params)


class Sampling(Generic[AnyNode]):
    """The request for the children of a node, before it has run."""

    def __init__(
        self,
        session: BaseSession[AnyNode],
        node: AnyNode,
        names: list[str],
        seeds: list[int],
        request: CheckedRequest,
    ) -> None:
        self.request = request
        self._session = session
        self._node = node
        self._names = names
        self._seeds = seeds

    def children(self, outputs: Sequence[CompletionOutput]) -> list[AnyNode]:
        """Return the children with these outputs of the request."""
        return [
            self._session._add(
                self._node,
                name,
                tuple(output.token_ids),
                None if self.request.params.beam_width is not None else seed,
                output,
            )
            for name, seed, output in zip(self._names, self._seeds, outputs, strict=True)
        ]

    def abandon(self) -> None:
        """Stop keeping the KV of children whose result no one has read."""
        self._session.host.release(map(self._session._path_name, self._names))


def score_of(result: RequestOutput, num_prefix_tokens: int) -> Score:
    """Return the score of a scored path. Raises RequestFailedError after a timeout."""
    ids = result.prompt_token_ids[num_prefix_tokens:]
    logprobs = (result.prompt_logprobs or [])[num_prefix_tokens:]
    if len(logprobs) < len(ids):
        raise RequestFailedError("the continuation timed out before its score", [result])
    values = [entry[token].logprob for token, entry in zip(ids, logprobs, strict=True) if entry]
    return Score(ids, values)


def embedding_of(result: RequestOutput) -> NDArray[np.float32]:  # [dim]
    """Return the embedding of a path. Raises RequestFailedError after a timeout."""
    if result.embedding is None:
        raise RequestFailedError("the path timed out before its embedding", [result])
    return result.embedding
