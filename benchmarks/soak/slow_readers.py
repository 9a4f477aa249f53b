"""Clients that read a byte per second: their buffers are bounded, others are not slowed down, and
they are cut off in the end.
"""

import asyncio
import json
import socket
import time

from client import Answer, ask, request
from harness import Findings, Held, Running, check_rest, held, serving, tiny_model, wait

_SLOW = 100
_BODY = {
    "prompt": "hello",
    "max_tokens": 2000,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 5,
    "stream": True,
}
_OTHER = {
    "prompt": "hello world",
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
_MAX_EACH = 2 << 20


def run(findings: Findings) -> None:
    flags = (
        "--threads",
        "1",
        "--kv-blocks",
        "8192",
        "--max-num-seqs",
        str(_SLOW),
        "--max-waiting",
        "8",
        "--send-timeout",
        "10",
    )
    with serving(findings, tiny_model(), *flags) as server:
        alone = asyncio.run(ask(server.port, "/v1/completions", _OTHER))
        before = held(server.process.pid)
        asyncio.run(_slow_beside_others(findings, server, alone, before))
        took = wait(lambda: held(server.process.pid).fds <= before.fds + 1, 60)
        findings.holds(
            took is not None,
            f"their connections are cut: {held(server.process.pid).fds} files open, "
            f"{before.fds} before",
        )
        check_rest(findings, server, 5)


async def _slow_beside_others(
    findings: Findings, server: Running, alone: Answer, before: Held
) -> None:
    """Other clients send requests one after the other, until the slow clients are cut off."""
    slow = [asyncio.ensure_future(_read_slowly(server.port)) for _ in range(_SLOW)]
    pid, max_anon, begun = server.process.pid, before.anon, time.monotonic()
    meanwhile: list[Answer] = []
    after: list[Answer] = []
    await asyncio.sleep(2)
    while (seconds := time.monotonic() - begun) < 120 and held(pid).fds > before.fds + _SLOW // 10:
        (after if await asyncio.to_thread(server.at_rest) else meanwhile).append(
            await ask(server.port, "/v1/completions", _OTHER)
        )
        max_anon = max(max_anon, held(pid).anon)
        await asyncio.sleep(0.2)
    findings.says(f"cut after {seconds:.0f} s, of which a client without reads has 10")
    for others, when in (
        (meanwhile, "while the engine writes for the slow ones too"),
        (after, "after that"),
    ):
        right = sum(one.is_whole and one.text == alone.text != "" for one in others)
        slowest = max((one.seconds for one in others), default=0)
        findings.holds(
            right == len(others) > 0,
            f"{right} of {len(others)} others were served right {when}, in {slowest:.2f} s or less",
        )
    findings.says(f"alone in {alone.seconds:.2f} s")
    each = (max_anon - before.anon) / _SLOW
    findings.holds(
        each <= _MAX_EACH,
        f"at most {each / 1024:,.0f} kB for each in the API process (at most {_MAX_EACH >> 10:,})",
    )
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def _read_slowly(port: int) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        data = json.dumps(_BODY).encode()
        await loop.sock_sendall(connection, request("/v1/completions", data) + data)
        try:
            while await loop.sock_recv(connection, 1):
                await asyncio.sleep(1)
        except ConnectionError:
            pass
