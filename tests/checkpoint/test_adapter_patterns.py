"""Expressions for module names match as in PEFT, in bounded time."""

import re

import pytest

from headrace.checkpoint.adapter_patterns import compiled, matches

NAMES = [
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "layers.1.mlp.up_proj",
    "q_proj",
    "xq_proj",
    "lm_head",
    "",
]
EXPRESSIONS = [
    r".*\.layers\.1\..*(q_proj|k_proj)$",
    r"^model\.layers\.\d+\.self_attn\.(?:q|k|v)_proj$",
    r".*self_attn.*",
    r"layers.1.*",
    r"(self_attn|mlp)\.(q|up)_proj",
    r"q_pro.?j?",
    r"\w+",
    r"(a|)q_proj",
    r"layers\.(0|1(1|2))\..*",
    r"^q_proj.*",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_names_match_as_with_re(expression: str) -> None:
    alternatives = compiled(expression)
    assert alternatives is not None
    for name in NAMES:
        want = re.match(rf"(.*\.)?({expression})$", name) is not None
        assert matches(alternatives, name, at_start=expression.startswith("^")) == want, name


@pytest.mark.parametrize(
    "expression",
    ["(a+)+$", "(a|b)*", "[ab]", "a{3}", "(?!a)b", "(a", "a)", r"\b", "*", "(a|b)" * 20],
)
def test_other_elements_are_refused(expression: str) -> None:
    assert compiled(expression) is None


def test_time_is_bounded() -> None:
    alternatives = compiled("a*" * 150 + "b")
    assert alternatives is not None and not matches(alternatives, "a" * 400)
