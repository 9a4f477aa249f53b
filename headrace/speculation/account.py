"""The account of a proposer: the time that it has saved, less the time that it has cost."""

TIME_SHARE = 0.005
"""Share of the time that a proposer may lose."""
START_SECONDS = 0.05
"""Credit of the first account of a proposer, to read the first prompts."""
_LIMIT_TOKENS = 16
"""Limit of a credit in plain tokens, and one more for each sequence that samples."""
_RESERVE = 0.5
"""Share of the largest credit that is left after a first call, to try the drafts."""


class Account:
    """Bounds the time that a proposer loses, without any trust in its estimates.

    The credit grows by a share of the time and by the time that drafts saved, up to a limit. It
    falls by the time of calls, observed steps and draft rows. A proposer acts only if the credit
    affords the action. So in any period it loses at most the first credit or the limit, the share
    of the period, and the last action before the credit fell below zero.
    """

    def __init__(self, credit: float) -> None:
        self.credit = credit
        """Seconds."""
        self._limit = 0.0

    def set_limit(self, token_seconds: float, num_sampling: int) -> None:
        """Set the limit by the seconds of a plain token and the sequences that sample.

        The first limit is also the least first credit.
        """
        limit = token_seconds * (_LIMIT_TOKENS + num_sampling)
        if not self._limit:
            self.credit = max(self.credit, limit)
        self._limit = limit

    def pass_time(self, seconds: float) -> None:
        self.book(TIME_SHARE * seconds)

    def book(self, seconds: float) -> None:
        """Add saved seconds, or subtract spent ones, if negative."""
        credit = self.credit + seconds
        self.credit = min(credit, max(self._limit, self.credit)) if seconds > 0 else credit

    def wait(self, seconds: float = 0.0, *, has_reserve: bool = False) -> float:
        """Seconds of plain decoding until an action of `seconds` is affordable; 0: now.

        With `has_reserve`, some of the credit has to be left.
        """
        needed = seconds + (_RESERVE * self._limit if has_reserve else 0.0)
        seconds_short = min(needed, self._limit or needed) - self.credit
        return seconds_short / TIME_SHARE if seconds_short > 0 else 0.0
