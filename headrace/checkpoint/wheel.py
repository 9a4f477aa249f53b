"""Sources of model files in wheels. Imports little, because every start imports it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import ModelNotFoundError
from headrace.record import frozen

_SOURCE = re.compile(
    r"pypi:(?P<distribution>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*))?"
    r"/(?P<member>[^#\\]+)(?:#sha256=(?P<sha256>[0-9a-f]{64}))?"
)
_UNPINNED = "unpinned"


@frozen
class WheelSource:
    distribution: str
    version: str | None
    member: str
    sha256: str | None

    def __str__(self) -> str:
        pin = f"#sha256={self.sha256}" if self.sha256 else ""
        return f"pypi:{self.requirement}/{self.member}{pin}"

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}" if self.version else self.distribution

    def path(self, cache: Path) -> Path:
        """The checksum in the path keeps an unchecked file from replacing a pinned file."""
        return cache / "pypi" / self.requirement / (self.sha256 or _UNPINNED) / self.member


def parse(source: str) -> WheelSource:
    """Parse `pypi:DISTRIBUTION[==VERSION]/PATH[#sha256=HEX]`. Raises ModelNotFoundError."""
    match = _SOURCE.fullmatch(source)
    if match is None or not _is_plain(match["member"]):
        raise ModelNotFoundError(
            f"{source}: expected pypi:DISTRIBUTION[==VERSION]/PATH/IN/WHEEL[#sha256=HEX]"
        )
    return WheelSource(
        distribution=match["distribution"],
        version=match["version"],
        member=match["member"],
        sha256=match["sha256"],
    )


def list_cached(cache: Path) -> Iterator[tuple[WheelSource, Path]]:
    top = cache / "pypi"
    for path in sorted(Path(parent, name) for parent, _, names in os.walk(top) for name in names):
        parts = path.relative_to(top).parts
        if len(parts) > 2 and path.is_file():
            requirement, pin, *member = parts
            distribution, _, version = requirement.partition("==")
            source = WheelSource(
                distribution=distribution,
                version=version or None,
                member="/".join(member),
                sha256=None if pin == _UNPINNED else pin,
            )
            yield source, path


def _is_plain(member: str) -> bool:
    return all(part not in ("", ".", "..") for part in member.split("/"))
