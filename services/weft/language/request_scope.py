"""The part of a request that conditions can read."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.base.core import ParameterValue


@dataclass(slots=True)
class RequestScope:
    """Request data visible to conditions, besides tensors.

    Attributes:
        headers: ASCII metadata, lower-case keys.
        request_id: May be "".
        priority: 0 if not given.
        deadline_ns: On ``clock_ns``; None without deadline.
    """

    parameters: Mapping[str, ParameterValue]
    headers: Mapping[str, str]
    request_id: str = ""
    priority: int = 0
    deadline_ns: int | None = None
    clock_ns: Callable[[], int] = time.monotonic_ns
