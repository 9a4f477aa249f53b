"""The audit of a server: all probes, with both APIs, within fixed limits."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from headrace.audit.bodies import Models
from headrace.audit.client import AuditLimits, Client, FailedError, NotOfferedError
from headrace.audit.compare import Finding, Result, not_offered
from headrace.audit.context import APIS, Api, Context
from headrace.audit.probes import OTHER_SERVER, PROBES, Probe
from headrace.errors import AuditError, RequestError
from headrace.measure.progress import ProgressCallback, ignore_progress

_NUM_START = 8
"""Requests before the first probe: names, versions, and the first answers."""
_MAX_TOKENS_FACTOR = 2
"""A request of a crowd has up to twice the tokens of others, and `n` may be 2."""
_MAX_FAILED = 5
"""Probes in a row whose failure ends the audit. Broken streams alone fail four."""
_MIN_KEY = 4
"""Characters of a key that is hidden in messages of the server."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The server of an audit and the bounds of its load."""

    url: str
    key: str = ""
    model: str | None = None
    against: str | None = None
    """URL of a second server, whose answers must be equal."""
    tokens: int = 24
    """Output tokens of a request."""
    crowd: int = 7
    """Requests next to the request under audit."""
    seconds: float = 600.0
    request_seconds: float = 60.0
    seed: int = 0
    """Chooses the prompts that no cache has; an audit with the same seed finds them cached."""

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The probes that the plan asks for."""
        return (*PROBES, OTHER_SERVER) if self.against else PROBES

    @property
    def limits(self) -> AuditLimits:
        """Upper bounds of the load of one server."""
        per_api = sum(probe.requests + self.crowd * probe.crowds for probe in self.probes)
        requests = _NUM_START + len(APIS) * per_api
        return AuditLimits(
            requests=requests,
            tokens=requests * self.tokens * _MAX_TOKENS_FACTOR,
            seconds=self.seconds,
            request_seconds=self.request_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table for one API."""

    name: str
    api: str
    finding: Finding


@dataclass(frozen=True, kw_only=True)
class Report:
    """The rows of an audit."""

    url: str
    model: str
    server: str
    """Version of the server, as it reports it; empty if it reports none."""
    rows: tuple[Row, ...]
    requests: int
    problem: str = ""
    """Reason why the audit ended early."""

    def having(self, result: Result) -> list[Row]:
        """The rows with this result."""
        return [row for row in self.rows if row.finding.result is result]

    def facts(self) -> dict[str, Any]:
        """The report for JSON."""
        rows = [
            {
                "row": row.name,
                "api": row.api,
                "result": row.finding.result.value,
                "detail": row.finding.detail,
                "token": row.finding.token,
            }
            for row in self.rows
        ]
        head = {"url": self.url, "model": self.model, "server": self.server}
        return {**head, "requests": self.requests, "problem": self.problem, "rows": rows}


