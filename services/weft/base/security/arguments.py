"""Command-line arguments for TLS and keys; imports nothing heavy."""

import argparse
from pathlib import Path

from weft.base.text.argument_types import add, given_arguments

Parser = argparse.ArgumentParser | argparse._ArgumentGroup


def add_server_arguments(parser: Parser, *, takes_keys: bool = True) -> None:
    """Add the security options of a service's ports; keys are for a service that checks them itself."""
    add(parser, "--tls-cert FILE", "PEM certificate of this service: serve TLS only", Path)
    add(parser, "--tls-key FILE", "its private key", Path)
    add(parser, "--tls-client-ca FILE", "clients must show a certificate that this CA issued (mTLS)", Path)
    if takes_keys:
        text = "calls need a key of this file (weft key new makes one); may be repeated"
        add(parser, "--auth-keys FILE ...", text, Path)


def server_fault(options: argparse.Namespace) -> str:
    """Error message for invalid arguments of ``add_server_arguments``; "" if valid."""
    if (options.tls_cert is None) != (options.tls_key is None):
        return "--tls-cert and --tls-key go together"
    if options.tls_client_ca is not None and options.tls_cert is None:
        return "--tls-client-ca needs --tls-cert and --tls-key"
    return ""


def given_to_server(options: argparse.Namespace) -> list[str]:
    """The same arguments for the command line of a service."""
    return [*given_arguments(options, ("tls_cert", "tls_key", "tls_client_ca", "auth_keys"))]


def add_channel_arguments(
    parser: Parser,
    prefix: str = "",
    whom: str = "the service",
    *,
    takes_key: bool = True,
    takes_name: bool = True,
) -> None:
    """Add the security options of calls to another service, prefixed for example with ``router-``."""
    add(parser, f"--{prefix}tls-ca FILE", f"call {whom} over TLS; this CA issued its certificate", Path)
    add(parser, f"--{prefix}tls-cert FILE", f"certificate to show to {whom}, where it asks for one", Path)
    add(parser, f"--{prefix}tls-key FILE", "private key of that certificate", Path)
    if takes_name:
        add(parser, f"--{prefix}tls-name NAME", "name in its certificate (default: the host called)", default="")
    if takes_key:
        add(parser, f"--{prefix}key-file FILE", f"key to send to {whom}: the first line of this file", Path)
