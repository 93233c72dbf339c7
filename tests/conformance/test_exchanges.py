"""Each exchange of the table, with Multi Model Server and with ours."""

from __future__ import annotations

import pytest

from .allowed import ALLOWED, excuse
from .comparing import differences
from .conftest import Account, Stage
from .exchanges import Exchange, Script, Setting
from .table import settings

# The first exchange of a setting starts both servers and plays all its scripts.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

SETTINGS = settings()
EXCHANGES = [
    (setting, script, step)
    for setting in SETTINGS
    for script in setting.scripts
    for step in script.steps
    if isinstance(step, Exchange)
]


def name_of(setting: Setting, script: Script, exchange: Exchange) -> str:
    return f"{setting.name} / {script.name} / {exchange.name}"


@pytest.mark.parametrize(
    ("setting", "script", "exchange"), EXCHANGES, ids=[name_of(*each) for each in EXCHANGES]
)
def test_both_answer_alike(
    setting: Setting,
    script: Script,
    exchange: Exchange,
    stage: Stage,
    account: Account,
    request: pytest.FixtureRequest,
) -> None:
    if getattr(request.node, "execution_count", 1) > 1:  # a rerun, for what hangs on timing
        stage.repeat(setting, script)
    ours, theirs = (heard[script.name, exchange.name] for heard in stage.heard(setting))
    name = name_of(setting, script, exchange)
    found = [
        difference
        for mine, other in zip(ours, theirs, strict=True)
        for difference in differences(mine, other)
    ]
    rows = [(difference, excuse(name, difference)) for difference in found]
    account.compared(name, [row for _, row in rows if row is not None], not found)
    left = [str(difference) for difference, row in rows if row is None]
    assert not left, "\n".join((f"{exchange.method} {exchange.path}", *left))


@pytest.mark.at_the_end
def test_every_allowed_difference_still_occurs(stage: Stage, account: Account) -> None:
    if len(account.exchanges) < len(EXCHANGES):
        pytest.skip("not all exchanges were compared in this run")
    stale = [f"{row.reason}: {row.why}" for row in ALLOWED if not account.excused[row]]
    assert not stale, "these rows of allowed.py excuse nothing any more"


@pytest.mark.at_the_end
def test_no_allowed_difference_covers_a_whole_route(stage: Stage, account: Account) -> None:
    if len(account.exchanges) < len(EXCHANGES):
        pytest.skip("not all exchanges were compared in this run")
    routes: dict[str, set[str]] = {}
    for setting, script, exchange in EXCHANGES:
        routes.setdefault(route_of(exchange), set()).add(name_of(setting, script, exchange))
    covered = [
        f"{row.reason} ({row.why}): {route}"
        for row, excused in account.excused_exchanges.items()
        for route, exchanges in routes.items()
        if exchanges <= excused
    ]
    assert not covered


def route_of(exchange: Exchange) -> str:
    """The route an exchange asks for, with `{m}` for a model's name; one for all that is none."""
    if exchange.raw is not None:
        return "the wire"
    parts = [part for part in exchange.path.partition("?")[0].split("/") if part]
    match parts:
        case ["ping" | "api-description" | "invocations" as first, *_]:
            return f"/{first}"
        case ["predictions", _, *_]:
            return "/predictions/{m}"
        case [_, "predict"]:
            return "/{m}/predict"
        case ["models"]:
            return f"{exchange.method} /models"
        case ["models", _]:
            return f"{exchange.method} /models/{{m}}"
        case ["models", _, "invoke"]:
            return "/models/{m}/invoke"
        case []:
            return "/"
    return "no route"
