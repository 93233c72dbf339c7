from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mmserve.models.folder import Folder, clear, stale

OWNER = """
import sys
from pathlib import Path
from mmserve.models.folder import Folder
folder = Folder.make(Path(sys.argv[1]))
(folder.path / "weights.bin").write_text("w")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_gone_once_its_owner_closes_it(tmp_path: Path) -> None:
    folder = Folder.make(tmp_path / "not" / "there")
    (folder.path / "sub").mkdir()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    assert list((tmp_path / "not/there").iterdir()) == []


def test_a_living_owners_folder_is_not_stale(tmp_path: Path) -> None:
    folder = Folder.make(tmp_path)
    assert stale(tmp_path) == []
    assert not clear(folder.path)
    assert folder.path.is_dir()
    folder.close()


def test_a_killed_owners_folder_is_stale_and_can_be_cleared(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert stale(tmp_path) == []
        owner.kill()
    while stale(tmp_path) != [path]:  # the kernel lets go of its locks a moment after its end
        assert path.exists()
    assert clear(path)
    assert list(tmp_path.iterdir()) == []
    assert not clear(path)


@pytest.mark.parametrize("name", ["mmserve-data", "mmserve-1-abc", "other"])
def test_what_is_not_a_folder_of_ours_is_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("x")
    if name == "mmserve-data":
        (tmp_path / name / "lock").write_text("")
    assert stale(tmp_path) == []
    assert (tmp_path / name / "precious").exists()


def test_a_link_to_a_stale_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/lock").write_text("")
    (tmp_path / "mmserve-1-abc").symlink_to(tmp_path / "elsewhere")
    assert stale(tmp_path) == []
    assert stale(tmp_path / "nowhere") == []
