"""Copies of this process that user code forks, by ``multiprocessing`` or ``os.fork``.

A copy has none of the threads that serve, so that what it waits for never comes, and it keeps open what this process
has open: ports stay taken, and whoever is connected does not see the process end. Therefore it ends with its parent.
"""

import os
import threading
import time
from collections.abc import Callable

#: What a model in a copy is told that wants something of the service.
IN_COPY = (
    "this process is a copy that the model has forked, and only the process that it was forked from reaches the "
    "service; call from there, and pass the result on"
)
#: Pause between two looks at the parent, in seconds.
_LOOK_S = 0.5


class _State:
    is_watched = False
    is_copy = False
    parent = 0
    in_copies: tuple[Callable[[], None], ...] = ()


def is_copy() -> bool:
    """Whether this process is a copy of one that called ``end_copies``."""
    return _State.is_copy


def end_copies(in_copy: Callable[[], None] | None = None) -> None:
    """Have every copy that is forked from now on end when this process has ended.

    Args:
        in_copy: Called in each copy first, for example to close what it must not hold open.
    """
    if in_copy is not None:
        _State.in_copies += (in_copy,)
    if not _State.is_watched:
        _State.is_watched = True
        os.register_at_fork(before=_before, after_in_child=_after)


def _before() -> None:
    _State.parent = os.getpid()


def _after() -> None:
    _State.is_copy = True
    for in_copy in _State.in_copies:
        in_copy()
    threading.Thread(target=_end_with, args=(_State.parent,), name="end-with-parent", daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
