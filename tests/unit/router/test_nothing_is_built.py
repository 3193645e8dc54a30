"""For every kind of node and every policy: what runs when a graph is loaded does not run for a request."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall

_HEADER = """
name: "g" platform: "graph" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
_TWO = 'step { name: "a" model_name: "double" } step { name: "b" model_name: "double" }'
_REST = 'step { name: "rest" otherwise: true model_name: "double" }'

BODIES = {
    "sequence": 'sequence { step { model_name: "double" } }',
    "ordered": 'sequence { ordered: true step { model_name: "double" } }',
    "node": 'sequence { step { node: "inner" } } } node { name: "inner" sequence { step { model_name: "double" } }',
    "loop": """sequence { step { model_name: "double" }
        loop { while: 'max(outputs.Y) < 0.0' max_iterations: 3 carry { key: "Y" value: "X" } } }""",
    "switch on": f"""switch {{ on: 'get(parameters, "k", "")' step {{ case: "1" model_name: "double" }} {_REST} }}""",
    "switch when": f"switch {{ step {{ name: 'one' when: 'inputs.X[0] > 5.0' model_name: 'double' }} {_REST} }}",
    "switch per row": f"""switch {{ per_row: true
        step {{ name: 'one' when: 'inputs.X[0] > 1.5' model_name: 'double' }} {_REST} }}""",
    "splitter": f"splitter {{ {_TWO} }}",
    "splitter sticky": f"splitter {{ sticky_by: 'request.id' {_TWO} }}",
    "splitter that learns": f"splitter {{ bandit {{ algorithm: UCB1 }} {_TWO} }}",
    "ensemble": f'ensemble {{ {_TWO} combine {{ output: "Y" method: AVERAGE }} }}',
    "ensemble, first": f'ensemble {{ {_TWO} combine {{ output: "Y" method: FIRST }} }}',
    "ensemble, quorum": f"""ensemble {{ step {{ name: "c" model_name: "double" dependency: SOFT }} {_TWO} quorum: 2
        straggler_ms: 5 combine {{ output: "Y" method: MEDIAN }} }}""",
    "cascade": f"cascade {{ step {{ name: 'c' model_name: 'double' accept: 'outputs.Y[0] > 5.0' }} {_TWO} }}".replace(
        'step { name: "b" model_name: "double" }', ""
    ),
    "cascade per row": """cascade { per_row: true step { name: 'c' model_name: 'double' accept: 'outputs.Y[0] > 1.5' }
        step { name: "d" model_name: "double" } }""",
    "shadow": f"""splitter {{ {_TWO} step {{ name: "s" model_name: "double" shadow {{ percent: 100 }} }} }}""",
    "soft": """sequence { step { model_name: "double" dependency: SOFT when: 'inputs.X[0] > 0.0'
        default { output: "Y" number: [ 0, 0 ] } } }""",
    "fallback": 'sequence { step { model_name: "double" fallback { model_name: "double" } } }',
    "policies": """sequence { step { model_name: "double" policy { timeout_ms: 1000 max_inflight: 8 min_remaining_ms: 1
        retry { attempts: 2 } hedge { after_ms: 900 } } } }""",
    "cache": 'sequence { step { model_name: "double" policy { cache { key: "request.id" } } } }',
}


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


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_what_runs_at_load_does_not_run_for_a_request(tmp_path: Path, target: FakeTarget, body: str) -> None:
    """Neither the compiler nor any constructor; a first request may keep what it works out for the next."""
    make.write(tmp_path, f'{_HEADER} node {{ name: "root" {body} }}', "g")

    async def send(core: Any, number: int) -> None:
        inputs = {"X": make.tensor(1, 1, 2, 2, shape=(2, 2)) if "per_row" in body else make.tensor(1, 2, shape=(1, 2))}
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
