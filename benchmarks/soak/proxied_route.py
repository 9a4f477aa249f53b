"""`headrace route` with nginx before each of two workers, one of which is dead at any time: no
client sees an error, and every response is the one of undisturbed workers. Needs nginx (Debian's
package; NGINX names another path). Default: 120 s.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Findings, Running, tiny_model, wait

from tests.scaleout.cluster import free_port

_WORKER = ("--worker", "--threads", "1", "--kv-blocks", "256", "--max-num-seqs", "8")
_CLIENTS = 6
_SITE = """
  server {{
    listen 127.0.0.1:{listen};
    location / {{
      proxy_pass http://127.0.0.1:{worker};
      proxy_http_version 1.1;
      proxy_set_header connection "";
      proxy_buffering off;
    }}
  }}
"""
_CONFIG = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
worker_processes 1;
events {{ worker_connections 512; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder};
  proxy_temp_path {folder};
  fastcgi_temp_path {folder};
  uwsgi_temp_path {folder};
  scgi_temp_path {folder};
{sites}
}}
"""
_BODIES: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 200, "seed": 1, "temperature": 1, "ignore_eos": True},
    {"prompt": "hello you", "max_tokens": 60, "seed": 2, "n": 2, "logprobs": 1},
    {"prompt": "hello", "max_tokens": 400, "seed": 3, "ignore_eos": True, "temperature": 0.7},
    {"prompt": "a b c", "max_tokens": 30, "seed": 4, "structured_outputs": {"regex": "[a-z ]{30}"}},
    {"prompt": "hello", "max_tokens": 20, "use_beam_search": True, "n": 3},
]


@contextmanager
def nginx(program: str, ports: dict[int, int]) -> Iterator[Path]:
    """A proxy for each worker: `ports` of workers, by the port of the proxy."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sites = "".join(_SITE.format(listen=own, worker=worker) for own, worker in ports.items())
        (folder / "nginx.conf").write_text(_CONFIG.format(folder=folder, sites=sites))
        command = [program, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                yield folder
            finally:
                process.terminate()


def run(findings: Findings) -> None:
    program = os.environ.get("NGINX") or shutil.which("nginx")
    if program is None:
        findings.holds(False, "nginx is there: install Debian's package, or set NGINX to its path")
        return
    model, rng = tiny_model(), random.Random(1)
    workers = {free_port(): 0 for _ in range(2)}
    ports = {free_port(): worker for worker in workers}
    with nginx(program, ports) as folder, ThreadPoolExecutor(_CLIENTS + 1) as pool:
        urls = ",".join(f"127.0.0.1:{port}" for port in ports)
        starting = pool.submit(lambda: Running(model, "--workers", urls, command="route"))
        time.sleep(1)  # the frontend sees 502 of both
        servers = [Running(model, *_WORKER, "--port", str(port)) for port in workers]
        frontend = starting.result()
        try:
            expected = [_choices(frontend.post("/v1/completions", body)) for body in _BODIES]
            results, ended = Counter[str](), threading.Event()

            def ask(seed: int) -> None:
                random_body = random.Random(seed)
                while not ended.is_set():
                    number = random_body.randrange(len(_BODIES))
                    reply = frontend.post("/v1/completions", _BODIES[number])
                    is_equal = reply.status == 200 and _choices(reply) == expected[number]
                    results["equal" if is_equal else f"{reply.status} {reply.body[:200]!r}"] += 1

            clients = [pool.submit(ask, seed) for seed in range(_CLIENTS)]
            deadline, deaths = time.monotonic() + (findings.seconds or 120), 0
            while time.monotonic() < deadline:
                time.sleep(rng.uniform(0.5, 2.0))
                number = deaths % 2
                servers[number].stop(signal.SIGKILL)
                deaths += 1
                time.sleep(rng.uniform(0.0, 2.0))
                servers[number] = Running(model, *_WORKER, "--port", str(servers[number].port))
                wait(lambda: frontend.figures()["headrace_kv_blocks"] == 512, 20)
            ended.set()
            for client in clients:
                client.result()
        finally:
            for server in (frontend, *servers):
                server.stop()
        log = (folder / "access.log").read_text().splitlines()
    equal = results.pop("equal", 0)
    bad_gateways = sum('" 502 ' in line for line in log)
    findings.says(f"{deaths} deaths of workers; nginx answered 502 {bad_gateways} times")
    findings.holds(equal > 0 and not results, f"{equal} responses equal, others: {dict(results)}")


def _choices(reply: Any) -> Any:
    return [
        (choice["text"], choice["finish_reason"], choice["logprobs"])
        for choice in reply.json.get("choices", ())
    ]
