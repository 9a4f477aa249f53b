"""A vocabulary whose tokens have no text, since simulated requests have none."""

from collections.abc import Collection

VOCAB_SIZE = 256
"""Prompts are bytes: Python keeps these numbers once, so that long prompts take little memory."""


class Textless:
    """A `TokenizerView` and a `TextDecoder` that give empty text. No token ends an output."""

    eos_ids: Collection[int] = ()
    special_ids: Collection[int] = ()

    def decoder(self, skip_special: bool, continues: bool) -> "Textless":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def clone(self) -> "Textless":
        return self

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def has_control_token(self, text: str) -> bool:
        return False

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())
