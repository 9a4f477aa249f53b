"""A client disconnects while its response without streaming is computed: the request ends."""

import asyncio

from client import ask
from harness import Findings, check_rest, serving, tiny_model, wait

_TOKENS = 3500


def run(findings: Findings) -> None:
    with serving(
        findings, tiny_model(), "--threads", "1", "--kv-blocks", "1024", "--max-num-seqs", "8"
    ) as server:
        for n in (4, 8):
            body = {"prompt": "hello", "max_tokens": _TOKENS, "ignore_eos": True, "n": n}
            before = server.figures()["headrace_generated_tokens_total"]
            asyncio.run(
                ask(server.port, "/v1/completions", body, seconds=0.5)
            )  # so long that a report has told of it
            took = wait(server.at_rest, 5)
            tokens = server.figures()["headrace_generated_tokens_total"] - before
            shown = (
                f"at rest after {took or 5:.2f} s, of which a report takes up to 0.25 (at most 1)"
            )
            is_ended = took is not None and took <= 1 and 0 < tokens < _TOKENS * n
            findings.holds(is_ended, f"n={n}: {shown}; {tokens:,.0f} tokens of {_TOKENS * n:,}")
            check_rest(findings, server, 1)
