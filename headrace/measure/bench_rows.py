"""Rows of a benchmark: speeds of requests, with the use of the machine by their steps."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headrace.outputs import Timing
from headrace.planner.hardware import Machine
from headrace.planner.utilisation import StepUse
from headrace.record import frozen


@frozen(kw_only=True)
class BenchSetup:
    model: str
    name: str
    file_bytes: int
    parameters: int
    version: str
    date: str
    """UTC time of the start, in ISO 8601."""
    backend: str
    isa: str
    machine: Machine
    kv_dtype: str
    lossy: str = ""
    """Description of the lossy options in use, with their price."""

    def facts(self) -> dict[str, Any]:
        """The setup as JSON, in bytes/s and operations/s."""
        facts = {name: value for name, value in vars(self).items() if name != "machine"}
        return facts | {
            "cpu": self.machine.cpu,
            "threads": self.machine.threads,
            "bandwidth": self.machine.bandwidth,
            "rates": dict(self.machine.rates),
        }


@frozen(kw_only=True)
class LatencyRow:
    """Speed of one request: of its prompt (`pp`), or of its output (`tg`)."""

    setup: BenchSetup
    test: str
    """`pp` or `tg`, and the number of timed tokens."""
    depth: int
    tokens_per_second: float
    """Median over the runs."""
    tokens_per_second_min: float
    tokens_per_second_max: float
    ms_per_token: float
    first_token: float
    """Median seconds to the first token."""
    limit: float
    """By the roofline."""
    share_of_limit: float
    peak_memory: int
    """Bytes."""
    timing: Timing
    """Mean of the whole requests."""
    use: StepUse | None
    """Of the machine, by all steps of the prompt, or by the steps that decode. None for a prompt
    of one token.
    """
    dollars_per_million: float | None
    """Price of a million of the timed tokens; None without a price of the machine."""
    samples: dict[str, Any]
    """Seconds, by figure."""

    def facts(self) -> dict[str, Any]:
        return {"kind": "latency"} | _row_facts(self)


@frozen(kw_only=True)
class ThroughputRow:
    """Speed and latencies of requests that are submitted together."""

    setup: BenchSetup
    test: str
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float
    """Output tokens of all requests over the whole time."""
    first_token: float | None
    """Median seconds to the first token."""
    first_token_p95: float | None
    between_tokens: float | None
    """Median seconds; None if each output is one token."""
    between_tokens_p95: float | None
    limit: float
    """By the roofline."""
    share_of_limit: float
    peak_memory: int
    """Bytes."""
    timing: Timing
    """Mean of the requests."""
    uses: Mapping[str, StepUse]
    """Of the machine, by the steps with prompts (`prompt`) and the other ones (`decode`)."""
    dollars_per_million: Mapping[str, float] | None
    """Price of a million `prompt` and `output` tokens. A step with prompts counts to them."""
    samples: dict[str, Any]
    """Seconds, by figure."""

    def facts(self) -> dict[str, Any]:
        return {"kind": "throughput"} | _row_facts(self)


def _row_facts(row: LatencyRow | ThroughputRow) -> dict[str, Any]:
    figures = vars(row) | {"timing": asdict(row.timing)}
    del figures["setup"]
    if isinstance(row, LatencyRow):
        figures["use"] = row.use and row.use.facts()
    else:
        figures["uses"] = {kind: use.facts() for kind, use in row.uses.items()}
    return row.setup.facts() | figures
