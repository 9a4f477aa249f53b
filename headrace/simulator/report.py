"""The figures of a simulation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.planner.money import per_million
from headrace.record import frozen
from headrace.simulator.events import Served
from headrace.simulator.replica import Replica


class Percentiles(NamedTuple):
    """Seconds of requests; zeros without a request."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Percentiles":
        values = np.fromiter(seconds, float)
        if not len(values):
            return cls()
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        return cls(mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


@frozen(kw_only=True)
class Latencies:
    """Latencies of requests, seen by a client without a network."""

    queue: Percentiles
    """From the arrival to the first step."""
    first_token: Percentiles
    """TTFT: from the arrival to the first token."""
    per_token: Percentiles
    """TPOT: from the first token to the last, for each token after the first."""
    total: Percentiles
    """From the arrival to the end."""

    @classmethod
    def of(cls, served: Sequence[Served]) -> "Latencies":
        return cls(
            queue=Percentiles.of(one.queue for one in served),
            first_token=Percentiles.of(one.first_token - one.came for one in served),
            per_token=Percentiles.of(
                (one.ended - one.first_token) / (one.num_tokens - 1)
                for one in served
                if one.num_tokens > 1
            ),
            total=Percentiles.of(one.ended - one.came for one in served),
        )


@frozen(kw_only=True)
class ReplicaReport:
    requests: int
    busy: float
    """Share of the time with a request."""
    steps: int
    preemptions: int
    hit_rate: float
    """Share of the prompt tokens that were cached."""
    kv_mean: float
    """Mean share of the KV blocks that sequences hold, over the whole time."""
    kv_max: float


@frozen(kw_only=True)
class Report:
    """Throughput and latencies of simulated requests."""

    requests: int
    """Requests that ended."""
    refused: int
    """Requests that do not fit in the context or in the KV cache."""
    refusal: str
    """The reason of the first; empty without one."""
    seconds: float
    """From the first arrival to the last end."""
    prompt_tokens: int
    output_tokens: int
    latencies: Latencies
    hit_rate: float
    preemptions: int
    acceptance: float | None
    """Share of the draft tokens that were accepted; None without drafts."""
    replicas: tuple[ReplicaReport, ...]

    @property
    def requests_per_second(self) -> float:
        return self._per_second(self.requests)

    @property
    def prompt_tokens_per_second(self) -> float:
        return self._per_second(self.prompt_tokens)

    @property
    def output_tokens_per_second(self) -> float:
        return self._per_second(self.output_tokens)

    def _per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0

    def cost(self, price: float) -> float | None:
        """Dollars for a million output tokens, if all devices cost `price` dollars an hour."""
        if not self.output_tokens:
            return None
        return per_million(price, self.seconds, self.output_tokens)


def report_of(served: Sequence[Served], replicas: Sequence[Replica]) -> Report:
    """Count the requests of a simulation that has ended."""
    done = [one for one in served if not one.refused]
    refusals = [one.refused for one in served if one.refused]
    start = min((one.came for one in served), default=0.0)
    seconds = max((one.ended for one in done), default=start) - start
    counts = np.bincount([one.replica for one in done], minlength=len(replicas)).tolist()
    stats = [replica.stats for replica in replicas]
    drafted = sum(each.drafted for each in stats)
    return Report(
        requests=len(done),
        refused=len(refusals),
        refusal=refusals[0] if refusals else "",
        seconds=seconds,
        prompt_tokens=sum(one.prompt_len for one in done),
        output_tokens=sum(one.num_tokens for one in done),
        latencies=Latencies.of(done),
        hit_rate=_share(sum(e.cached_tokens for e in stats), sum(e.prompt_tokens for e in stats)),
        preemptions=sum(each.preemptions for each in stats),
        acceptance=sum(each.accepted for each in stats) / drafted if drafted else None,
        replicas=tuple(
            ReplicaReport(
                requests=count,
                busy=_share(replica.busy_seconds, seconds),
                steps=each.steps,
                preemptions=each.preemptions,
                hit_rate=_share(each.cached_tokens, each.prompt_tokens),
                kv_mean=replica.kv.mean(seconds),
                kv_max=replica.kv.max,
            )
            for replica, each, count in zip(replicas, stats, counts, strict=True)
        ),
    )


def report_facts(report: Report) -> Mapping[str, Any]:
    """A report as JSON, in seconds, tokens and tokens/s."""
    names = ("requests", "refused", "refusal", "seconds", "prompt_tokens", "output_tokens")
    facts: dict[str, Any] = {name: getattr(report, name) for name in names}
    facts |= {
        "requests_per_second": report.requests_per_second,
        "prompt_tokens_per_second": report.prompt_tokens_per_second,
        "output_tokens_per_second": report.output_tokens_per_second,
    }
    facts |= {name: each._asdict() for name, each in vars(report.latencies).items()}
    facts |= {
        "hit_rate": report.hit_rate,
        "preemptions": report.preemptions,
        "acceptance": report.acceptance,
        "replicas": [dict(vars(replica)) for replica in report.replicas],
    }
    return facts


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
