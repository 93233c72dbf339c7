"""Commands in Markdown: what the docs show, cut into pieces that a shell can run.

A fenced block of `sh` holds commands. One of `console` holds commands after `$ ` (and `> ` where
they go on) with their output below; `…` in an output stands for anything. A comment right before a
block, `<!-- not run: why -->`, leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(
    r"(?P<skip><!-- not run:[^>]*-->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Command(NamedTuple):
    """What is typed, and what is shown below it; None where the docs show no output."""

    line: int
    text: str
    output: str | None


def commands(document: str) -> list[Command]:
    """The commands of a document, in order."""
    found: list[Command] = []
    for block in _BLOCK.finditer(document):
        line = document.count("\n", 0, block.start("text")) + 1
        if block["skip"]:
            continue
        if block["language"] in ("sh", "bash", "shell"):
            found.append(Command(line, block["text"], None))
        elif block["language"] == "console":
            found += _console(block["text"], line)
    return found


def _console(text: str, first: int) -> Iterator[Command]:
    typed: list[str] = []
    shown: list[str] = []
    at = first
    for number, line in enumerate(text.splitlines(), first):
        if line.startswith("$ "):
            if typed:
                yield Command(at, "\n".join(typed), "\n".join(shown))
            typed, shown, at = [line[2:]], [], number
        elif not shown and (line.startswith("> ") or line == ">"):
            typed.append(line[2:])
        elif not shown and typed and typed[-1].endswith("\\"):
            typed.append(line)
        else:
            assert typed, f"line {number}: output before any command"
            shown.append(line)
    if typed:
        yield Command(at, "\n".join(typed), "\n".join(shown))


def looks_like(output: str, shown: str) -> bool:
    """Whether an output is what the docs show, blanks at the ends of lines aside."""
    lines = "\n".join(line.rstrip() for line in output.strip().splitlines())
    wanted = "\n".join(line.rstrip() for line in shown.strip().splitlines())
    pattern = ".*".join(map(re.escape, wanted.split("…")))
    return re.fullmatch(pattern, lines, re.DOTALL) is not None


def links(document: str) -> list[str]:
    """Targets of links to files of this repository, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", document)
    return [t.partition("#")[0] for t in targets if "://" not in t and not t.startswith("#")]


def pages() -> list[Path]:
    """README and everything below docs/."""
    return [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
