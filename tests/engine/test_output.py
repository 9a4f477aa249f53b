"""Text, stop strings and finish reasons of one sequence, against a search of the complete
output.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.batch import TokenLogprobs
from headrace.engine.output import Output, stop_patterns
from headrace.engine.stops import AnswerFinder, StopFinder, StopPattern
from headrace.outputs import Logprob
from headrace.sampling_params import ReasoningMarkers, SamplingParams
from tests.tiny import TinyVocabulary

VOCABULARY = TinyVocabulary(60, eos_ids=(5,))
A, B, C, D, EOS = 0, 1, 2, 3, 5
AB = VOCABULARY.pieces.index(b"ab")
EURO = [VOCABULARY.pieces.index(bytes([byte])) for byte in "€".encode()]


def output(max_tokens: int = 100, **params: Any) -> Output:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Output(sampling, VOCABULARY, stop_patterns(sampling, VOCABULARY), max_tokens)


def push_all(out: Output, tokens: list[int]) -> list[str]:
    """Return the pieces of text that a stream would show."""
    pieces = []
    for token in tokens:
        if out.finish_reason:
            break
        out.push(token, None)
        pieces.append(out.take()[0])
    return pieces


class TestStopStrings:
    @given(
        text=st.text("ab", max_size=40),
        stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
        data=st.data(),
    )
    @settings(max_examples=300, deadline=None)
    def test_the_finder_agrees_with_a_plain_search(
        self, text: str, stops: list[str], data: st.DataObject
    ) -> None:
        finder = StopFinder(StopPattern(stop) for stop in stops)
        ends = [
            end
            for end in range(1, len(text) + 1)
            if any(text[:end].endswith(stop) for stop in stops)
        ]
        done = 0
        while done < len(text):
            piece = text[done : done + data.draw(st.integers(1, 4))]
            found = finder.push(piece, armed=True)
            if ends and done < ends[0] <= done + len(piece):
                assert found is not None and done + found.end == ends[0]
                assert found.text == max(
                    (stop for stop in stops if text[: ends[0]].endswith(stop)), key=len
                )
                return
            assert found is None
            done += len(piece)
            prefixes = [stop[:length] for stop in stops for length in range(1, len(stop))]
            assert finder.num_held == max(
                (len(prefix) for prefix in prefixes if text[:done].endswith(prefix)), default=0
            )

    def test_a_stop_string_may_span_tokens(self) -> None:
        out = output(stop="bca")
        assert push_all(out, [A, B, C, AB]) == ["a", "", "", ""]
        assert (out.text, out.finish_reason, out.stop_reason) == ("a", "stop", "bca")
        assert out.token_ids == [A, B, C, AB]

    def test_a_stop_string_can_be_included_in_the_output(self) -> None:
        out = output(stop=["bca"], include_stop_str_in_output=True)
        assert "".join(push_all(out, [A, B, C, AB])) == out.text == "abca"

    def test_held_text_is_released_when_it_is_no_stop_string(self) -> None:
        out = output(stop="abd")
        assert push_all(out, [A, B, A, B, C]) == ["", "", "ab", "", "abc"]

    def test_held_text_is_released_at_the_end(self) -> None:
        out = output(stop="abd", max_tokens=2)
        assert push_all(out, [A, B]) == ["", "ab"]
        assert out.finish_reason == "length"

    def test_the_longer_of_two_that_end_together_is_the_reason(self) -> None:
        out = output(stop=["b", "ab"])
        push_all(out, [A, B])
        assert (out.stop_reason, out.text) == ("ab", "")

    def test_a_stop_string_at_the_last_token_counts(self) -> None:
        out = output(stop="ab", max_tokens=2)
        push_all(out, [A, B])
        assert (out.finish_reason, out.stop_reason, out.text) == ("stop", "ab", "")

    def test_a_character_of_several_tokens_can_be_a_stop_string(self) -> None:
        out = output(stop="€")
        assert push_all(out, [A, *EURO, B]) == ["a", "", "", ""]
        assert out.stop_reason == "€"

    def test_a_stop_string_does_not_end_before_min_tokens(self) -> None:
        out = output(stop="ab", min_tokens=2)
        assert "".join(push_all(out, [A, B, A, B, C])) == "ab"
        assert out.token_ids == [A, B, A, B]

    def test_a_stop_string_may_begin_before_min_tokens(self) -> None:
        out = output(stop="ab", min_tokens=1)
        push_all(out, [A, B])
        assert (out.text, out.finish_reason) == ("", "stop")

    def test_a_long_stop_string(self) -> None:
        stop = "ab" * 499 + "cd"
        out = output(max_tokens=2000, stop=stop)
        push_all(out, [A, B] * 500 + [C, D, A])
        assert (out.text, out.stop_reason) == ("ab", stop)


PIECES = st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.booleans()), max_size=10)
PATTERNS = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=5), st.booleans()), min_size=1, max_size=4
)


class TestControlTokensInStopStrings:
    """The end token `f` is a control token, which the text leaves out."""

    @given(pieces=PIECES, patterns=PATTERNS)
    @settings(max_examples=500, deadline=None)
    def test_the_finder_agrees_with_a_plain_search(
        self, pieces: list[tuple[str, bool]], patterns: list[tuple[str, bool]]
    ) -> None:
        finder = StopFinder(StopPattern(text, sees) for text, sees in patterns)
        seen: list[tuple[str, bool]] = []  # characters, with whether each is hidden

        def ending(prefixes: list[tuple[str, bool]]) -> list[tuple[str, int]]:
            """Those that end the text, with their number of visible characters."""
            found = []
            for text, sees in prefixes:
                run = [item for item in seen if sees or not item[1]][-len(text) :]
                if "".join(character for character, _ in run) == text:
                    found.append((text, sum(not hidden for _, hidden in run)))
            return found

        for piece, hidden in pieces:
            stop = finder.push(piece, armed=True, hidden=hidden)
            for end, character in enumerate(piece, start=1):
                seen.append((character, hidden))
                reading = [pattern for pattern in patterns if pattern[1] or not hidden]
                if ended := ending(reading):
                    assert stop is not None
                    assert stop.end == end
                    assert (stop.text, stop.num_visible) in ended
                    assert len(stop.text) == max(len(text) for text, _ in ended)
                    return
            assert stop is None
            longest: dict[tuple[str, bool], int] = {}
            for text, sees in patterns:
                for length in range(1, len(text)):
                    for _, visible in ending([(text[:length], sees)]):
                        longest[text, sees] = visible
            assert finder.num_held == max(longest.values(), default=0)

    @pytest.mark.parametrize(
        ("stop", "text"),
        [("f", "ab"), ("bf", "a"), ("abf", ""), ("fa", "ab"), ("faba", "ab"), ("bfab", "a")],
    )
    @pytest.mark.parametrize("include", [False, True])
    @pytest.mark.parametrize("tokens", [[A, B, EOS, A, B, A], [AB, EOS, AB, AB]])
    def test_a_stop_string_with_a_control_token(
        self, stop: str, text: str, include: bool, tokens: list[int]
    ) -> None:
        out = output(stop=stop, ignore_eos=True, include_stop_str_in_output=include)
        shown = "".join(push_all(out, tokens))
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        assert out.text == shown == text + (stop if include else "")

    def test_a_stop_string_without_one_does_not_see_control_tokens(self) -> None:
        out = output(stop="ba", ignore_eos=True)
        push_all(out, [A, B, EOS, A])
        assert (out.text, out.stop_reason) == ("a", "ba")

    def test_a_text_with_control_tokens(self) -> None:
        out = output(stop="bfa", ignore_eos=True, skip_special_tokens=False)
        push_all(out, [A, B, EOS, A])
        assert (out.text, out.stop_reason) == ("a", "bfa")

    def test_a_copy_continues_alone(self) -> None:
        out = output(stop="bfab", ignore_eos=True)
        push_all(out, [A, B, EOS])
        copy = out.clone()
        assert "".join(push_all(out, [C])) == "bc"
        assert "".join(push_all(copy, [AB])) == ""
        assert (out.finish_reason, copy.stop_reason) == (None, "bfab")


class TestStopTokens:
    def test_an_end_of_text_token_ends_the_output(self) -> None:
        out = output()
        assert push_all(out, [A, EOS, B]) == ["a", ""]
        assert (out.token_ids, out.finish_reason, out.stop_reason) == ([A, EOS], "stop", None)

    def test_ignore_eos_continues_after_an_end_token(self) -> None:
        out = output(ignore_eos=True)
        push_all(out, [A, EOS, B])
        assert out.finish_reason is None

    def test_a_request_has_stop_tokens_of_its_own(self) -> None:
        out = output(stop_token_ids=[C])
        push_all(out, [A, C])
        assert (out.text, out.finish_reason, out.stop_reason) == ("a", "stop", C)

    def test_a_stop_token_can_be_included_in_the_output(self) -> None:
        out = output(stop_token_ids=[C], include_stop_str_in_output=True)
        push_all(out, [A, C])
        assert out.text == "ac"


class TestText:
    @given(
        tokens=st.lists(st.integers(0, 59), max_size=30),
        stops=st.lists(st.text("abc€", min_size=1, max_size=3), max_size=3),
    )
    @settings(max_examples=200, deadline=None)
    def test_the_pieces_of_the_stream_make_the_text(
        self, tokens: list[int], stops: list[str]
    ) -> None:
        out = output(max_tokens=25, stop=stops)
        pieces = push_all(out, tokens)
        if out.finish_reason is None:
            out.finish("abort")
            pieces.append(out.take()[0])
        assert "".join(pieces) == out.text == out.completion(0).text
        if out.stop_reason is None:
            assert out.text == VOCABULARY.decode(out.token_ids)

    def test_an_incomplete_character_at_the_end_is_replaced(self) -> None:
        out = output(max_tokens=2)
        assert push_all(out, EURO) == ["", "\ufffd"]


def test_logprobs_are_recorded_for_each_token() -> None:
    out = output(logprobs=2)
    out.push(A, TokenLogprobs(-2.5, 3, [B, C], [-0.5, -1.5]))
    out.push(B, TokenLogprobs(-0.25, 1, [B, C], [-0.25, -1.75]))
    completion = out.completion(4)
    first = {A: Logprob(-2.5, 3, "a"), B: Logprob(-0.5, 1, "b"), C: Logprob(-1.5, 2, "c")}
    second = {B: Logprob(-0.25, 1, "b"), C: Logprob(-1.75, 2, "c")}
    assert completion.logprobs == [first, second]
    assert list(completion.logprobs[0]) == [A, B, C]
    assert completion.cumulative_logprob == -2.75
    assert out.take() == ("ab", [A, B], [first, second])
    assert out.take() == ("", [], [])


@pytest.mark.parametrize("asked", [None, 0])
def test_logprobs_are_none_unless_asked_for(asked: int | None) -> None:
    completion = output(logprobs=asked).completion(0)
    assert (completion.logprobs, completion.cumulative_logprob) == (
        (None, None) if asked is None else ([], 0.0)
    )


@given(
    tokens=st.lists(st.integers(0, 59), max_size=20),
    at=st.integers(0, 20),
    other=st.lists(st.integers(0, 59), max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_a_clone_continues_independently(tokens: list[int], at: int, other: list[int]) -> None:
    """The clone may be made inside a character or a stop string."""
    first, expected = output(stop=["ab", "bca"], logprobs=0), output(stop=["ab", "bca"], logprobs=0)
    record = TokenLogprobs(-0.5, 1, [], [])

    def push(out: Output, more: list[int]) -> None:
        for token in more:
            if not out.finish_reason:
                out.push(token, record)

    push(first, tokens[:at])
    first.take()
    clone = first.clone()
    push(first, other)
    push(clone, tokens[at:])
    push(expected, tokens)
    assert clone.completion(0) == expected.completion(0)


def test_the_end_is_reported_once() -> None:
    out = output()
    assert not out.has_new
    out.push(EOS, None)
    assert out.has_new
    out.take()
    assert not out.has_new and out.finish_reason == "stop"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_in_the_text(skip: bool) -> None:
    asked = []

    class Vocabulary(TinyVocabulary):
        def decoder(self, skip_special: bool, continues: bool = False) -> Any:
            asked.append((skip_special, continues))
            return super().decoder(skip_special, continues)

    out = Output(
        SamplingParams(skip_special_tokens=skip, ignore_eos=True),
        Vocabulary(60, eos_ids=(EOS,)),
        [],
        9,
    )
    for token in (A, EOS, B):
        out.push(token, None)
    assert asked == [(skip, True)] and out.text == (
        "ab" if skip else f"a{VOCABULARY.pieces[EOS].decode()}b"
    )


@pytest.mark.parametrize(
    ("markers", "text", "before", "answer"),
    [
        ({}, "<think>a</think>\n\nAns", "<think>a</think>\n\n", "Ans"),
        ({}, " <think>a</think>", " <think>a</think>", ""),
        ({}, "  <b> </think>", "", "  <b> </think>"),
        ({}, "<thin", "<thin", ""),  # it ends before it is clear
        ({"has_begun": True}, "a</thi </think> <x>", "a</thi </think> ", "<x>"),
        ({"has_begun": True}, "a</think", "a</think", ""),
        ({"has_begun": True, "opener": "<r>"}, "a</think> <r>\n b<r>", "a</think> <r>\n ", "b<r>"),
        ({"has_begun": True, "opener": "<r>"}, "a</think> <s>", "a</think> ", "<s>"),
        ({"has_begun": True, "opener": "<r>"}, "a</think> <", "a</think> <", ""),
        ({"has_begun": True, "end": "aab"}, "aaab b", "aaab ", "b"),
    ],
)
def test_answer_after_the_reasoning(
    markers: dict[str, Any], text: str, before: str, answer: str
) -> None:
    for size in range(1, len(text) + 1):
        finder = AnswerFinder(ReasoningMarkers(**markers))
        pieces = [finder.push(text[i : i + size]) for i in range(0, len(text), size)]
        found = "".join(piece[0] for piece in pieces) + finder.flush()
        assert (found, "".join(piece[1] for piece in pieces)) == (before, answer)
        assert finder.has_begun == bool(answer)
