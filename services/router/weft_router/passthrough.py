"""A target's model called by its own name: traced, reported and told of in errors as a step of a graph is."""

import time

from weft_common import telemetry
from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import WeftError
from weft_router.graph.plan import NodeKind
from weft_router.headers import forwarded_headers
from weft_router.report import PATH_HEADER, TRACE_PARAMETER, NodeRun, StepRun, path_text, trace_text
from weft_router.spans import call_attributes, step_attributes, step_span
from weft_router.targets import Target


async def pass_through(target: Target, version: str, call: InferCall, context: CallContext) -> InferResult:
    """The model's answer as it is.

    The path, which is the model's name, is added to ``context.trailing_metadata``, also when the call fails. With the
    parameter ``graph_trace`` the answer has the time that the call took.

    Args:
        target: Serves the model.
        version: Of the model, for messages and traces.
        call: Sent as it is.
        context: Of the request.

    Raises:
        WeftError: As the target raised it; the message names the model.

    Cancelling the awaiting task cancels the call.
    """
    name = call.model_name
    run = NodeRun(name, NodeKind.SEQUENCE)
    context.trailing_metadata.append((PATH_HEADER, path_text(run)))
    record = StepRun(name, name, time.monotonic_ns(), target=target.name, model=name, version=version)
    run.steps.append(record)
    is_traced = telemetry.is_enabled()
    headers = forwarded_headers(context.headers, is_traced=is_traced)
    attributes = step_attributes(name, name) | call_attributes(name, version, target)
    with step_span(name, telemetry.CLIENT, attributes, context.trace_context) as (_, inner):
        try:
            result = await target.infer(call, CallContext(context.deadline_ns, headers, [], inner))
        except WeftError as error:
            raise error.with_message(f"{name}@{version}: {error.message}") from error
    record.status, record.end_ns = "OK", time.monotonic_ns()
    if call.parameters.get(TRACE_PARAMETER) is True:
        result.parameters = {**result.parameters, TRACE_PARAMETER: trace_text(run, record.start_ns)}
    return result
