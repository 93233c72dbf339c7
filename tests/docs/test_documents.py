from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.documents import commands, links, looks_like, pages

PAGE = """
```console
$ echo one \\
    two
one two
$ cat <<END
> hi
> END
hi
```

<!-- not run: it needs a moon -->
```sh
rocket
```

```sh
true
false
```

```json
{}
```
"""


def test_commands_are_read_with_what_is_shown_below() -> None:
    found = commands(PAGE)
    assert [(c.text, c.output) for c in found] == [
        ("echo one \\\n    two", "one two"),
        ("cat <<END\nhi\nEND", "hi"),
        ("true\nfalse\n", None),
    ]
    assert PAGE.splitlines()[found[0].line - 1] == "$ echo one \\"


@pytest.mark.parametrize(
    ("output", "shown", "is_alike"),
    [
        ("a\nb\n", "a\nb", True),
        ("a  \nb", "a\nb", True),
        ("a b c", "a … c", True),
        ("a\nb\nc", "a\n…\nc", True),
        ("a", "b", False),
        ("a.c", "abc", False),
        ("abc", "a.c", False),
    ],
)
def test_an_output_is_compared_with_gaps(output: str, shown: str, is_alike: bool) -> None:
    assert looks_like(output, shown) is is_alike


@pytest.mark.parametrize("page", pages(), ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in links(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_every_field_report_names_a_test_or_the_decision() -> None:
    page = Path("docs/field-reports.md")
    rows = [line.split(" | ")[-1] for line in page.read_text().splitlines() if " | " in line]
    shown = [row for row in rows if row.rstrip(" |") not in ("shown by", "---")]
    assert len(shown) > 60
    vague = [row for row in shown if not re.search(r"`tests/[\w/]+\.py::test_\w+`|\]\(", row)]
    assert not vague


def test_every_test_that_the_docs_name_exists() -> None:
    for page in pages():
        for path, _, name in re.findall(r"`(tests/[\w/.]+)(::(test_\w+))?`", page.read_text()):
            assert Path(path).exists(), f"{page}: {path}"
            assert not name or f"def {name}(" in Path(path).read_text(), f"{page}: {path}::{name}"
