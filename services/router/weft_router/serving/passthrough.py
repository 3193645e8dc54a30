"""A target's model called by its own name: traced, checked, reported and told of in errors as a step of a graph is.

Its answer is held against its configuration. Metadata, which are all that some servers have, do not say which dimension
is that of the batch, and are often vague beside: there the client gets what the target sent.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import NamedTuple

from weft_common.classification import PARAMETER
from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import InternalError, WeftError
from weft_common.observing import telemetry
from weft_common.observing.logs import get_logger
from weft_common.tensors import WireTensor
from weft_router.reporting.headers import forwarded_headers
from weft_router.reporting.path import PATH_HEADER, TRACE_PARAMETER, NodeRecord, StepRecord, path_text, trace_text
from weft_router.reporting.spans import call_attributes, step_attributes, step_span
from weft_router.target import Target, TargetModel
from weft_router.tensors.answers import check_outputs, rows_of

_log = get_logger("weft.router")


class _ForwardedCall(NamedTuple):
    """A call on its way through.

    Attributes:
        context: What surrounds it at the target.
        run: Receives what it did.
        record: Of the call.
    """

    context: CallContext
    run: NodeRecord
    record: StepRecord

    def add_trace(self, call: InferCall, result: InferResult) -> None:
        """The result has the time that the call took, if the client asked for it."""
        self.record.status, self.record.end_ns = "OK", time.monotonic_ns()
        if call.parameters.get(TRACE_PARAMETER) is True:
            trace = trace_text(self.run, self.record.start_ns)
            result.parameters = {**result.parameters, TRACE_PARAMETER: trace}


async def pass_through(target: Target, model: TargetModel, call: InferCall, context: CallContext) -> InferResult:
    """The model's answer as it is.

    The path, which is the model's name, is added to ``context.trailing_metadata``, also when the call fails. With the
    parameter ``graph_trace`` the answer has the time that the call took.

    Args:
        target: Serves the model.
        model: The model.
        call: Sent as it is.
        context: Of the request.

    Raises:
        WeftError: As the target raised it; the message names the model.
        InternalError: The answer is not as the model declares, or has not the rows of the call.

    Cancelling the awaiting task cancels the call.
    """
    with _passage(target, model, call, context) as passage:
        num_rows = rows_of(call.inputs, is_batching=model.signature.max_batch_size > 0)
        call.num_rows = max(num_rows, 1)
        result = await target.infer(call, passage.context)
        if model.config is not None:
            check_outputs(_tensors(result, call), model.signature, num_rows)
    passage.add_trace(call, result)
    return result


async def stream_through(
    target: Target, model: TargetModel, call: InferCall, context: CallContext
) -> AsyncGenerator[InferResult, None]:
    """The responses of a decoupled model as they are; arguments, errors and path are those of ``pass_through``.

    Each may have any number of rows. The trace comes with the last response, which is then not null.
    """
    with _passage(target, model, call, context) as passage:
        call.num_rows = max(rows_of(call.inputs, is_batching=model.signature.max_batch_size > 0), 1)
        async with contextlib.aclosing(target.stream_infer(call, passage.context)) as results:
            async for result in results:
                if model.config is not None:
                    check_outputs(_tensors(result, call), model.signature, -1)
                passage.record.responses += not result.is_null
                if result.is_final:
                    passage.add_trace(call, result)
                    result.is_null = result.is_null and not result.parameters
                yield result


def _tensors(result: InferResult, call: InferCall) -> Mapping[str, WireTensor]:
    """The outputs that are as the model declares them, which those asked for as classes are not."""
    classes = {output.name for output in call.outputs if PARAMETER in output.parameters}
    if not classes:
        return result.outputs
    return {name: tensor for name, tensor in result.outputs.items() if name not in classes}


@contextlib.contextmanager
def _passage(target: Target, model: TargetModel, call: InferCall, context: CallContext) -> Iterator[_ForwardedCall]:
    """A call is in work, within its span."""
    name, version = call.model_name, model.signature.version
    run = NodeRecord(name)
    context.trailing_metadata.append((PATH_HEADER, path_text(run)))
    record = StepRecord(name, name, time.monotonic_ns(), target=target.name, model=name, version=version)
    run.steps.append(record)
    is_traced = telemetry.is_enabled()
    headers = forwarded_headers(context.headers, is_traced=is_traced)
    attributes = step_attributes(name, name) | call_attributes(name, version, target)
    with step_span(name, telemetry.CLIENT, attributes, context.trace_context) as (_, inner):
        try:
            yield _ForwardedCall(CallContext(context.deadline_ns, headers, [], inner), run, record)
        except WeftError as error:
            placed = error.with_message(f"{name}@{version}: {error.message}")
            if isinstance(placed, InternalError):
                _log.error("%s", placed.message, extra={"error_id": placed.error_id})
            raise placed from error
