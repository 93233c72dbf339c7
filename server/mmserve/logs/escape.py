"""Text that strangers wrote, made fit for one line of a log."""

from __future__ import annotations

# Control characters move a terminal's cursor or start a forged line; U+0085, U+2028 and U+2029
# end a line for many readers. Tabs are harmless.
_TABLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_TABLE |= {ord("\n"): "\\n", ord("\r"): "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"}
del _TABLE[ord("\t")]


def escaped(text: str) -> str:
    """The text on one line, control characters as `\\n`, `\\x1b` and the like."""
    return text if text.isprintable() else text.translate(_TABLE)


def indented(text: str) -> str:
    """Several lines, of which none but the first can pass for a line of the log's own."""
    if text.isprintable():
        return text
    return "\n\t".join(line.translate(_TABLE) for line in text.split("\n"))
