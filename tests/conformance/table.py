"""The table: routes × body kinds × failure kinds, as scripts. Quiet: only values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from urllib.parse import quote, urlencode

from .archives import HANDLERS, LOAD_FAILURES, MANIFESTS
from .exchanges import Clear, Exchange, Gone, Headers, Script, Setting, Settle, Step

METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
TEXT: Headers = (("Content-Type", "text/plain"),)
JSON: Headers = (("Content-Type", "application/json"),)
LIMIT_BYTES = 70_000  # max_request_size and max_response_size of the plain setting


def typed(content_type: str, *more: tuple[str, str]) -> Headers:
    return (("Content-Type", content_type), *more)


# ------------------------------------------------------------------------------ routes

PATHS = (
    "/",
    "//",
    "/ping",
    "/ping/",
    "/ping/more",
    "/Ping",
    "/%70ing",
    "/api-description",
    "/api-description/more",
    "/predictions",
    "/predictions/",
    "/predictions/ghost",
    "/predictions/ghost/more",
    "/predictions/gh%6Fst?a=1",
    "/predictions/%E5%A5%BD",
    "/predictions/%zz",
    "/predictions/noop",
    "/predictions/noop/more/parts",
    "/ghost/predict",
    "/noop/predict",
    "/noop/predict/more",
    "/invocations",
    "/invocations?model_name=",
    "/invocations?model_name=ghost",
    "/invocations?model_name=noop",
    "/invocations/more",
    "/models",
    "/models/",
    "/MODELS",
    "/models/ghost",
    "/models/ghost/invoke",
    "/models/noop/invoke",
    "/models/noop/other",
    "/models/noop/invoke/more",
    "/execution-parameters",
    "/nope",
    "/nope/a/b",
    "/nope?x=%zz",
)


def routes(*, apis: Iterable[str] = ("inference", "management")) -> Iterator[Exchange]:
    """Every method on every path of every listener, where `noop` is loaded and `ghost` is not."""
    for api, path, method in product(apis, PATHS, METHODS):
        if api == "management" and path.rstrip("/") == "/models" and method == "POST":
            continue  # a registration
        yield Exchange(f"{api} {method} {path}", method, path, api=api)


# ------------------------------------------------------------------------------ bodies


def multipart(*parts: tuple[str, str], boundary: str = "edge") -> bytes:
    """Parts of (head lines, text)."""
    lines = [f"--{boundary}\r\n{head}\r\n\r\n{text}\r\n" for head, text in parts]
    return "".join((*lines, f"--{boundary}--\r\n")).encode()


FORM = "application/x-www-form-urlencoded"
PARTS = "multipart/form-data; boundary=edge"
FIELD = 'Content-Disposition: form-data; name="{}"'
FILE = 'Content-Disposition: form-data; name="{}"; filename="{}"'

BODIES: Mapping[str, tuple[bytes, Headers]] = {
    "none": (b"", ()),
    "untyped": (b"\x00\xff raw", ()),
    "octets": (b"\x00\xff raw", typed("application/octet-stream")),
    "json object": (b'{"a": [1, 2.5, null, true], "b": {"c": "d"}}', JSON),
    "json list": (b"[1, 2]", JSON),
    "json text": (b'"word"', JSON),
    "json number": (b"-1.5e3", JSON),
    "json null": (b"null", JSON),
    "json unicode": ('{"s": "好 é \\u597d"}'.encode(), JSON),
    "json charset": (b'{"a": 1}', typed("application/json; charset=utf-8")),
    "json charset close": (b'{"a": 1}', typed("application/json;charset=UTF-8")),
    "json capitals": (b'{"a": 1}', typed("Application/JSON")),
    "json nan": (b'{"a": NaN}', JSON),
    "json repeated key": (b'{"a": 1, "a": 2}', JSON),
    "json blanks": (b' \r\n {"a": 1} \n', JSON),
    "json like": (b'{"a": 1}', typed("application/vnd.x+json")),
    "json lines": (b'{"a": 1}\n{"a": 2}\n', typed("application/jsonlines")),
    "text": (b"plain words", TEXT),
    "text empty": (b"", TEXT),
    "text unicode": ("wörter 好".encode(), TEXT),
    "text charset": ("wörter".encode(), typed("text/plain; charset=utf-8")),
    "text latin": ("wo".encode("latin-1"), typed("text/plain; charset=iso-8859-1")),
    "text latin umlaut": ("wörter".encode("latin-1"), typed("text/plain; charset=iso-8859-1")),
    "text capitals": (b"plain words", typed("Text/Plain")),
    "csv": (b"a,b\n1,2\n", typed("text/csv")),
    "text only": (b"words", typed("text")),
    "xml": (b"<a/>", typed("application/xml")),
    "image": (b"\xff\xd8\xff", typed("image/jpeg")),
    "odd type": (b"x", typed("x/y")),
    "empty type": (b"x", typed("")),
    "junk type": (b"x", typed(";;;")),
    "form": (b"a=1&b=two", typed(FORM)),
    "form charset": (b"a=1", typed(f"{FORM}; charset=utf-8")),
    "form repeated": (b"a=1&b=2&a=3", typed(FORM)),
    "form escapes": (b"a=x%20y+z%26&%C3%A9=%E5%A5%BD", typed(FORM)),
    "form empty": (b"", typed(FORM)),
    "form without values": (b"a&b=&=c", typed(FORM)),
    "form body field": (b"body=x", typed(FORM)),
    "form semicolons": (b"a=1;b=2", typed(FORM)),
    "form bad escape": (b"a=%zz", typed(FORM)),
    "parts field": (multipart((FIELD.format("a"), "1")), typed(PARTS)),
    "parts fields": (
        multipart((FIELD.format("a"), "1"), (FIELD.format("b"), "zwölf")),
        typed(PARTS),
    ),
    "parts typed field": (
        multipart((FIELD.format("a") + "\r\nContent-Type: application/json", '{"x": 1}')),
        typed(PARTS),
    ),
    "parts file": (
        multipart((FILE.format("f", "a.bin") + "\r\nContent-Type: application/x-y", "bytes")),
        typed(PARTS),
    ),
    "parts untyped file": (multipart((FILE.format("f", "a.bin"), "bytes")), typed(PARTS)),
    "parts json file": (
        multipart((FILE.format("f", "a.json") + "\r\nContent-Type: application/json", "[1, 2]")),
        typed(PARTS),
    ),
    "parts text file": (
        multipart((FILE.format("f", "a.txt") + "\r\nContent-Type: text/plain", "zwölf")),
        typed(PARTS),
    ),
    "parts mixed": (
        multipart(
            (FIELD.format("a"), "1"),
            (FILE.format("f", "a.bin"), "one"),
            (FILE.format("g", "b.bin"), "two"),
        ),
        typed(PARTS),
    ),
    "parts repeated": (
        multipart((FIELD.format("a"), "1"), (FIELD.format("b"), "2"), (FIELD.format("a"), "3")),
        typed(PARTS),
    ),
    "parts empty field": (multipart((FIELD.format("a"), "")), typed(PARTS)),
    "parts empty file": (multipart((FILE.format("f", "a.bin"), "")), typed(PARTS)),
    "parts quoted boundary": (
        multipart((FIELD.format("a"), "1")),
        typed('multipart/form-data; boundary="edge"'),
    ),
    "parts many": (
        multipart(*((FIELD.format(f"n{number}"), str(number)) for number in range(50))),
        typed(PARTS),
    ),
    "parts none": (multipart(), typed(PARTS)),
    "parts no boundary": (
        multipart((FIELD.format("a"), "1")),
        typed("multipart/form-data"),
    ),
    "parts other kind": (
        multipart((FIELD.format("a"), "1")),
        typed("multipart/mixed; boundary=edge"),
    ),
    "parts nonsense": (b"no parts in here", typed(PARTS)),
    "parts unnamed": (multipart(("Content-Disposition: form-data", "1")), typed(PARTS)),
    "accepts": (b"x", (("Accept", "application/json, text/plain;q=0.5"),)),
    "gzip claimed by accept": (b"x", (("Accept-Encoding", "gzip, deflate"),)),
}

#: Routes of predictions; the query reaches the handler on all but the first.
PREDICT_ROUTES = (
    "/predictions/{m}",
    "/{m}/predict",
    "/models/{m}/invoke",
    "/invocations?model_name={m}",
)


def bodies(model: str = "echo") -> Iterator[Exchange]:
    """Every kind of body on every route."""
    for route, (name, (body, headers)) in product(PREDICT_ROUTES, BODIES.items()):
        path = route.format(m=model)
        yield Exchange(f"{route} {name}", "POST", path, body, headers)
    for route, method in product(PREDICT_ROUTES, ("GET", "PUT", "DELETE", "PATCH")):
        path = route.format(m=model)
        path += "&" if "?" in path else "?"
        yield Exchange(f"{route} {method} query", method, path + "k=v&k=w&u=%E5%A5%BD&e=&p=a+b&n")
        yield Exchange(
            f"{route} {method} query and form", method, path + "a=query&b=q", b"a=form", typed(FORM)
        )


#: Bodies that end the worker of Multi Model Server.
DEADLY_BODIES: Mapping[str, tuple[bytes, Headers]] = {
    "json malformed": (b"{bad", JSON),
    "json empty": (b"", JSON),
    "text not utf-8": (b"\xff\xfe", TEXT),
    "json file malformed": (
        multipart((FILE.format("f", "a.json") + "\r\nContent-Type: application/json", "{bad")),
        typed(PARTS),
    ),
}


def deadly_bodies(model: str = "echo") -> Iterator[Step]:
    for name, (body, headers) in DEADLY_BODIES.items():
        yield Exchange(name, "POST", f"/predictions/{model}", body, headers)
        yield Settle(model)


# ------------------------------------------------------------------------------ results

#: What a handler returns, as Python.
RESULTS = {
    "text": "['word']",
    "empty text": "['']",
    "unicode text": "['wörter 好']",
    "bytes": "[b'\\x00\\xff']",
    "bytearray": "[bytearray(3)]",
    "memoryview": "[memoryview(b'x')]",
    "dict": "[{'a': [1, 2.5, None, True], 'ä': '好'}]",
    "empty dict": "[{}]",
    "list": "[[1, [2, 3]]]",
    "tuple inside": "[(1, 2)]",
    "integer": "[7]",
    "float": "[1e100]",
    "true": "[True]",
    "none inside": "[None]",
    "not a number": "[[math.nan, math.inf, -math.inf]]",
    "number keys": "[{1: 'a', 2.5: 'b', None: 'c', True: 'd'}]",
    "html text": "['<a href=\"x\">&amp;</a>']",
    "html json": "[{'a': '<b>&\\'=</b>'}]",
    "none": "None",
    "tuple": "('x',)",
    "dict alone": "{}",
    "text alone": "'x'",
    "bytes alone": "b'x'",
    "generator": "(x for x in 'x')",
    "empty list": "[]",
    "two for one": "['a', 'b']",
    "object": "[object()]",
    "set": "[{1, 2}]",
    "bytes nested": "[[b'a']]",
    "complex keys": "[{(1, 2): 3}]",
    "surrogate": "[{'a': '\\ud800'}]",
    "large": f"['x' * {LIMIT_BYTES - 10}]",
}

RAISE = "from mms.service import PredictionException\nraise PredictionException"

#: What a handler does, as Python statements.
DEEDS = {
    "ValueError": "raise ValueError('broken')",
    "unicode error": "raise ValueError('zerbrochen 好')",
    "KeyError": "{}['x']",
    "MemoryError": "raise MemoryError('full')",
    "StopIteration": "raise StopIteration",
    "AssertionError": "assert False",
    "custom": "class Own(Exception): pass\nraise Own('mine')",
    "PredictionException": f"{RAISE}('told')",
    "PredictionException 400": f"{RAISE}('a', 400)",
    "PredictionException 404": f"{RAISE}('a', 404)",
    "PredictionException 418": f"{RAISE}('a', 418)",
    "PredictionException 507": f"{RAISE}('a', 507)",
    "PredictionException 599": f"{RAISE}('a', 599)",
    "PredictionException quoted": f"{RAISE}('<a> \"b\" 好', 500)",
    "PredictionException empty": f"{RAISE}('', 500)",
    "PredictionException number": f"{RAISE}(5, 500)",
    "PredictionException 200": f"{RAISE}('a', 200)",
    **{
        f"status {code}": f"context.set_response_status({code})"
        for code in (200, 201, 202, 210, 299, 301, 399, 400, 404, 418, 429, 500, 503, 507, 599, 999)
    },
    "status and phrase": "context.set_response_status(200, 'Well Done')",
    "status, phrase, index": "context.set_response_status(code=503, phrase='Not Now', idx=0)",
    "all statuses": "context.set_all_response_status(202, 'Later')",
    "status by request": "context.request_processor[0].report_status(507, 'Too Big')",
    "error status, empty body": "context.set_response_status(500)\nresult = ['']",
    "error status, json body": "context.set_response_status(400)\nresult = [{'why': 'so'}]",
    "content type": "context.set_response_content_type(0, 'application/json')",
    "content type, json": "context.set_response_content_type(0, 'application/x-own')\n"
    "result = [{'a': 1}]",
    "content type text": "context.set_response_content_type(0, 'text/html; charset=utf-8')",
    "header": "context.set_response_header(0, 'X-Own', 'mine')",
    "headers": "for n in 'CAB': context.set_response_header(0, 'X-' + n, n)",
    "header twice": "context.set_response_header(0, 'X-A', '1')\n"
    "context.set_response_header(0, 'X-A', '2')",
    "header case": "context.set_response_header(0, 'X-A', '1')\n"
    "context.set_response_header(0, 'x-a', '2')",
    "header empty": "context.set_response_header(0, 'X-A', '')",
    "header by request": "context.request_processor[0].add_response_property('X-A', '1')",
    "header content-type": "context.set_response_header(0, 'Content-Type', 'text/csv')",
    "header fixed": "for n in ('x-request-id', 'Pragma', 'Cache-Control', 'Expires'): "
    "context.set_response_header(0, n, 'mine')",
    "header length": "context.set_response_header(0, 'Content-Length', '99')",
    "header connection": "context.set_response_header(0, 'Connection', 'close')",
    "header cors": "context.set_response_header(0, 'Access-Control-Allow-Origin', 'https://a')",
    "header on error": "context.set_response_header(0, 'X-A', '1')\nraise ValueError('x')",
    "header on error status": "context.set_response_header(0, 'X-A', '1')\n"
    "context.set_response_status(503)",
    "prints": "print('words')\nprint('more', file=sys.stderr)",
    "prints metrics": "print('[METRICS]Own.Count:1|#Level:Host|#hostname:h,1')",
    "metrics": "context.metrics.add_counter('C', 1)\ncontext.metrics.add_time('T', 1.5)\n"
    "context.metrics.add_size('S', 2, unit='kB')\ncontext.metrics.add_percent('P', 50)",
    "metric of a wrong unit": "context.metrics.add_time('T', 1, unit='h')",
}

#: What ends the worker of Multi Model Server, and what of it should.
DEADLY_DEEDS = {
    "os._exit": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "kill": "os.kill(os.getpid(), 9)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "circular": "a = []\na.append(a)\nresult = [a]",
    "header not text": "context.set_response_header(0, 'X-A', 5)",
    "too large": f"result = ['x' * {LIMIT_BYTES + 1}]",
    "too large json": f"result = [['x' * {LIMIT_BYTES + 1}]]",
}

#: Statuses that are none.
ODD_STATUSES = {
    f"status {code}": f"context.set_response_status({code})"
    for code in (-1, 0, 99, 100, 101, 204, 205, 304, 1000, 65536)
}

#: What a handler sees, as Python; the values are told as JSON text.
SIGHTS = {
    "model name": "context.model_name",
    "manifest": "context.manifest",
    "property names": "sorted(context.system_properties)",
    "gpu and batch": "[context.system_properties[n] for n in ('gpu_id', 'batch_size')]",
    "server": "[context.system_properties[n] for n in ('server_name', 'server_version')]",
    "model dir is cwd": "os.getcwd() == context.system_properties['model_dir']",
    "model dir type": "type(context.system_properties['model_dir']).__name__",
    "files": "sorted(f for f in os.listdir('.') if f != '__pycache__')",
    "data": "[type(data).__name__, len(data), type(data[0]).__name__, list(data[0])]",
    "request id": "context.get_request_id(0) == context.request_ids[0] == context.get_request_id()",
    "request ids": "[type(context.request_ids).__name__, len(context.request_ids)]",
    "header": "context.get_request_header(0, 'X-Mine')",
    "header lower case": "context.get_request_header(0, 'x-lower')",
    "header missing": "context.get_request_header(0, 'X-Missing')",
    "header of a parameter": "context.get_request_header(0, 'body')",
    "header repeated": "context.get_request_header(0, 'X-Twice')",
    "all headers": "sorted(context.get_all_request_header(0))",
    "content length": "context.get_request_header(0, 'Content-Length')",
    "response status": "context.get_response_status(0)",
    "response headers": "context.get_response_headers(0)",
    "response type": "context.get_response_content_type(0)",
    "processors": "[type(context.request_processor).__name__, len(context.request_processor)]",
    "property": "context.request_processor[0].get_request_property('X-Mine')",
    "properties": "sorted(context.request_processor[0].get_request_properties())",
    "metrics": "type(context.metrics).__name__",
    "variables": "[os.environ.get(n) for n in ('OMP_NUM_THREADS', 'MMS_DECODE_INPUT_REQUEST')]",
    "path begins": "os.getcwd() in sys.path",
    "main": "__import__('__main__').__name__",
    "version": "__import__('mms').__version__",
    "modules": "[bool(__import__(n, fromlist=['x'])) for n in ('mms.service', 'mms.context', "
    "'mms.metrics.dimension', 'mms.metrics.metric', 'mms.metrics.metrics_store', "
    "'mms.metrics.system_metrics', 'mms.metrics.metric_encoder', 'mms.metrics.unit', "
    "'mms.utils.timeit_decorator')]",
    "log level": "__import__('logging').getLogger().level",
}
SIGHT_HEADERS: Headers = (
    ("Content-Type", "text/plain"),
    ("X-Mine", "mine"),
    ("x-lower", "lower"),
    ("X-Twice", "one"),
    ("X-Twice", "two"),
)


def obedience(model: str = "obey") -> Iterator[Exchange]:
    """Every result, deed and sight."""
    path = f"/predictions/{model}"
    for name, result in RESULTS.items():
        yield Exchange(f"result {name}", "POST", path, f"result = {result}".encode(), TEXT)
    for name, deed in DEEDS.items():
        yield Exchange(f"deed {name}", "POST", path, deed.encode(), TEXT)
    for name, sight in SIGHTS.items():
        body = f"result = [json.dumps({sight})]".encode()
        yield Exchange(f"sight {name}", "POST", path, body, SIGHT_HEADERS)


def disobedience(model: str = "obey") -> Iterator[Step]:
    """What Multi Model Server's worker, or its client, does not survive."""
    path = f"/predictions/{model}"
    for name, deed in ODD_STATUSES.items():
        yield Exchange(f"odd {name}", "POST", path, deed.encode(), TEXT, limit_s=2)
        yield Settle(model, b"result = ['ok'] * len(data)")
    for name, deed in DEADLY_DEEDS.items():
        yield Exchange(f"deadly {name}", "POST", path, deed.encode(), TEXT)
        yield Settle(model, b"result = ['ok'] * len(data)")


