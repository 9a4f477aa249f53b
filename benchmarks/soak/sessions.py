"""Sessions that are created, extended, sampled, scored, forked, rolled back, left to their time to
live, cut off and refused: at the end there is no session, all blocks are free, and memory is flat.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from client import fill, request
from harness import Findings, Running, Watch, check_rest, check_steady, serving, tiny_model, wait

_SECONDS = 300.0
_CLIENTS = 8
_WARM_UP = 0.3
_BLOCKS = 256
_MAX_SESSIONS = 6
"""Below the number of clients, so that some are refused."""
_MAX_NODES = 12
_TTL = 4.0
"""Seconds without a request after which a session ends."""
_MAX_PER_SECOND = (1 << 20) / 600
_WORDS = "mill water stone wheel river grain flour dam".split()


def run(findings: Findings) -> None:
    seconds = findings.seconds or _SECONDS
    flags = ("--threads", "1", "--max-num-seqs", "16", "--kv-blocks", str(_BLOCKS))
    with serving(
        findings, tiny_model(), *flags, "--max-sessions", str(_MAX_SESSIONS), "--max-waiting", "512"
    ) as server:
        asyncio.run(fill(server.port, _BLOCKS))
        watch = Watch(server)
        watch.look()
        seen = asyncio.run(_Traffic(server, seconds, watch).run())
        findings.says(f"{sum(seen.values()):,} requests: {dict(sorted(seen.items()))}")
        findings.holds(not seen["wrong"], f"{seen['wrong']} wrong responses")
        needed = ("refused session", "refused node", "left", "expired", "score")
        findings.holds(
            all(seen[kind] for kind in needed),
            ", ".join(f"{seen[kind]:,} {kind}" for kind in needed) + ": each happened",
        )
        took = wait(lambda: not server.figures()["headrace_kept_paths"], _TTL + 5)
        findings.holds(took is not None, f"no kept path {took or _TTL + 5:.1f} s after the end")
        findings.holds(_all_can_open(server), f"{_MAX_SESSIONS} sessions can be opened again")
        check_rest(findings, server, 5)
        watch.look()
        warm = seconds * _WARM_UP
        for name, samples in watch.samples.items():
            slope = watch.growth_per_second(name, warm)
            findings.holds(
                slope <= _MAX_PER_SECOND,
                f"{name}: {slope * 600 / 2**20:+.2f} MB in 10 minutes after a warm-up of "
                f"{warm:.0f} s (at most 1), {samples[-1][1].anon / 2**20:.0f} MB at the end",
            )
            check_steady(findings, name, samples, warm)


def _all_can_open(server: Running) -> bool:
    """Open as many sessions as the limit allows, which only works if no other one is open."""
    replies = [server.post("/v1/sessions", {"prompt": "hello"}) for _ in range(_MAX_SESSIONS + 1)]
    for reply in replies[:-1]:
        if reply.status == 200:
            server.request("DELETE", f"/v1/sessions/{reply.json['id']}")
    statuses = [reply.status for reply in replies]
    return statuses == [200] * _MAX_SESSIONS + [429]


class _Traffic:
    """Clients that work with sessions of their own, and count each kind of response."""

    def __init__(self, server: Running, seconds: float, watch: Watch) -> None:
        self._server = server
        self._end = time.monotonic() + seconds
        self._watch = watch
        self._rng = random.Random(0)
        self._used: dict[str, float] = {}
        """Time of the last response of each session."""
        self.seen = Counter[str]()

    async def run(self) -> Counter[str]:
        # A session must not wait for a thread, as its time to live would end.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * _CLIENTS))
        looking = asyncio.ensure_future(self._look())
        await asyncio.gather(*(self._client() for _ in range(_CLIENTS)))
        looking.cancel()
        return self.seen

    async def _look(self) -> None:
        while True:
            self._watch.look()
            await asyncio.sleep(1)

    async def _client(self) -> None:
        while time.monotonic() < self._end:
            try:
                await self._session()
            except _Late:
                self.seen["late"] += 1
            except _Wrong as error:
                self.seen["wrong"] += 1
                print(f"         {error}")

    async def _post(
        self, kind: str, path: str, body: dict[str, Any], refused: str = ""
    ) -> Any | None:
        """The JSON of a response; None if the server refuses the request with this code.

        Raises _Late if the session has ended, because this process was slow or stopped.
        """
        begun = time.monotonic()
        reply = await asyncio.to_thread(self._server.post, f"/v1/sessions{path}", body)
        unused = begun - self._used.get(body.get("session", ""), begun)
        if reply.status == 404 and unused + (time.monotonic() - begun) >= _TTL:
            raise _Late
        if reply.status == 200:
            self.seen[kind] += 1
            session = reply.json.get("id") or body["session"]
            self._used[session] = time.monotonic()
            return reply.json
        if refused and reply.json["error"]["code"] == refused:
            self.seen[f"refused {kind}"] += 1
            return None
        raise _Wrong(f"{kind}: status {reply.status}, {reply.body[:200]!r}")

    async def _session(self) -> None:
        rng = self._rng
        words = " ".join(rng.choices(_WORDS, k=rng.choice((4, 30, 120))))
        body = {"prompt": words, "ttl": _TTL, "max_nodes": _MAX_NODES, "seed": rng.randrange(99)}
        made = await self._post("session", "", body, refused="rate_limit_exceeded")
        if made is None:
            await asyncio.sleep(0.2)
            return
        here, nodes = {"session": made["id"]}, ["0"]
        for _ in range(rng.randint(2, 12)):
            await self._work(here, nodes)
        ending = rng.random()
        if ending < 0.15:
            await self._leave({**here, "node": "0", "k": 4, "max_tokens": 1000, "ignore_eos": True})
        elif ending < 0.3:
            await self._expire(here)
        else:
            path = f"/v1/sessions/{made['id']}"
            reply = await asyncio.to_thread(self._server.request, "DELETE", path)
            if reply.status == 404 and time.monotonic() - self._used[made["id"]] >= _TTL:
                raise _Late
            self.seen["deleted" if reply.status == 200 else "wrong"] += 1
        del self._used[made["id"]]

    async def _work(self, here: dict[str, str], nodes: list[str]) -> None:
        rng = self._rng
        at = {**here, "node": rng.choice(nodes)}
        kind, text = rng.random(), " ".join(rng.choices(_WORDS, k=rng.choice((2, 20))))
        if kind < 0.4:
            body = {**at, "k": rng.randint(1, 4), "max_tokens": rng.randint(2, 24)}
            found = await self._post("node", "/sample", body, refused="invalid_value")
            nodes += [child["node"] for child in (found or {"data": []})["data"]]
        elif kind < 0.55:
            found = await self._post("node", "/extend", {**at, "text": text}, "invalid_value")
            nodes += [found["node"]] if found else []
        elif kind < 0.65:
            body = {**at, "n": rng.randint(1, 8)}
            found = await self._post("node", "/fork", body, refused="invalid_value")
            nodes += [child["node"] for child in (found or {"data": []})["data"]]
        elif kind < 0.85:
            body = {**at, "continuations": [f" {text}", " the end."]}
            first = await self._post("score", "/score", body)
            again = await self._post("score", "/score", body)
            if first != again:
                raise _Wrong(f"two scores of one text: {first} and {again}")
        elif at["node"] != "0":
            await self._post("closed", "/close", at)
            nodes[:] = [name for name in nodes if not f"{name}.".startswith(f"{at['node']}.")]
        else:
            found = await self._post("node", "/extend", {**at, "text": text}, "invalid_value")
            if found and found["num_tokens"] > 1:
                body = {**here, "node": found["node"], "to": found["num_tokens"] - 1}
                back = await self._post("rollback", "/rollback", body)
                nodes += [] if back["node"] in nodes else [back["node"]]

    async def _leave(self, body: dict[str, Any]) -> None:
        """Disconnect while a sampling runs; its session ends by its time to live."""
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(request("/v1/sessions/sample", data) + data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(0.3 * self._rng.random())
        writer.transport.abort()
        self.seen["left"] += 1

    async def _expire(self, here: dict[str, str]) -> None:
        """Wait until the session ends by itself, then use it."""
        await asyncio.sleep(_TTL + 1)
        path, body = "/v1/sessions/extend", {**here, "text": "late"}
        reply = await asyncio.to_thread(self._server.post, path, body)
        self.seen["expired" if reply.status == 404 else "wrong"] += 1


class _Late(Exception):
    """The time to live of a session ended between two requests of its client."""


class _Wrong(Exception):
    """A response that no session may give."""
