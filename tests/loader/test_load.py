"""Loading a model by its name, and errors of loading."""

import re
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.backend import lower_program
from headrace.backend.cpu.executable import CpuExecutable
from headrace.backend_traits import BACKENDS, traits_of
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.config import OFFLINE
from headrace.errors import FormatError, MemoryLimitError, ModelNotFoundError, RequestError
from headrace.loader import drafts, load
from headrace.loader.load import load_model
from headrace.loader.memory import default_logit_rows
from headrace.loader.options import engine_config
from headrace.model import trace_model
from headrace.planner.fit import RUNTIME_BYTES
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


def test_load_model_returns_engine_and_prompts(model: str) -> None:
    engine, prompts, tokenizer, checkpoint = load_model(
        model, engine_config({"backend": "reference", "max_model_len": 64}, OFFLINE)
    )
    assert (engine.limits.max_model_len, engine.limits.vocab_size, engine.name) == (
        64,
        checkpoint.spec.vocab_size,
        model,
    )
    assert engine.config.threads > 0 and engine.config.multi_step_ms == 50
    assert engine.config.max_logit_rows == default_logit_rows(checkpoint.spec.vocab_size)
    assert prompts.read("hello").token_ids == tokenizer.encode("hello")
    engine.close()


def test_tokenizer_loads_while_weights_are_packed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, after the plan has its weights and before anything waits for them."""
    seen: list[str] = []

    def noted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    noted(load, "compile_program")
    noted(Checkpoint, "load_tokenizer")
    noted(CpuExecutable, "prepare")
    load_model(model, engine_config({"backend": "cpu", "kv_blocks": 8}, OFFLINE)).engine.close()
    assert seen == ["compile_program", "load_tokenizer", "prepare"]


def test_context_defaults_to_the_model(model: str) -> None:
    engine = load_model(model, engine_config({"backend": "reference"})).engine
    assert engine.limits.max_model_len == 256
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"proposer": "draft_model"},
            "needs a smaller model; set draft_model",
        ),
        ({"proposer": "self_draft"}, "'self_draft' needs one of draft_layers, draft_w"),
        ({"proposer": "self_draft", "draft_layers": 99}, "draft_layers is 99, but must be 1 to"),
        ({"proposer": "auto", "draft_layers": 99}, "draft_layers is 99, but must be 1 to"),
        ({"proposer": "medusa"}, "needs heads that were trained for the model; set medusa_heads"),
        ({"proposer": "medusa", "medusa_heads": "nowhere"}, "medusa_heads 'nowhere' is not a file"),
        ({"max_model_len": 257}, "max_model_len is 257, but the model's context has 256 tokens"),
    ],
)
def test_options_unsuited_to_the_model_raise(
    model: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((RequestError, ModelNotFoundError)) as error:
        load_model(model, engine_config(options))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "is_absorbed"), [({}, False), ({"latent_attention": "absorbed"}, True)]
)
def test_latent_attention_option_reaches_the_checkpoints(
    model: str, options: dict[str, Any], is_absorbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the model and its draft model."""
    opened = []

    def open_one(path: Path, *, is_absorbed: bool) -> Checkpoint:
        opened.append(is_absorbed)
        return open_checkpoint(path, is_absorbed=is_absorbed)

    for module in (load, drafts):
        monkeypatch.setattr(module, "open_checkpoint", open_one)
    load_model(
        model,
        engine_config(
            {"backend": "reference", "proposer": "draft_model", "draft_model": model, **options}
        ),
    ).engine.close()
    assert opened == [is_absorbed, is_absorbed]


def test_unknown_model_raises() -> None:
    with pytest.raises(ModelNotFoundError):
        load_model("/no/such/model.gguf", engine_config({}))


class TestMemory:
    """A model that does not fit raises an error with the sum, and no weight is loaded."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("kind", ["F32", "Q5_0"])
    def test_memory_limit_is_exact_to_a_byte(
        self,
        backend: str,
        kind: str,
        write_gguf: Any,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        model = write_gguf(kind=kind)
        checkpoint = open_checkpoint(model)
        program = lower_program(
            backend, trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors
        )
        weights = program.weight_bytes
        assert weights > sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        (group,) = program.kv_groups
        block_bytes = group.block_bytes("bf16", traits_of(backend).kv_block_size)
        needed = RUNTIME_BYTES + weights + 2 * block_bytes
        options: dict[str, Any] = {"backend": backend, "max_model_len": 64, "kv_blocks": 2}
        monkeypatch.setattr("headrace.loader.memory.available_memory", lambda: needed)
        with LLM(str(model), **options) as llm:
            assert (
                len(
                    llm.generate(
                        "hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
                    )[0]
                    .outputs[0]
                    .token_ids
                )
                == 8
            )
        monkeypatch.setattr("headrace.loader.memory.available_memory", lambda: needed - 1)
        monkeypatch.setattr(
            "headrace.loader.load.compile_program", lambda *arguments: pytest.fail("compiled")
        )
        with pytest.raises(
            MemoryLimitError,
            match=f"{weights:,} bytes of weights, .* {needed:,} bytes, but {needed - 1:,} are "
            "available",
        ):
            LLM(str(model), **options)


@pytest.mark.parametrize(("vocab", "rows"), [(49_152, 341), (256_000, 65), (1 << 20, 64)])
def test_default_logit_rows_are_bounded_by_memory(vocab: int, rows: int) -> None:
    assert default_logit_rows(vocab) == rows


@pytest.mark.parametrize("is_file", [True, False])
def test_chat_template_replaces_the_models_own(model: str, tmp_path: Path, is_file: bool) -> None:
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    path = tmp_path / "chat.jinja"
    path.write_text(template)
    options = {"backend": "reference", "chat_template": str(path) if is_file else template}
    with LLM(model, **options) as llm:
        messages = [{"role": "user", "content": "hi"}]
        assert llm.apply_chat_template(messages, tokenize=False) == "hi!"


def test_wrong_chat_templates_raise(model: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    for given, error, message in (
        (str(path), RequestError, "cannot be read: No such file or directory; name a Jinja file"),
        ("{% for %}", FormatError, "chat template, line 1"),
        (b"\xff", RequestError, "chat_template must be text"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            load_model(model, engine_config({"backend": "reference", "chat_template": given}))
    path.write_bytes(b"\xff")
    with pytest.raises(RequestError, match="it is not UTF-8 text"):
        load_model(model, engine_config({"backend": "reference", "chat_template": str(path)}))
