"""What a handler is given and what becomes of what it returns, in a real worker process."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.runtime.workers import Process, Request

Serve = Callable[..., Process]

SHOW = "return [f'{type(body).__name__} {body!r}']"


# What goes in


DECODED = [
    ("application/json", b'{"a":1}', "dict {'a': 1}"),
    ("application/json;charset=utf-8", b'{"a":1}', "dict {'a': 1}"),
    ("Application/JSON; Charset=UTF-8", b'{"a":1}', "dict {'a': 1}"),
    ("application/json", '"好"'.encode(), "str '好'"),
    ("application/json; charset=latin-1", b'"\xe9"', "str 'é'"),
    ('application/json; charset="utf-16"', '"é"'.encode("utf-16"), "str 'é'"),
    ("application/json", b"\xef\xbb\xbf[1]", "list [1]"),
    ("application/json", b"NaN", "float nan"),
    ("application/json", rb'"\ud800"', r"str '\ud800'"),
    ("text/plain", b"", "str ''"),
    ("text/csv; charset=latin-1", b"\xe9", "str 'é'"),
    ("TEXT/plain", "é".encode(), "str 'é'"),
    ("application/vnd.x+json", b"{}", "bytearray bytearray(b'{}')"),
    ("application/jsonlines", b"{}", "bytearray bytearray(b'{}')"),
    ("", b"{}", "bytearray bytearray(b'{}')"),
]


def test_a_body_is_decoded_by_its_media_type(serve: Serve) -> None:
    worker = serve(SHOW)
    for content_type, body, shown in DECODED:
        assert worker.ask(Request(body, content_type)).text == shown, content_type


def test_with_decoding_off_every_body_is_bytes(serve: Serve) -> None:
    worker = serve(SHOW, decode_input=False)
    for content_type in ("application/json", "text/plain", ""):
        assert worker.ask(Request(b"{}", content_type)).text == "bytearray bytearray(b'{}')"


REFUSED = [
    ("application/json", b"{bad", "The request body is not valid JSON: Expecting property"),
    ("application/json", b'{"a":', "The request body is not valid JSON: Expecting value"),
    ("application/json", b"", "The request body is empty, which is no JSON."),
    ("application/json", b" \n", "The request body is empty, which is no JSON."),
    ("application/json", b"\xff\xfe", "The request body is not utf-8 text: byte 0"),
    ("application/json", b"[" * 100_000, "The request body is JSON nested too deeply."),
    ("application/json", b"9" * 5000, "The request body has a number of too many digits."),
    ("application/json; charset=klingon", b"1", "The request body has the charset 'klingon'"),
    ("text/plain; charset=base64", b"1", "The request body has the charset 'base64'"),
    ("text/plain; charset=idna", b"1", "The request body has the charset 'idna'"),
    ("text/plain", b"ab\xff", "The request body is not utf-8 text: byte 2"),
]


def test_a_body_that_is_not_what_it_says_is_the_clients_error_and_the_worker_lives(
    serve: Serve,
) -> None:
    worker = serve("return [str(len(data))]", batch_size=2)
    for content_type, body, message in REFUSED:
        answer = worker.ask(Request(body, content_type))
        assert answer.outcome.status == 400
        assert answer.outcome.is_bad_request
        assert answer.outcome.error is not None and answer.outcome.error.startswith(message)
    assert worker.ask(Request(b"1", "application/json")).text == "1"


def test_a_bad_body_costs_no_other_request_of_its_batch(serve: Serve) -> None:
    worker = serve(
        """
        for index in range(len(data)):
            context.set_response_header(index, 'X-Id', context.get_request_id(index))
        return [row['body'] for row in data]
        """,
        batch_size=4,
    )
    bad = Request(b"{", "application/json", id="bad")
    good = [Request(b"[%d]" % number, "application/json", id=f"{number}") for number in (1, 2)]
    answers = worker.predict(bad, good[0], bad, good[1])
    assert [answer.outcome.status for answer in answers] == [400, 200, 400, 200]
    assert [json.loads(answers[at].body) for at in (1, 3)] == [[1], [2]]
    assert [answers[at].outcome.headers for at in (1, 3)] == [[("X-Id", "1")], [("X-Id", "2")]]


def test_a_batch_of_bad_bodies_does_not_reach_the_handler(serve: Serve) -> None:
    worker = serve("raise SystemExit(3)", batch_size=2)
    bad = Request(b"", "application/json")
    assert [answer.outcome.status for answer in worker.predict(bad, bad)] == [400, 400]


def test_each_parameter_is_one_key_and_the_last_of_a_name_wins(serve: Serve) -> None:
    worker = serve("return [{k: [type(v).__name__, str(v)] for k, v in data[0].items()}]")
    request = Request(
        parameters=[
            ("q", b"query", None),
            ("f", b'{"a":1}', "application/json"),
            ("t", "é".encode(), "text/plain"),
            ("o", b"x", "application/octet-stream"),
            ("q", b"last", None),
            ("empty", b"", None),
        ]
    )
    assert json.loads(worker.ask(request).body) == {
        "q": ["bytearray", "bytearray(b'last')"],
        "f": ["dict", "{'a': 1}"],
        "t": ["str", "é"],
        "o": ["bytearray", "bytearray(b'x')"],
        "empty": ["bytearray", "bytearray(b'')"],
    }
    assert worker.ask(Request(parameters=[])).text == "{}"
    bad_part = Request(parameters=[("a", b"1", None), ("b", b"{", "application/json")])
    status, error = worker.ask(bad_part).error
    assert status == 400
    assert error is not None and error.startswith("The part 'b' is not valid JSON")


def test_a_large_body_arrives_whole_and_is_the_handlers_own(serve: Serve) -> None:
    worker = serve("body += b'!'; return [body]", max_response_size=1 << 24)
    body = bytes(range(256)) * 20_000
    assert worker.ask(body).body == body + b"!"


# What comes out


RESULTS: list[object] = [
    {"a": 1, "姓名": "程"},
    {1: 2, None: 3, False: [], "x": {}},
    [1e16, 1e-7, -0.0, 10**30, True, None, "\x7f\u2028\U0001f600\ud800"],
    [[], [[]], {"a": [{}]}],
    [float("nan"), float("inf")],
    None,
    5,
    "",
]


def test_results_are_json_as_multi_model_server_writes_it(serve: Serve) -> None:
    worker = serve("nan, inf = float('nan'), float('inf'); return [eval(body)]")
    for result in RESULTS:
        expected = json.dumps(result, indent=2) if result != "" else ""
        answer = worker.ask(repr(result).encode())
        assert answer.body == expected.encode()
        assert answer.outcome.is_json is (result != "")
        assert (answer.outcome.status, answer.outcome.headers) == (200, [])


@pytest.mark.parametrize("result", ["b'\\xff\\0'", "bytearray(b'\\xff\\0')"])
def test_bytes_are_sent_as_they_are(serve: Serve, result: str) -> None:
    answer = serve(f"return [{result}]").ask()
    assert (answer.body, answer.outcome.is_json) == (b"\xff\0", False)


def test_text_is_sent_as_utf_8(serve: Serve) -> None:
    assert serve("return ['é好']").ask().body == "é好".encode()


def test_what_is_no_list_is_503(serve: Serve) -> None:
    worker = serve("return eval(body)", batch_size=2)
    for result in (b"None", b"('x',)", b"{}", b"'x'", b"(x for x in 'x')", b"5"):
        errors = [answer.error for answer in worker.predict(result, b"")]
        assert errors == [(503, "Invalid model predict output")] * 2
    worker.end()
    assert "The handler returned" in worker.err


def test_a_batch_of_wrong_length_is_503_for_every_request_and_a_lone_one_is_served(
    serve: Serve,
) -> None:
    worker = serve("return ['one']", batch_size=3)
    errors = [answer.error for answer in worker.predict(b"", b"", b"")]
    assert errors == [(503, "number of batch response mismatched")] * 3
    assert worker.ask().text == "one"


def test_a_result_that_cannot_be_sent_is_503_for_its_request_alone(serve: Serve) -> None:
    worker = serve("return [eval(body), 'fine', 'too']", batch_size=3)
    for result in (
        b"object()",
        b"[b'a']",
        b"{1: {2}}",
        b"(lambda circle: circle.append(circle) or circle)([])",
        b"chr(0xd800)",
    ):
        bad, fine, too = worker.predict(result, b"", b"")
        assert bad.error == (503, "Unsupported model output data type.")
        assert (fine.text, too.text) == ("fine", "too")
    worker.end()
    assert "Unsupported model output data type. The result is of type object." in worker.err


def test_a_response_over_the_limit_is_500_for_its_request_alone(serve: Serve) -> None:
    worker = serve(
        "return [b'x' * int(row['body']) for row in data]", batch_size=3, max_response_size=1000
    )
    over, at, under = worker.predict(b"1001", b"1000", b"0")
    status, message = over.error
    assert status == 500
    assert message is not None and "1001" in message and "max_response_size" in message
    assert (len(at.body), len(under.body)) == (1000, 0)


# Errors


FAILURES = [
    ("raise ValueError('secret')", 503, "Prediction failed"),
    ("raise asyncio.CancelledError", 503, "Prediction failed"),
    ("raise MemoryError", 507, "Out of resources"),
    ("raise RuntimeError('CUDA out of memory. Tried')", 507, "Out of resources"),
    (
        'raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you")',
        507,
        "Out of resources",
    ),
    ("raise OSError(errno.ENOMEM, 'no')", 507, "Out of resources"),
    ("raise PredictionException('mine', 404)", 404, "mine"),
    ("raise PredictionException('mine')", 500, "mine"),
    ("raise PredictionException('unusual', 599)", 599, "unusual"),
    ("raise PredictionException('junk', 99)", 503, "Prediction failed"),
    ("raise PredictionException('junk', 'x')", 503, "Prediction failed"),
]


def test_an_exception_is_the_error_of_every_request_of_its_batch_only(serve: Serve) -> None:
    worker = serve(
        """
        for row in data:
            exec(row['body'])
        return ['ok'] * len(data)
        """,
        setup="import asyncio, errno\nfrom mms.service import PredictionException",
        batch_size=3,
    )
    for statement, status, message in FAILURES:
        answers = worker.predict(b"", statement.encode(), b"")
        assert [answer.error for answer in answers] == [(status, message)] * 3, statement
        assert not any(answer.outcome.is_bad_request for answer in answers)
    assert worker.ask().text == "ok"
    worker.end()
    assert worker.err.count("Invoking custom service failed.") == len(FAILURES)
    assert 'service.py", line' in worker.err
    assert "runtime/batch.py" not in worker.err


@pytest.mark.parametrize(
    "crash, code",
    [
        ("sys.exit(3)", 3),
        ("sys.exit(0)", 1),
        ("sys.exit('words')", 1),
        ("raise KeyboardInterrupt", 1),
        ("os._exit(0)", 0),
        ("os.abort()", -6),
        ("ctypes.string_at(0)", -11),
        ("os.closerange(0, 100)", 1),
    ],
)
def test_a_handler_that_ends_its_process_ends_it(serve: Serve, crash: str, code: int) -> None:
    worker = serve(f"{crash}; return ['never']", setup="import ctypes, os, sys")
    worker.send(Request())
    assert worker.recv() is None
    assert worker.exit_code() == code


# What it says beside its results


def test_a_handler_sets_status_type_and_headers_of_each_reply(serve: Serve) -> None:
    worker = serve(
        """
        context.set_response_content_type(0, 'application/json')
        context.set_response_content_type(context.get_request_id(1), 'text/csv')
        context.set_response_header(0, 'X-A', 'b')
        context.set_response_status(201, 'Made\\nit', 0)
        context.request_processor[1].report_status(418)
        context.request_processor[1].add_response_property('X-B', 'c')
        return ['{}', 'x'] if body == b'set' else ['y', 'z']
        """,
        batch_size=2,
    )
    first, second = worker.predict(Request(b"set", id="a"), Request(b"", id="b"))
    assert (first.outcome.status, first.outcome.phrase) == (201, "Made it")
    assert first.outcome.headers == [("content-type", "application/json"), ("X-A", "b")]
    assert (second.outcome.status, second.outcome.phrase) == (418, None)
    assert second.outcome.headers == [("content-type", "text/csv"), ("X-B", "c")]


def test_what_one_batch_sets_is_forgotten_by_the_next(serve: Serve) -> None:
    worker = serve(
        """
        if body == b'set':
            context.set_all_response_status(207, 'Many')
            context.set_response_header(0, 'X-A', 'b')
        return [str(context.get_response_status(0)) + str(context.get_response_headers(0))]
        """
    )
    assert worker.ask(b"set").outcome.status == 207
    again = worker.ask()
    assert (again.text, again.outcome.status) == ("(200, None){}", 200)


UNSENDABLE = [
    ("context.set_response_header(0, 'X-A', 5)", "header X-A to 5; a header's value is text"),
    ("context.set_response_header(0, 'X-A', None)", "X-A to a value of NoneType"),
    ("context.set_response_header(0, 'X A', 'b')", "name is none"),
    ("context.set_response_header(0, 7, 'b')", "name is none: 7"),
    ("context.set_response_header(0, 'X-A', 'b\\r\\nX-B: c')", "X-A to a text with a line break"),
    ("context.set_response_header(0, 'X-A', chr(0xd800))", "X-A to a text with a line break"),
    ("context.set_response_status('junk')", "no whole number from 200 to 999"),
    ("context.set_response_status(99)", "no whole number from 200 to 999"),
    ("context.set_response_status(101)", "no whole number from 200 to 999"),
    ("context.set_response_status(1000)", "no whole number from 200 to 999"),
    ("context.set_response_status(True)", "no whole number from 200 to 999"),
    ("context.set_response_status(None)", "no whole number from 200 to 999"),
    ("context.set_response_status(200, 5)", "reason phrase is no text: 5"),
]


def test_a_reply_that_cannot_be_sent_is_503_for_its_request_alone(serve: Serve) -> None:
    worker = serve("exec(body)\nreturn ['x'] * len(data)", batch_size=2)
    for statement, message in UNSENDABLE:
        bad, fine = worker.predict(statement.encode(), b"")
        assert bad.outcome.status == 503
        assert bad.outcome.error is not None and message in bad.outcome.error, statement
        assert fine.text == "x"


def test_text_that_has_no_utf_8_form_harms_no_reply(serve: Serve) -> None:
    worker = serve(
        """
        context.set_response_status(200, 'fine' + chr(0xd800))
        context.metrics.add_counter('odd' + chr(0xd800), 1)
        if body == b'raise':
            raise PredictionException('bad' + chr(0xd800), 400)
        return ['ok']
        """,
        setup="from mms.service import PredictionException",
    )
    answer = worker.ask()
    assert (answer.text, answer.outcome.phrase) == ("ok", "fine\\ud800")
    assert worker.ask(b"raise").error == (400, "bad\\ud800")


def test_a_header_that_was_set_twice_is_sent_once(serve: Serve) -> None:
    worker = serve(
        """
        context.set_response_header(0, 'Content-Type', 'a/b')
        context.set_response_content_type(0, 'c/d')
        return ['x']
        """
    )
    assert worker.ask().outcome.headers == [("content-type", "c/d")]


def test_a_handler_reads_headers_in_any_letter_case(serve: Serve) -> None:
    worker = serve(
        """
        get = context.get_request_header
        return [[
            get(0, 'X-Trace'), get(0, 'x-trace'), get(0, 'TRACEPARENT'), get(0, 'none'),
            get(0, 'body'), context.get_all_request_header(0),
            context.request_processor[0].get_request_property('x-TRACE'),
        ]]
        """
    )
    headers = [("X-Trace", "é"), ("traceparent", "00-a-b-01"), ("Two", "1"), ("Two", "2")]
    assert json.loads(worker.ask(Request(b"", "a/b", headers)).body) == [
        "é",
        "é",
        "00-a-b-01",
        None,
        {"content-type": "a/b"},
        {
            "body": {"content-type": "a/b"},
            "X-Trace": "é",
            "traceparent": "00-a-b-01",
            "Two": "2",
        },
        "é",
    ]


def test_a_header_hides_the_parameter_of_its_name(serve: Serve) -> None:
    worker = serve("return [[context.get_request_header(0, name) for name in ('q', 'p')]]")
    request = Request(parameters=[("q", b"", None), ("p", b"", None)], headers=[("q", "real")])
    assert json.loads(worker.ask(request).body) == ["real", {"content-type": ""}]


def test_the_context_tells_of_the_model(serve: Serve) -> None:
    worker = serve(
        """
        return [[context.model_name, context.manifest, context.system_properties,
                 context.request_ids]]
        """,
        model_name="the model",
        manifest='{"runtime": "python"}',
        batch_size=7,
        gpu_id=3,
        properties={"extra": "entry"},
    )
    name, manifest, properties, ids = json.loads(worker.ask().body)
    assert (name, manifest, ids) == ("the model", {"runtime": "python"}, {"0": "the-id"})
    assert properties.pop("model_dir").endswith("/model")
    assert properties == {
        "gpu_id": 3,
        "batch_size": 7,
        "server_name": "MMS",
        "server_version": "1.1.11",
        "extra": "entry",
    }


# Metrics


def test_each_batch_is_timed_and_the_handlers_own_metrics_come_along(serve: Serve) -> None:
    worker = serve(
        """
        context.metrics.add_counter('Hits', 2, 0)
        context.metrics.add_counter('two words|#', 1)
        if body == b'raise': raise ValueError
        return ['ok'] * len(data)
        """,
        batch_size=2,
    )
    worker.send(Request(id="a"), Request(id="b"))
    lines = worker.replies()[0].metrics
    assert [line.partition(":")[0] for line in lines] == [
        "Hits.Count",
        "two_words__.Count",
        "PredictionTime.Milliseconds",
    ]
    assert "|#ModelName:m,Level:Model|#hostname:" in lines[0]
    assert ",requestID:a,timestamp:" in lines[0]
    assert ",requestID:a,b,timestamp:" in lines[1]
    assert ",requestID:a,b,timestamp:" in lines[2]
    worker.send(Request(b"raise"))
    assert [line.partition(":")[0] for line in worker.replies()[0].metrics] == [
        "Hits.Count",
        "two_words__.Count",
    ]


def test_memory_is_told_with_the_first_batch_and_then_now_and_then(serve: Serve) -> None:
    worker = serve("return ['ok']")
    for _ in range(50):
        worker.send(Request())
    told = [worker.replies()[0].memory_bytes for _ in range(50)]
    assert told[0] > 1 << 20
    assert told.count(0) > 25
