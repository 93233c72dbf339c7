"""Any bytes as an archive: it unpacks below its folder, or is refused in words.

`one_input(data)` takes what a fuzzer made and raises AssertionError, or whatever escaped, where
unpacking misbehaves: another error than ours, a file elsewhere, a link that leads out, more bytes
than the limits allow.

By hand: `python tests/fuzz/fuzz_archive.py [SECONDS] [SEED]`.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from mmserve.errors import InvalidModel
from mmserve.models.archive import unpack
from mmserve.models.layout import read_layout
from mmserve.models.limits import Limits
from mmserve.models.manifest import Overrides, resolve

LIMITS = Limits(
    max_entries=200, max_directory_bytes=1 << 16, free_bytes=1 << 20, max_unpacked_bytes=4 << 20
)
#: In memory where there is such a place: a run makes thousands of files.
PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def one_input(data: bytes) -> None:
    """Raises what an archive should never cause."""
    with tempfile.TemporaryDirectory(dir=PLACE) as place, tempfile.TemporaryFile(dir=PLACE) as file:
        file.write(data)
        file.flush()
        tree = Path(place, "inner", "tree")
        tree.mkdir(parents=True)
        try:
            size = unpack(file.fileno(), str(tree), limits=LIMITS)
        except InvalidModel as error:
            assert str(error)
        else:
            assert size <= LIMITS.max_unpacked_bytes
            _check_model(tree)
        _check_tree(tree)
        assert [path.name for path in Path(place).iterdir()] == ["inner"]
        assert [path.name for path in tree.parent.iterdir()] == ["tree"]


def _check_tree(tree: Path) -> None:
    total = 0
    for folder, folders, files in os.walk(tree):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink():
                assert path.resolve().is_relative_to(tree), "a link leads out"
                continue
            mode = path.lstat().st_mode
            assert path.is_dir() or path.is_file(), "neither file nor folder"
            assert not mode & 0o7022, f"mode {mode:o}"
            total += 0 if path.is_dir() else path.lstat().st_size
    assert total <= LIMITS.max_unpacked_bytes


def _check_model(tree: Path) -> None:
    try:
        layout = read_layout(tree, tree)
        resolve(layout.manifest, Overrides(default_name="m", default_handler="service:handle"))
    except InvalidModel as error:
        assert str(error)


# By hand


def seeds() -> list[bytes]:
    """Small archives of every form, sound ones and bad ones."""
    names = {
        "MAR-INF/MANIFEST.json": b'{"model": {"modelName": "m", "handler": "service:handle"}}',
        "service.py": b"def handle(data, context): pass\n" * 20,
        "a/b/c.txt": b"x",
    }
    bad = ["../up", "/abs", "a\\..\\..\\up", "C:\\x", "n" * 300, "a/b", "A/B/c.txt", "x\0y"]
    found = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        for extra in (None, *bad):
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w", method) as archive:
                for name, content in names.items():
                    archive.writestr(name, content)
                if extra is not None:
                    info = zipfile.ZipInfo("p" * len(extra))
                    info.filename = extra
                    archive.writestr(info, b"pwned")
                link = zipfile.ZipInfo("link")
                link.create_system, link.external_attr = 3, 0o120777 << 16
                archive.writestr(link, b"a/b" if extra != "a/b" else b"../..")
            found.append(buffer.getvalue())
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        for extra in (None, *bad[:6]):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
                for name, content in names.items():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
                for kind, name, target in (
                    (tarfile.SYMTYPE, "link", "a/../service.py" if extra is None else "../.."),
                    (tarfile.LNKTYPE, "hard", "service.py" if extra is None else "/etc/passwd"),
                    (tarfile.DIRTYPE, "d/", ""),
                    (tarfile.FIFOTYPE, "pipe", "") if extra == "/abs" else (b"5", "e", ""),
                ):
                    entry = tarfile.TarInfo(name)
                    entry.type, entry.linkname = kind, target
                    tar.addfile(entry)
                if extra is not None and form != tarfile.USTAR_FORMAT:
                    tar.addfile(tarfile.TarInfo(extra * 3), io.BytesIO())
            found += [buffer.getvalue(), gzip.compress(buffer.getvalue(), 1)]
    zeros = io.BytesIO()
    with zipfile.ZipFile(zeros, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(8 << 20))
    return [*found, zeros.getvalue(), gzip.compress(bytes(8 << 20)), b"", b"<html>", b"PK\x05\x06"]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few of them changed, cut, doubled or swapped."""
    work = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        if not work:
            return bytes(work)
        at = chance.randrange(len(work))
        match chance.randrange(6):
            case 0:
                work[at] = chance.randrange(256)
            case 1:
                work[at] ^= 1 << chance.randrange(8)
            case 2:
                del work[at : at + chance.randint(1, 40)]
            case 3:
                work[at:at] = work[chance.randrange(len(work)) :][: chance.randint(1, 600)]
            case 4:
                work[at : at + 4] = chance.choice(
                    [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x01\0\0\0", b"\xff\xff\xff\x7f"]
                )
            case _:
                del work[at:]
    if chance.random() < 0.5 and is_tar(work):
        mend_checksums(work)
    return bytes(work)


def is_tar(data: bytearray) -> bool:
    return data[257:262] == b"ustar"


def mend_checksums(data: bytearray) -> None:
    """Headers that look like ones get their checksum, so that what they say is looked at."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            total = sum(data[at : at + 148]) + 8 * 0x20 + sum(data[at + 156 : at + 512])
            data[at + 148 : at + 156] = b"%06o\0 " % total


def main(seconds: float, seed: int) -> None:
    chance = random.Random(seed)
    corpus = seeds()
    for data in corpus:
        one_input(data)
    count = len(corpus)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutated(chance.choice(corpus), chance)
        if chance.random() < 0.1:
            data = gzip.compress(data, 1)
        try:
            one_input(data)
        except BaseException:
            Path("crash").write_bytes(data)
            print(f"input {count} of seed {seed} is in ./crash", file=sys.stderr)
            raise
        count += 1
    print(f"{count} inputs, seed {seed}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(
        float(arguments[0]) if arguments else 10.0,
        int(arguments[1]) if len(arguments) > 1 else random.randrange(1 << 32),
    )
