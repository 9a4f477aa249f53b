"""Prices of calls and draft rows, for adaptive speculation."""

from headrace.speculation.step_cost import StepCost

_ROW_MARGIN, _SHARED_ROW_MARGIN, _STEP_MARGIN = 1.25, 1.5, 0.05
"""Factors for rows, and tokens for a step, against errors of the estimates.

A draft speeds up only one of several sequences, and delays all.
"""
_PRICE_RATE, _MAX_PRICE_RISE = 0.1, 4
"""Weight of the newest call, and the largest multiple of an average that counts. A longer call
was interrupted.
"""


class CallPrice:
    """Moving averages of the seconds that calls to one proposer take."""

    def __init__(self) -> None:
        self.first_by_token = 0.0
        """Seconds per known token: the first call may read the prompt."""
        self.by_sequence = 0.0
        """Seconds of a later call and of observing the step."""
        self.by_node = 0.0

        self.is_known = False
        """Whether a first call was recorded."""
        self._was_long = False

    def record_first(self, num_tokens: int, seconds: float) -> None:
        change = seconds / num_tokens - self.first_by_token
        self.first_by_token += change * (_PRICE_RATE if self.first_by_token else 1)
        self.is_known = True

    def record(self, num_seqs: int, num_nodes: int, seconds: float) -> float:
        """Record a later call, and return its seconds without an interruption.

        Only one long call counts as interrupted. If the next is as long, calls became longer.
        """
        longest = _MAX_PRICE_RISE * self.by_sequence * num_seqs
        is_long = bool(self.by_sequence) and seconds > longest
        if is_long and not self._was_long:
            seconds = longest
        self._was_long = is_long
        self.by_sequence += (seconds / num_seqs - self.by_sequence) * _PRICE_RATE
        if num_nodes:
            self.by_node += (seconds / num_nodes - self.by_node) * _PRICE_RATE
        return seconds


class RowPrices:
    """Prices of draft rows, in units of plain decoding's time for a token."""

    def __init__(self, cost: StepCost, num_scheduled: int, num_sampling: int) -> None:
        self.num_sampling = num_sampling
        self.token_seconds = cost.seconds(num_sampling) / num_sampling
        self._cost = cost
        self._num_scheduled = num_scheduled
        self._margin = _ROW_MARGIN if num_sampling == 1 else _SHARED_ROW_MARGIN
        self._prices = [0.0]

    def price(self, num_rows: int) -> float:
        prices = self._prices
        while len(prices) <= num_rows:
            with_drafts = self._cost.seconds(self._num_scheduled + len(prices))
            seconds = with_drafts - self._cost.seconds(self._num_scheduled)
            prices.append(_STEP_MARGIN + self._margin * seconds / self.token_seconds)
        return prices[num_rows]

    def gain(self, values: list[float], *, indivisible: bool) -> float:
        """Max tokens that a draft gains, less the price of its rows.

        `values` are the probabilities of its nodes, which all run if indivisible.
        """
        if indivisible:
            return max(0.0, sum(values) - self.price(len(values)))
        best = total = 0.0
        for num_rows, value in enumerate(sorted(values, reverse=True), 1):
            total += value
            best = max(best, total - self.price(num_rows))
        return best
