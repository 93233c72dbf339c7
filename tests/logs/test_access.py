import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.config.settings import Settings
from mmserve.frontend.http import Exchange, Request
from mmserve.logs.access import RequestLog, access_line, shown_target
from mmserve.logs.journal import open_journal
from mmserve.metrics.requests import RequestCounters
from tests.metric_lines import parse_line

AccessLog = Literal["all", "no-ping", "errors", "off"]


def exchange(path: str = "/predictions/m", query: str = "", **more: str) -> Exchange:
    target = path + ("?" + query if query else "")
    peer = more.get("peer", "127.0.0.1:50000")
    return Exchange(Request("POST", target, path, query, [], b"", peer=peer, id="r1"))


def kept(folder: Path, value: AccessLog) -> list[str]:
    asked = Settings(log_location=str(folder), metrics_location=str(folder), access_log=value)
    with open_journal(asked, stdout=None) as journal:
        log = RequestLog(journal, asked, RequestCounters("h"))
        log.observe(exchange("/ping"), 200, 0.001, 20)
        log.observe(exchange("/ping"), 500, 0.001, 20)
        log.observe(exchange(), 200, 0.005, 2)
        log.observe(exchange(), 503, 0.005, 2)
        log.observe(exchange("/old"), 302, 0.005, 2)
    lines = (folder / "access_log.log").read_text().splitlines()
    counters = (folder / "mms_metrics.log").read_text().splitlines()
    assert [line.split(" - ")[1].split(".")[0] for line in counters] == [
        "Requests2XX",
        "Requests5XX",
        "Requests2XX",
        "Requests5XX",
        "Requests5XX",
    ]
    for line in counters:
        metric = parse_line(line.split(" - ")[1])
        assert metric is not None
        assert metric.timestamp > 1_700_000_000
    return [line.split(" ", 3)[3].removesuffix(" 5").removesuffix(" 1") for line in lines]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("all", ["/ping 200", "/ping 500", "/predictions/m 200", "/predictions/m 503", "/old 302"]),
        ("no-ping", ["/ping 500", "/predictions/m 200", "/predictions/m 503", "/old 302"]),
        ("errors", ["/ping 500", "/predictions/m 503"]),
        ("off", []),
    ],
)
def test_the_setting_decides_which_requests_are_logged_and_all_are_counted(
    tmp_path: Path, value: AccessLog, wanted: list[str]
) -> None:
    found = [line.replace('"POST ', "").replace(' HTTP/1.1"', "") for line in kept(tmp_path, value)]
    assert found == wanted


def test_the_line_is_that_of_multi_model_server() -> None:
    line = access_line("127.0.0.1:50000", "POST", "/predictions/m?a=b", "1.1", 200, 0.0059)
    assert line == '/127.0.0.1:50000 "POST /predictions/m?a=b HTTP/1.1" 200 5'
    assert (
        access_line("0.0.0.0", "GET", "/ping", "1.0", 200, 0)
        == '0.0.0.0 "GET /ping HTTP/1.0" 200 0'
    )
    assert access_line("[::1]:5", "GET", "/", "1.1", 200, 0).startswith('/[::1]:5 "GET')


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        (
            "/models?url=http://u:p@h/m.mar?sig=x&batch_size=1",
            "/models?url=http://****@h/m.mar?****&batch_size=1",
        ),
        (
            "/models/?a=b&model_url=https%3A%2F%2Fh%2Fm%3Fsig%3Dx",
            "/models/?a=b&model_url=https://h/m?****",
        ),
        ("/models?a;url=http://u:p@h/m;b=c&d", "/models?a;url=http://****@h/m;b=c&d"),
        ("/models?u%72l=http://u:p@h/m", "/models?u%72l=http://****@h/m"),
        ("/models?url=http://h/m.mar", "/models?url=http://h/m.mar"),
        ("/models?url=m.mar?x", "/models?url=m.mar?x"),
        ("/models?next_page_token=1", "/models?next_page_token=1"),
        ("/predictions/m?url=http://h/x?y", "/predictions/m?url=http://h/x?y"),
    ],
)
def test_the_url_of_a_registration_is_shown_where_nothing_in_it_is_secret(
    target: str, shown: str
) -> None:
    assert shown_target(target) == shown
    assert f" {shown} HTTP/" in access_line("1.2.3.4:5", "POST", target, "1.1", 200, 0)


@given(st.text())
def test_a_target_cannot_end_its_field_or_the_line(target: str) -> None:
    line = access_line("1.2.3.4:5", "GET", target, "1.1", 200, 0)
    assert len(line.splitlines()) == 1
    field = line.removeprefix('/1.2.3.4:5 "').removesuffix(' HTTP/1.1" 200 0')
    assert '"' not in field.replace("\\\\", "").replace('\\"', "")


def test_json_has_the_request_id_and_the_trace(tmp_path: Path) -> None:
    asked = Settings(log_location=str(tmp_path), metrics_location=str(tmp_path), log_format="json")
    with open_journal(asked, stdout=None) as journal:
        log = RequestLog(journal, asked, RequestCounters("h"))
        traced = exchange(query="a=b")
        traced.request.headers.append(("Traceparent", "00-0af7-b7ad-01"))
        log.observe(traced, 200, 0.0051, 2)
    found = json.loads((tmp_path / "access_log.log").read_text())
    wanted = {
        "request_id": "r1",
        "peer": "127.0.0.1:50000",
        "method": "POST",
        "target": "/predictions/m?a=b",
        "status": 200,
        "duration_ms": 5.1,
        "bytes_out": 2,
        "traceparent": "00-0af7-b7ad-01",
    }
    assert wanted.items() <= found.items()