def server_url(url: str, *, remote: bool) -> str:
    """Check the address of a server, and return it without a path.

    Raises RequestError for an address on another machine, unless `remote` allows it.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    path = parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise RequestError(f"{url!r} is not a URL; write http://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise RequestError("a URL must not have a password; give the key with --api-key")
    if path or parts.query or parts.fragment:
        raise RequestError(f"{url!r} has more than a host and a port; write http://HOST:PORT")
    if not remote and not _is_loopback(parts.hostname):
        raise RequestError(
            f"{parts.hostname} is another machine, whose server an audit would load; add --remote "
            "if the server is yours"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def audit(plan: Plan, on_progress: ProgressCallback = ignore_progress) -> Report:
    """Audit a server. Raises AuditError if it cannot be audited at all."""
    return asyncio.run(_Audit(plan, on_progress).run())


class _Audit:
    def __init__(self, plan: Plan, on_progress: ProgressCallback) -> None:
        self._plan = plan
        self._on_progress = on_progress
        self._client = Client(plan.url, plan.key, plan.limits)
        self._rows: list[Row] = []
        self._failed: list[str] = []
        """Reasons of the last probes, which failed in a row."""
        self._model, self._server, self._problem = "", "", ""
        self._rng = random.Random(plan.seed)

    async def run(self) -> Report:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._client)
            against = None
            if self._plan.against:
                other = Client(self._plan.against, self._plan.key, self._plan.limits)
                against = await stack.enter_async_context(other)
            try:
                async with asyncio.timeout(self._plan.seconds):
                    contexts = await self._start(against)
                    await self._probe(contexts)
            except TimeoutError:
                self._problem = f"the audit did not end in {self._plan.seconds:g} seconds"
        if self._problem and not self._rows:
            raise AuditError(self._hidden(self._problem))
        self._add_missing()
        return Report(
            url=self._plan.url,
            model=self._model,
            server=self._server,
            rows=tuple(self._sorted_rows()),
            requests=self._client.num_requests,
            problem=self._hidden(self._problem),
        )

    async def _start(self, against: Client | None) -> list[Context | Finding]:
        """The context of each API, or the reason why there is none."""
        self._on_progress("first answers", 0.0)
        self._model = self._plan.model or await self._first_model()
        self._server = await self._version()
        contexts: list[Context | Finding] = []
        for api in APIS:
            context = Context(
                client=self._client,
                api=api,
                model=self._model,
                tokens=self._plan.tokens,
                crowd=self._plan.crowd,
                rng=self._rng,
                against=against,
            )
            contexts.append(await _first_answer(context) or context)
        reasons = [item for item in contexts if isinstance(item, Finding)]
        if len(reasons) == len(APIS):
            details = "; ".join(
                f"{api.path}: {reason.detail}" for api, reason in zip(APIS, reasons, strict=True)
            )
            raise AuditError(
                self._hidden(f"{self._plan.url} cannot be audited: {details}")
                + "; check that the URL is one of a running server with OpenAI's API"
            )
        return contexts

    async def _first_model(self) -> str:
        try:
            models = await self._client.get("/v1/models", Models)
        except NotOfferedError:
            return "default"
        except FailedError as error:
            raise AuditError(
                self._hidden(f"{self._plan.url} cannot be audited: {error}")
                + "; check that the server runs there"
            ) from None
        return models.data[0].id if models.data else "default"

    async def _version(self) -> str:
        for path, name in (("/version", "version"), ("/props", "build_info")):
            try:
                found = (await self._client.get(path, dict[str, Any])).get(name)
            except (NotOfferedError, FailedError):
                continue
            if isinstance(found, str):
                return found[:40]
        return ""

    async def _probe(self, contexts: Sequence[Context | Finding]) -> None:
        probes, total = self._plan.probes, len(APIS) * len(self._plan.probes)
        for number, probe in enumerate(probes):
            for place, (api, context) in enumerate(zip(APIS, contexts, strict=True)):
                share = (number * len(APIS) + place) / total
                self._on_progress(f"probes; {probe.rows[0]}, {api.name}", share)
                findings = (
                    [context] * len(probe.rows)
                    if isinstance(context, Finding)
                    else await self._findings(probe, context)
                )
                self._add(probe, api, findings)
                if len(self._failed) == _MAX_FAILED:
                    self._problem = f"{_MAX_FAILED} probes in a row failed: {self._failed[-1]}"
                    return

    async def _findings(self, probe: Probe, context: Context) -> Sequence[Finding]:
        try:
            findings = await probe.run(context)
        except NotOfferedError as error:
            findings = [not_offered(str(error))] * len(probe.rows)
        except FailedError as error:
            self._failed.append(str(error))
            return [Finding(result=Result.FAILED, detail=str(error))] * len(probe.rows)
        self._failed.clear()
        return findings

    def _add(self, probe: Probe, api: Api, findings: Sequence[Finding]) -> None:
        for name, finding in zip(probe.rows, findings, strict=True):
            shown = replace(
                finding,
                detail=self._hidden(finding.detail),
                expected=self._hidden(finding.expected),
                actual=self._hidden(finding.actual),
            )
            self._rows.append(Row(name=name, api=api.name, finding=shown))

    def _add_missing(self) -> None:
        """Rows of probes that did not run."""
        done = {(row.name, row.api) for row in self._rows}
        not_run = Finding(result=Result.FAILED, detail="not run")
        self._rows += [
            Row(name=name, api=api.name, finding=not_run)
            for probe in self._plan.probes
            for name in probe.rows
            for api in APIS
            if (name, api.name) not in done
        ]

    def _sorted_rows(self) -> list[Row]:
        names = [name for probe in self._plan.probes for name in probe.rows]
        place = {name: number for number, name in enumerate(names)}
        return sorted(self._rows, key=lambda row: place[row.name])

    def _hidden(self, text: str) -> str:
        """The text of a server without the key, which the server may repeat."""
        key = self._plan.key
        return text.replace(key, "***") if len(key) >= _MIN_KEY else text


async def _first_answer(context: Context) -> Finding | None:
    """Set the answer that others are compared with; return the reason if there is none."""
    try:
        context.first = await context.ask()
    except FailedError as error:
        return Finding(result=Result.FAILED, detail=str(error))
    except NotOfferedError as with_scores:
        context.has_scores = False
        try:
            context.first = await context.ask()
        except NotOfferedError:
            return not_offered(str(with_scores))
        except FailedError as error:
            return Finding(result=Result.FAILED, detail=str(error))
    context.has_scores = bool(context.first.output.tokens)
    return None
