"""Tests whether a mean is below a limit, with an error probability that holds in finite samples.

A binomial test takes the tokens of a text as independent. A t test takes the mean of few, skewed
shares as normal. The test here assumes neither.
"""

import math

import numpy as np
from numpy.typing import NDArray


def is_below(shares: NDArray[np.float64], limit: float, error_probability: float) -> bool:
    """Whether draws from 0 to 1 [draws] show that their mean is at most `limit`.

    If the mean exceeds the limit, the result is True with at most `error_probability`, for any
    distribution and any number of draws. Each draw multiplies a capital, which is bet on a low
    mean, with 1 + limit - share (Waudby-Smith and Ramdas 2024). If the mean exceeds the limit, each
    factor is below 1 on average, and so is the product. Thus the product reaches
    1 / error_probability with at most that probability (Markov).

    The draws are independent, or all shares of a finite population are equally likely to be drawn,
    without replacement: then the mean of the product is still lower (Maclaurin).
    """
    if limit <= 0:
        return False
    capital = float(np.log1p(limit - shares).sum())
    return capital >= math.log(1 / error_probability)


def fewest_draws(limit: float, error_probability: float) -> int:
    """The number of draws that pass `is_below` if all of them are 0; fewer never pass."""
    return math.ceil(math.log(1 / error_probability) / math.log1p(limit))
