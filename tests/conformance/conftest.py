"""Both servers, what they said, and the account of it at the end of the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmserve_loadtest.servers import ServerFailed, Subject, mms, mmserve, running

from .allowed import ALLOWED, Allowed
from .archives import files_of_store
from .exchanges import Script, Setting
from .playing import Transcript, files, play, write_store

#: Set by what must not pass without the comparison.
REQUIRED = "MMSERVE_REQUIRE_ORACLE"


class Account:
    """What was compared, and what was excused, over the whole run."""

    def __init__(self) -> None:
        self.exchanges: dict[str, bool] = {}  # whether the two were equal
        self.excused = Counter[Allowed]()
        self.excused_exchanges: dict[Allowed, set[str]] = {}
        self.corpus = 0  # exchanges with the handlers of others
        self.missing = ""

    def compared(self, exchange: str, used: list[Allowed], is_equal: bool) -> None:
        self.exchanges[exchange] = is_equal
        for row in used:
            self.excused[row] += 1
            self.excused_exchanges.setdefault(row, set()).add(exchange)


ACCOUNT = pytest.StashKey[Account]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ACCOUNT] = Account()
    config.addinivalue_line("markers", "at_the_end: looks back at all the others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The one that asks what was never needed comes after all that may need it.
    items.sort(key=lambda item: item.get_closest_marker("at_the_end") is not None)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    account, say = config.stash[ACCOUNT], terminalreporter
    if account.missing:
        say.section("NOT COMPARED with Multi Model Server", sep="!", red=True, bold=True)
        say.line(account.missing)
        return
    if not account.exchanges and not account.corpus:
        return
    say.section("conformance with Multi Model Server 1.1.11")
    equal = sum(account.exchanges.values())
    say.line(
        f"{len(account.exchanges)} exchanges, {equal} equal in every aspect, "
        f"{len(account.exchanges) - equal} with differences"
    )
    if account.corpus:
        say.line(f"{account.corpus} exchanges with the handlers of others, all as written down")
    say.line(f"{account.excused.total()} allowed differences, by reason:")
    for row in ALLOWED:
        if count := account.excused[row]:
            exchanges = len(account.excused_exchanges[row])
            say.line(f"  {row.reason:5} {count:5} in {exchanges:4} exchanges: {row.why}")


@pytest.fixture(scope="session")
def account(pytestconfig: pytest.Config) -> Account:
    return pytestconfig.stash[ACCOUNT]


@pytest.fixture(scope="session")
def subjects(account: Account) -> tuple[Subject, Subject]:
    """Ours and theirs. Skips, and says so at the end, where there is no Multi Model Server."""
    try:
        theirs = mms()
    except ServerFailed as missing:
        account.missing = f"{missing}\nNothing here says how mmserve compares."
        if os.environ.get(REQUIRED):
            pytest.fail(account.missing)
        pytest.skip(account.missing)
    return mmserve(os.environ.get("MMSERVE_COMMAND")), theirs


class Stage:
    """Plays scripts to both servers at once and keeps what they say."""

    def __init__(self, subjects: tuple[Subject, Subject], store: Path, files_url: str) -> None:
        self._subjects, self._store, self._files_url = subjects, store, files_url
        self._heard: dict[str, tuple[Transcript, Transcript]] = {}
        self._repeated: set[tuple[str, str]] = set()

    def heard(self, setting: Setting) -> tuple[Transcript, Transcript]:
        """What ours and theirs said to all scripts of a setting."""
        if setting.name not in self._heard:
            self._heard[setting.name] = self._play(setting, setting.scripts)
        return self._heard[setting.name]

    def repeat(self, setting: Setting, script: Script) -> None:
        """Plays one script again, once a run, on fresh servers."""
        if (setting.name, script.name) not in self._repeated:
            self._repeated.add((setting.name, script.name))
            for before, now in zip(
                self.heard(setting), self._play(setting, (script,)), strict=True
            ):
                before.update(now)

    def _play(self, setting: Setting, scripts: tuple[Script, ...]) -> tuple[Transcript, Transcript]:
        def one(subject: Subject) -> Transcript:
            with running(
                subject,
                self._store,
                properties=setting.properties,
                models=setting.models,
                one_port=setting.one_port,
            ) as server:
                return play(server, scripts, self._files_url)

        with ThreadPoolExecutor(2) as both:
            ours, theirs = both.map(one, self._subjects)
        return ours, theirs


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    write_store(path, files_of_store())
    return path


@pytest.fixture(scope="session")
def stage(subjects: tuple[Subject, Subject], store: Path) -> Iterator[Stage]:
    with files() as url:
        yield Stage(subjects, store, url)
