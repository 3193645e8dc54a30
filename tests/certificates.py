"""A certificate authority for tests; what it issues is for ``localhost``, 127.0.0.1 and one more name."""

import datetime
import ipaddress
import os
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


class Pair(NamedTuple):
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Issues certificates into a folder; ``ca`` is the file with its own.

    Args:
        folder: Where files go.
        name: Of the authority; two with one name are still two.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(self._name, self._name, self._key.public_key(), 3600)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(certificate.public_bytes(_PEM))

    def issue(self, name: str, *, valid_s: float = 3600, into: str = "", uri: str = "") -> Pair:
        """A new certificate for ``name`` that is valid from an hour ago until ``valid_s`` seconds from now.

        ``uri`` is one more name. The files are named ``into``, by default ``name``; those that are there are replaced,
        each at once.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.DNSName(name),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        if uri:
            names.append(x509.UniformResourceIdentifier(uri))
        certificate = (
            _builder(_named(name), self._name, key.public_key(), valid_s)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        pair = Pair(self._folder / f"{into or name}.pem", self._folder / f"{into or name}.key")
        _replace(pair.key, private)
        _replace(pair.cert, certificate.public_bytes(_PEM))
        return pair


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(data)
    os.replace(draft, path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_s: float):
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(seconds=valid_s))
    )
