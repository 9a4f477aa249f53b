"""A pytest plugin that runs vLLM's HTTP tests against a running Headrace server.

vLLM's modules and torch are not installed: a stub stands for each. Only tests that use a fixture of
a server or a client remain, since the others test vLLM's own classes.
"""

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import anthropic
import gguf
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

URL, GGUF, RESULTS = (os.environ[name] for name in ("URL", "GGUF", "RESULTS"))
SECONDS = 120.0
_STUBBED = ("vllm", "torch", "tests.utils", "tests.models", "tests.conftest", "fastapi")
_OVER_HTTP = re.compile(r"(server|client)(?!_args|_config)")


class RemoteOpenAIServer:
    """Stands for vLLM's class that starts a server; the tests' server runs already."""

    url_root = URL
    _KEY = "token-abc123"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options("v1", options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options("v1", options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options("", options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options("", options))

    def _options(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for(path), "api_key": self._KEY, "max_retries": 0}
        return own | {"timeout": SECONDS} | options


def tokenizer_of_gguf(*_: object, **__: object) -> PreTrainedTokenizerFast:
    """Return SmolLM2's tokenizer, made from the GGUF file without Headrace."""
    fields = gguf.GGUFReader(GGUF).fields
    tokens, merges, kinds = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")
    )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    made.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    template = fields["tokenizer.chat_template"].contents()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, clean_up_tokenization_spaces=False
    )


class ModelConfig:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(tokenizer_of_gguf())


class _Stub(types.ModuleType):
    """A module whose every name is a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _REAL.get((self.__name__, name), MagicMock(name=f"{self.__name__}.{name}"))
        setattr(self, name, made)
        return made


_REAL = {
    ("tests.utils", "RemoteOpenAIServer"): RemoteOpenAIServer,
    ("tests.utils", "ROCM_EXTRA_ARGS"): [],
    ("torch", "iinfo"): lambda _: types.SimpleNamespace(min=-(2**63), max=2**63 - 1),
    ("vllm.config", "ModelConfig"): ModelConfig,
    ("vllm.tokenizers", "get_tokenizer"): tokenizer_of_gguf,
    (
        "vllm.model_executor.model_loader.weight_utils",
        "download_weights_from_hf",
    ): lambda model, **_: model,
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        stubbed = any(name == stub or name.startswith(f"{stub}.") for stub in _STUBBED)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)  # the import system adds `__path__`

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    over_http = [item for item in items if any(map(_OVER_HTTP.match, item.fixturenames))]
    config.hook.pytest_deselected(items=[item for item in items if item not in over_http])
    items[:] = over_http


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        line = {"test": item.nodeid, "outcome": report.outcome, "text": report.longreprtext}
        with open(RESULTS, "a") as file:
            file.write(json.dumps(line) + "\n")
    return report
