"""Versions of models and graphs: whole numbers of at least 1. Imports nothing heavy."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.base.errors import InvalidArgumentError

if TYPE_CHECKING:
    from weft_protos.model_config_pb2 import ModelVersionPolicy

_CANONICAL = re.compile(r"[1-9][0-9]{0,17}")
#: Leading zeros are ignored, as in Triton Inference Server; longer numbers are rejected.
_SENT = re.compile(r"0*[1-9][0-9]{0,17}")


def is_version(text: str) -> bool:
    """Whether a text, such as a folder's name, is a version: without leading zeros, as in Triton Inference Server."""
    return _CANONICAL.fullmatch(text) is not None


def version_number(version: str) -> int:
    """Parse a version sent by a client; "" is invalid.

    Raises:
        InvalidArgumentError: It is not a whole number of at least 1.
    """
    if not _SENT.fullmatch(version):
        raise InvalidArgumentError(
            f"failed to get model version from specified version string '{version[:80]}', version should be an "
            "integral value > 0"
        )
    return int(version)


def version_order(version: str) -> int:
    """Sort key of a version; text that is not a number comes first."""
    return int(version) if version.isdecimal() else -1


def versions_to_serve(policy: "ModelVersionPolicy", available: Sequence[int]) -> list[int]:
    """The available versions that ``version_policy`` selects, ascending; without a policy the highest."""
    ordered = sorted(available)
    match policy.WhichOneof("policy_choice"):
        case "all":
            return ordered
        case "specific":
            return [version for version in ordered if version in policy.specific.versions]
        case "latest":
            return ordered[-max(policy.latest.num_versions, 1) :]
        case _:
            return ordered[-1:]
