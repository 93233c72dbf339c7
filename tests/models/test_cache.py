from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import StorageFailed
from mmserve.models.cache import Cache, Entry, Idle, digest_key, file_key, surplus
from tests.models.workshop import Files, below, write_tree

FILES: Files = {"service.py": "x", "weights.bin": "w" * 1000}
HUGE = 1 << 62


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    Cache.lay_out(tmp_path, tmp_path)
    return Cache(tmp_path, tmp_path)


def shared(root: Path, *names: str) -> list[Cache]:
    homes = [root / "users" / name for name in names]
    for home in homes:
        Cache.lay_out(root, home)
    return [Cache(root, home) for home in homes]


def admitted(cache: Cache, digest: str | None = "d", files: Files = FILES) -> Entry:
    with cache.workplace() as place:
        write_tree(place / "tree", files)
        return cache.admit(place, 10, digest)


def nothing_but_folders(root: Path) -> bool:
    return all(path.is_dir() or path.name == "guard" for path in root.rglob("*"))


def test_an_entry_is_taken_again_by_its_digest_and_its_file(cache: Cache) -> None:
    first = admitted(cache)
    assert first.size == 1001
    cache.remember("some-file", first)
    assert cache.may_have(10)
    assert not cache.may_have(11)
    for key in (digest_key("d"), "some-file"):
        again = cache.take(key)
        assert again is not None
        assert again.tree == first.tree
        assert again.token != first.token
    assert cache.take("another-file") is None
    assert below(first.tree) == {"service.py": b"x", "weights.bin": b"w" * 1000}


def test_the_same_archive_twice_is_one_entry(cache: Cache) -> None:
    assert admitted(cache).tree == admitted(cache).tree
    assert admitted(cache, None).tree != admitted(cache, None).tree


def test_an_entry_goes_with_its_last_user_if_it_is_not_to_be_kept(cache: Cache) -> None:
    first = admitted(cache)
    cache.remember("some-file", first)
    second = cache.take("some-file")
    assert second is not None
    cache.release(first.token, keep=False)
    assert first.tree.is_dir()
    cache.release(first.token, keep=False)  # a second time changes nothing
    assert first.tree.is_dir()
    cache.release(second.token, keep=False)
    assert nothing_but_folders(cache.root)


def test_a_kept_entry_stays_while_there_is_room(cache: Cache) -> None:
    first = admitted(cache)
    cache.release(first.token, keep=True)
    again = cache.take(digest_key("d"))
    assert again is not None
    cache.trim(HUGE)  # it is in use
    assert again.tree.is_dir()
    cache.release(again.token, keep=True)
    cache.trim(HUGE)
    assert nothing_but_folders(cache.root)


def test_room_is_made_by_what_nobody_uses(cache: Cache) -> None:
    used, idle = admitted(cache, "used"), admitted(cache, "idle")
    cache.release(idle.token, keep=True)
    cache.make_room(1)
    assert idle.tree.is_dir()
    with pytest.raises(StorageFailed, match=r"No space left on device \(ENOSPC, errno 28\)"):
        cache.make_room(HUGE)
    assert used.tree.is_dir()
    assert not idle.tree.exists()


def test_what_python_compiled_may_change_but_code_without_a_source_may_not(cache: Cache) -> None:
    files: Files = {"a.py": "", "b/__pycache__/c.cpython-311.pyc": "old", "d.pyc": "code"}
    first = admitted(cache, files=files)
    compiled = first.tree / "b/__pycache__/c.cpython-311.pyc"
    compiled.write_bytes(b"newer")
    assert (second := cache.take(digest_key("d"))) is not None
    compiled.unlink()
    assert (third := cache.take(digest_key("d"))) is not None
    assert first.tree == second.tree == third.tree
    (first.tree / "d.pyc").write_bytes(b"other")  # which is imported as it is, without a source
    assert cache.take(digest_key("d")) is None


def test_an_entry_that_nobody_can_be_given_is_not_there(cache: Cache) -> None:
    (cache.home / "tokens").rmdir()
    with pytest.raises(StorageFailed):
        admitted(cache)
    assert nothing_but_folders(cache.root)


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: (tree / "weights.bin").unlink(),
        lambda tree: (tree / "weights.bin").write_text("other"),
        lambda tree: os.utime(tree / "service.py", (1, 1)),
        lambda tree: (tree.parent / "about").write_text("{"),
        lambda tree: (tree.parent / "about").unlink(),
    ],
    ids=["gone", "written", "touched", "no sense", "no record"],
)
def test_an_entry_that_a_handler_wrote_to_is_not_handed_out_again(
    damage: Damage, cache: Cache
) -> None:
    first = admitted(cache)
    damage(first.tree)
    assert cache.take(digest_key("d")) is None
    second = admitted(cache)
    assert second.tree != first.tree
    assert first.tree.is_dir()  # it is in use
    third = cache.take(digest_key("d"))
    assert third is not None
    assert third.tree == second.tree
    cache.release(first.token, keep=True)
    assert not first.tree.exists()
    assert cache.take(digest_key("d")) is not None


