"""Names inside an archive: which are safe, and what tree they make.

Nothing here touches a disk. `archive.py` writes only what a `Tree` has accepted.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Mapping

from mmserve.errors import InvalidModel

#: A path below the model's folder, cut at its separators; () is the folder itself.
Parts = tuple[str, ...]

MAX_NAME_BYTES = 255  # of one component: ext4, xfs, overlayfs and tmpfs alike
MAX_PATH_BYTES = 2048  # half of Linux's PATH_MAX; the other half is for where the folder lies
MAX_DEPTH = 64
MAX_LINK_HOPS = 40  # as the kernel's

_DRIVE = re.compile(r"[A-Za-z]:")


def quoted(name: str) -> str:
    """A name for a message: printable, and short."""
    shown = ascii(name)  # cut after it is escaped: an escape has up to ten characters
    return shown if len(shown) <= 200 else f"{shown[:120]}...{shown[-60:]}"


def parts_of(name: str) -> Parts:
    """Cuts an entry's name. Backslashes separate too: archives made on Windows have them.

    Raises:
        InvalidModel: the name is absolute, climbs, is too long or cannot be a file's name.
    """

    def refused(why: str) -> InvalidModel:
        return InvalidModel(f"The archive entry {quoted(name)} is refused: {why}.")

    path = name.replace("\\", "/")
    if "\0" in path:
        raise refused("its name holds a zero byte")
    if path.startswith("/"):
        raise refused("its path is absolute")
    if _DRIVE.match(path):
        raise refused("its path begins with a drive letter")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise refused("its path leads out of the model's folder")
    try:
        sizes = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:
        raise refused("its name cannot be encoded") from None
    if max(sizes, default=0) > MAX_NAME_BYTES:
        raise refused(f"a part of its name is longer than {MAX_NAME_BYTES} bytes")
    if sum(sizes) + len(sizes) > MAX_PATH_BYTES:
        raise refused(f"its path is longer than {MAX_PATH_BYTES} bytes")
    if len(parts) > MAX_DEPTH:
        raise refused(f"it lies deeper than {MAX_DEPTH} folders")
    return parts


class Tree:
    """The files, folders and links of one archive, each accepted before it is written.

    No path comes twice, nor twice but for upper and lower case: on a file system that ignores
    case the second would replace the first, after somebody looked at the first. Nothing lies
    below a file or a link. Links are judged together, by `check_links`, once all are known.

    Args:
        max_entries: files, folders and links at most.
    """

    def __init__(self, max_entries: int) -> None:
        self.folders: set[Parts] = {()}
        self.files: set[Parts] = set()
        self.links: dict[Parts, str] = {}
        self._spelling: dict[str, Parts] = {}
        self._max_entries = max_entries

    def add_folder(self, parts: Parts) -> None:
        if parts in self.folders:
            return
        if parts in self.files or parts in self.links:
            raise InvalidModel(f"The archive holds {_shown(parts)} as a file and as a folder.")
        self.add_folder(parts[:-1])
        self._claim(parts)
        self.folders.add(parts)

    def add_file(self, parts: Parts) -> None:
        self._claim_leaf(parts)
        self.files.add(parts)

    def add_link(self, parts: Parts, target: str) -> None:
        """A symbolic link; `target` as in the archive."""
        if "\0" in target or len(target) > MAX_PATH_BYTES:
            raise InvalidModel(f"The link {_shown(parts)} in the archive has an impossible target.")
        self._claim_leaf(parts)
        self.links[parts] = target

    def check_links(self) -> None:
        """Raises InvalidModel where a link leads out of the model's folder, or in a circle."""
        for parts in self.links:
            if follow(parts, self.links) is None:
                raise InvalidModel(
                    f"The archive entry {_shown(parts)} is refused: it is a link that leads out of "
                    "the model's folder or in a circle."
                )

    def _claim_leaf(self, parts: Parts) -> None:
        if not parts:
            raise InvalidModel("The archive holds a file without a name.")
        if parts in self.folders or parts in self.files or parts in self.links:
            raise InvalidModel(f"The archive holds {_shown(parts)} twice.")
        self.add_folder(parts[:-1])
        self._claim(parts)

    def _claim(self, parts: Parts) -> None:
        folded = unicodedata.normalize("NFC", "/".join(parts)).casefold()
        other = self._spelling.setdefault(folded, parts)
        if other != parts:
            raise InvalidModel(
                f"The archive holds {_shown(other)} and {_shown(parts)}, which are one file where "
                "upper and lower case are the same."
            )
        if len(self._spelling) > self._max_entries:
            raise InvalidModel(f"The archive holds more than {self._max_entries} entries.")


def follow(parts: Parts, links: Mapping[Parts, str]) -> Parts | None:
    """Where a path ends once every link in it is followed, as the kernel would.

    Returns:
        None where that is outside, or where too many links follow one another.
    """
    here: list[str] = []
    ahead = deque(parts)
    hops = 0
    while ahead:
        part = ahead.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            if not here:
                return None
            here.pop()
            continue
        here.append(part)
        target = links.get(tuple(here))
        if target is not None:
            hops += 1
            if hops > MAX_LINK_HOPS or target.startswith("/") or not target:
                return None
            here.pop()
            ahead.extendleft(reversed(target.split("/")))
    return tuple(here)


def wrapper(top: Iterable[tuple[str, bool]]) -> str | None:
    """The only folder at the top, where there is nothing else that counts.

    Args:
        top: (name, whether it is a folder) of each entry at the top of a model's folder. Hidden
            ones and `__MACOSX` do not count.
    """
    counted = [
        (name, is_folder)
        for name, is_folder in top
        if not name.startswith(".") and name != "__MACOSX"
    ]
    if len(counted) == 1 and counted[0][1]:
        return counted[0][0]
    return None


_MODULE_ENDINGS = re.compile(
    r"(\.py|\.pyc|\.so|\.abi3\.so|\.(cpython|pypy)[A-Za-z0-9_.-]*\.so)$", re.ASCII
)


def module_name(file_name: str) -> str | None:
    """What `import` calls a file in a folder on the module path; None where it is no module."""
    stem = _MODULE_ENDINGS.sub("", file_name)
    return stem if stem != file_name and stem.isidentifier() else None


def _shown(parts: Parts) -> str:
    return quoted("/".join(parts))
