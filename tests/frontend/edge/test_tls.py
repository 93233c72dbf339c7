"""Certificates and handshakes."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import logging
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID

from mmserve.config.addresses import Address
from mmserve.errors import ConfigurationError
from mmserve.frontend.edge import Limits
from mmserve.frontend.http import Exchange, Response
from mmserve.frontend.tls import TlsSource, read_keystore

if TYPE_CHECKING:
    from conftest import Client, House

GET = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
HTTPS = Address("https", "127.0.0.1", 0)
PEM = serialization.Encoding.PEM
PKCS8 = serialization.PrivateFormat.PKCS8
PKCS1 = serialization.PrivateFormat.TraditionalOpenSSL
PLAIN = serialization.NoEncryption()
Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey

_rsa = rsa.generate_private_key(65537, 2048)  # takes long: one for all tests


def rsa_key() -> Key:
    return _rsa


def ec_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def certify(
    key: Key, name: str = "127.0.0.1", by: tuple[Key, x509.Certificate] | None = None
) -> x509.Certificate:
    """A certificate of `key`, signed by itself or `by` another."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer_key, issuer = (by[0], by[1].subject) if by else (key, subject)
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


def pem_files(
    folder: Path, key: Key, certificate: x509.Certificate, form: serialization.PrivateFormat = PKCS8
) -> TlsSource:
    key_file, certificate_file = folder / "key.pem", folder / "cert.pem"
    key_file.write_bytes(key.private_bytes(PEM, form, PLAIN))
    certificate_file.write_bytes(certificate.public_bytes(PEM))
    return TlsSource(private_key_file=str(key_file), certificate_file=str(certificate_file))


def say_ok(exchange: Exchange) -> None:
    exchange.reply(Response(200, b"ok"))


def digest(exchange: Exchange) -> None:
    exchange.reply(Response(200, hashlib.sha256(exchange.request.body).digest()))


def connect(kit: ModuleType, port: int, trusted: x509.Certificate | None = None) -> Client:
    """A TLS client that trusts one certificate, or anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if trusted is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=trusted.public_bytes(PEM).decode())
    plain = socket.create_connection(("127.0.0.1", port), timeout=kit.PATIENCE_S)
    client: Client = kit.Client(context.wrap_socket(plain, server_hostname="127.0.0.1"))
    return client


# Where the certificate comes from


@pytest.mark.parametrize("make_key", [rsa_key, ec_key])
@pytest.mark.parametrize("form", [PKCS8, PKCS1], ids=["PKCS8", "traditional"])
def test_pem_files_work(
    house: House, kit: ModuleType, tmp_path: Path, make_key, form: serialization.PrivateFormat
) -> None:  # type: ignore[no-untyped-def] # a function as parameter
    key = make_key()
    certificate = certify(key)
    listener = house.open(say_ok, address=HTTPS, tls=pem_files(tmp_path, key, certificate, form))
    with connect(kit, listener.port, certificate) as client:
        assert client.ask(GET).body == b"ok"
        assert client.ask(GET).body == b"ok"


def test_a_keystore_works_and_wins_over_pem_files(
    house: House, kit: ModuleType, tmp_path: Path
) -> None:
    key = rsa_key()
    root = certify(key, "root")
    middle_key = ec_key()
    middle = certify(middle_key, "middle", by=(key, root))
    leaf_key = ec_key()
    leaf = certify(leaf_key, by=(middle_key, middle))
    store = tmp_path / "store.p12"
    store.write_bytes(
        pkcs12.serialize_key_and_certificates(
            b"mms",
            leaf_key,
            leaf,
            [root, middle],  # not in the order a chain is sent
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    sent = x509.load_pem_x509_certificates(read_keystore(str(store), "secret", "PKCS12"))
    assert sent == [leaf, middle, root]
    source = pem_files(tmp_path, key, certify(key))
    source.keystore, source.keystore_pass = str(store), "secret"
    listener = house.open(say_ok, address=HTTPS, tls=source)
    with connect(kit, listener.port, root) as client:
        assert client.ask(GET).status == 200


@pytest.fixture(scope="session")
def keytool_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two keys, with the password that is the default of the setting."""
    if shutil.which("keytool") is None:
        pytest.skip("no keytool command")
    store = tmp_path_factory.mktemp("keytool") / "keystore.p12"
    common = ("-keystore", str(store), "-storepass", "changeit", "-storetype", "PKCS12")
    for alias in ("first", "second"):
        words = ("-genkeypair", "-alias", alias, "-keyalg", "EC", "-dname", f"CN={alias}", *common)
        subprocess.run(["keytool", *words], check=True, capture_output=True, timeout=60)
    return store


