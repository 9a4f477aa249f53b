"""`python -m headrace` is `headrace`."""

from headrace.cli.main import entry

entry()