def test_a_damaged_entry_that_nobody_uses_is_removed(cache: Cache) -> None:
    first = admitted(cache)
    cache.release(first.token, keep=True)
    (first.tree / "weights.bin").unlink()
    assert cache.take(digest_key("d")) is None
    assert nothing_but_folders(cache.root)


def test_files_that_appeared_do_not_matter(cache: Cache) -> None:
    first = admitted(cache)
    write_tree(first.tree, {"__pycache__/service.cpython-311.pyc": "x"})
    assert cache.take(digest_key("d")) is not None


def test_a_file_in_no_encoding_is_no_trouble(cache: Cache) -> None:
    with cache.workplace() as place:
        (place / "tree").mkdir()
        (place / "tree" / os.fsdecode(b"\xe9\xff")).write_text("x")
        cache.admit(place, 10, "d")
    assert cache.take(digest_key("d")) is not None


def test_work_is_gone_afterwards_also_after_an_error(cache: Cache) -> None:
    with contextlib.suppress(ZeroDivisionError), cache.workplace() as place:
        write_tree(place / "tree", FILES)
        _ = 1 / 0
    assert nothing_but_folders(cache.root)


def test_leftovers_of_a_killed_process_are_cleared(cache: Cache) -> None:
    used, lost = admitted(cache, "used"), admitted(cache, "lost")
    write_tree(cache.home / "work/w1/tree", FILES)
    cache.clear_leftovers([used.token])
    cache.trim(HUGE)
    assert used.tree.is_dir()
    assert not lost.tree.exists()
    assert list((cache.home / "work").iterdir()) == []


def test_servers_that_share_a_cache_keep_each_others_entries(tmp_path: Path) -> None:
    one, two = shared(tmp_path, "one", "two")
    first = admitted(one)
    second = two.take(digest_key("d"))
    assert second is not None
    one.release(first.token, keep=False)
    one.trim(HUGE)
    assert second.tree.is_dir()
    two.release(second.token, keep=False)
    assert not second.tree.exists()


def test_many_threads_unpack_one_archive_once(cache: Cache) -> None:
    entries: list[Entry] = []

    def use() -> None:
        for _ in range(10):
            entry = cache.take(digest_key("d")) or admitted(cache)
            entries.append(entry)
            assert below(entry.tree)
            cache.release(entry.token, keep=True)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entries) == 40
    assert len({entry.tree for entry in entries}) == 1


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 10)), max_size=8), st.floats(-10, 300))
def test_what_is_kept_fits_the_budget(entries: list[tuple[int, float]], budget: float) -> None:
    idle = [Idle(str(n), size, used) for n, (size, used) in enumerate(entries)]
    gone = surplus(idle, budget)
    kept = [entry for entry in idle if entry.name not in gone]
    assert sum(entry.size for entry in kept) <= max(0.0, budget)
    # Nothing goes for what was used longer ago.
    for name in gone:
        entry = idle[int(name)]
        newer = sum(other.size for other in kept if other.last_used >= entry.last_used)
        assert newer + entry.size > budget


def test_a_file_is_known_by_what_cannot_stay_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m.mar"
    path.write_text("x")
    later = path.stat().st_ctime_ns + 10_000_000_000
    key = file_key(path.stat(), later)
    assert key == file_key(path.stat(), later)
    os.utime(path, ns=(1_000_000_001, 1_000_000_001))
    assert file_key(path.stat(), later) != key


def test_a_file_that_changed_just_now_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "m.mar"
    path.write_text("x")
    changed = path.stat().st_ctime_ns
    assert file_key(path.stat(), changed + 1_000_000) is None
    assert file_key(path.stat(), changed + 3_000_000_000) is not None


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    Cache.lay_out(tmp_path, tmp_path)
    (tmp_path / "work").rmdir()
    (tmp_path / "work").write_text("in the way")
    cache = Cache(tmp_path, tmp_path)
    with pytest.raises(StorageFailed, match=r"work/.*: Not a directory \(ENOTDIR, errno 20\)"):
        admitted(cache)
