"""Capture and replay of work on a CUDA device: ``CudaRecorder``."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class GraphRecorder(Protocol):
    """Captures work once, to be repeated on the same tensors."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture ``work``.

        Args:
            work: Launches operations whose number, shapes and addresses are the same each time; runs more than once.

        Returns:
            A function that repeats it, and its result, which each call overwrites.
        """


class CudaRecorder:
    """CUDA graphs that share one pool of memory: only one of them may be running, and the next overwrites its results.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See ``GraphRecorder``; ``work`` runs twice before, so that nothing is compiled while it is captured."""
        with torch.cuda.device(self._device), torch.inference_mode():
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = work()
        return graph.replay, result
