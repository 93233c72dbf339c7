"""The state diagram in the docs is the table of the code."""

from __future__ import annotations

from pathlib import Path

from mmserve.workers.life import TRANSITIONS, State

PAGE = Path(__file__).parents[2] / "docs/architecture.md"


def test_the_diagram_in_the_docs_is_the_table() -> None:
    block = PAGE.read_text().partition("<!-- life:begin -->")[2].partition("<!-- life:end -->")[0]
    drawn = {line.strip() for line in block.splitlines() if "-->" in line}
    wanted = {
        f"{before.value} --> {after.value}: {event.value}"
        for (before, event), after in TRANSITIONS.items()
    }
    assert drawn == wanted | {f"[*] --> {State.STARTING.value}"}
