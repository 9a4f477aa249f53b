"""A small vocabulary that can write JSON, for tiny models."""

from tests.tiny import TinyVocabulary

SINGLE = '{}[]":,.-+ 0123456789abcdefnmt'
LONGER = [
    '{"',
    '": ',
    '", "',
    ", ",
    "true",
    "false",
    "null",
    "na",
    "name",
    "me",
    "ab",
    "abc",
    "10",
    "}}",
    '"}',
    *"\\ulsriz",
]
VOCAB = 61
EOS = (59, 60)


class JsonVocabulary(TinyVocabulary):
    """Pieces of JSON, two bytes of a longer character, and two end tokens that are spelled like
    text.
    """

    def __init__(self, eos_ids: tuple[int, ...] = EOS) -> None:
        super().__init__(VOCAB, eos_ids)
        self.pieces = [*(piece.encode() for piece in (*SINGLE, *LONGER)), b"\xc3", b"\xa9"]
        self.pieces += [b""] * (EOS[0] - len(self.pieces)) + [b"ab", b'{"']
        assert len(self.pieces) == VOCAB
