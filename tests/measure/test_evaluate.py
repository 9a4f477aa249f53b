"""`headrace.evaluate` on a tiny model."""

from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import RequestError
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog " * 10)
    return path


def test_evaluate_compares_formats_with_the_model(model: str, text: Path) -> None:
    steps: list[tuple[str, float]] = []
    whole, eight, three = headrace.evaluate(
        model,
        formats=["int8-g32", "int3-g32"],
        text=text,
        tokens=128,
        length=64,
        by_layer=True,
        backend="cpu",
        threads=1,
        on_progress=lambda step, share: steps.append((step, share)),
    )
    assert (whole.name, eight.name, three.name) == (model, "int8-g32", "int3-g32")
    assert whole.quality.kl == 0 and whole.quality.agreement == 1 and not whole.layer_errors
    assert 0 < eight.loss < three.loss
    assert (eight.bits, three.bits) == pytest.approx((8.25, 3.25), rel=0.1)
    assert eight.layer_errors.keys() == {0, 1}
    assert all(eight.layer_errors[layer] < three.layer_errors[layer] for layer in (0, 1))
    assert whole.prefill > 0 and whole.decode > 0
    assert {"reference", model, "int8-g32", "int3-g32: quantising"} <= {step for step, _ in steps}
    assert all(0 <= share <= 1 for _, share in steps)


def test_evaluate_keeps_the_price_of_a_lossy_mode(
    model: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines in the mode print the price; other modes and other files print the command."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"backend": "cpu", "threads": 1, "attention_window": 8}
    full, mode = headrace.evaluate(model, text=text, tokens=128, length=64, **options)
    assert full.quality.kl == 0
    assert mode.name == "attends to the first 4 and the last 8 tokens only" and mode.loss > 0

    price = (
        f"price: KL {mode.loss:.4f} nats, NLL {mode.quality.nll - full.quality.nll:+.4f} "
        f"({mode.quality.tokens} tokens of text)"
    )
    others = {"kv_blocks": 40, "max_model_len": 64}
    with headrace.LLM(model, **options, **others) as llm:
        assert f"{mode.name} ({price})" in repr(llm)
    with headrace.LLM(model, **options, **others, attention_sinks=1) as llm:
        flags = "--attention-window 8 --attention-sinks 1"
        assert f"price not measured: run `headrace eval {model} {flags}`" in repr(llm)
    with headrace.LLM(model, threads=1, **others) as llm:
        assert "lossy" not in repr(llm)

    (tmp_path / "cache/prices.json").write_text('{"x": [1]')
    with headrace.LLM(model, **options, **others) as llm:
        assert "price not measured" in repr(llm)


def test_evaluate_refuses_formats_in_a_lossy_mode(model: str) -> None:
    with pytest.raises(RequestError, match="leave out formats and reference, or the mode"):
        headrace.evaluate(model, formats=["int8-g32"], attention_window=8)


def test_evaluate_a_model_alone(model: str, text: Path) -> None:
    (row,) = headrace.evaluate(model, text=str(text), tokens=64, length=64, threads=1)
    assert row.quality.kl is None and row.loss == row.quality.nll


def test_evaluate_against_the_exact_reference(model: str, text: Path) -> None:
    (row,) = headrace.evaluate(
        model, reference="exact", text=text, tokens=64, length=64, threads=1, activations="f32"
    )
    assert row.quality.kl is not None and row.quality.kl < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ["int5"]}, "int5"),
        ({"method": "magic"}, "method 'magic' is unknown; use rtn, imatrix"),
        ({"length": 1}, "length"),
        ({"tokens": 0}, "tokens"),
        ({"threads": -1}, "threads"),
        ({"text": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_evaluate_refuses(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        headrace.evaluate(model, **options)


def test_evaluate_refuses_a_text_of_one_token(model: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    with pytest.raises(RequestError, match="has 0 tokens; use a longer one"):
        headrace.evaluate(model, text=tmp_path / "text")
