"""Ends forked copies of a service process when the service ends.

User code may fork, by ``multiprocessing`` or ``os.fork``. A copy has none of the serving threads, so it would wait for
ever, and it keeps the process's sockets open: ports stay taken, and peers do not see the process end.
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
    """Whether this process is a forked copy of one that called ``end_copies``."""
    return _State.is_copy


def end_copies(in_copy: Callable[[], None] | None = None) -> None:
    """End every copy that is forked from now on when this process ends.

    Args:
        in_copy: Called first in each copy, for example to close inherited sockets.
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
