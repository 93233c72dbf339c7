"""`mmserve`: its commands, against a small server that answers like the real one."""

import contextlib
import datetime
import http.server
import io
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

import mmserve
from mmserve.cli import main as cli

MODELS = [f"m{number:03}" for number in range(130)]


#: Workers wanted of some that can be described; the first is ready.
WORKERS = {"m001": 1, "m002": 0, "m003": 3}


class Handler(http.server.BaseHTTPRequestHandler):
    """Management and inference API of a server with the models above; notes what it was asked."""

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append((self.command, self.path, dict(self.headers), body))
        if self.server.raw is not None:
            self.wfile.write(self.server.raw)
            return
        status, reply = self.answer(url.path, parse_qs(url.query), body)
        data = reply if isinstance(reply, bytes) else json.dumps(reply, indent=2).encode() + b"\n"
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, object]:
        if path.startswith("/predictions/"):
            return 200, b"<" + body + b">"
        if (self.command, path) == ("GET", "/models"):
            start, limit = int(query.get("next_page_token", ["0"])[0]), int(query["limit"][0])
            shown = MODELS[start : start + limit]
            page = {"models": [{"modelName": n, "modelUrl": f"{n}.mar"} for n in shown]}
            more = {"nextPageToken": str(start + limit)} if start + limit < len(MODELS) else {}
            return 200, more | page
        if self.command == "POST":
            return 200, {"status": "Workers scaled"}
        if self.command == "GET" and (number := WORKERS.get(path[8:])) is not None:
            states = ["READY", "LOADING", "UNLOADING"][:number]
            return 200, {"minWorkers": number, "workers": [{"status": each} for each in states]}
        if path != "/models/m000" and self.command != "PUT":
            problem = {"type": "ModelNotFoundException", "message": f"Model not found: {path[8:]}"}
            return 404, {"code": 404, **problem}
        if self.command == "GET":
            return 200, {"modelName": "m000"}
        return 200, {"status": f"{self.command} done"}

    do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - http.server's spelling

    def log_message(self, *_: object) -> None:
        pass


