"""A pytest plugin (`-p tests.native.instead`): the tests use the extension that HEADRACE_NATIVE
names, a sanitized build, say.
"""

import importlib.util
import os
import sys

import headrace

_spec = importlib.util.spec_from_file_location("headrace._native", os.environ["HEADRACE_NATIVE"])
assert _spec and _spec.loader
headrace._native = importlib.util.module_from_spec(_spec)
sys.modules["headrace._native"] = headrace._native
_spec.loader.exec_module(headrace._native)
