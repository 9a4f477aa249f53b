"""Dollars for tokens, from the price of the machine that computes them."""

_HOUR = 3600


def per_million(price: float, seconds: float, tokens: float) -> float:
    """Dollars for a million tokens, if a machine at `price` dollars an hour takes `seconds` for
    `tokens` of them.

    With a batch these are the tokens of all sequences.
    """
    return 1e6 * price / _HOUR * seconds / tokens
