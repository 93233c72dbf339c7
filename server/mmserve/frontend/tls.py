"""Certificates: from a keystore, from PEM files, or made up at the start.

Source: section 8.2 of the Multi Model Server reference (order of the sources, default password);
quirk D36 (its protocol and suites are outdated: TLS 1.2 and 1.3 with forward secrecy here).
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mmserve.errors import ConfigurationError
from mmserve.metrics.host import hostname

if TYPE_CHECKING:
    from cryptography import x509

    from mmserve.config.settings import Settings

log = logging.getLogger(__name__)

#: TLS 1.2; those of 1.3 are all fine. Source: RFC 9325, section 4.2.
_SUITES = "ECDHE+AESGCM:ECDHE+CHACHA20"
_JKS_MAGIC = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")
_SELF_SIGNED_DAYS = 3650


class TlsSource(msgspec.Struct, kw_only=True):
    """Where the certificate comes from: the keystore, else the two PEM files, else made up.

    Attributes: the settings of these names.
    """

    keystore: str | None = None
    keystore_pass: str = "changeit"
    keystore_type: str = "PKCS12"
    private_key_file: str | None = None
    certificate_file: str | None = None
    _made_up: bytes = b""  # the self-signed pair, the same for each listener and each reload

    def context(self) -> ssl.SSLContext:
        """Reads the files.

        Raises:
            ConfigurationError: names the setting and what is wrong with its file.
        """
        if self.keystore:
            pair = read_keystore(self.keystore, self.keystore_pass, self.keystore_type)
        elif self.private_key_file or self.certificate_file:
            return self._from_files()
        else:
            if not self._made_up:
                log.warning(
                    "no certificate is configured: clients get a self-signed one; set keystore, "
                    "or private_key_file and certificate_file"
                )
                self._made_up = self_signed()
            pair = self._made_up
        context = _fresh_context()
        with _as_file(pair) as path:
            context.load_cert_chain(path)
        return context

    def _from_files(self) -> ssl.SSLContext:
        key, certificate = self.private_key_file, self.certificate_file
        if not key:
            raise ConfigurationError("certificate_file is set but private_key_file is not")
        if not certificate:
            raise ConfigurationError("private_key_file is set but certificate_file is not")
        _read("private_key_file", key)
        if b"-----BEGIN CERTIFICATE-----" not in _read("certificate_file", certificate):
            raise ConfigurationError(f"certificate_file={certificate} has no PEM certificate")
        context = _fresh_context()
        try:
            context.load_cert_chain(certificate, key, password=_no_password(key))
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigurationError(
                    f"private_key_file={key} does not belong to the first certificate "
                    f"of certificate_file={certificate}"
                ) from None
            raise ConfigurationError(
                f"private_key_file={key} or certificate_file={certificate} cannot be used: "
                f"{error.reason or error}; both must be PEM"
            ) from None
        return context


def tls_of(settings: Settings) -> TlsSource:
    return TlsSource(
        keystore=settings.keystore,
        keystore_pass=settings.keystore_pass,
        keystore_type=settings.keystore_type,
        private_key_file=settings.private_key_file,
        certificate_file=settings.certificate_file,
    )


def _fresh_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_SUITES)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{key}={path} cannot be read: {error.strerror}") from None


def _no_password(path: str) -> Callable[[], str]:
    """Called for a key that is encrypted; without it OpenSSL would ask on the terminal."""

    def refuse() -> str:
        raise ConfigurationError(
            f"private_key_file={path} is encrypted; take the password off: "
            "openssl pkey -in KEY -out PLAIN_KEY"
        )

    return refuse


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path to these bytes while the block lasts: OpenSSL reads keys from files only."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(fd, content)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.NamedTemporaryFile() as file:  # mode 0600
            file.write(content)
            file.flush()
            yield file.name


# PKCS12


def read_keystore(path: str, password: str, kind: str) -> bytes:
    """PEM of the first key in a PKCS12 file, its certificate, then the chain above it.

    Raises:
        ConfigurationError: another kind of keystore, a wrong password, or no key.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.serialization import pkcs12

    content = _read("keystore", path)
    if content.startswith(_JKS_MAGIC) or kind.upper() in ("JKS", "JCEKS"):
        raise ConfigurationError(
            f"keystore={path} is a Java keystore (JKS), which is not supported; convert it: "
            "keytool -importkeystore -srckeystore OLD -destkeystore NEW.p12 -deststoretype PKCS12"
        )
    if kind.upper() not in ("PKCS12", "P12", "PFX"):
        raise ConfigurationError(f"keystore_type={kind} is not supported; use PKCS12")
    try:
        key, leaf, others = pkcs12.load_key_and_certificates(content, password.encode())
    except ValueError:
        raise ConfigurationError(
            f"keystore={path} cannot be opened: it is no PKCS12 file, or keystore_pass is wrong"
        ) from None
    if key is None or leaf is None:
        raise ConfigurationError(f"keystore={path} has no private key with a certificate")
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for certificate in _chain(leaf, others):
        pem += certificate.public_bytes(serialization.Encoding.PEM)
    return pem


def _chain(leaf: x509.Certificate, others: list[x509.Certificate]) -> list[x509.Certificate]:
    """The leaf, its issuer, the issuer's issuer, as far as they are there. A keystore has them in
    any order."""
    by_subject = {certificate.subject: certificate for certificate in others}
    chain = [leaf]
    while (issuer := by_subject.pop(chain[-1].issuer, None)) is not None:
        chain.append(issuer)
    return chain


def self_signed() -> bytes:
    """PEM of a new P-256 key and a certificate for this machine's names."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [
        *(x509.DNSName(host) for host in {"localhost", hostname()} if host.isascii()),
        *(x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "::1")),
    ]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
