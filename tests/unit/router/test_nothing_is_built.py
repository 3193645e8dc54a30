"""For every kind of node and every policy: what runs when a graph is loaded does not run for a request."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.case_files import Case, cases
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall

_HEADER = """
name: "g" platform: "graph" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


@contextmanager
def functions_that_run() -> Iterator[set[CodeType]]:
    """Every constructor of the router, and every function of its compiler, that runs in the block, in any thread."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        is_built = frame.f_code.co_name == "__init__" and module.startswith("weft.router")
        if event == "call" and (is_built or module.startswith(("weft.language.", "weft.router.compile"))):
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@cases(Path(__file__).with_name("nothing_is_built.txt"))
async def test_what_runs_at_load_does_not_run_for_a_request(tmp_path: Path, target: FakeTarget, case: Case) -> None:
    """Neither the compiler nor any constructor; a first request may keep what it works out for the next."""
    graph = f"{_HEADER}\n{case.text}"
    make.write(tmp_path, graph, "g")

    async def send(core: Any, number: int) -> None:
        inputs = {"X": make.tensor(1, 1, 2, 2, shape=(2, 2)) if "per_row" in graph else make.tensor(1, 2, shape=(1, 2))}
        await core.infer(InferCall("g", "", f"r{number}", {"k": "1"}, inputs), CallContext())

    with functions_that_run() as at_load:
        started = make.started(tmp_path, target)
        s = await started.__aenter__()
    try:
        await send(s.core, 0)
        with functions_that_run() as at_request:
            for number in range(1, 4):
                await send(s.core, number)
    finally:
        await started.__aexit__(None, None, None)
    assert any(code.co_name == "compile_graph" or "compile" in code.co_name for code in at_load)
    again = {f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}" for code in at_load & at_request}
    assert set() == again
