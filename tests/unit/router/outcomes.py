"""What becomes of a request, in one line: outputs or error, path, and where they apply the time and what was cancelled.

``Y=5 root{a;b!;c~} 40 ms ~c``, or ``ABORTED: g/1: root/b -> b@1: gone root{a;b!}``.
"""

import re
from typing import Any, NamedTuple

from tests.unit.router import make
from tests.unit.router.fake_target import Answer, FakeTarget, answering, failing
from tests.unit.router.virtual_clock import virtual_clock_of_loop

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.base.tensors import WireTensor, decode
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor

GONE = "UNAVAILABLE"
_ERROR_ID = re.compile(r" \(error id \w+\)")


class Late(NamedTuple):
    """What a model does after some time."""

    answer: Any
    after_ms: float


def models(**answers: Any) -> FakeTarget:
    """Numbers are an answer, a text is the status of a failure, a function is a script; any of these may be late."""
    return FakeTarget(**{name: _script(answer) for name, answer in answers.items()})


def _script(answer: Any, after_ms: float = 0) -> Answer:
    if isinstance(answer, Late):
        return _script(answer.answer, answer.after_ms)
    if isinstance(answer, str):
        return failing(answer, after_ms=after_ms)
    if isinstance(answer, WireTensor):

        async def give(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
            await answering(0, after_ms=after_ms)(call, context)
            return {output.name: answer for output in call.outputs}

        return give
    if callable(answer):
        return answer  # type: ignore[no-any-return]
    return answering(*(answer if isinstance(answer, tuple) else (answer,)), after_ms=after_ms)


def shown(tensor: WireTensor) -> str:
    """The values of a tensor."""
    values = decode(tensor).ravel().tolist()
    return ",".join(one.decode() if isinstance(one, bytes) else f"{one:g}" for one in values)


async def outcome(
    plan: GraphPlan | GraphExecutor, target: FakeTarget, *, timeout_ms: float | None = None, **options: Any
) -> str:
    """One request; nothing of it is left behind."""
    context, clock = make.context(timeout_ms=timeout_ms), virtual_clock_of_loop()
    start_ms, num_cancelled = clock.elapsed_ms() if clock else 0.0, len(target.cancelled)
    try:
        result = await make.run(plan, target, context=context, **options)
        found = " ".join(f"{name}={shown(tensor)}" for name, tensor in result.outputs.items()) or "nothing"
    except WeftError as error:
        found = f"{error.code}: {_ERROR_ID.sub('', error.message)}"
    assert (0, 0) == (target.num_open, make.num_other_tasks())
    [(_, path)] = context.trailing_metadata
    time = f" {clock.elapsed_ms() - start_ms:g} ms" if clock and clock.elapsed_ms() > start_ms else ""
    cancelled = sorted(target.cancelled[num_cancelled:])
    return f"{found} {path}{time}" + (f" ~{','.join(cancelled)}" if cancelled else "")
