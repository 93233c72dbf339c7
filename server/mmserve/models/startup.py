"""Which models a server loads at its start."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class StartupList(msgspec.Struct, frozen=True):
    """The models, in order, and what the user should know about the list.

    Attributes:
        models: (name where the list gives one, url).
        warnings: one line each, for the log.
    """

    models: list[tuple[str | None, str]] = []
    warnings: list[str] = []


def is_all(load_models: str) -> bool:
    """Whether everything in the model store is meant."""
    return load_models.strip().upper() == "ALL"


def in_list(load_models: str) -> StartupList:
    """`a.mar, name=b.mar`: cut at commas, then at the first `=`; blanks are trimmed.

    A `=` behind `://` belongs to the URL. An entry whose name was there before, or that repeats
    another, is left out and warned of.
    """
    models: list[tuple[str | None, str]] = []
    warnings: list[str] = []
    names: set[str] = set()
    for entry in load_models.split(","):
        before, equals, after = (text.strip() for text in entry.partition("="))
        if "://" in before:  # Multi Model Server takes `http://host/m.mar?v` for a name here
            before, equals, after = entry.strip(), "", ""
        name, url = (before or None, after) if equals else (None, before)
        if not url:
            if equals:
                warnings.append(f"load_models: {entry.strip()!r} names no archive; it is skipped")
        elif (name, url) in models:
            warnings.append(f"load_models: {entry.strip()!r} is there twice")
        elif name is not None and name in names:
            warnings.append(f"load_models: the name {name!r} is used twice; {url!r} is skipped")
        else:
            models.append((name, url))
            names |= {name} if name else set()
    return StartupList(models, warnings)


def in_store(entries: Iterable[tuple[str, bool]]) -> StartupList:
    """Everything in a model store that is taken for a model.

    Args:
        entries: (name, whether it is a directory) of each entry.

    Returns:
        In alphabetical order, so that of two archives with one name always the same wins:
        directories, and files ending in `.mar` or `.model`; nothing hidden, and not the
        `lost+found` of a freshly made volume. A name that is no UTF-8 is left out and warned of.
    """
    models: list[tuple[str | None, str]] = []
    warnings: list[str] = []
    for name, is_directory in sorted(entries):
        if name.startswith(".") or name == "lost+found":
            continue
        if not (is_directory or name.endswith((".mar", ".model"))):
            continue
        shown = name.encode("utf-8", "backslashreplace").decode()
        if shown == name:
            models.append((None, name))
        else:
            warnings.append(f"model_store: the name of {shown} is not UTF-8; it is skipped")
    return StartupList(models, warnings)
