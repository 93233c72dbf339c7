"""What torch says of a pickle that its weights-only reader does not take."""

from __future__ import annotations

import re

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def needed_code(error: BaseException) -> str | None:
    """Name of the function or class that the pickle wants to be run; None for another mistake."""
    found = _GLOBAL.search(str(error))
    return found[1][:100] if found else None
