"""The server's app over a fleet of workers."""

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


def worker_urls(arguments: Iterable[str]) -> list[str]:
    """Split arguments at commas. Raises RequestError for an invalid or repeated URL."""
    urls: list[str] = []
    parts = (part.strip().rstrip("/") for argument in arguments for part in argument.split(","))
    for text in parts:
        url = text if "://" in text else f"http://{text}"
        if not _is_http_url(url) or url in urls:
            raise RequestError(
                f"--workers {text!r} is not a URL, or repeats one; list each worker once, for "
                "example http://10.0.0.1:8000,http://10.0.0.2:8000"
            )
        urls.append(url)
    return urls


def _is_http_url(url: str) -> bool:
    parts = urlsplit(url)
    try:
        has_valid_port = parts.port != 0
    except ValueError:
        return False
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
    return is_http and has_valid_port and not parts.query


def route(
    model: str,
    config: EngineConfig,
    settings: Settings,
    urls: Iterable[str],
    key: str,
    wait: float,
    announce: Announce,
) -> int:
    """Serve until a signal arrives; returns the exit code. Raises as `serve` does.

    `key`: API key of the workers; `wait`: maximum seconds a request waits.
    """
    workers = HttpWorkers(urls, key, partial(_fingerprint, model, config), wait)
    return serve(model, config, settings, lambda: Fleet(workers, config.seed, wait), announce)


def _fingerprint(model: str, config: EngineConfig) -> str:
    checkpoint = open_model(model, config)
    return fingerprint(checkpoint, checkpoint.load_tokenizer())