class UnixServer(http.server.ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0

    def get_request(self):
        request, _ = self.socket.accept()
        return request, ("unix", 0)


@contextlib.contextmanager
def serving(server, raw: bytes | None = None):
    server.seen, server.raw = [], raw
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def shell(tmp_path, monkeypatch):
    """An empty folder, and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("MMS_CONFIG_FILE", "SAGEMAKER_MULTI_MODEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(tmp_path):
    """Answers on a free port; a `config.properties` in the current folder has its address."""
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        lines = f"inference_address={server.url}\nmanagement_address={server.url}\n"
        (tmp_path / "config.properties").write_text(lines)
        yield server


class Output:
    """What a command wrote, as bytes."""

    def __init__(self, capfdbinary) -> None:
        self._captured = capfdbinary

    def of(self, *argv: str) -> tuple[int, bytes, str]:
        """Exit code, standard output, standard error."""
        try:
            code = cli._run(list(argv))
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        out, err = self._captured.readouterr()
        return code, out, err.decode()


@pytest.fixture
def run(capfdbinary):
    return Output(capfdbinary).of


# Help


@pytest.mark.parametrize("words", [[], ["serve"], ["config"], ["models"], ["invoke"]])
def test_help_has_examples(run, words):
    code, out, _ = run(*words, "--help")
    assert code == 0
    assert f"  mmserve {' '.join(words) or 'serve'}".encode() in out


def test_help_spells_abbreviations_as_they_are(run):
    assert b"as JSON." in run("models", "describe", "--help")[1]
    assert b"mmserve stop\n" in run("serve", "--help")[1]


def test_the_version(run):
    assert run("--version")[:2] == (0, f"mmserve {mmserve.__version__}\n".encode())


@pytest.mark.parametrize("words", [[], ["nope"], ["models"], ["models", "scale", "m"], ["invoke"]])
def test_wrong_usage_ends_with_2(run, words):
    code, _, err = run(*words)
    assert code == 2
    assert err.startswith("usage: mmserve")


def test_the_command_is_installed_as_a_module():
    command = [sys.executable, "-m", "mmserve.cli.main", "config", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "the built-in configuration is fine\n"


# config


def test_config_shows_every_setting_with_its_origin(run, tmp_path):
    (tmp_path / "config.properties").write_text("job_queue_size=7\nvmargs=-Xmx1g\nnope=1\n")
    code, out, err = run("config", "--models", "ALL")
    assert code == 0
    lines = {" ".join(line.split()) for line in out.decode().splitlines()}
    assert "job_queue_size = 7 requests [config.properties, line 1]" in lines
    assert "load_models = ALL [--models]" in lines
    assert "note: only a Java virtual machine needs vmargs" in err
    assert "warning: nope (config.properties, line 3) is unknown" in err


def test_config_check_says_only_what_is_wrong(run, tmp_path):
    (tmp_path / "mine").write_text("debug=yes")
    code, out, err = run("config", "--check", "--mms-config", "mine")
    assert (code, out) == (0, b"mine is usable, with 1 warning\n")
    assert err.startswith("warning: debug=yes (mine, line 1)")
    (tmp_path / "mine").write_text("debug=yes\nnope=1")
    assert run("config", "--check", "--mms-config", "mine")[1].endswith(b"with 2 warnings\n")
    (tmp_path / "mine").write_text("debug=true")
    assert run("config", "--check", "--mms-config", "mine") == (0, b"mine is fine\n", "")


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_each_wrong_value_has_a_line(run, tmp_path, flags):
    (tmp_path / "config.properties").write_text("job_queue_size=0\nping_mode=x\nkeystore=$$NOPE$$")
    code, out, err = run("config", *flags)
    assert (code, out) == (1, b"")
    variable, size, mode = sorted(err.splitlines(), key=lambda line: line.split()[2])
    assert "Invalid Environment Variable NOPE: keystore (config.properties, line 3)" in variable
    assert "job_queue_size=0 (config.properties, line 1)" in size
    assert "ping_mode=x (config.properties, line 2)" in mode


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("keystore=no.p12", "keystore=no.p12 cannot be read: No such file"),
        ("keystore=rubbish", "keystore=rubbish cannot be opened"),
        ("private_key_file=rubbish", "private_key_file is set but certificate_file is not"),
        ("certificate_file=rubbish\nprivate_key_file=rubbish", "has no PEM certificate"),
        ("management_token_file=no", "management_token_file=no cannot be read"),
        ("management_token_file=empty", "management_token_file=empty is empty"),
    ],
)
def test_config_check_opens_what_the_server_opens(run, tmp_path, lines, said):
    (tmp_path / "rubbish").write_text("rubbish")
    (tmp_path / "empty").touch()
    (tmp_path / "config.properties").write_text(f"inference_address=https://127.0.0.1\n{lines}\n")
    code, out, err = run("config", "--check")
    assert (code, out) == (1, b"")
    assert said in err
    assert "Invalid configuration: " in err


def test_config_check_opens_no_certificate_that_nobody_asks_for(run, tmp_path):
    (tmp_path / "config.properties").write_text("keystore=no.p12\nkeystore_type=JKS")
    assert run("config", "--check") == (0, b"config.properties is fine\n", "")


def test_config_check_warns_of_a_made_up_certificate_and_a_missing_model_store(run, tmp_path):
    (tmp_path / "config.properties").write_text("inference_address=https://h\nmodel_store=no")
    code, out, err = run("config", "--check")
    assert (code, out) == (0, b"config.properties is usable, with 2 warnings\n")
    assert "self-signed" in err
    assert "model_store=no is no directory" in err


def test_config_check_refuses_the_flags_that_serve_refuses(run):
    code, out, err = run("config", "--check", "--model-store", "no")
    assert (code, out) == (1, b"")
    assert "Invalid configuration: --model-store directory not found: no\n" in err


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_a_wrong_configuration_ends_with_1(run, tmp_path, flags):
    (tmp_path / "config.properties").write_text("job_queue_size=0")
    code, out, err = run("config", *flags)
    assert (code, out) == (1, b"")
    assert err.startswith("Invalid configuration: job_queue_size=0 (config.properties, line 1): ")


# models


def test_list_shows_every_page(run, server):
    code, out, _ = run("models", "list")
    assert code == 0
    counts = {"m001": "1/1", "m002": "0/0", "m003": "1/3"}
    assert [line.split() for line in out.decode().splitlines()] == [
        [name, counts.get(name, "-"), f"{name}.mar"] for name in MODELS
    ]
    paths = [path for _, path, *_ in server.seen]
    assert paths.index("/models/m099") < paths.index("/models?limit=100&next_page_token=100")


def test_a_name_from_an_archive_does_nothing_to_the_terminal(run):
    page = b'{"models": [{"modelName": "a\\u001b[2J", "modelUrl": "b\\nc"}]}'
    raw = b"HTTP/1.1 200 x\r\ncontent-length: %d\r\n\r\n%s" % (len(page), page)
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler), raw) as server:
        code, out, _ = run(
            *("models", "list", "--address", f"http://127.0.0.1:{server.server_port}")
        )
    assert (code, out) == (0, b"a\\x1b[2J      -  b\\nc\n")


def test_load_sends_what_is_asked_and_nothing_else(run, server):
    code, out, _ = run(
        *("models", "load", "a.mar", "--name", "a", "--workers", "2", "--batch-size", "8"),
        *("--max-batch-delay", "50", "--response-timeout", "9", "--handler", "s:h", "--no-wait"),
        "--preload",
    )
    assert (code, out) == (0, b"Workers scaled\n")  # as the server says: it has gone again
    run("models", "load", "b.mar")
    first, second = (json.loads(body) for method, *_, body in server.seen if method == "POST")
    assert first == {
        "url": "a.mar",
        "model_name": "a",
        "initial_workers": 2,
        "batch_size": 8,
        "max_batch_delay": 50,
        "response_timeout": 9,
        "handler": "s:h",
        "preload_model": "true",
        "synchronous": False,
    }
    assert second == {"url": "b.mar", "initial_workers": 1, "synchronous": True}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m001.mar"], 'Model "m001" loaded, 1 worker'),
        (["m002.mar", "--workers", "0"], 'Model "m002" loaded, 0 workers'),
        (["x.mar", "--name", "m003", "--no-wait"], 'Model "m003" loaded, 1 of 3 workers ready'),
        (["x.mar"], "Workers scaled"),  # under which name is not known
    ],
)
def test_load_says_which_model_has_how_many_workers(run, server, words, said):
    assert run("models", "load", *words)[:2] == (0, f"{said}\n".encode())


def test_describe_shows_the_reply_as_it_is(run, server):
    assert run("models", "describe", "m000")[:2] == (0, b'{\n  "modelName": "m000"\n}\n')


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("m001", 'Model "m001": 1 worker'),
        ("m002", 'Model "m002": 0 workers'),
        ("m003", 'Model "m003": 1 of 3 workers ready'),
    ],
)
def test_scale_says_how_many_workers_are_ready(run, server, name, said):
    assert run("models", "scale", name, "--min", "3")[:2] == (0, f"{said}\n".encode())


def test_scale_and_unload_say_what_the_server_says(run, server):
    assert run("models", "scale", "m000", "--min", "3")[:2] == (0, b"PUT done\n")
    assert run("models", "scale", "m000", "--min", "1", "--max", "2", "--no-wait")[0] == 0
    assert run("models", "unload", "m000")[:2] == (0, b"DELETE done\n")
    assert [path for method, path, *_ in server.seen if method != "GET"] == [
        "/models/m000?min_worker=3&max_worker=3&synchronous=true",
        "/models/m000?min_worker=1&max_worker=2&synchronous=false",
        "/models/m000",
    ]


def test_an_error_of_the_server_ends_with_1_and_its_message(run, server):
    code, out, err = run("models", "describe", "no such/model")
    assert (code, out) == (1, b"")
    assert err == "404 ModelNotFoundException: Model not found: no%20such%2Fmodel\n"


@pytest.mark.parametrize(
    ("raw", "code", "said"),
    [
        (b"HTTP/1.1 503 x\r\ncontent-length: 4\r\n\r\nbusy", 1, "503 Service Unavailable: busy"),
        (b"HTTP/1.1 404 x\r\ncontent-length: 6\r\n\r\na\x1b[2J\n", 1, "404 Not Found: a\\x1b[2J\n"),
        (b"HTTP/1.1 413 x\r\ncontent-length: 0\r\n\r\n", 1, "413 Request Entity Too Large\n"),
        (b"HTTP/1.1 200 x\r\ncontent-length: 2\r\n\r\n[]", 3, "is no model server"),
        (b"HTTP/1.1 200 x\r\ncontent-length: 9\r\n\r\n{}", 3, "no server answers at"),
        (b"SSH-2.0-x\r\n", 3, "no server answers at"),
        (b"", 3, "no server answers at"),
    ],
)
def test_a_reply_that_is_no_success_is_told_in_a_line(run, raw, code, said):
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler), raw) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        ended, _, err = run("models", "list", "--address", address)
    assert ended == code
    assert said in err
    assert err.count("\n") == 1


def test_no_server_ends_with_3_and_says_where_it_was_looked_for(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, _, err = run("models", "list", "--address", f"http://127.0.0.1:{port}")
    assert code == 3
    assert f"no server answers at http://127.0.0.1:{port}: Connection refused" in err


def test_a_server_that_says_nothing_is_given_up_after_the_timeout(run):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, _, err = run("models", "list", "--address", url, "--timeout", "0.05")
    assert code == 3
    assert err == f"{url} did not answer within 0.05 s; --timeout gives it longer\n"


def test_only_a_prediction_has_a_time_limit_of_its_own():
    parse = cli._parser().parse_args
    assert parse(["invoke", "m"]).timeout == 60
    assert parse(["invoke", "m", "--timeout", "1.5"]).timeout == 1.5
    assert parse(["models", "load", "m.mar"]).timeout is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--address", "8081"], "--address 8081 is not an address"),
        (["--address", "http://127.0.0.1:0"], "chosen at start"),
        (["--timeout", "0"], "not a number of seconds above 0"),
        (["--timeout", "nan"], "not a number of seconds above 0"),
        (["--token-file", "missing"], "the token in missing cannot be read"),
        (["--address", "https://h", "--ca-file", "missing"], "holds no certificate"),
    ],
)
def test_wrong_flags_of_the_connection_end_with_2(run, flags, said):
    code, _, err = run("models", "list", *flags)
    assert code == 2
    assert said in err


def test_a_wrong_configuration_is_said_where_the_address_comes_from_it(run, tmp_path):
    (tmp_path / "config.properties").write_text("management_address=nowhere")
    code, _, err = run("models", "list")
    assert code == 1
    assert err.startswith("Invalid configuration: management_address=nowhere")


@pytest.mark.parametrize("by", ["flag", "setting"])
def test_the_token_goes_to_management_only(run, server, tmp_path, by):
    (tmp_path / "token").write_text("s3cret\n")
    flags = ["--token-file", "token"] if by == "flag" else []
    if by == "setting":
        with (tmp_path / "config.properties").open("a") as file:
            file.write("management_token_file=token\n")
    assert run("models", "unload", "m000", *flags)[0] == 0
    assert run("invoke", "m000")[0] == 0
    managed, invoked = (headers for _, _, headers, _ in server.seen)
    assert managed["Authorization"] == "Bearer s3cret"
    assert "Authorization" not in invoked


def test_a_unix_socket_is_an_address(run, tmp_path):
    with serving(UnixServer("s", Handler)):
        assert run("models", "unload", "m000", "--address", f"unix:{tmp_path}/s")[0] == 0


def test_a_wildcard_address_is_this_machine(run, server):
    url = server.url.replace("127.0.0.1", "0.0.0.0")
    assert run("models", "unload", "m000", "--address", url)[0] == 0


# TLS


@pytest.fixture
def tls_server(tmp_path):
    """Speaks TLS with a certificate it made itself, kept in `cert.pem`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    Path("cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    Path("key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain("cert.pem", "key.pem")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # The handshake belongs to the request's own thread: a refused one must not end the server.
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    server.handle_error = lambda *_: None
    with serving(server):
        yield f"https://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("flags", [["--ca-file", "cert.pem"], ["--insecure"]])
def test_a_certificate_that_is_named_or_waved_through_is_taken(run, tls_server, flags):
    assert run("models", "unload", "m000", "--address", tls_server, *flags)[0] == 0


def test_a_certificate_of_nobody_is_refused_with_the_way_out(run, tls_server):
    code, _, err = run("models", "unload", "m000", "--address", tls_server)
    assert code == 3
    assert "is not trusted" in err
    assert "--ca-file" in err
    assert "--insecure" in err


# invoke


@pytest.mark.parametrize(
    ("words", "body", "content_type"),
    [
        ([], b"", None),
        (["--json", '{"a": "é"}'], '{"a": "é"}'.encode(), "application/json"),
        (["--json", "1", "--content-type", "x/y"], b"1", "x/y"),
        (["cat.jpg"], b"\xff\xd8", "image/jpeg"),
        (["blob"], b"\x00\xff", "application/octet-stream"),
        (["blob", "--content-type", "text/plain"], b"\x00\xff", "text/plain"),
    ],
)
def test_invoke_sends_a_body_with_its_type(run, server, tmp_path, words, body, content_type):
    (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "blob").write_bytes(b"\x00\xff")
    assert run("invoke", "m 0/1", *words) == (0, b"<" + body + b">", "")
    ((method, path, headers, sent),) = server.seen
    assert (method, path, sent) == ("POST", "/predictions/m%200%2F1", body)
    assert headers.get("Content-Type") == content_type


def test_invoke_reads_the_standard_input(run, server, monkeypatch):
    piped = io.TextIOWrapper(io.BytesIO(b"\x01\x02"))
    monkeypatch.setattr(sys, "stdin", piped)
    assert run("invoke", "m", "-")[1] == b"<\x01\x02>"


def test_invoke_sends_more_headers(run, server):
    assert run("invoke", "m", "--header", "X-One: 1", "--header", "x-two:  b c")[0] == 0
    headers = server.seen[0][2]
    assert (headers["X-One"], headers["x-two"]) == ("1", "b c")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--header", "no colon"], "is not like NAME: VALUE"),
        (["--header", "a: b\r\nc: d"], "is not like NAME: VALUE"),
        (["--header", "a: \u20ac"], "is not like NAME: VALUE"),
        (["missing.jpg"], "missing.jpg cannot be read: No such file"),
        (["x", "--json", "1"], "either FILE or --json"),
    ],
)
def test_invoke_refuses_what_it_cannot_send(run, server, words, said):
    code, _, err = run("invoke", "m", *words)
    assert code == 2
    assert said in err
    assert server.seen == []


# serve, stop, archive


def test_stop_says_what_the_launcher_says(run):
    code, out, _ = run("stop")
    assert code == 1
    assert out.startswith(b"Model server is not currently running.\n")


def test_archive_says_what_it_wrote(run, tmp_path, capfdbinary):
    from mmserve.cli import archiver

    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "service.py").write_text("def handle(data, context): ...\n")
    words = ["--model-name", "x", "--model-path", "h", "--handler", "service:handle"]
    assert run("archive", *words) == (0, f"{tmp_path}/x.mar\n".encode(), "")
    assert run("archive", *words)[:2] == (1, b"")  # it is there already
    assert archiver.main([*words, "--force"]) == 0
    assert capfdbinary.readouterr()[0] == b""


def test_serve_checks_its_flags_as_the_launcher_does(run):
    code, out, _ = run("serve", "--mms-config", "missing")
    assert (code, out) == (1, b"--mms-config file not found: missing\n")


def test_an_output_that_nobody_reads_ends_the_command_without_a_trace():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "mmserve.cli.main", "config"]
    try:
        done = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")
