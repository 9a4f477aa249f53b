"""The thread pool under ThreadSanitizer: the part of `make sanitize` that takes seconds. The rest
builds for minutes.
"""

import shutil
import subprocess

import pytest

from tests.native import sanitize


@pytest.mark.skipif(
    not shutil.which(sanitize.COMPILER) or not shutil.which("setarch"), reason="no compiler here"
)
def test_the_pool_has_no_race() -> None:
    """And what its threads throw, one or several of them, comes out of the call."""
    probe = subprocess.run(
        [sanitize.COMPILER, "-print-file-name=libtsan.so"],
        capture_output=True,
        text=True,
        check=True,
    )
    if probe.stdout.strip() == "libtsan.so":
        pytest.skip("no ThreadSanitizer here")
    sanitize.check_pool()
