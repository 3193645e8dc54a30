"""Command-line arguments for TLS and keys; imports nothing heavy."""

import argparse
from collections.abc import Sequence
from pathlib import Path

Parser = argparse.ArgumentParser | argparse._ArgumentGroup


def add_server_arguments(parser: Parser, *, takes_keys: bool = True) -> None:
    """Add the security options of a service's ports; keys are for a service that checks them itself."""
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate of this service: serve TLS only")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument(
        "--tls-client-ca", type=Path, metavar="FILE", help="clients must show a certificate that this CA issued (mTLS)"
    )
    if takes_keys:
        parser.add_argument(
            "--auth-keys",
            type=Path,
            action="append",
            default=[],
            metavar="FILE",
            help="calls need a key of this file (weft key new makes one); may be repeated",
        )


def server_fault(options: argparse.Namespace) -> str:
    """Error message for invalid arguments of ``add_server_arguments``; "" if valid."""
    if (options.tls_cert is None) != (options.tls_key is None):
        return "--tls-cert and --tls-key go together"
    if options.tls_client_ca is not None and options.tls_cert is None:
        return "--tls-client-ca needs --tls-cert and --tls-key"
    return ""


def given_to_server(options: argparse.Namespace) -> Sequence[str]:
    """The same arguments for the command line of a service."""
    names = ("tls_cert", "tls_key", "tls_client_ca")
    files = [f"--{name.replace('_', '-')}={path}" for name in names if (path := getattr(options, name)) is not None]
    return [*files, *(f"--auth-keys={path}" for path in options.auth_keys)]


def add_channel_arguments(
    parser: Parser,
    prefix: str = "",
    whom: str = "the service",
    *,
    takes_key: bool = True,
    takes_name: bool = True,
) -> None:
    """Add the security options of calls to another service, prefixed for example with ``router-``."""
    parser.add_argument(
        f"--{prefix}tls-ca", type=Path, metavar="FILE", help=f"call {whom} over TLS; this CA issued its certificate"
    )
    parser.add_argument(
        f"--{prefix}tls-cert", type=Path, metavar="FILE", help=f"certificate to show to {whom}, where it asks for one"
    )
    parser.add_argument(f"--{prefix}tls-key", type=Path, metavar="FILE", help="private key of that certificate")
    if takes_name:
        parser.add_argument(
            f"--{prefix}tls-name", default="", metavar="NAME", help="name in its certificate (default: the host called)"
        )
    if takes_key:
        parser.add_argument(
            f"--{prefix}key-file", type=Path, metavar="FILE", help=f"key to send to {whom}: the first line of this file"
        )
