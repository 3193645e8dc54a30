"""A rollout whose steps stream."""

from tests.unit.router.stream_targets import collected, compiled, counting, stream_of, stream_target

from weft.base.errors import RemoteError
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

GRAPH = """node { name: "root" splitter { step { name: "old" model_name: "a" } step { name: "new" model_name: "b" }
  rollout { steps: 100 guard { max_error_rate: 0.01 } } } }"""


async def test_a_stream_counts_once_at_its_end() -> None:
    """As a failure if it breaks off, though it has given responses; not if the client has read enough."""
    target = stream_target()
    runtime = Runtime({"model": target})
    executor = GraphExecutor(compiled(GRAPH), runtime)
    (rollout,) = runtime.rollouts
    found = []
    for script in (counting(3), counting(2, RemoteError("UNAVAILABLE", "gone"))):
        target.streams["b"] = script
        await collected(stream_of(executor, target))
        found.append((rollout.candidate.num_requests, rollout.candidate.num_errors))
    target.streams["b"] = counting(9)
    stream = stream_of(executor, target)
    await anext(stream)
    assert [(1, 0), (2, 1)] == found
    assert 2 == rollout.candidate.num_requests
    await stream.aclose()
    assert (3, 1) == (rollout.candidate.num_requests, rollout.candidate.num_errors)
