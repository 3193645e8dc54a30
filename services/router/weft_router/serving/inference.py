"""What the two ways to answer a request have in common."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from weft_common.core import InferResult


class Inference(Protocol):
    """A request that was begun; it ends with ``answer``, or else with ``fail``.

    Attributes:
        work: What takes time; await it once, and give what it returns to ``answer``.
    """

    work: Callable[[], Awaitable[Any]]

    def answer(self, outcome: Any) -> InferResult:
        """The answer. Raises WeftError for a bad one; then call ``fail``."""

    def fail(self, error: BaseException) -> None:
        """``work`` or ``answer`` has raised this. Raises in its place what the client is to see, where it differs."""
