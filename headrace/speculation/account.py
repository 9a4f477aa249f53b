"""The account of a proposer: the time that it has saved, less the time that it has cost."""

TIME_SHARE = 0.005
"""Share of the time that a proposer may lose."""
START_SECONDS = 0.05
"""Balance of the first account of a proposer, to read the first prompts."""
_LIMIT_TOKENS = 16
"""Limit of a balance in plain tokens, and one more for each sequence that samples."""
_RESERVE = 0.5
"""Share of the largest balance that is left after a first call, to try the drafts."""


class Account:
    """Bounds the time that a proposer loses, without any trust in its estimates.

    The balance grows by a share of the time and by the time that drafts saved, up to a limit. It
    falls by the time of calls, observed steps and draft rows. A proposer acts only if the balance
    affords the action. So in any period it loses at most the first balance or the limit, the share
    of the period, and the last action before the balance fell below zero.
    """

    def __init__(self, balance: float) -> None:
        self.balance = balance
        """Seconds."""
        self._limit = 0.0

    def set_limit(self, token_seconds: float, num_sampling: int) -> None:
        """Set the limit by the seconds of a plain token and the sequences that sample.

        The first limit is also the least first balance.
        """
        limit = token_seconds * (_LIMIT_TOKENS + num_sampling)
        if not self._limit:
            self.balance = max(self.balance, limit)
        self._limit = limit

    def pass_time(self, seconds: float) -> None:
        self.book(TIME_SHARE * seconds)

    def book(self, seconds: float) -> None:
        """Add saved seconds, or subtract spent ones, if negative."""
        balance = self.balance + seconds
        self.balance = min(balance, max(self._limit, self.balance)) if seconds > 0 else balance

    def wait(self, seconds: float = 0.0, *, has_reserve: bool = False) -> float:
        """Seconds of plain decoding until an action of `seconds` is affordable; 0: now.

        With `has_reserve`, some of the balance has to be left.
        """
        needed = seconds + (_RESERVE * self._limit if has_reserve else 0.0)
        missing = min(needed, self._limit or needed) - self.balance
        return missing / TIME_SHARE if missing > 0 else 0.0
