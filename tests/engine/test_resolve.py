"""What a sequence drew in several launches, as one result."""

from headrace.batch import TokenLogprobs
from headrace.engine.resolve import _concatenate
from headrace.logit_ops import Drawn


def test_the_tokens_of_several_launches_follow_each_other() -> None:
    first, second = (Drawn([token], [], [TokenLogprobs(-1.0 * token, 1, [], [])]) for token in (4, 5))
    assert _concatenate([first]) is first
    assert _concatenate([first, second]) == Drawn([4, 5], [], first.logprobs + second.logprobs)


def test_what_follows_logits_that_are_not_finite_does_not_count() -> None:
    first, second = Drawn([4], [], []), Drawn([5], [], [])
    assert _concatenate([first, None, second]) == first
    assert _concatenate([None, first]) is None and _concatenate([None]) is None