@pytest.mark.java
def test_a_keystore_of_keytool_works_and_its_first_key_counts(
    house: House, kit: ModuleType, keytool_store: Path
) -> None:
    listener = house.open(say_ok, address=HTTPS, tls=TlsSource(keystore=str(keytool_store)))
    with connect(kit, listener.port) as client:
        assert client.ask(GET).status == 200
        assert isinstance(client.socket, ssl.SSLSocket)
        shown = x509.load_der_x509_certificate(client.socket.getpeercert(binary_form=True) or b"")
        assert shown.subject.rfc4514_string() == "CN=first"


def test_without_any_certificate_one_is_made_up_and_a_warning_says_so(
    house: House, kit: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    listener = house.open(say_ok, address=HTTPS)
    house.call(listener.reload_tls)
    with connect(kit, listener.port) as client:
        assert client.ask(GET).status == 200
        assert isinstance(client.socket, ssl.SSLSocket)
        shown = x509.load_der_x509_certificate(client.socket.getpeercert(binary_form=True) or b"")
    with connect(kit, listener.port, shown) as client:  # it names 127.0.0.1
        assert client.ask(GET).status == 200
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "self-signed" in warnings[0].message


# Certificates that cannot be used


def refusal(source: TlsSource) -> str:
    with pytest.raises(ConfigurationError) as caught:
        source.context()
    return str(caught.value)


def test_a_wrong_password_is_a_clear_error(tmp_path: Path) -> None:
    store, key = tmp_path / "store.p12", ec_key()
    encrypted = serialization.BestAvailableEncryption(b"right")
    store.write_bytes(
        pkcs12.serialize_key_and_certificates(None, key, certify(key), None, encrypted)
    )
    message = refusal(TlsSource(keystore=str(store), keystore_pass="a guess"))
    assert f"keystore={store}" in message
    assert "keystore_pass is wrong" in message
    assert "a guess" not in message


def test_a_keystore_without_a_key_is_a_clear_error(tmp_path: Path) -> None:
    store = tmp_path / "store.p12"
    store.write_bytes(
        pkcs12.serialize_key_and_certificates(
            None,
            None,
            None,
            [certify(ec_key())],
            serialization.BestAvailableEncryption(b"changeit"),
        )
    )
    assert "no private key" in refusal(TlsSource(keystore=str(store)))


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"\xfe\xed\xfe\xed\0\0\0\2", "PKCS12", "deststoretype PKCS12"),
        (b"anything", "JKS", "deststoretype PKCS12"),
        (b"anything", "BKS", "keystore_type=BKS is not supported; use PKCS12"),
        (b"anything", "pkcs12", "no PKCS12 file"),
    ],
)
def test_other_keystores_are_refused_with_advice(
    tmp_path: Path, content: bytes, kind: str, words: str
) -> None:
    store = tmp_path / "store"
    store.write_bytes(content)
    assert words in refusal(TlsSource(keystore=str(store), keystore_type=kind))


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    source = pem_files(tmp_path, key := ec_key(), certify(key))
    assert f"keystore={missing} cannot be read" in refusal(TlsSource(keystore=missing))
    for setting in ("private_key_file", "certificate_file"):
        broken = TlsSource(
            private_key_file=source.private_key_file, certificate_file=source.certificate_file
        )
        setattr(broken, setting, missing)
        assert f"{setting}={missing} cannot be read" in refusal(broken)


def test_half_a_pair_is_an_error_that_names_the_other_half() -> None:
    assert "private_key_file is not" in refusal(TlsSource(certificate_file="/c"))
    assert "certificate_file is not" in refusal(TlsSource(private_key_file="/k"))


def test_a_key_of_another_certificate_is_a_clear_error(tmp_path: Path) -> None:
    message = refusal(pem_files(tmp_path, ec_key(), certify(ec_key())))
    assert "does not belong" in message


def test_an_encrypted_key_is_refused_without_a_question_on_the_terminal(tmp_path: Path) -> None:
    source = pem_files(tmp_path, key := ec_key(), certify(key))
    assert source.private_key_file
    Path(source.private_key_file).write_bytes(
        key.private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"x"))
    )
    assert "is encrypted" in refusal(source)


@pytest.mark.parametrize("setting", ["private_key_file", "certificate_file"])
def test_a_file_that_is_no_pem_is_a_clear_error(tmp_path: Path, setting: str) -> None:
    source = pem_files(tmp_path, key := ec_key(), certify(key))
    path = Path(getattr(source, setting))
    path.write_bytes(b"no pem")
    message = refusal(source)
    assert f"{setting}={path}" in message
    assert "PEM" in message


