"""Real archives, unpacked into real folders."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import resource
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.errors import InvalidModel, StorageFailed
from mmserve.models import inflate
from mmserve.models.archive import unpack
from mmserve.models.limits import Limits
from mmserve.models.packed import SPAN_BYTES, Pacing
from tests.fuzz import fuzz_archive
from tests.models.workshop import below, model, special, tar_of, zip_of

FILES = {
    **model(),
    "empty": b"",
    "sub/deep/weights.bin": random.Random(0).randbytes(700_000),
    "sub/zeros": bytes(700_000),
    "caf\u00e9/日本.txt": "text",
}
EXPECTED = {name: c if isinstance(c, bytes) else c.encode() for name, c in FILES.items()}


def unpacked(data: bytes, place: Path, limits: Limits | None = None) -> dict[str, bytes]:
    """Unpacks below `place`; whatever else lies there afterwards is an error."""
    tree = place / "in" / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    archive = place / "archive"
    archive.write_bytes(data)
    fd = os.open(archive, os.O_RDONLY)
    try:
        size = unpack(fd, str(tree), limits=limits)
    finally:
        os.close(fd)
        archive.unlink()
        assert [path.name for path in place.iterdir()] == ["in"]
        assert [path.name for path in (place / "in").iterdir()] == ["tree"]
    files = [path.lstat() for path in tree.rglob("*") if stat.S_ISREG(path.lstat().st_mode)]
    assert size == sum({file.st_ino: file.st_size for file in files}.values())
    return below(tree)


def refused(data: bytes, place: Path, limits: Limits | None = None) -> str:
    with pytest.raises(InvalidModel) as caught:
        unpacked(data, place, limits)
    return str(caught.value)


# What can be read


@pytest.mark.parametrize(
    "data",
    [
        zip_of(FILES, zipfile.ZIP_DEFLATED),
        zip_of(FILES, zipfile.ZIP_STORED),
        b"#!/bin/sh\nexit\n" + zip_of(FILES),
        tar_of(FILES, "w:gz"),
        tar_of(FILES, "w"),
        tar_of(FILES, "w:gz") + bytes(512),
        gzip.compress(tar_of(FILES, "w")[:1000]) + gzip.compress(tar_of(FILES, "w")[1000:]),
        gzip.compress(tar_of(FILES, "w")) + b"trailing text",
    ],
    ids=[
        "deflated",
        "stored",
        "behind a script",
        "tar.gz",
        "tar",
        "padded gzip",
        "two gzip members",
        "text behind gzip",
    ],
)
def test_archives_of_every_form_unpack_to_their_files(data: bytes, tmp_path: Path) -> None:
    assert unpacked(data, tmp_path) == EXPECTED


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_of_tar_is_read(form: int, tmp_path: Path) -> None:
    long_name = "/".join(["d" * 60] * 3)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        info = tarfile.TarInfo(long_name)
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    assert unpacked(buffer.getvalue(), tmp_path) == {long_name: b"abc"}


def test_backslashes_in_names_are_separators(tmp_path: Path) -> None:
    assert unpacked(zip_of({"a\\b\\c.txt": "x"}), tmp_path) == {"a/b/c.txt": b"x"}


def test_an_empty_zip_has_no_files(tmp_path: Path) -> None:
    assert unpacked(zip_of({}), tmp_path) == {}


def test_links_inside_the_model_are_kept(tmp_path: Path) -> None:
    links = (
        special("snapshots/1/weights.bin", tarfile.SYMTYPE, "../../blobs/abc"),
        special("hard", tarfile.LNKTYPE, "blobs/abc"),
    )
    files = {"blobs/abc": "w", "snapshots/1/hard": "w", "snapshots/1/weights.bin": "w"}
    found = unpacked(tar_of({"blobs/abc": "w", "snapshots/1/hard": "w"}, "w:gz", *links), tmp_path)
    assert found == dict.fromkeys([*files, "hard"], b"w")
    assert (tmp_path / "in/tree/snapshots/1/weights.bin").is_symlink()


def test_rights_are_ours_but_for_the_right_to_run(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, mode in (("run.sh", 0o4777), ("read", 0o400), ("open", 0o666)):
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, (stat.S_IFREG | mode) << 16
            archive.writestr(info, "x")
    before = os.umask(0o022)
    try:
        unpacked(buffer.getvalue(), tmp_path)
    finally:
        os.umask(before)
    tree = tmp_path / "in/tree"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tree.iterdir()}
    assert modes == {"run.sh": 0o755, "read": 0o644, "open": 0o644}


# What is none


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "the file is empty"),
        (b"<!doctype html><title>m</title>", "an HTML page"),
        (b" \n<HTML>", "an HTML page"),
        (b"<?xml version='1.0'?><Error/>", "an XML document"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
        (b"BZh91AY", "a bzip2 file"),
        (b"\x80\x04\x95", "a pickle file"),
        (b"hello there", "a text file"),
        (bytes(2000), "zero bytes"),
        (b"\x01\x02\x03" * 900, "other binary data"),
        (gzip.compress(b"hello"), "no tar archive"),
        (gzip.compress(b""), "no tar archive"),
    ],
)
def test_what_is_no_archive_is_told_for_what_it_is(data: bytes, found: str, tmp_path: Path) -> None:
    message = refused(data, tmp_path)
    assert "not a valid archive" in message
    assert found in message


@pytest.mark.parametrize("data", [zip_of(FILES), tar_of(FILES, "w:gz"), tar_of(FILES, "w")])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_cut_off_archive_is_refused(data: bytes, share: float, tmp_path: Path) -> None:
    if data[257:262] == b"ustar" and share == 0.99:
        share = 0.9  # the rest of a tar is its blocking
    assert "not a valid" in refused(data[: int(len(data) * share)], tmp_path)


SMALL = [zip_of(model()), zip_of(model(), zipfile.ZIP_STORED), tar_of(model())]


@given(st.sampled_from(SMALL), st.data())
def test_an_archive_cut_off_anywhere_is_refused(data: bytes, draw: st.DataObject) -> None:
    end = draw.draw(st.integers(0, len(data) - 1))
    fuzz_archive.one_input(data[:end])
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_bytes(data[:end]))
        folder = stack.enter_context(empty_folder())
        with pytest.raises(InvalidModel, match="not a valid"):
            unpack(file, folder)


@contextlib.contextmanager
def open_bytes(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("archive")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def empty_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        data = bytearray(zip_of({"weights.bin": random.Random(1).randbytes(5000)}, method))
        data[2000] ^= 1
        assert "not a valid zip archive" in refused(bytes(data), tmp_path)
        (tmp_path / "in/tree/weights.bin").unlink()
    packed = bytearray(tar_of({"weights.bin": random.Random(1).randbytes(5000)}))
    packed[-8] ^= 1  # the checksum itself
    assert "not a valid tar.gz archive" in refused(bytes(packed), tmp_path)


LARGE = random.Random(2).randbytes(2 * SPAN_BYTES + 12_345)


def test_a_large_stored_file_is_whole_though_several_threads_write_it(tmp_path: Path) -> None:
    files = {"model.safetensors": LARGE, "small": "s", "just": LARGE[: SPAN_BYTES + 1]}
    found = unpacked(zip_of(files, zipfile.ZIP_STORED), tmp_path)
    assert found == {**files, "small": b"s"}


@pytest.mark.parametrize("place", [0, SPAN_BYTES, len(LARGE) - 1])
def test_a_changed_byte_of_a_large_stored_file_is_noticed(place: int, tmp_path: Path) -> None:
    data = bytearray(zip_of({"model.safetensors": LARGE}, zipfile.ZIP_STORED))
    data[data.index(LARGE[:64]) + place] ^= 1
    assert "'model.safetensors' is damaged" in refused(bytes(data), tmp_path)


# What is refused

CLIMBERS = ["../../tmp/pwn", "/abs/pwn", "a/../../pwn", "C:\\pwn", "..\\pwn", "a\\..\\..\\pwn"]


@pytest.mark.parametrize("name", [*CLIMBERS, "n" * 5000])
@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_an_entry_that_climbs_out_is_refused(name: str, pack: object, tmp_path: Path) -> None:
    assert callable(pack)
    assert "is refused" in refused(pack({"service.py": "x", name: "pwned"}), tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        [special("out", tarfile.SYMTYPE, "/etc")],
        [special("out", tarfile.SYMTYPE, "../../x")],
        [special("a", tarfile.SYMTYPE, "."), special("b", tarfile.SYMTYPE, "a/a/../..")],
        [special("out", tarfile.SYMTYPE, "in"), special("out/x", tarfile.REGTYPE)],
        [special("hard", tarfile.LNKTYPE, "/etc/passwd")],
        [special("hard", tarfile.LNKTYPE, "../x")],
        [special("hard", tarfile.LNKTYPE, "nowhere")],
        [special("pipe", tarfile.FIFOTYPE)],
        [special("null", tarfile.CHRTYPE)],
        [special("disk", tarfile.BLKTYPE)],
        [special("sparse", tarfile.GNUTYPE_SPARSE)],
        [special("twice", tarfile.REGTYPE), special("twice", tarfile.REGTYPE)],
        [special("Twice", tarfile.REGTYPE), special("twice", tarfile.SYMTYPE, "x")],
    ],
    ids=lambda entries: " ".join(f"{entry.name}-{entry.linkname}" for entry in entries),
)
@pytest.mark.filterwarnings("ignore")
def test_a_tar_with_a_dangerous_entry_is_refused(
    entries: list[tarfile.TarInfo], tmp_path: Path
) -> None:
    refused(tar_of({"service.py": "x"}, "w:gz", *entries), tmp_path)


def zip_entry(mode: int = 0, content: bytes = b"x", name: str = "entry") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.create_system, info.external_attr = 3, mode << 16
        archive.writestr(info, content)
    return buffer.getvalue()


@pytest.mark.parametrize("target", [b"/etc/passwd", b"../../x", b"x" * 5000, b"", b"a\0b"])
def test_a_zip_link_that_leads_out_is_refused(target: bytes, tmp_path: Path) -> None:
    refused(zip_entry(stat.S_IFLNK | 0o777, target), tmp_path)


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_a_device_in_a_zip_is_refused(kind: int, tmp_path: Path) -> None:
    assert "a device or a pipe" in refused(zip_entry(kind | 0o644), tmp_path)


def test_an_encrypted_entry_is_refused(tmp_path: Path) -> None:
    data = bytearray(zip_entry())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    assert "is encrypted" in refused(bytes(data), tmp_path)


def test_other_compressions_are_named(tmp_path: Path) -> None:
    message = refused(zip_of({"a": "x" * 100}, zipfile.ZIP_BZIP2), tmp_path)
    assert "compressed by method 12" in message


# Bombs


def test_an_archive_that_grows_beyond_measure_is_refused(tmp_path: Path) -> None:
    limits = Limits(free_bytes=1 << 20)
    for data in (zip_of({"z": bytes(4 << 20)}), tar_of({"z": bytes(4 << 20)})):
        assert "more than 1048576 bytes" in refused(data, tmp_path, limits)


def test_what_is_below_the_free_size_may_grow_as_it_likes(tmp_path: Path) -> None:
    limits = Limits(free_bytes=5 << 20)
    assert len(unpacked(zip_of({"z": bytes(4 << 20)}), tmp_path, limits)["z"]) == 4 << 20


def test_a_size_that_is_declared_too_small_does_not_help(tmp_path: Path) -> None:
    data = bytearray(zip_of({"z": bytes(4 << 20)}))
    at = data.index(b"PK\x01\x02") + 24  # uncompressed size in the directory
    data[at : at + 4] = struct.pack("<I", 1000)
    assert "is damaged" in refused(bytes(data), tmp_path)
    assert (tmp_path / "in/tree/z").stat().st_size <= 1000


def test_headers_that_only_grow_are_refused(tmp_path: Path) -> None:
    limits = Limits(free_bytes=1 << 20)
    packed = gzip.compress(tar_of({"a": "x"}, "w") + bytes(8 << 20), 9)
    assert "more than" in refused(packed, tmp_path, limits)

    pax = tarfile.TarInfo("x")
    pax.pax_headers = {"comment": "c" * 300_000}
    assert "a header is too long" in refused(tar_of({}, "w:gz", pax), tmp_path)


def test_entries_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    one = zip_of({"a": "x" * 1000})
    start = one.index(b"PK\x01\x02")
    end = one.index(b"PK\x05\x06")
    directory = one[start:end]
    footer = bytearray(one[end:])
    footer[8:16] = struct.pack("<HHI", 2, 2, 2 * len(directory))
    other = bytearray(directory)
    other[46:47] = b"b"
    assert "overlap" in refused(one[:end] + bytes(other) + bytes(footer), tmp_path)


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_too_many_entries_are_refused(pack: object, tmp_path: Path) -> None:
    assert callable(pack)
    limits = Limits(max_entries=20)
    assert "more than 20 entries" in refused(
        pack({f"f{n}": "" for n in range(21)}), tmp_path, limits
    )
    directories = [special("./", tarfile.DIRTYPE)] * 30
    assert "more than 20 entries" in refused(tar_of({}, "w:gz", *directories), tmp_path, limits)


def test_a_huge_directory_of_a_zip_is_not_read(tmp_path: Path) -> None:
    limits = Limits(max_directory_bytes=1000)
    assert "too many entries" in refused(
        zip_of({f"{n}" * 9: "" for n in range(50)}), tmp_path, limits
    )


def test_what_fuzzing_starts_from_is_handled(tmp_path: Path) -> None:
    for data in fuzz_archive.seeds():
        fuzz_archive.one_input(data)


@settings(max_examples=150)
@given(st.sampled_from(fuzz_archive.seeds()), st.randoms(use_true_random=False))
def test_a_damaged_archive_is_handled(data: bytes, chance: random.Random) -> None:
    fuzz_archive.one_input(fuzz_archive.mutated(data, chance))


@given(st.binary(max_size=2000))
def test_any_bytes_are_handled(data: bytes) -> None:
    fuzz_archive.one_input(data)


# The disk, and whoever waits


def test_a_disk_that_takes_no_more_is_a_storage_failure(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_bytes(zip_of({"weights.bin": bytes(700_000)})) as fd:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
        try:
            with pytest.raises(StorageFailed, match=r"weights\.bin: File too .* \(EFBIG, errno 27"):
                unpack(fd, str(tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_place_that_is_no_folder_is_a_storage_failure(tmp_path: Path) -> None:
    (tmp_path / "tree").write_text("in the way")
    with open_bytes(zip_of(FILES)) as fd, pytest.raises(StorageFailed, match="tree: Not a dir"):
        unpack(fd, str(tmp_path / "tree"))


@pytest.mark.parametrize("data", [zip_of(FILES), tar_of(FILES)])
def test_whoever_asked_may_give_up(data: bytes, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def check() -> None:
        raise EnoughError

    with open_bytes(data) as fd, pytest.raises(EnoughError):
        unpack(fd, str(tmp_path), pacing=Pacing(check=check))


@pytest.mark.parametrize("data", [zip_of(FILES), tar_of(FILES)])
def test_room_is_asked_for_before_files_are_written(data: bytes, tmp_path: Path) -> None:
    asked: list[int] = []

    def make_room(size: int) -> None:
        asked.append(size)
        raise StorageFailed("no room")

    with open_bytes(data) as fd, pytest.raises(StorageFailed, match="no room"):
        unpack(fd, str(tmp_path), pacing=Pacing(make_room=make_room))
    assert asked[0] > 0
    assert below(tmp_path) == {}


# zlib and isal


@given(st.binary(max_size=5000), st.integers(1, 400), st.integers(1, 700), st.booleans())
def test_both_inflaters_agree(data: bytes, piece: int, most: int, is_gzip: bool) -> None:
    packed = gzip.compress(data) if is_gzip else inflate_raw(data)
    makers = (
        (inflate.gzip_inflater, inflate._plain_gzip)
        if is_gzip
        else (inflate.deflate_inflater, inflate._plain_deflate)
    )
    for make in makers:
        stream, offset, out = make(), 0, b""
        while not stream.eof:
            chunk = b""
            if stream.needs_input:
                chunk = packed[offset : offset + piece]
                assert chunk, "wants more than there is"
                offset += len(chunk)
            got = stream.decompress(chunk, most)
            assert len(got) <= most
            out += got
        assert out == data


def inflate_raw(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()
