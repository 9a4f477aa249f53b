"""Reads the chat template that a user gives in place of the model's own."""

from pathlib import Path

from headrace.checkpoint.templates import Renderer
from headrace.errors import RequestError

_JINJA = ("{{", "{%")


def read_chat_template(value: str) -> str:
    """Return a template from its file, or the text itself if it has Jinja's marks.

    Raises RequestError if the file cannot be read, and FormatError if the template is
    malformed.
    """
    text = value
    if not any(mark in value for mark in _JINJA):
        try:
            text = Path(value).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise RequestError(
                f"chat_template {value[:200]!r} cannot be read: {reason}; name a Jinja file, or "
                "give the text of a template"
            ) from None
    renderer = Renderer()
    try:
        renderer.check(text)
    finally:
        renderer.close()
    return text
