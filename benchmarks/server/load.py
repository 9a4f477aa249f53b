"""A client with many concurrent streams. It prints its measurements and CPU time as a line of JSON.

    python load.py URL STREAMS < requests.json

`requests.json` is a list of bodies for /v1/completions. STREAMS requests always run, each as a
stream over its own connection.
"""

import asyncio
import json
import resource
import sys
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit


class Seen:
    """Times in seconds."""

    def __init__(self) -> None:
        self.first: list[float] = []
        """From a request to its first text."""
        self.gaps: list[float] = []
        """Between two chunks of a stream, which may have several tokens."""
        self.each: list[float] = []
        """Mean seconds per token after the first, of each stream."""
        self.tokens = 0


async def stream(host: str, port: int, body: dict[str, Any], seen: Seen) -> None:
    """Run one request to its end."""
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    begun = first = last = perf_counter()
    writer.write(head.encode() + data)
    is_first = True
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if not line:
            raise ConnectionError("the stream was cut")
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(event["error"])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
            seen.tokens += tokens
            seen.each.append((last - first) / max(tokens - 1, 1))
        if event["choices"] and event["choices"][0].get("text"):
            now = perf_counter()
            (seen.first if is_first else seen.gaps).append(now - (begun if is_first else last))
            is_first, first, last = False, now if is_first else first, now
    writer.close()


async def main(url: str, streams: int, bodies: list[dict[str, Any]]) -> None:
    place, seen, left = urlsplit(url), Seen(), list(reversed(bodies))

    async def lane() -> None:
        while left:
            await stream(place.hostname or "", place.port or 80, left.pop(), seen)

    begun = perf_counter()
    await asyncio.gather(*(lane() for _ in range(streams)))
    seconds, used = perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {"seconds": seconds, "cpu": (used.ru_utime + used.ru_stime) / seconds} | vars(seen)
        )
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))
