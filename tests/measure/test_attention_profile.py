"""Attention of a tiny model on a text: keys with most of the weight, and weights of exactly 0."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.measure.attention_picture import attention_map_svg
from headrace.measure.attention_profile import (
    SHARES,
    AttentionProfile,
    attention_profile,
    head_attention,
)
from tests.checkpoint.conftest import write_tiny_gguf


def head(scores: Any, bounds: Any) -> Any:
    scores = np.asarray(scores, np.float64)
    return head_attention(3, 1, scores, np.asarray(bounds, np.float64), np.isfinite(scores))


def test_keys_are_the_fewest_with_a_share_of_the_weight() -> None:
    """Weights of 0.6, 0.35, 0.049 and 0.001 need 2, 3 and 3 keys."""
    found = head(np.log([[0.049, 0.6, 0.001, 0.35]]), np.zeros((1, 0)))
    assert found.keys == (2, 3, 3) and SHARES == (0.9, 0.99, 0.999)
    assert (found.zero_keys, found.zero_blocks, found.bounded_blocks) == (0, 0, 0)


def test_zero_weights_and_the_blocks_that_bounds_find() -> None:
    """Of three blocks, two have no weight, and the bounds of one of them show it."""
    scores = np.zeros((1, 96))
    scores[0, :64] = -110.0
    found = head(scores, [[-105.0, -90.0, 5.0]])
    assert found.zero_keys == pytest.approx(2 / 3)
    assert found.zero_blocks == pytest.approx(2 / 3)
    assert found.bounded_blocks == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> AttentionProfile:
    folder = tmp_path_factory.mktemp("attention")
    text = folder / "text.txt"
    text.write_text("hello well low hold " * 60)
    model = str(write_tiny_gguf(folder / "target.gguf"))
    steps: list[str] = []
    found = attention_profile(
        model, text=text, tokens=128, threads=1, on_progress=lambda step, share: steps.append(step)
    )
    assert list(dict.fromkeys(steps)) == ["text", "weights of keys"]
    return found


def test_a_profile_has_each_head(profile: AttentionProfile) -> None:
    assert len(profile.heads) == len({(head.layer, head.head) for head in profile.heads})
    assert profile.rows == 64 and 64 < profile.context < 128
    for found in profile.heads:
        assert 1 <= found.keys[0] <= found.keys[1] <= found.keys[2] <= profile.context
        assert found.bounded_blocks <= found.zero_blocks <= 1
    facts = profile.facts()
    assert facts["shares"] == [0.9, 0.99, 0.999] and len(facts["heads"]) == len(profile.heads)


def test_the_picture_has_a_cell_for_each_head(profile: AttentionProfile) -> None:
    root = ElementTree.fromstring(attention_map_svg("Attention", profile))
    cells = [element for element in root.iter() if element.get("class") == "head"]
    assert len(cells) == len(profile.heads)


@pytest.mark.parametrize(("tokens", "message"), [(10**6, "too long"), (250, "the text has")])
def test_lengths_that_do_not_fit_are_refused(tokens: int, message: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello " * 9)
    with pytest.raises(RequestError, match=message):
        attention_profile(str(write_tiny_gguf(tmp_path / "m.gguf")), text=text, tokens=tokens)
