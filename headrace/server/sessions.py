"""Routes of sessions: trees of texts whose nodes share their KV (docs/use/sessions.md)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from headrace.errors import ClosedError, RequestError
from headrace.outputs import CompletionOutput, Logprobs
from headrace.prompts import TokenizedPrompt
from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.stream import Stream
from headrace.request import CheckedRequest
from headrace.server.errors import ApiError, invalid
from headrace.server.generation import Choice, sampling_params
from headrace.server.http_exchange import HttpExchange
from headrace.server.openai_records import (
    SessionExtendRequest,
    SessionForkRequest,
    SessionNodeRequest,
    SessionRequest,
    SessionRollbackRequest,
    SessionSampleRequest,
    SessionScoreRequest,
)
from headrace.server.served_sessions import (
    DEFAULT_NODES,
    DEFAULT_TTL,
    ServedNode,
    SessionEngine,
)
from headrace.server.state import ServerState, merge_streams, timeout_error, unsigned_seed
from headrace.sessions.tree import Score, SessionOptions
from headrace.validation import token_ids

_DEFAULT_MAX_TOKENS = 16
_PREFIX = "/v1/sessions/"


async def create(http: HttpExchange, state: ServerState) -> None:
    """Start a session with a prompt or a conversation, and compute it."""
    request = await http.read(SessionRequest)
    if not state.engine.has_sessions:
        raise ApiError(
            501,
            "unsupported_route",
            "sessions need one engine, and this server has replicas; use a server of its own",
        )
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    adapter = state.resolve_adapter(request.model)
    key = http.api_key or ""
    state.sessions.check_limit(key)
    param = "prompt" if request.messages is None else "messages"
    with state.admit(http, 1):
        ids = await state.tokenize(partial(_read_prompt, state, request), param, 1)
        options = SessionOptions(
            seed=unsigned_seed(request.seed),
            max_nodes=request.max_nodes or DEFAULT_NODES,
            cache_salt=request.cache_salt,
            adapter=adapter,
        )
        host = SessionEngine(state.engine, state.prompt_reader)
        session = state.sessions.open(host, key, ids, options, request.ttl)
        try:
            with state.sessions.using(session.id, key):
                await _compute(http, state, session.root)
        except BaseException:
            state.sessions.delete(session.id, key)
            raise
        await http.respond(
            {
                "id": session.id,
                "object": "session",
                "model": adapter or state.settings.model_name,
                "seed": _signed(session.seed),
                "ttl": DEFAULT_TTL if request.ttl is None else request.ttl,
                "root": _shown(session.root),
            }
        )


async def extend(http: HttpExchange, state: ServerState) -> None:
    """Add a child with a text or token ids to a node."""
    request = await http.read(SessionExtendRequest)
    with _node(http, state, request) as node:
        try:
            ids = await state.run_in_thread(lambda: node.session.read(request.text))
            node.session.check_tokens(len(ids))
            child = node.extend(ids)
        except RequestError as error:
            raise invalid(str(error), "text") from None
        await http.respond(_shown(child))


async def fork(http: HttpExchange, state: ServerState) -> None:
    """Add children with the path of the node, which draw different tokens."""
    request = await http.read(SessionForkRequest)
    with _node(http, state, request) as node:
        await http.respond(_listed(node.fork(request.n)))


async def rollback(http: HttpExchange, state: ServerState) -> None:
    """Close a node, and return a node with the first tokens of its path."""
    request = await http.read(SessionRollbackRequest)
    with _node(http, state, request) as node:
        try:
            back = node.rollback(request.to)
        except RequestError as error:
            raise invalid(str(error), "to") from None
        await http.respond(_shown(back))


async def close_node(http: HttpExchange, state: ServerState) -> None:
    """Close a node and all nodes below it."""
    request = await http.read(SessionNodeRequest)
    with _node(http, state, request) as node:
        if node.parent is None:
            raise invalid("the root ends with its session; delete the session", "node")
        node.close()
        await http.respond({"id": request.session, "object": "session", "closed": node.name})


async def sample(http: HttpExchange, state: ServerState) -> None:
    """Sample continuations of a node, and return them as its children."""
    request = await http.read(SessionSampleRequest)
    if request.stream:
        raise invalid("stream must be false: the nodes of a session come whole", "stream")
    if request.cache_salt is not None:
        raise invalid("cache_salt belongs to the session; leave it out here", "cache_salt")
    k, max_tokens = request.k or 1, request.max_tokens or _DEFAULT_MAX_TOKENS
    params = sampling_params(
        request,
        state.advised_sampling,
        strict_schemas=state.settings.strict_schemas,
        max_tokens=max_tokens,
        logprobs=0 if request.logprobs else None,
    )
    adapter = state.resolve_adapter(request.model)
    with state.admit(http, k, request.priority or 0), _node(http, state, request) as node:
        session = node.session
        session.check_tokens(k * max_tokens)
        options = session.request_options(request.priority or 0, adapter=adapter)
        sampling = session.sampling(node, k, params, options)
        try:
            choices = await _run(http, state, sampling.request, k)
        except BaseException:
            sampling.abandon()
            raise
        children = sampling.children([_output(i, choice) for i, choice in enumerate(choices)])
        await http.respond(_listed(children))


async def score(http: HttpExchange, state: ServerState) -> None:
    """Return the log-probabilities of continuations of a node."""
    request = await http.read(SessionScoreRequest)
    count = len(request.continuations)
    with state.admit(http, count, request.priority or 0), _node(http, state, request) as node:
        options = node.session.request_options(request.priority or 0)
        try:
            requests = await state.run_in_thread(
                lambda: node.session.scoring(node, request.continuations, options)
            )
        except RequestError as error:
            raise invalid(str(error), "continuations") from None
        if count > 1:
            await _compute(http, state, node)
        first = requests[0]
        prompts = [item.prompt_token_ids for item in requests]
        async with state.submit(http, prompts, first.params, first.options) as streams:
            ends = await http.while_connected(_ends(streams))
        scores = []
        for ids, end in zip(prompts, ends, strict=True):
            own = ids[node.num_tokens :]
            entries = (end.prompt_logprobs or [])[node.num_tokens :]
            if len(entries) < len(own):
                raise timeout_error()
            pairs = zip(entries, own, strict=True)
            logprobs = [entry[token].logprob for entry, token in pairs if entry]
            total = Score(own, logprobs).total
            scores.append({"token_ids": own, "logprobs": logprobs, "total": total})
        await http.respond({"object": "list", "data": scores})


async def delete(http: HttpExchange, state: ServerState) -> None:
    """End a session, and free its memory."""
    session_id = http.path.removeprefix(_PREFIX)
    state.sessions.delete(session_id, http.api_key or "")
    await http.respond({"id": session_id, "object": "session", "deleted": True})


@contextmanager
def _node(
    http: HttpExchange, state: ServerState, request: SessionNodeRequest | SessionSampleRequest
) -> Iterator[ServedNode]:
    """Yield the node that a request names. Raises ApiError, also if its session ends meanwhile."""
    with state.sessions.using(request.session, http.api_key or "") as session:
        try:
            node = session.node(request.node)
        except RequestError as error:
            raise invalid(str(error), "node") from None
        try:
            yield node
        except ClosedError as error:
            raise ApiError(404, "session_not_found", str(error), param="session") from None


def _read_prompt(state: ServerState, request: SessionRequest) -> TokenizedPrompt:
    reader = state.prompt_reader
    if request.messages is not None:
        return reader.read_chat(
            [msgspec.to_builtins(message) for message in request.messages],
            sanitize_control_tokens=state.settings.sanitize_control_tokens,
        )
    if isinstance(request.prompt, str):
        return reader.read_prompt(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
    return TokenizedPrompt(token_ids("prompt", request.prompt, reader.max_model_len), None)


async def _compute(http: HttpExchange, state: ServerState, node: ServedNode) -> None:
    """Compute the path of a node, and keep its KV. Raises as `_run`."""
    request = node.session.prefill(node, node.session.request_options())
    if request is not None:
        await _run(http, state, request, 1)


async def _run(
    http: HttpExchange, state: ServerState, request: CheckedRequest, num_outputs: int
) -> list[Choice]:
    """Run a request and return its outputs. Raises ApiError after a timeout."""
    choices = [Choice() for _ in range(num_outputs)]

    async def collect(streams: Sequence[Stream]) -> None:
        async for _, item in merge_streams(list(streams)):
            if isinstance(item, frames.Ended):
                if item.error:
                    raise RefusedError(item.error.kind, item.error.message)
            else:
                choices[item.index].add(item)

    prompts = [request.prompt_token_ids]
    async with state.submit(http, prompts, request.params, request.options) as streams:
        await http.while_connected(collect(streams))
    return choices


async def _ends(streams: list[Stream]) -> list[frames.Ended]:
    ends: dict[int, frames.Ended] = {}
    async for number, item in merge_streams(streams):
        if isinstance(item, frames.Ended):
            if item.error:
                raise RefusedError(item.error.kind, item.error.message)
            ends[number] = item
    return [ends[number] for number in range(len(streams))]


def _output(index: int, choice: Choice) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs or None,
        cumulative_logprob=None,
        finish_reason=choice.finish_reason,  # type: ignore[arg-type]
        stop_reason=choice.stop_reason,
    )


def _listed(nodes: Sequence[ServedNode]) -> dict[str, Any]:
    return {"object": "list", "data": [_shown(node) for node in nodes]}


def _shown(node: ServedNode) -> dict[str, Any]:
    """The node in JSON, with its own text and tokens."""
    shown: dict[str, Any] = {
        "object": "session.node",
        "node": node.name,
        "parent": node.parent.name if node.parent else None,
        "text": node.text,
        "token_ids": list(node.own_token_ids),
        "num_tokens": node.num_tokens,
    }
    if node.output is not None:
        output = node.output
        shown |= {
            "seed": None if node.seed is None else _signed(node.seed),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "logprobs": output.logprobs and _own(output.logprobs, output.token_ids),
        }
    return shown


def _signed(seed: int) -> int:
    """The seed as the field `seed` of a request takes it, with 64 bits and a sign."""
    return seed - 2**64 if seed >= 2**63 else seed


def _own(entries: Sequence[Logprobs], ids: Sequence[int]) -> list[float]:
    """Log-probabilities of the tokens themselves."""
    return [entry[token].logprob for entry, token in zip(entries, ids, strict=True)]
