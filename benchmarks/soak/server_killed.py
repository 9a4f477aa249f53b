"""kill -9 of the API process under load: the engine and the template renderer end with it."""

import os
import time

from harness import Findings, Running, children, is_alive, tiny_model, wait


def run(findings: Findings) -> None:
    flags = ("--threads", "1", "--kv-blocks", "2048", "--max-num-seqs", "12")
    shared = set(os.listdir("/dev/shm"))
    server = Running(tiny_model(), *flags)
    server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    )
    left = [*children(server.process.pid)]
    streams = [
        server.open_stream(
            "/v1/completions",
            {"prompt": "hello", "max_tokens": 3500, "ignore_eos": True, "stream": True},
        )
        for _ in range(8)
    ]
    wait(lambda: server.figures()["headrace_sequences_running"] == 8, 10)
    server.process.kill()
    begun = time.monotonic()
    wait(lambda: not any(map(is_alive, left)), 10)
    took = time.monotonic() - begun
    findings.holds(took <= 2, f"its {len(left)} processes ended after {took:.2f} s (at most 2)")
    for stream in streams:
        stream.close()
    server.stop()
    findings.holds(set(os.listdir("/dev/shm")) <= shared, "no shared memory is left")
    again = Running(tiny_model(), *flags)
    reply = again.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})
    findings.holds(reply.status == 200 and again.stop() == 0, "another one starts and serves")
