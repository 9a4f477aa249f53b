"""The note in a model's file about a loss, which is printed when the model is loaded."""

from headrace.model.fields import Fields

FOLDER_NOTE = "headrace_note"
"""Field of `config.json`."""
GGUF_NOTE = "headrace.note"
"""Key of a GGUF file."""
_MAX_LENGTH = 400


def notes_of(fields: Fields, key: str, where: str) -> tuple[str, ...]:
    """The note of a file, if it has one. The text is not trusted, so it is one short line."""
    text = fields.get(key)
    if not isinstance(text, str):
        return ()
    line = "".join(letter if letter.isprintable() else " " for letter in text[:_MAX_LENGTH])
    return (f"{where}: {line}",)
