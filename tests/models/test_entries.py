from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import InvalidModel
from mmserve.models.entries import (
    MAX_DEPTH,
    Parts,
    Tree,
    follow,
    module_name,
    parts_of,
    wrapper,
)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b.txt", ("a", "b.txt")),
        ("./a//b/", ("a", "b")),
        ("a\\b\\c.py", ("a", "b", "c.py")),
        ("./", ()),
        ("...", ("...",)),
        ("ab:c", ("ab:c",)),
        ("é/日本", ("é", "日本")),
        ("\udce9.txt", ("\udce9.txt",)),
    ],
)
def test_a_plain_name_is_cut_at_both_separators(name: str, parts: Parts) -> None:
    assert parts_of(name) == parts


@pytest.mark.parametrize(
    "name",
    [
        "../up",
        "a/../../up",
        "a/../b",
        "..",
        "..\\up",
        "a\\..\\..\\up",
        "/abs/pwn",
        "\\abs",
        "//server/share",
        "C:\\pwn",
        "C:pwn",
        "c:/pwn",
        "a\0b",
        "n" * 256,
        "é" * 128,
        "n/" * 5000,
        "x" * 5000,
        "/".join("d" * (MAX_DEPTH + 1)),
        "\ud800",
    ],
)
def test_a_name_that_leads_elsewhere_or_nowhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidModel, match="is refused"):
        parts_of(name)


@given(st.text(alphabet=st.sampled_from("ab./\\:C\0é "), max_size=30) | st.text(max_size=300))
def test_an_accepted_name_stays_below_its_folder(name: str) -> None:
    try:
        parts = parts_of(name)
    except InvalidModel as error:
        assert str(error).isprintable()
        assert len(str(error)) < 400
        return
    assert all(part not in ("", ".", "..") and "/" not in part for part in parts)
    below = os.path.normpath(os.path.join("/root", *parts))  # noqa: PTH118 - the text, not a path
    assert below == "/".join(("/root", *parts))


@pytest.mark.parametrize(
    "paths",
    [
        ["a.txt", "a.txt"],
        ["a", "a/b"],
        ["a/b", "a"],
        ["Service.py", "service.py"],
        ["Dir/a", "dir/b"],
        ["STRASSE", "straße"],
        ["e\u0301", "\u00e9"],
        [""],
    ],
)
def test_no_path_comes_twice_nor_below_a_file(paths: list[str]) -> None:
    tree = Tree(100)
    with pytest.raises(InvalidModel):
        for path in paths:
            tree.add_file(parts_of(path))


def test_folders_may_be_named_again() -> None:
    tree = Tree(100)
    for _ in range(2):
        tree.add_folder(("a", "b"))
    tree.add_file(("a", "b", "c"))
    tree.add_folder(("a",))
    assert tree.folders == {(), ("a",), ("a", "b")}


def test_folders_that_only_a_path_names_count_as_entries() -> None:
    tree = Tree(10)
    with pytest.raises(InvalidModel, match="more than 10 entries"):
        tree.add_file(tuple("abcdefghijkl"))


def test_nothing_is_put_below_a_link() -> None:
    tree = Tree(100)
    tree.add_link(("d",), "elsewhere")
    with pytest.raises(InvalidModel):
        tree.add_file(("d", "x"))


@pytest.mark.parametrize(
    ("links", "is_safe"),
    [
        ({"a": "b"}, True),
        ({"d/a": "../b"}, True),
        ({"snapshots/1/w.bin": "../../blobs/abc"}, True),
        ({"a": "../b"}, False),
        ({"a": "/etc/passwd"}, False),
        ({"a": "b/../../c"}, False),
        ({"a": "."}, True),
        ({"a": ".", "b": "a/a/../.."}, False),
        ({"d": "sub/deep", "e": "d/../../.."}, False),
        ({"a": "b", "b": "a"}, False),
        ({"a": "a"}, False),
        ({"a": ""}, False),
        ({"a": "x\0"}, False),
        ({"a": "x" * 5000}, False),
    ],
)
def test_a_link_may_lead_inside_only(links: dict[str, str], is_safe: bool) -> None:
    tree = Tree(100)

    def build() -> None:
        for name, target in links.items():
            tree.add_link(parts_of(name), target)
        tree.check_links()

    if is_safe:
        build()
    else:
        with pytest.raises(InvalidModel):
            build()


NAMES = st.sampled_from(["a", "b", "c"])
TARGETS = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=6)


@given(st.dictionaries(NAMES, TARGETS.map("/".join), max_size=3), st.lists(NAMES, max_size=3))
def test_links_are_followed_as_the_kernel_does(links: dict[str, str], path: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        # Deep enough that nothing climbs out of the place itself.
        root = Path(place, *("deep" for _ in range(20)))
        root.mkdir(parents=True)
        for name in ("a", "b", "c"):
            if name in links:
                (root / name).symlink_to(links[name])
            else:
                (root / name).mkdir()
        ours = follow(tuple(path), {(name,): target for name, target in links.items()})
        try:
            real = root.joinpath(*path).resolve(strict=True)
        except (FileNotFoundError, RuntimeError):
            return  # a dangling path or a circle: whatever we say, nothing is there
        if ours is not None:
            assert root.joinpath(*ours).resolve() == real
        else:
            # We refuse a path as soon as it is outside, even if it comes back in.
            assert any(".." in target for target in links.values())


@pytest.mark.parametrize(
    ("top", "name"),
    [
        ([("m", True)], "m"),
        ([("m", True), (".DS_Store", False), ("__MACOSX", True)], "m"),
        ([("m", True), ("n", True)], None),
        ([("m", True), ("service.py", False)], None),
        ([("m", False)], None),
        ([(".m", True)], None),
        ([], None),
    ],
)
def test_only_a_single_folder_wraps(top: list[tuple[str, bool]], name: str | None) -> None:
    assert wrapper(top) == name


@pytest.mark.parametrize(
    ("file_name", "module"),
    [
        ("service.py", "service"),
        ("fast.cpython-311-x86_64-linux-gnu.so", "fast"),
        ("fast.abi3.so", "fast"),
        ("fast.so", "fast"),
        ("old.pyc", "old"),
        ("weights.bin", None),
        ("service", None),
        ("a-b.py", None),
        ("a.b.py", None),
        (".py", None),
    ],
)
def test_a_module_is_known_by_its_ending(file_name: str, module: str | None) -> None:
    assert module_name(file_name) == module
