"""How the router secures its calls of each target, as its command line says."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from weft.base.errors import InvalidArgumentError
from weft.v2.security.channel import ChannelSecurity
from weft.v2.security.tls import TlsFiles

#: Option, what it takes, and its help; each may be given once for all targets and once for each.
_OPTIONS = (
    ("--target-tls-ca", "FILE", "call targets over TLS; this CA issued their certificates"),
    ("--target-tls-cert", "FILE", "certificate to show to targets that ask for one"),
    ("--target-tls-key", "FILE", "private key of that certificate"),
    ("--target-tls-name", "NAME", "name in the certificate of targets (default: the host called)"),
    ("--target-key-file", "FILE", "key to send to targets: the first line of this file"),
)

_ALL = ""


def add_target_security_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what secures the calls of targets."""
    group = parser.add_argument_group(
        "security of targets", "each for all targets, or as TARGET=VALUE for one; may be repeated"
    )
    for option, metavar, text in _OPTIONS:
        group.add_argument(
            option, type=_for_target, action="append", default=[], metavar=f"[TARGET=]{metavar}", help=text
        )


def target_securities(options: argparse.Namespace) -> dict[str, ChannelSecurity]:
    """Of each target that is not called in plaintext without a key.

    Raises:
        InvalidArgumentError: A target has another name, an option is given twice, or a file is missing or wrong.
    """
    names = [name for name, _ in options.target]
    given = {option: _by_target(option, getattr(options, _dest(option)), names) for option, *_ in _OPTIONS}
    securities: dict[str, ChannelSecurity] = {}
    for name in names:
        ca, cert, key, server_name, key_file = (values.get(name, values.get(_ALL, "")) for values in given.values())
        security = ChannelSecurity(TlsFiles(_path(cert), _path(key), _path(ca)), server_name, _path(key_file))
        try:
            security.check()
        except InvalidArgumentError as error:
            raise error.with_message(f"target '{name}': {error.message}") from None
        if not security.is_plain:
            securities[name] = security
    return securities


def _for_target(text: str) -> tuple[str, str]:
    """Target and value; a path with a folder in front of its "=" is a value for all."""
    name, separator, value = text.partition("=")
    return (name, value) if separator and "/" not in name else (_ALL, text)


def _by_target(option: str, pairs: Iterable[tuple[str, str]], names: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in pairs:
        if name and name not in names:
            raise InvalidArgumentError(f"{option} {name}={value}: there is no target '{name}', only {', '.join(names)}")
        if name in values:
            raise InvalidArgumentError(f"{option} is given twice for {f'target {name!r}' if name else 'all targets'}")
        values[name] = value
    return values


def _dest(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _path(text: str) -> Path | None:
    return Path(text) if text else None