def test_a_bad_certificate_stops_before_the_port_is_taken(house: House, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keystore="):
        house.open(say_ok, address=HTTPS, tls=TlsSource(keystore=str(tmp_path / "missing")))


# New certificates


def test_a_new_certificate_is_taken_and_a_bad_one_is_not(
    house: House, kit: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old_key, new_key = ec_key(), ec_key()
    old, new = certify(old_key), certify(new_key)
    source = pem_files(tmp_path, old_key, old)
    listener = house.open(say_ok, address=HTTPS, tls=source)
    with connect(kit, listener.port, old) as early:
        pem_files(tmp_path, new_key, new)
        house.call(listener.reload_tls)
        with connect(kit, listener.port, new) as late:
            assert late.ask(GET).status == 200
        assert early.ask(GET).status == 200

    assert source.certificate_file
    Path(source.certificate_file).write_bytes(b"broken")
    house.call(listener.reload_tls)
    with connect(kit, listener.port, new) as client:
        assert client.ask(GET).status == 200
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "the old one stays" in error.message


def test_a_plain_listener_has_nothing_to_reload(house: House) -> None:
    house.call(house.open(say_ok).reload_tls)


# Handshakes


@pytest.mark.parametrize(
    ("junk", "words"),
    [
        (GET, "plain HTTP"),
        (b"\0" * 64, "did not speak TLS"),
        (b"hello\r\n\r\n", ""),
    ],
)
def test_plain_text_on_the_tls_port_is_turned_away_quietly(
    house: House,
    kit: ModuleType,
    caplog: pytest.LogCaptureFixture,
    junk: bytes,
    words: str,
) -> None:
    caplog.set_level(logging.INFO)
    listener = house.open(say_ok, address=HTTPS, tls=TlsSource())
    caplog.clear()
    for _ in range(3):
        with kit.Client(listener) as client:
            client.send(junk)
            assert client.is_closed() or client.is_closed()  # an alert may come first
    with connect(kit, listener.port) as client:
        assert client.ask(GET).status == 200
    (line,) = caplog.records
    assert (line.levelno, line.exc_info) == (logging.INFO, None)
    assert words in vars(line)["cause"]


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_stalls_is_ended(
    house: House, kit: ModuleType, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    listener = house.open(say_ok, address=HTTPS, limits=Limits(handshake_s=0.1))
    caplog.clear()
    with kit.Client(listener) as client:
        client.send(said)
        assert client.is_closed()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_stalled_handshake_does_not_hold_up_the_end(house: House, kit: ModuleType) -> None:
    listener = house.open(say_ok, address=HTTPS, limits=Limits(handshake_s=1000))
    client = kit.Client(listener)
    client.send(b"\x16")
    with connect(kit, listener.port) as other:  # accepted after the first
        assert other.ask(GET).status == 200
    house.close()
    assert client.is_closed()
    client.socket.close()


def test_rubbish_behind_the_handshake_is_no_error_of_ours(
    house: House, kit: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    listener = house.open(say_ok, address=HTTPS)
    caplog.clear()
    client = connect(kit, listener.port)
    assert client.ask(GET).status == 200
    assert isinstance(client.socket, ssl.SSLSocket)
    with socket.socket(fileno=client.socket.detach()) as bare:
        bare.settimeout(kit.PATIENCE_S)
        bare.sendall(b"no TLS record at all, but long enough to be looked at")
        while bare.recv(1000):
            pass
    kit.eventually(lambda: listener.connections == 0)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_old_protocols_are_refused_and_new_ones_have_forward_secrecy(
    house: House, kit: ModuleType
) -> None:
    listener = house.open(say_ok, address=HTTPS)
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection(("127.0.0.1", listener.port)) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            suite = (wrapped.cipher() or ("",))[0]
            assert suite.startswith(("ECDHE-", "TLS_"))
            assert "CBC" not in suite
    weak = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    weak.check_hostname, weak.verify_mode = False, ssl.CERT_NONE
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("AES128-SHA256:ECDHE-ECDSA-AES128-SHA256")
    with (
        socket.create_connection(("127.0.0.1", listener.port)) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        weak.wrap_socket(plain)


# Bodies


def test_big_bodies_go_through_tls_both_ways(house: House, kit: ModuleType) -> None:
    limits = Limits(max_body_bytes=20_000_000)
    body = bytes(range(256)) * 60_000
    listener = house.open(digest, address=HTTPS, limits=limits)
    with connect(kit, listener.port) as client:
        request = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        for _ in range(2):
            assert client.ask(request).body == hashlib.sha256(body).digest()

    def mirror(exchange: Exchange) -> None:
        exchange.reply(Response(200, exchange.request.body))

    with connect(kit, house.open(mirror, address=HTTPS, limits=limits).port) as client:
        assert client.ask(request).body == body


def test_a_body_in_tiny_records_arrives_whole(house: House, kit: ModuleType) -> None:
    listener = house.open(digest, address=HTTPS)
    body = b"abc" * 10_000
    with connect(kit, listener.port) as client:
        client.send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 1000):
            client.send(body[at : at + 1000])
        assert client.reply().body == hashlib.sha256(body).digest()


def test_an_early_error_can_be_read_through_tls(house: House, kit: ModuleType) -> None:
    listener = house.open(say_ok, address=HTTPS, limits=Limits(max_body_bytes=10))
    with connect(kit, listener.port) as client:
        body = bytes(300_000)
        reply = client.ask(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert reply.status == 413
