"""`POST /v1/embeddings`."""

import base64
import struct

from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.stream import Stream
from headrace.request import PoolingParams, RequestOptions
from headrace.server.completions import prompt_list, tokenize_prompts
from headrace.server.http_exchange import HttpExchange
from headrace.server.openai_records import EmbeddingRequest
from headrace.server.state import ServerState, Truncation, merge_streams, timeout_error


async def embeddings(http: HttpExchange, state: ServerState) -> None:
    """Embed texts or token ids; by default from the last token, as vectors of unit norm."""
    request = await http.read(EmbeddingRequest)
    adapter = state.resolve_adapter(request.model)
    pooling = PoolingParams(
        pooling=request.pooling or "last", normalise=request.normalize is not False
    )
    texts = prompt_list(request.input, "input")

    with state.admit(http, len(texts), request.priority or 0):
        prompts = await tokenize_prompts(
            state,
            texts,
            "input",
            max_tokens=0,
            truncation=Truncation(request.truncate_prompt_tokens, request.truncation_side),
            add_special_tokens=request.add_special_tokens is not False,
            parse_special=request.parse_special is not False,
        )
        options = RequestOptions(priority=request.priority or 0, adapter=adapter)
        async with state.submit(http, prompts, None, options, pooling=pooling) as streams:
            vectors = await http.while_connected(_collect(streams))
        num_tokens = sum(map(len, prompts))
        data = [
            {"object": "embedding", "index": i, "embedding": _encode(vector, request)}
            for i, vector in enumerate(vectors)
        ]
        await http.respond(
            {
                "object": "list",
                "data": data,
                "model": adapter or state.settings.model_name,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        )


async def _collect(streams: list[Stream]) -> list[bytes]:
    vectors = [b""] * len(streams)
    async for number, item in merge_streams(streams):
        if isinstance(item, frames.Ended):
            if item.error:
                raise RefusedError(item.error.kind, item.error.message)
            if item.embedding is None:
                raise timeout_error()
            vectors[number] = item.embedding
    return vectors


def _encode(vector: bytes, request: EmbeddingRequest) -> str | list[float]:
    if request.encoding_format == "base64":
        return base64.b64encode(vector).decode()
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
