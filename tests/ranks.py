"""Processes of a test that compute together: ``on_ranks`` calls a function in each and returns what they return."""

import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.llm.parallel.groups import Groups, join
from weft.llm.parallel.topology import ParallelSizes

TIMEOUT_S = 180.0


def on_ranks(sizes: ParallelSizes, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``function(groups, *arguments)`` in order of ranks, each in a process with one torch thread.

    Function, arguments and results are pickled, so the function is one of a module.
    """
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(sizes.num_ranks) as pool:
        places = [(rank, sizes, f"{folder}/store", function, arguments) for rank in range(sizes.num_ranks)]
        return pool.map_async(_call, places, chunksize=1).get(TIMEOUT_S)


def _call(place: tuple[int, ParallelSizes, str, Callable[..., Any], tuple[Any, ...]]) -> Any:
    rank, sizes, path, function, arguments = place
    torch.set_num_threads(1)
    groups: Groups = join(
        rank, sizes, dist.FileStore(str(Path(path)), sizes.num_ranks), device="cpu", timeout_s=TIMEOUT_S
    )
    try:
        result = function(groups, *arguments)
        dist.barrier()  # what has been sent may not have been received yet
        return result
    finally:
        dist.destroy_process_group()
