r"""ASCII classes of regular expressions.

llguidance's `\d`, `\w` and `\s` match all of Unicode. A JSON schema's `pattern` takes ASCII alone,
and so do the engines that clients know (xgrammar, outlines).
"""

import re

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_PART = re.compile(r"\\.|.", re.DOTALL)


def with_ascii_classes(expression: str) -> str:
    r"""Replace `\d`, `\w`, `\s` and their opposites by classes of ASCII characters."""
    return _PART.sub(lambda part: _replaced(part[0]), expression)


def _replaced(part: str) -> str:
    r"""A class may stand in a class, so `[\w.]` becomes `[[0-9A-Za-z_].]`."""
    members = _CLASSES.get(part[1:].lower()) if part.startswith("\\") else None
    if members is None:
        return part
    return f"[^{members}]" if part[1].isupper() else f"[{members}]"
