"""Copies of small results to the host without stopping the device: ``HostCopy``."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class HostCopy:
    """A copy of tensors to the host that has begun; ``wait`` gives them.

    On a GPU they go into pinned memory, on a stream of their own that waits for the current one, and an event says when
    they are there. So work that is launched after them neither waits nor is waited for. On a CPU nothing is copied.

    Args:
        stream: Of the copies; None: the tensors are on a CPU.
        tensors: Not changed until ``wait`` returns.
    """

    def __init__(self, stream: "torch.cuda.Stream | None", *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._sources = tensors  # kept alive until they are copied
        self._tensors = tensors
        if stream is None:
            return
        self._tensors = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors)
        self._event = torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event.record(stream)

    def wait(self) -> list[npt.NDArray[Any]]:
        """Block until the copies are there; the tensors as arrays."""
        if self._event is not None:
            self._event.synchronize()
        self._sources = ()
        return [x.numpy() for x in self._tensors]
