"""`POST /v1/embeddings`: a vector for each text."""

import base64
import struct
from typing import Any

from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.stream import Stream
from headrace.request import PoolingParams, RequestOptions
from headrace.server.asgi import Call
from headrace.server.completions import prompts_of, read_prompts
from headrace.server.errors import ApiError
from headrace.server.openai_records import EmbeddingRequest
from headrace.server.served_model import ServedModel, merge, timed_out


async def embeddings(served: ServedModel, call: Call) -> None:
    """Embed texts, or token ids: by the last token unless asked otherwise, each vector of length 1,
    as OpenAI's are.
    """
    asked = await call.read(EmbeddingRequest)
    adapter = served.adapter_of(asked.model)
    if asked.dimensions is not None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "dimensions cannot be chosen for this model",
            param="dimensions",
        )
    pooling = PoolingParams(pooling=asked.pooling or "last", normalise=asked.normalize is not False)
    texts = prompts_of(asked.input, "input")
    with served.admitted(call, len(texts)):
        prompts = await read_prompts(served, "input", texts, None, 0)
        options = RequestOptions(priority=asked.priority or 0, adapter=adapter)
        async with served.submitted(call, prompts, None, options, pooling=pooling) as streams:
            vectors = await call.while_connected(_vectors(streams))
        tokens = sum(map(len, prompts))
        await call.respond(
            {
                "object": "list",
                "data": [
                    {
                        "object": "embedding",
                        "index": i,
                        "embedding": _encoded(vector, asked.encoding_format),
                    }
                    for i, vector in enumerate(vectors)
                ],
                "model": adapter or served.settings.model_name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )


async def _vectors(streams: list[Stream]) -> list[bytes]:
    found = [b""] * len(streams)
    async for number, item in merge(streams):
        if isinstance(item, frames.Ended):
            if item.error:
                raise RefusedError(item.error.kind, item.error.message)
            if item.embedding is None:
                raise timed_out()
            found[number] = item.embedding
    return found


def _encoded(vector: bytes, how: str | None) -> Any:
    if how == "base64":
        return base64.b64encode(vector).decode()
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
