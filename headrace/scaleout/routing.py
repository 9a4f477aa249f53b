"""Runs the frontend of workers: the server's own app over a fleet of them."""

from collections.abc import Iterable
from functools import partial
from urllib.parse import urlsplit

from headrace.checkpoint.fingerprint import fingerprint
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.loader.load import open_model
from headrace.scaleout.fleet import Fleet
from headrace.scaleout.http_workers import HttpWorkers
from headrace.server.serving import Announce, serve
from headrace.server.settings import Settings


def worker_urls(given: Iterable[str]) -> list[str]:
    """URLs, each of them with any number of commas between. Raises RequestError for what is none,
    and for one that is named twice.
    """
    urls: list[str] = []
    for text in (part.strip().rstrip("/") for words in given for part in words.split(",")):
        url = text if "://" in text else f"http://{text}"
        parts = urlsplit(url)
        try:
            is_url = (
                parts.scheme in ("http", "https")
                and bool(parts.hostname)
                and parts.port != 0
                and not parts.query
            )
        except ValueError:  # a port that is no number
            is_url = False
        if not is_url or url in urls:
            raise RequestError(
                "--workers takes URLs with commas between them, each once, such as "
                f"http://10.0.0.1:8000, not {text!r}"
            )
        urls.append(url)
    return urls


def route(
    model: str,
    config: EngineConfig,
    settings: Settings,
    urls: Iterable[str],
    key: str,
    wait: float,
    announce: Announce,
) -> int:
    """Serve until a signal ends it; returns the exit code. `key`: of the workers; `wait`: seconds
    for which a request waits for one.

    Raises as `serve` does.
    """
    workers = HttpWorkers(urls, key, partial(_fingerprint, model, config))
    return serve(model, config, settings, lambda: Fleet(workers, config.seed, wait), announce)


def _fingerprint(model: str, config: EngineConfig) -> str:
    checkpoint = open_model(model, config)
    return fingerprint(checkpoint, checkpoint.load_tokenizer())
