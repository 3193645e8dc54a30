"""The keys file: who may call, and what each may do. It holds hashes and certificate names, never keys.

One JSON object per line; empty lines and those starting with ``#`` are skipped::

    {"name": "shop", "sha256": "9f86...", "models": ["digits*"], "max_inflight": 32, "requests_per_s": 100}

A key is ``NAME.SECRET`` with 256 random bits, so an unsalted SHA-256 cannot be reversed.
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError
from weft.base.security.files import read_file

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SECRET_BYTES = 32
_MAX_LINE_CHARS = 16_384
_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class Grant:
    """One line of the file.

    Attributes:
        name: Holder of the key.
        sha256: Hashes of the valid keys, in hex; two during a rotation.
        certificates: Names, common or alternative, of client certificates that replace a key.
        models: Allowed graphs and models; globs (``*``, ``?``, ``[ab]``).
        max_inflight: Concurrent inference requests; 0: no limit.
        requests_per_s: Mean rate of inference requests; 0: no limit.
        burst: Requests that may come at once after a pause; 0: those of one second, at least one.
        highest_priority: Best priority level that a request may use (1 is the highest level); a better one is lowered
            to it. 0: any.
        control: Whether load, unload, shared memory, log and trace settings, and signatures of all models are allowed.
        feedback: Whether rewards for bandits are accepted.
    """

    name: str
    sha256: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    models: tuple[str, ...] = ("*",)
    max_inflight: int = 0
    requests_per_s: float = 0.0
    burst: int = 0
    highest_priority: int = 0
    control: bool = False
    feedback: bool = False

    def allows(self, model_name: str) -> bool:
        """Whether access to the graph or model is allowed."""
        return any(fnmatchcase(model_name, pattern) for pattern in self.models)

    def holds(self, key: str) -> bool:
        """Whether ``key`` matches this line; in constant time."""
        return _is_one_of(key, self.sha256)


def new_key(name: str) -> tuple[str, str]:
    """Generate a key and its line for the file. Raises InvalidArgumentError for an invalid name."""
    _check_name(name)
    key = f"{name}.{secrets.token_urlsafe(_SECRET_BYTES)}"
    return key, json.dumps({"name": name, "sha256": _digest(key)})


def grant_of(grants: "dict[str, Grant]", key: str) -> Grant | None:
    """The line of a key; None if it is invalid."""
    grant = grants.get(key.partition(".")[0])
    if grant is None:
        _is_one_of(key, (_NO_DIGEST,))  # constant time: an unknown name takes as long as a wrong secret
        return None
    return grant if grant.holds(key) else None


def read_keys(paths: Sequence[Path], *, may_be_empty: bool = False) -> dict[str, Grant]:
    """Read the lines of some files, by name. Raises InvalidArgumentError with file and line."""
    grants: dict[str, Grant] = {}
    certificates: dict[str, str] = {}
    for path in paths:
        try:
            text = read_file(path, "keys file").decode()
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(f"keys file {path} is not UTF-8: {error.reason}") from None
        for number, line in enumerate(text.split("\n"), start=1):
            if not (line := line.strip()) or line.startswith("#"):
                continue
            try:
                grant = _parsed(line)
                if grant.name in grants:
                    raise InvalidArgumentError(
                        f"there is a line for '{grant.name}' already; give several hashes as a list in one line"
                    )
                for certificate in grant.certificates:
                    if (other := certificates.setdefault(certificate, grant.name)) != grant.name:
                        raise InvalidArgumentError(f"certificate {certificate[:80]!a} is that of '{other}' already")
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"keys file {path}:{number}: {error.message}") from None
            grants[grant.name] = grant
    if not grants and not may_be_empty:
        raise InvalidArgumentError(
            f"keys file {', '.join(map(str, paths))} has no key, so nobody could call; weft key new NAME makes one"
        )
    return grants


def _parsed(line: str) -> Grant:
    if len(line) > _MAX_LINE_CHARS:
        raise InvalidArgumentError(f"the line has {len(line)} characters; at most {_MAX_LINE_CHARS} are allowed")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InvalidArgumentError("each line must be a JSON object, as weft key new prints it")
    known = [field.name for field in fields(Grant)]
    if unknown := [name for name in entry if name not in known]:
        raise InvalidArgumentError(f"unknown field '{unknown[0][:80]}'; there are {', '.join(known)}")
    for field in fields(Grant):
        if field.name not in entry:
            if field.default is MISSING:
                raise InvalidArgumentError(f"field '{field.name}' is missing")
            continue
        entry[field.name] = _value(field.name, entry[field.name], field.default)
    grant = Grant(**entry)
    _check_name(grant.name)
    if not (grant.sha256 or grant.certificates):
        raise InvalidArgumentError("field 'sha256' is missing; a line needs it, or 'certificates'")
    for digest in grant.sha256:
        if not _SHA256.fullmatch(digest):
            raise InvalidArgumentError(
                "'sha256' must be 64 hex digits in lower case, or a list of such; never the key itself"
            )
    return grant


def _value(name: str, value: Any, default: object) -> Any:
    """The value of a field, converted to its type."""
    if name in ("sha256", "certificates", "models"):
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(item, str) for item in values):
            raise InvalidArgumentError(f"'{name}' must be a string or a list of strings that is not empty")
        return tuple(values)
    if name == "name":
        if not isinstance(value, str):
            raise InvalidArgumentError("'name' must be a string")
        return value
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"'{name}' must be true or false")
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1_000_000_000 or (isinstance(default, int) and value != int(value)):
        kind = "whole number" if isinstance(default, int) else "number"
        raise InvalidArgumentError(f"'{name}' must be a {kind} from 0 to 1000000000, got {value!r:.80}")
    return type(default)(value)  # type: ignore[call-arg]  # int or float


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"'{name[:80]!a}' cannot name a key; use 1 to 64 letters, digits, '-' and '_', a letter or digit first"
        )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _is_one_of(key: str, digests: Sequence[str]) -> bool:
    shown = _digest(key)
    return (
        sum(hmac.compare_digest(shown, digest) for digest in digests) > 0
    )  # compares with each of them, for constant time
