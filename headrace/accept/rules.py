"""Rules of acceptance by name."""

from headrace.accept.descend import Accept, descend
from headrace.accept.rejection import reject
from headrace.accept.typical import typical
from headrace.config import Acceptance

RULES: dict[Acceptance, Accept] = {"descend": descend, "rejection": reject, "typical": typical}
