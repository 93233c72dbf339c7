"""`requirements.txt` of an archive, compared with what is installed. Nothing is installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Sequence

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_MAX_LINES = 1000
_COMMENT = re.compile(r"(^|\s)#.*$")


def missing(text: str, path: Sequence[str]) -> list[str]:
    """Requirements of which no version is installed, as they are written.

    Args:
        text: of the file.
        path: folders that hold installed packages.
    """
    return [line for line, name, _ in _wanted(text) if _installed(name, path) is None]


def of_another_version(text: str, path: Sequence[str]) -> list[str]:
    """`wanted (installed is 1.0)` for each whose version is another than the file allows."""
    found = []
    for line, name, specifier in _wanted(text):
        version = _installed(name, path)
        if version is not None and specifier is not None and not _allows(specifier, version):
            found.append(f"{line} (installed is {version})")
    return found


def _wanted(text: str) -> Iterator[tuple[str, str, str | None]]:
    """(line, name, version specifier or None where it cannot be judged) of what is asked for here.

    Options, addresses and lines for other platforms are left out.
    """
    for raw in text.replace("\\\n", " ").splitlines()[:_MAX_LINES]:
        line = _COMMENT.sub("", raw).strip()
        if not line or line.startswith("-") or "://" in line.partition("@")[0]:
            continue
        line = line.partition(" --")[0].strip()  # --hash and its like
        if (requirement := _read(line)) is not None:
            yield line, *requirement


def _read(line: str) -> tuple[str, str | None] | None:
    """Name and version specifier of one line; None where it is not for this platform, or no line.

    Without `packaging`, which most environments have, the name is all that is read.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        name = _NAME.match(line)
        return (name[0], None) if name and ";" not in line else None
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return None
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    return requirement.name, str(requirement.specifier)


def _allows(specifier: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _installed(name: str, path: Sequence[str]) -> str | None:
    for distribution in importlib.metadata.distributions(name=name, path=list(path)):
        if version := distribution.metadata["Version"]:
            return str(version)
    return None
