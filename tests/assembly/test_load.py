"""From the name of a model to an engine: what is refused, and how much KV it has."""

from pathlib import Path
from typing import Any

import pytest

from headrace.assembly.load import load_model, size_kv
from headrace.assembly.options import engine_config
from headrace.config import OFFLINE, KvConfig
from headrace.errors import MemoryLimitError, ModelNotFoundError, RequestError
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.tiny import tiny_model


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


def test_one_record(model: str) -> None:
    engine, prompts, tokenizer, checkpoint = load_model(model, engine_config({"backend": "reference", "max_model_len": 64}, OFFLINE))
    assert (engine.limits.max_model_len, engine.limits.vocab_size, engine.name) == (64, checkpoint.spec.vocab_size, model)
    assert engine.config.threads > 0 and engine.config.multi_step_ms == 50
    assert prompts.read("hello").token_ids == tokenizer.encode("hello")
    engine.close()


def test_the_context_is_the_models_own_unless_shorter(model: str) -> None:
    engine = load_model(model, engine_config({"backend": "reference"})).engine
    assert engine.limits.max_model_len == 256
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proposer": "draft_model"}, "needs a smaller model with the same vocabulary: set draft_model"),
        ({"proposer": "self_draft"}, "draft_layers is 0, and must be 1 to"),
        ({"proposer": "self_draft", "draft_layers": 99}, "draft_layers is 99, and must be 1 to"),
        ({"proposer": "auto", "draft_layers": 99}, "draft_layers is 99, and must be 1 to"),
        ({"proposer": "medusa"}, "needs heads that were trained for the model: set medusa_heads"),
        ({"proposer": "medusa", "medusa_heads": "nowhere"}, "nowhere: no such file"),
        ({"max_model_len": 257}, "max_model_len is 257, and the model's context ends at 256"),
    ],
)
def test_options_that_the_model_cannot_have(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((RequestError, ModelNotFoundError)) as error:
        load_model(model, engine_config(options))
    assert message in str(error.value)


def test_no_such_model() -> None:
    with pytest.raises(ModelNotFoundError):
        load_model("/no/such/model.gguf", engine_config({}))


class TestKvSize:
    SPEC = tiny_model(0, context=1000)[0]
    BLOCK = 2 * 2 * 32 * (8 + 16) * 2  # layers, KV heads, tokens, head dim of K and, padded, of V, bytes
    WEIGHTS = 10_000

    def size(self, blocks: float, **options: Any) -> KvConfig:
        """With memory for so many blocks beside the weights."""
        return size_kv([self.SPEC], engine_config(options), 1000, self.WEIGHTS, self.WEIGHTS + int(blocks * self.BLOCK))

    def test_enough_for_all_sequences(self) -> None:
        assert self.size(10_000, max_num_seqs=3) == KvConfig(3 * 32, 32, "bf16")

    def test_half_of_the_memory(self) -> None:
        assert self.size(200).num_blocks == 100
        assert self.size(200, kv_dtype="f32").num_blocks == 50

    def test_at_least_one_sequence(self) -> None:
        assert self.size(40).num_blocks == 32

    def test_as_asked_for(self) -> None:
        assert self.size(8, kv_blocks=7).num_blocks == 7

    @pytest.mark.parametrize(
        ("blocks", "options", "message"),
        [
            (20.5, {}, "10,000 bytes of weights and 196,608 bytes of KV for 1,024 tokens are 206,608 bytes, and 135,952 are available"),
            (20.5, {}, "set max_model_len to 640 or less"),
            (20.5, {"kv_blocks": 21}, "kv_blocks may be 20"),
            (-1, {}, "the model is too large for this machine"),
        ],
    )
    def test_too_much(self, blocks: float, options: dict[str, Any], message: str) -> None:
        with pytest.raises(MemoryLimitError) as error:
            self.size(blocks, **options)
        assert message in str(error.value)
