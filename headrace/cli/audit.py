"""Audit a server with OpenAI's API: does load, caching or streaming change an answer?

The audit sends the same request alone and in a crowd, with a prefix miss and a hit, whole and
streamed, with several options, and compares the tokens and the log-probabilities. It reads the
counts of the usage, the events of streams, stop strings and scores, too. A row is equal, differs,
is not offered (the server refuses or lacks the feature) or failed.

Exit codes: 0 all rows are equal or not offered, 1 a row differs, 2 the server or a row could not
be audited.
"""

import argparse
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import MAX_SECONDS, number, whole_number

if TYPE_CHECKING:
    from headrace.audit.run import Plan, Report, Row

EXAMPLES = """\
  headrace audit http://127.0.0.1:8000
  headrace audit http://127.0.0.1:8080 --json audit.json --verbose
  headrace audit http://127.0.0.1:8000 --against http://127.0.0.1:8001"""

_MAX_SEED = 2**31 - 1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="address of the server: http://HOST:PORT")
    parser.add_argument(
        "--model", metavar="NAME", help="model to name in requests (default: the server's first)"
    )
    parser.add_argument(
        "--api-key",
        default="",
        metavar="KEY",
        help="key to send (default: HEADRACE_API_KEY); it is never printed",
    )
    parser.add_argument(
        "--remote",
        action="store_true",
        help="permission to load a server on another machine",
    )
    parser.add_argument(
        "--against",
        metavar="URL",
        help="second server of the same model, such as one without drafts; its answers must be "
        "equal",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--crowd",
        type=whole_number(1, 64),
        default=7,
        metavar="N",
        help="number of other requests in a crowd",
    )
    load.add_argument(
        "--tokens",
        type=whole_number(8, 512),
        default=24,
        metavar="N",
        help="output tokens of a request",
    )
    load.add_argument(
        "--timeout",
        type=number(0.1, MAX_SECONDS),
        default=60.0,
        metavar="S",
        help="maximum seconds of a request",
    )
    load.add_argument(
        "--seconds",
        type=number(1, MAX_SECONDS),
        default=600.0,
        metavar="S",
        help="maximum seconds of the audit",
    )
    load.add_argument(
        "--seed",
        type=whole_number(0, _MAX_SEED),
        metavar="N",
        help="seed of the prompts that no cache has (default: random)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the rows")
    output.add_argument(
        "--verbose", action="store_true", help="both texts of each row that differs"
    )


def run(args: argparse.Namespace) -> int:
    from headrace.cli.output_file import check_writable
    from headrace.cli.progress import progress_bar
    from headrace.cli.server_arguments import check_packages
    from headrace.cli.terminal import print_stderr

    check_packages("headrace audit", "audit", ("aiohttp", "msgspec"))
    from headrace.audit.run import audit

    plan = _plan(args)
    if args.json:
        check_writable("--json", args.json)
    limits = plan.limits
    print_stderr(
        f"audit of {plan.url}: at most {limits.requests:,} requests, {limits.tokens:,} output "
        f"tokens and {limits.seconds:g} seconds"
    )
    with progress_bar() as on_progress:
        report = audit(plan, on_progress)
    return _finish(args, report)


def _plan(args: argparse.Namespace) -> "Plan":
    from headrace.audit.run import Plan, server_url

    against = args.against and server_url(args.against, remote=args.remote)
    seed = random.SystemRandom().randrange(_MAX_SEED) if args.seed is None else args.seed
    return Plan(
        url=server_url(args.url, remote=args.remote),
        key=args.api_key or os.environ.get("HEADRACE_API_KEY", ""),
        model=args.model,
        against=against,
        tokens=args.tokens,
        crowd=args.crowd,
        seconds=args.seconds,
        request_seconds=args.timeout,
        seed=seed,
    )


def _finish(args: argparse.Namespace, report: "Report") -> int:
    """Print the report and write its file; returns the exit code."""
    import json

    from headrace.audit.compare import Result
    from headrace.cli.output_file import write
    from headrace.errors import AuditError, HeadraceError

    _print(report)
    if args.verbose:
        _print_texts(report.having(Result.DIFFERS))
    if args.json:
        write("--json", args.json, json.dumps(report.facts(), indent=2) + "\n")
    differing, failed = report.having(Result.DIFFERS), report.having(Result.FAILED)
    if differing:
        raise HeadraceError(f"{len(differing)} of {len(report.rows)} rows differ")
    if report.problem:
        raise AuditError(report.problem)
    if failed:
        raise AuditError(f"{len(failed)} of {len(report.rows)} rows failed")
    return 0


def _print(report: "Report") -> None:
    from headrace.audit.compare import Result
    from headrace.measure.table import print_table

    apis = list(dict.fromkeys(row.api for row in report.rows))
    names = list(dict.fromkeys(row.name for row in report.rows))
    found = {(row.name, row.api): row for row in report.rows}
    lines = [[name, *(_cell(found[name, api]) for api in apis)] for name in names]
    server = f" {report.server}" if report.server else ""
    title = f"{report.url}{server}, {report.model}: {report.requests:,} requests"
    print_table(["", *apis], lines, title)

    reasons = [
        [row.name, row.api, row.finding.result.value, row.finding.detail]
        for row in report.rows
        if row.finding.detail and row.finding.result not in (Result.EQUAL, Result.NOTED)
    ]
    if reasons:
        print()
        print_table(["reason of", "", "", ""], reasons)


def _cell(row: "Row") -> str:
    from headrace.audit.compare import Result

    finding = row.finding
    if finding.result is Result.DIFFERS and finding.token:
        return f"differs at token {finding.token}"
    return finding.detail if finding.result is Result.NOTED else finding.result.value


def _print_texts(rows: "list[Row]") -> None:
    for row in rows:
        if row.finding.expected or row.finding.actual:
            print(f"\n{row.name}, {row.api}")
            print(f"  expected {row.finding.expected!r}")
            print(f"  actual   {row.finding.actual!r}")
