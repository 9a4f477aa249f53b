"""Dollars for tokens."""

import pytest

from headrace.planner.money import per_million


@pytest.mark.parametrize(
    ("price", "seconds", "tokens", "dollars"),
    [
        (3600, 1, 1_000_000, 1.0),
        (2, 3600, 1_000_000, 2.0),
        (2, 0.02, 64, 0.173611),  # 64 sequences with a token each 20 ms
        (0, 1, 1, 0),
    ],
)
def test_the_price_of_a_million_tokens(
    price: float, seconds: float, tokens: float, dollars: float
) -> None:
    assert per_million(price, seconds, tokens) == pytest.approx(dollars, rel=1e-5)