# ------------------------------------------------------------------------------ the wire


def raw(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


HOST = "Host: 127.0.0.1"
#: Requests as no client library sends them.
WIRE: Mapping[str, bytes] = {
    "1.1 ping": raw("GET /ping HTTP/1.1", HOST),
    "1.1 ping, close": raw("GET /ping HTTP/1.1", HOST, "Connection: close"),
    "1.0 ping": raw("GET /ping HTTP/1.0"),
    "1.0 ping, keep-alive": raw("GET /ping HTTP/1.0", "Connection: keep-alive"),
    "no host": raw("GET /ping HTTP/1.1"),
    "lower-case method": raw("get /ping HTTP/1.1", HOST),
    "invented method": raw("FETCH /ping HTTP/1.1", HOST),
    "invented method, prediction": raw(
        "m!x /predictions/echo HTTP/1.1", HOST, "Content-Length: 3", body=b"abc"
    ),
    "invented method, no route": raw("FETCH / HTTP/1.1", HOST),
    "absolute target": raw("GET http://127.0.0.1/ping HTTP/1.1", HOST),
    "star": raw("OPTIONS * HTTP/1.1", HOST),
    "no slash": raw("GET ping HTTP/1.1", HOST),
    "nonsense": b"nonsense\r\n\r\n",
    "no version": raw("GET /ping"),
    "odd version": raw("GET /ping HTTP/9.9", HOST),
    "long line": raw(f"GET /{'x' * 5000} HTTP/1.1", HOST),
    "nearly long line": raw(f"GET /{'x' * 4000} HTTP/1.1", HOST),
    "long headers": raw("GET /ping HTTP/1.1", HOST, f"X-Long: {'x' * 9000}"),
    "nearly long headers": raw("GET /ping HTTP/1.1", HOST, f"X-Long: {'x' * 7000}"),
    "header without colon": raw("GET /ping HTTP/1.1", HOST, "nonsense"),
    "own request id": raw("GET /ping HTTP/1.1", HOST, "x-request-id: mine"),
    "body on get": raw("GET /ping HTTP/1.1", HOST, "Content-Length: 3", body=b"abc"),
    "chunked": raw(
        "POST /predictions/echo HTTP/1.1",
        HOST,
        "Transfer-Encoding: chunked",
        body=b"3\r\nabc\r\n0\r\n\r\n",
    ),
    "chunked in parts": raw(
        "POST /predictions/echo HTTP/1.1",
        HOST,
        "Content-Type: application/json",
        "Transfer-Encoding: chunked",
        body=b'2\r\n{"\r\n5;x=y\r\na": 1\r\n1\r\n}\r\n0\r\nX-T: 1\r\n\r\n',
    ),
    "expect": raw(
        "POST /predictions/echo HTTP/1.1",
        HOST,
        "Expect: 100-continue",
        "Content-Length: 3",
        body=b"abc",
    ),
    "expect the unknown": raw(
        "POST /predictions/echo HTTP/1.1", HOST, "Expect: 200-ok", "Content-Length: 3", body=b"abc"
    ),
    "expect, too large": raw(
        "POST /predictions/echo HTTP/1.1",
        HOST,
        "Expect: 100-continue",
        f"Content-Length: {LIMIT_BYTES + 1}",
    ),
    "length not a number": raw("POST /predictions/echo HTTP/1.1", HOST, "Content-Length: x"),
    "length negative": raw("POST /predictions/echo HTTP/1.1", HOST, "Content-Length: -1"),
    "head ping": raw("HEAD /ping HTTP/1.1", HOST),
}


def wire() -> Iterator[Exchange]:
    for name, request in WIRE.items():
        yield Exchange(name, "", "", raw=request, limit_s=5)
    at_limit, beyond = b"x" * LIMIT_BYTES, b"x" * (LIMIT_BYTES + 1)
    path = "/predictions/noop"
    yield register("register noop", url="noop.mar", initial_workers=1)
    yield Exchange("body at the limit", "POST", path, at_limit)
    yield Exchange("body beyond the limit", "POST", path, beyond)
    yield Exchange("management body beyond the limit", "POST", "/models", beyond, api="management")
    yield unregister("unregister noop", "noop")


# ------------------------------------------------------------------------------ registration


def register(name: str, *, _json: bool = False, **fields: object) -> Exchange:
    """`POST /models` with query parameters or a JSON object."""
    if _json:
        body = json.dumps(fields).encode()
        return Exchange(name, "POST", "/models", body, JSON, api="management")
    query = urlencode({key: str(value) for key, value in fields.items()}, safe="{}:/")
    return Exchange(name, "POST", f"/models?{query}", api="management")


def describe(name: str, model: str) -> Exchange:
    return Exchange(name, "GET", f"/models/{quote(model)}", api="management")


def unregister(name: str, model: str) -> Exchange:
    return Exchange(name, "DELETE", f"/models/{quote(model)}", api="management")


def cycle(name: str, model: str, *registration: Exchange) -> Iterator[Exchange]:
    """A registration, what describe says then, a prediction, and the end of it."""
    yield from registration
    yield describe(f"{name}: describe", model)
    yield Exchange(f"{name}: predict", "POST", f"/predictions/{quote(model)}", b"x")
    yield unregister(f"{name}: unregister", model)


#: Fields of good registrations of noop.mar.
GOOD: Mapping[str, dict[str, object]] = {
    "plain": {},
    "named": {"model_name": "other"},
    "name with dots": {"model_name": "v1.2_a-b"},
    "unicode name": {"model_name": "modèle"},
    "blank in name": {"model_name": "a b"},
    "batch": {"batch_size": 4, "max_batch_delay": 50},
    "batch zero": {"batch_size": 0},
    "batch negative": {"batch_size": -3},
    "batch not a number": {"batch_size": "many"},
    "delay zero": {"max_batch_delay": 0},
    "workers zero": {"initial_workers": 0, "synchronous": "true"},
    "workers negative": {"initial_workers": -2},
    "workers not a number": {"initial_workers": "x"},
    "one worker": {"initial_workers": 1},
    "one worker, synchronous": {"initial_workers": 1, "synchronous": "true"},
    "two workers": {"initial_workers": 2},
    "synchronous in capitals": {"initial_workers": 1, "synchronous": "TRUE"},
    "synchronous yes": {"initial_workers": 0, "synchronous": "yes"},
    "runtime": {"runtime": "python"},
    "runtime 3": {"runtime": "python3"},
    "handler": {"handler": "service:handle", "initial_workers": 1},
    "handler that is none, no worker": {"handler": "nowhere:handle"},
    "timeout": {"response_timeout": 1},
    "timeout negative": {"response_timeout": -1},
    "unknown field": {"colour": "red"},
    "preloaded": {"preload_model": "true", "initial_workers": 1},
    "not preloaded": {"preload_model": "false", "initial_workers": 1},
}

#: Bad registrations, as fields.
BAD: Mapping[str, dict[str, object]] = {
    "no url": {"model_name": "x"},
    "not in store": {"url": "absent.mar"},
    "climbs": {"url": "../noop.mar"},
    "two dots inside": {"url": "a..b.mar"},
    "absolute": {"url": "/noop/absent.mar"},
    "file scheme": {"url": "file:///etc/passwd"},
    "s3": {"url": "s3://bucket/m.mar"},
    "ftp": {"url": "ftp://127.0.0.1/m.mar"},
    "bad runtime": {"url": "noop.mar", "runtime": "java"},
    "runtime in capitals": {"url": "noop.mar", "runtime": "PYTHON"},
    "bad runtime of an absent file": {"url": "absent.mar", "runtime": "java"},
    "text file": {"url": "readme.txt"},
    "folder without manifest": {"url": "folder-without-manifest"},
    "refused": {"url": "http://127.0.0.1:1/m.mar"},
    "no host": {"url": "http://"},
    "no host but a path": {"url": "http:///m.mar"},
    "port zero": {"url": "http://127.0.0.1:0/m.mar"},
    "malformed": {"url": "http://127.0.0.1:x/m.mar"},
    "port out of range": {"url": "http://127.0.0.1:99999/m.mar"},
    "remote 404": {"url": "{files}/absent.mar"},
    "remote 500": {"url": "{files}/500"},
    "remote page": {"url": "{files}/page.mar"},
    "remote empty": {"url": "{files}/empty.mar"},
}

#: Registrations as JSON text.
JSON_REGISTRATIONS: Mapping[str, str] = {
    "single quotes": "{'url': 'noop.mar'}",
    "unquoted keys": "{url: 'noop.mar'}",
    "numbers as text": '{"url": "noop.mar", "batch_size": "3", "initial_workers": "1"}',
    "booleans as text": '{"url": "noop.mar", "initial_workers": 1, "synchronous": "true"}',
    "unknown key": '{"url": "noop.mar", "colour": {"a": 1}}',
    "null name": '{"url": "noop.mar", "model_name": null}',
    "timeout in seconds": '{"url": "noop.mar", "response_timeout": 30}',
    "numbers": '{"url": "noop.mar", "batch_size": 2, "max_batch_delay": 20}',
}
BAD_JSON: Mapping[str, str] = {
    "malformed": "{bad",
    "cut off": '{"url": "noop.mar"',
    "list": "[]",
    "text": '"x"',
    "number": "5",
    "empty": "",
    "null": "null",
    "no url": "{}",
    "null url": '{"url": null}',
    "url a list": '{"url": []}',
    "batch not a number": '{"url": "noop.mar", "batch_size": "many"}',
    "batch a float": '{"url": "noop.mar", "batch_size": 1.5}',
}


def registrations() -> Iterator[Exchange]:
    """Good ones by query and by JSON, each with all its life."""
    for name, fields in GOOD.items():
        model = str(fields.get("model_name", "noop"))
        yield from cycle(name, model, register(f"{name}: register", url="noop.mar", **fields))
    for name, text in JSON_REGISTRATIONS.items():
        request = Exchange(
            f"json {name}: register", "POST", "/models", text.encode(), JSON, api="management"
        )
        yield from cycle(f"json {name}", "noop", request)
    for name, fields in {
        "query ignored with json": {"url": "absent.mar"},
        "capitals": {"url": "noop.mar"},
    }.items():
        headers = typed("Application/JSON") if name == "capitals" else JSON
        yield Exchange(
            f"{name}: register",
            "POST",
            f"/models?{urlencode(fields)}",
            b'{"url": "noop.mar", "model_name": "j"}',
            headers,
            api="management",
        )
        yield describe(f"{name}: describe", "j")
        yield unregister(f"{name}: unregister", "j")
    for source in ("folder", "deep/er/noop.mar", "{files}/noop.mar", "{files}/moved.mar"):
        model = "folder" if source == "folder" else "noop"
        yield from cycle(source, model, register(f"{source}: register", url=source))
    yield from cycle(
        "repaired",
        "repaired",
        register(
            "repaired: register",
            url="manifest-no-name-no-handler.mar",
            model_name="repaired",
            handler="service:handle",
            initial_workers=1,
        ),
    )
    yield from cycle(
        "runtime repaired",
        "m",
        register("runtime repaired: register", url="manifest-bad-runtime.mar", runtime="python"),
    )
    yield from cycle(
        "folder without manifest",
        "bare",
        register(
            "folder without manifest: register",
            url="folder-without-manifest",
            model_name="bare",
            handler="service:handle",
            initial_workers=1,
        ),
    )


def bad_registrations() -> Iterator[Exchange]:
    for name, fields in BAD.items():
        yield register(f"query {name}", **fields)
        yield register(f"json {name}", _json=True, **fields)
    for name, text in BAD_JSON.items():
        yield Exchange(f"text {name}", "POST", "/models", text.encode(), JSON, api="management")
    yield Exchange("form", "POST", "/models", b"url=noop.mar", typed(FORM), api="management")
    yield Exchange("list is empty", "GET", "/models", api="management")


def manifests() -> Iterator[Step]:
    """Archives with unusual manifests, or that are none: registered, described, unregistered."""
    for name in MANIFESTS:
        model = {"upper-name": "Upper.Case-1_x", "legacy": "bad"}.get(name, "m")
        yield register(f"{name}: register", url=f"manifest-{name}.mar")
        if name not in ("climbs-out", "absolute"):
            yield describe(f"{name}: describe", model)
            yield unregister(f"{name}: unregister", model)
        yield Clear(model)
    yield Exchange("list is empty", "GET", "/models", api="management")


def handlers() -> Iterator[Exchange]:
    """Handlers named in unusual ways, which all load."""
    for name in HANDLERS:
        yield register(f"{name}: register", url=f"handler-{name}.mar", initial_workers=1)
        yield Exchange(f"{name}: predict", "POST", "/predictions/h", b"x")
        yield unregister(f"{name}: unregister", "h")


def load_failures() -> Iterator[Step]:
    """Handlers that do not load, each under a name of its own."""
    for name in LOAD_FAILURES:
        model = f"f-{name}"
        yield register(
            f"{name}: register", url=f"fails-{name}.mar", model_name=model, initial_workers=1
        )
        # Whether the name stays taken after a MemoryError is a matter of chance there.
        if name not in ("memory", "initialize-raises"):
            yield Gone(model)
            yield Exchange(f"{name}: predict", "POST", f"/predictions/{model}", b"x")
            yield unregister(f"{name}: unregister", model)
        yield Clear(model)
    for name in LOAD_FAILURES:  # what was put back meanwhile would be on the pages below
        yield Clear(f"f-{name}")


def names() -> Iterator[Exchange]:
    """Names that are taken, and one archive under two names."""
    yield register("first", url="noop.mar", model_name="a")
    yield register("taken", url="noop.mar", model_name="a")
    yield register("taken by another archive", url="echo.mar", model_name="a")
    yield register("taken, in json", _json=True, url="noop.mar", model_name="a")
    yield register("second name", url="noop.mar", model_name="b", initial_workers=1)
    yield unregister("first name goes", "a")
    yield Exchange("second name stays", "POST", "/predictions/b", b"x")
    yield unregister("second name goes", "b")
    yield unregister("gone already", "b")


def paging() -> Iterator[Exchange]:
    """Five models, every kind of page."""
    letters = "edbca"
    for letter in letters:
        yield register(f"register {letter}", url="noop.mar", model_name=letter)
    limits = (None, "0", "1", "2", "4", "5", "6", "100", "101", "-1", "x", "")
    tokens = (None, "0", "2", "4", "5", "12", "-1", "x", "")
    for limit, token in product(limits, tokens):
        pairs = {"limit": limit, "next_page_token": token}
        query = urlencode({key: value for key, value in pairs.items() if value is not None})
        yield Exchange(f"page ?{query}", "GET", f"/models?{query}", api="management")
    for query in ("limit=2&limit=3", "model_name_pattern=a", "LIMIT=1"):
        yield Exchange(f"page ?{query}", "GET", f"/models?{query}", api="management")
    for letter in letters:
        yield unregister(f"unregister {letter}", letter)


def scaling() -> Iterator[Exchange]:
    """Up, down, wrong, and what describe says."""
    yield register("register", url="noop.mar")
    for query in (
        "min_worker=1&synchronous=true",
        "min_worker=2&synchronous=true",
        "min_worker=2&max_worker=2&synchronous=true",
        "min_worker=1&max_worker=5&synchronous=true",
        "min_worker=1&max_worker=1&synchronous=true",
        "synchronous=true",
        "min_worker=1&max_worker=2&number_gpu=1&timeout=-1&synchronous=true",
        "min_worker=x&synchronous=true",
        "min_worker=3&max_worker=2",
        "min_worker=1&max_worker=0",
        "min_worker=1&max_worker=x&synchronous=TRUE",
        "min_worker=1&colour=red&synchronous=true",
        "min_worker=1",
    ):
        yield Exchange(f"scale ?{query}", "PUT", f"/models/noop?{query}", api="management")
        yield describe(f"describe after ?{query}", "noop")
    yield Exchange(
        "body ignored", "PUT", "/models/noop", b'{"min_worker": 7}', JSON, api="management"
    )
    yield Exchange("predict", "POST", "/predictions/noop", b"x")
    yield Exchange("scale ghost", "PUT", "/models/ghost?min_worker=1", api="management")
    yield Exchange(
        "scale ghost, wrong", "PUT", "/models/ghost?min_worker=2&max_worker=1", api="management"
    )
    yield unregister("unregister", "noop")


def odd_scaling() -> Iterator[Exchange]:
    """Scaling that breaks a model of Multi Model Server."""
    yield register("register", url="noop.mar", initial_workers=1)
    yield Exchange("negative", "PUT", "/models/noop?min_worker=-1", api="management")
    yield describe("describe after negative", "noop")
    yield unregister("unregister", "noop")
    yield register("register again", url="noop.mar", model_name="again", initial_workers=1)
    yield Exchange(
        "to none",
        "PUT",
        "/models/again?min_worker=0&max_worker=0&synchronous=true",
        api="management",
    )
    yield describe("describe none", "again")
    yield Exchange("predict none", "POST", "/predictions/again", b"x")
    yield Exchange("ping", "GET", "/ping")
    yield unregister("unregister again", "again")


# ------------------------------------------------------------------------------ batches, queues


def crowds() -> Iterator[Exchange]:
    """More requests than a worker and its queue can take."""
    yield register("register", url="obey.mar", model_name="crowd", initial_workers=1)
    path = "/predictions/crowd"
    yield Exchange("queue full", "POST", path, b"time.sleep(0.7)", TEXT, times=6)
    yield unregister("unregister", "crowd")


def batches() -> Iterator[Exchange]:
    """Requests that go to the worker together."""
    for name, deed in {
        "good": "result = ['ok'] * len(data)",
        "short": "result = ['ok']",
        "raises": "raise ValueError('x')",
        "memory": "raise MemoryError",
        "prediction exception": f"{RAISE}('a', 599)",
        "unserialisable": "result = [object()] * len(data)",
        "no list": "result = None",
        "statuses": "for i in range(len(data)): context.set_response_status(202, 'So', i)",
        "all statuses": "context.set_all_response_status(507, 'Full')",
        "sizes": "result = [str(len(data))] * len(data)",
    }.items():
        # A model each: Multi Model Server's worker restarts after a failed batch.
        model = "batch-" + name.replace(" ", "-")
        yield register(
            f"batch {name}: register",
            url="obey.mar",
            model_name=model,
            batch_size=3,
            max_batch_delay=3000,
            initial_workers=1,
        )
        yield Exchange(
            f"batch {name}", "POST", f"/predictions/{model}", deed.encode(), TEXT, times=3
        )
        yield unregister(f"batch {name}: unregister", model)


def slowness() -> Iterator[Step]:
    """Handlers that take longer than they may."""
    fields = {"url": "obey.mar", "model_name": "slow", "initial_workers": 1, "response_timeout": 1}
    yield register("register", _json=True, **fields)
    yield Exchange("in time", "POST", "/predictions/slow", b"time.sleep(0.1)", TEXT)
    yield Exchange("too slow", "POST", "/predictions/slow", b"time.sleep(3)", TEXT)
    yield Settle("slow", b"result = ['ok']")
    yield Exchange("again", "POST", "/predictions/slow", b"result = ['ok']", TEXT)
    yield unregister("unregister", "slow")


# ------------------------------------------------------------------------------ settings


def script(name: str, steps: Iterable[Step]) -> Script:
    return Script(name, tuple(steps))


def with_model(model: str, steps: Iterable[Step]) -> Iterator[Step]:
    yield register(f"register {model}", url=f"{model}.mar", initial_workers=1)
    yield from steps
    yield unregister(f"unregister {model}", model)


def settings() -> tuple[Setting, ...]:
    plain = Setting(
        "plain",
        (
            script("routes, no model", (e for e in routes() if "noop" not in e.path)),
            script("routes", with_model("noop", routes())),
            script("bodies", with_model("echo", bodies())),
            script("wire", with_model("echo", wire())),
            script("deadly bodies", with_model("echo", deadly_bodies())),
            script("obedience", with_model("obey", obedience())),
            script("disobedience", with_model("obey", disobedience())),
            script("registrations", registrations()),
            script("bad registrations", bad_registrations()),
            script("manifests", manifests()),
            script("handlers", handlers()),
            script("load failures", load_failures()),
            script("names", names()),
            script("paging", paging()),
            script("scaling", scaling()),
            script("odd scaling", odd_scaling()),
            script("crowds", crowds()),
            script("slowness", slowness()),
        ),
        {"max_request_size": LIMIT_BYTES, "max_response_size": LIMIT_BYTES, "job_queue_size": 2},
    )
    shared = Setting(
        "shared",
        (
            script("routes", routes(apis=("inference",))),
            script("sole model", sole_model()),
            script("opaque bodies", opaque_bodies()),
            script("default handler", default_handler()),
            script("batches", batches()),
        ),
        {
            "decode_input_request": "false",
            "default_workers_per_model": 1,
            "default_service_handler": "service:handle",
            "cors_allowed_origin": "https://a.example",
            "cors_allowed_methods": "GET, POST",
            "cors_allowed_headers": "X-A",
        },
        ("noop=noop.mar",),
        one_port=True,
    )
    several = Setting(
        "several",
        (script("start-up models", start_up_models()),),
        {"default_workers_per_model": 1},
        ("first=noop.mar", "echo.mar", "third=folder"),
    )
    return plain, shared, several


def sole_model() -> Iterator[Exchange]:
    """`/invocations` where one model was loaded at start."""
    for path in ("/invocations", "/invocations?model_name=", "/invocations?model_name=ghost"):
        for method in ("GET", "POST", "OPTIONS"):
            yield Exchange(f"{method} {path}", method, path, b"x" if method == "POST" else b"")
    yield Exchange("json key", "POST", "/invocations", b'{"model_name": "ghost"}', JSON)
    yield Exchange("form field", "POST", "/invocations", b"model_name=ghost", typed(FORM))
    yield describe("describe", "noop")
    yield register("register a second", url="echo.mar", model_name="second")
    yield Exchange("still sole", "POST", "/invocations", b"x")
    yield describe("describe the second", "second")
    yield Exchange("list", "GET", "/models", api="management")
    yield unregister("unregister the second", "second")


def start_up_models() -> Iterator[Step]:
    """Where several models were loaded at start."""
    for model in ("first", "echo", "third"):
        yield Settle(model)
        yield describe(f"describe {model}", model)
    yield Exchange("list", "GET", "/models", api="management")
    yield Exchange("ping", "GET", "/ping")
    for query in ("", "?model_name=", "?model_name=first", "?model_name=noop", "?k=v"):
        yield Exchange(f"/invocations{query}", "POST", f"/invocations{query}", b"x")
    yield register("taken", url="noop.mar", model_name="first")
    yield register("workers by default", url="noop.mar")
    yield describe("describe workers by default", "noop")
    yield register("no worker all the same", url="noop.mar", model_name="idle", initial_workers=0)
    yield describe("describe no worker", "idle")
    yield Exchange("ping with an idle one", "GET", "/ping")
    for model in ("first", "noop", "idle"):
        yield unregister(f"unregister {model}", model)
    yield register("first again", url="noop.mar", model_name="first")
    yield describe("describe first again", "first")
    yield Exchange("list at the end", "GET", "/models", api="management")


def opaque_bodies() -> Iterator[Step]:
    """What a handler gets where decoding is off."""
    yield register("register", url="echo.mar")
    for name in ("none", "json object", "text", "form", "parts json file", "parts text file"):
        body, headers = BODIES[name]
        yield Exchange(name, "POST", "/predictions/echo", body, headers)
    for name, (body, headers) in DEADLY_BODIES.items():
        yield Exchange(name, "POST", "/predictions/echo", body, headers)
    yield unregister("unregister", "echo")


def default_handler() -> Iterator[Exchange]:
    """Models without a handler of their own."""
    for name in ("no-handler", "no-manifest", "no-name"):
        yield register(f"{name}: register", url=f"manifest-{name}.mar", model_name="d")
        yield Exchange(f"{name}: invoke", "POST", "/models/d/invoke", b"x")
        yield describe(f"{name}: describe", "d")
        yield unregister(f"{name}: unregister", "d")
