"""The reference of all settings is the settings'."""

import subprocess
import sys
from pathlib import Path

import pytest

from mmserve.config import document, properties
from mmserve.config.keys import KEYS
from mmserve.config.launch import Arguments
from mmserve.config.load import load_settings
from mmserve.config.settings import Settings

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "config.properties"


def test_every_key_stands_in_one_section():
    names = [name for names in document.SECTIONS.values() for name in names]
    assert sorted(names) == sorted(KEYS)


@pytest.mark.parametrize(
    ("path", "text"),
    [("docs/configuration.md", document.markdown()), ("config.properties", document.properties())],
)
def test_the_checked_in_file_is_current(path, text):
    assert (ROOT / path).read_text() == text, "python -m mmserve.config.document writes it anew"


def test_the_shipped_file_loads_and_changes_nothing():
    loaded = load_settings(Arguments(mms_config=str(SHIPPED)), {}, "/", with_gpus=False)
    assert loaded.warnings == []
    assert loaded.settings == Settings(
        cpu_count=loaded.settings.cpu_count, log_to=loaded.settings.log_to
    )


@pytest.mark.skipif(sys.platform != "linux", reason="one default is Linux's")
def test_every_line_that_is_commented_out_is_the_default():
    lines = [line[1:] for line in SHIPPED.read_text().splitlines() if line[:1] == "#" != line[:2]]
    written = properties.parse(
        "\n".join(line for line in lines if not line.startswith(" ")).encode()
    )
    assert written.keys() == KEYS.keys()
    for name, entry in written.items():
        assert KEYS[name].read(entry.value) == KEYS[name].default, name


@pytest.mark.parametrize(
    ("flags", "code", "head"),
    [([], 0, "# Configuration"), (["--properties"], 0, "# Every setting"), (["--x"], 2, "")],
)
def test_the_command_that_writes_it(flags, code, head):
    command = [sys.executable, "-m", "mmserve.config.document", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.startswith(head)
