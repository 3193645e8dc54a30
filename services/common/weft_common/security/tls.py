"""TLS from PEM files, checked before they are used, for gRPC and for the metrics port."""

import argparse
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import grpc

from weft_common.errors import InvalidArgumentError
from weft_common.security.files import Reloaded, read_file, warn_if_shared


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection.

    Attributes:
        cert: This end's certificate, with those between it and the CA behind it; None: this end shows none.
        key: Its private key, not encrypted.
        ca: Whose certificates the other end may show. None: a server asks for none, a client trusts gRPC's own roots.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """Those that are given."""
        return [path for path in (self.cert, self.key, self.ca) if path is not None]

    def read(self) -> "TlsContent":
        """The contents, which fit one another. Raises InvalidArgumentError."""
        if (self.cert is None) != (self.key is None):
            raise InvalidArgumentError("a TLS certificate needs its key and a key its certificate; give both")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        cert = key = ca = None
        if self.cert is not None and self.key is not None:
            cert, key = read_file(self.cert, "TLS certificate"), read_file(self.key, "TLS key")
            try:
                context.load_cert_chain(self.cert, self.key, _no_password)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise InvalidArgumentError(
                    f"TLS certificate {self.cert} and key {self.key} are no pair that can be used: {_reason(error)}"
                ) from None
            warn_if_shared(self.key)
            if (cert, key) != (read_file(self.cert, "TLS certificate"), read_file(self.key, "TLS key")):
                raise InvalidArgumentError(f"TLS certificate {self.cert} changed while it was read")
        if self.ca is not None:
            ca = read_file(self.ca, "TLS CA")
            try:
                context.load_verify_locations(cadata=ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise InvalidArgumentError(f"TLS CA {self.ca} has no certificates in PEM: {_reason(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return TlsContent(cert, key, ca, context)


class TlsContent(NamedTuple):
    """Contents of ``TlsFiles``; ``context`` is for a server that is not gRPC."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    context: ssl.SSLContext


def server_tls_files(options: argparse.Namespace) -> TlsFiles | None:
    """Of ``security.arguments.add_server_arguments``; None: plaintext."""
    files = TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
    return files if files.paths else None


class ServerTls:
    """The certificate of a server, for its gRPC and its metrics port; new files are used from the next handshake on.

    Connections stay as they were made.

    Args:
        files: ``cert`` and ``key`` are there; with ``ca`` clients must show a certificate of it.

    Raises:
        InvalidArgumentError: The files are wrong.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.requires_client_certificate = files.ca is not None
        self._files = (files.cert, files.key, files.ca)
        self._content = Reloaded(files.paths, files.read)
        self._given: TlsContent | None = None  # to gRPC
        self._lock = threading.Lock()  # gRPC's threads and those of the metrics port shake hands at the same time

    def content(self) -> TlsContent:
        """What is in force."""
        with self._lock:
            return self._content.get()

    def credentials(self) -> grpc.ServerCredentials:
        """For ``add_secure_port``; gRPC asks for the certificate at each handshake."""
        self._given = self.content()
        fetch: Any = self._news  # the stubs do not know that None is an answer
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._given), fetch, require_client_authentication=self.requires_client_certificate
        )

    def http_arguments(self) -> dict[str, Any]:
        """For ``prometheus_client.start_http_server``."""
        cert, key, ca = (None if path is None else str(path) for path in self._files)
        return {
            "certfile": cert,
            "keyfile": key,
            "client_cafile": ca,
            "client_auth_required": self.requires_client_certificate,
            "tls_min_version": ssl.TLSVersion.TLSv1_2,
        }

    def follow(self, context: ssl.SSLContext) -> None:
        """The next handshake of a listening ``context``, as of the metrics port, is made with what is then in force."""

        def choose(connection: ssl.SSLObject, server_name: str | None, listening: ssl.SSLContext) -> None:
            connection.context = self.content().context

        context.sni_callback = choose

    def _news(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC does not have yet; None where it has all.

        Each configuration makes it forget the one before, also for handshakes in work: of 100 clients at once one in
        two times was let in without ALPN, and so refused, as long as each handshake had a configuration of its own
        (grpcio 1.85).
        """
        content = self.content()
        if content is self._given:
            return None
        self._given = content
        return _configuration(content)


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """For a client of https that trusts ``files.ca`` alone, and shows its certificate if it has one.

    Raises:
        InvalidArgumentError: A file is wrong.
    """
    content = files.read()
    context = ssl.create_default_context(cadata=(content.ca or b"").decode("ascii"))
    if files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    return context


def _configuration(content: TlsContent) -> grpc.ServerCertificateConfiguration:
    pair: Any = (content.key, content.cert)
    return grpc.ssl_server_certificate_configuration([pair], content.ca)


def channel_credentials(content: TlsContent) -> grpc.ChannelCredentials:
    """For a channel."""
    return grpc.ssl_channel_credentials(content.ca, content.key, content.cert)


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted; give one that is not, readable by this service only")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error) or type(error).__name__
