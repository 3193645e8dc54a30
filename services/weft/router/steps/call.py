"""The call of a model."""

from collections.abc import Mapping, Sequence

from typing_extensions import override

from weft.base.core import CallContext, InferCall, RequestedOutput
from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.observing import telemetry
from weft.base.signature import OPTIONAL_OUTPUTS_PARAMETER, TensorSpec
from weft.base.tensors import WireTensor
from weft.language.plan import CallPlan, Frame, NodePlan, StepPlan
from weft.language.request_scope import RequestScope
from weft.router.reporting.path import StepRecord
from weft.router.reporting.spans import call_attributes
from weft.router.steps.base import Action, ErrorContext
from weft.router.steps.defaults import Defaults
from weft.router.steps.run import Run
from weft.router.target import Target
from weft.router.tensors.adaption import fitted_input, full_rank, restored_outputs
from weft.router.tensors.answers import broken_promise, misfit


class CallAction(Action):
    """Calls a model; tensors are passed from answer to call without a copy.

    Args:
        plan: The step that calls.
        call: The call.
        target: Answers it.
        error_context: The graph, for messages.
        node: Around the step.
    """

    kind = telemetry.CLIENT

    def __init__(
        self, plan: StepPlan, call: CallPlan, target: Target, error_context: ErrorContext, node: NodePlan
    ) -> None:
        self._target_object = target
        self._signature = signature = call.signature
        shown_version = call.model_version or signature.version
        super().__init__(
            f"{plan.path} -> {call.model_name}@{shown_version}",
            target=target.name,
            model=call.model_name,
            version=shown_version,
            attributes=call_attributes(call.model_name, shown_version, target, is_stream=signature.is_decoupled),
        )
        self._step_name = plan.name
        self._path = plan.path
        self._sent_version = call.model_version
        self._error_context = error_context
        is_batching = signature.max_batch_size > 0
        ranks = {spec.name: full_rank(spec, is_batching=is_batching) for spec in signature.inputs}
        self._needed = frozenset(spec.name for spec in signature.inputs if not spec.is_optional)
        self._inputs = [(name, slot, ranks.get(name)) for name, slot in plan.inputs]
        self._declared = declared = {spec.name: spec for spec in signature.outputs}
        self._outputs = [(name, slot, declared[name]) for name, slot in plan.outputs]
        self._optional_outputs = plan.optional_outputs.union(
            name for name, spec in declared.items() if spec.is_optional
        )
        self._defaults = Defaults(plan, node) if plan.defaults else None
        self._around = node
        self._requested = tuple(RequestedOutput(binding.name, {}) for binding in plan.outputs)
        self._is_batching = is_batching
        self._keeps_rows = plan.keeps_rows
        self._restores = is_batching != error_context.is_batching

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        frame, request = run.frame, run.request
        captured = () if request.captures is None else request.captures.get(self._path, ())
        try:
            call, num_rows, is_fitted = self._call(frame, request.scope, captured)
            context = CallContext(
                run.deadline_ns,
                request.headers,
                trace_context=run.context,
                arrival_ns=record.start_ns,
                tried=record.tried,
                priority=request.scope.priority,
            )
            result = await self._target_object.infer(call, context)
            restored = self._store(result.outputs, frame, num_rows, is_fitted=is_fitted)
            if captured:
                self._capture(captured, result.outputs, restored, request.captured, num_rows)
        except WeftError as error:
            raise self._error_context.wrap(self._explained(error, frame), self.where) from error
        if result.model_version:
            record.version = result.model_version
        if result.parameters:
            request.response_parameters.update(result.parameters)

    def _call(self, frame: Frame, scope: RequestScope, captured: Sequence[str]) -> tuple[InferCall, int, bool]:
        """The call, the rows of its answer (-1: any), whether the batch dimension of an input was added or taken away.

        Args:
            frame: Has the inputs.
            scope: Of the request.
            captured: Outputs that the client requested by the step's path.
        """
        inputs: dict[str, WireTensor] = {}
        is_fitted = False
        num_rows = -1
        for name, slot, rank in self._inputs:
            tensor = frame[slot]
            if tensor is None:
                continue
            if rank is not None and len(tensor.shape) != rank:
                tensor = fitted_input(tensor, rank, self._signature, name)
                is_fitted = True
            inputs[name] = tensor
            if self._is_batching and num_rows < 0 and tensor.shape:
                num_rows = tensor.shape[0]
        requested = self._requested_with(captured) if captured else self._requested
        call = InferCall(
            self.model, self._sent_version, scope.request_id, scope.parameters, inputs, requested, max(num_rows, 1)
        )
        return call, num_rows if self._keeps_rows else -1, is_fitted

    def _explained(self, error: WeftError, frame: Frame) -> WeftError:
        """The error; of a call that lacks an input, it tells why."""
        absent = [(name, slot) for name, slot, _ in self._inputs if frame[slot] is None and name in self._needed]
        if error.code != InvalidArgumentError.code or not absent:
            return error
        sources, specs = (
            {slot: step.name for step in self._around.steps for _, slot in step.outputs},
            self._around.specs,
        )
        reasons = [
            f"'{name}' takes '{specs[slot].name if slot in specs else name}', which "
            + (f"step '{sources[slot]}' did not give" if slot in sources else "is not there")
            for name, slot in absent
        ]
        return error.with_message(f"{error.message} Input {', input '.join(reasons)}")

    def _requested_with(self, captured: Sequence[str]) -> tuple[RequestedOutput, ...]:
        """The outputs that the graph uses, and the captured ones."""
        known = {output.name for output in self._requested}
        return (*self._requested, *(RequestedOutput(name, {}) for name in captured if name not in known))

    def _store(
        self, outputs: dict[str, WireTensor], frame: Frame, num_rows: int, *, is_fitted: bool
    ) -> dict[str, WireTensor]:
        """Check the answer against the model's signature, and write it into the frame.

        Returns:
            The answer as the graph sees it.
        """
        restored = restored_outputs(outputs, self._signature) if is_fitted and self._restores else outputs
        for name, slot, spec in self._outputs:
            tensor = outputs.get(name)
            if tensor is None or misfit(tensor, spec, has_batch=self._is_batching, num_rows=num_rows):
                if tensor is not None or name not in self._optional_outputs:
                    raise self._fault(spec, tensor, outputs, num_rows)
                frame[slot] = None
                continue
            frame[slot] = restored[name]
        if self._defaults is not None:
            self._defaults.complete(frame)
        return restored

    def _capture(
        self,
        names: Sequence[str],
        outputs: Mapping[str, WireTensor],
        restored: Mapping[str, WireTensor],
        captured: dict[str, WireTensor],
        num_rows: int,
    ) -> None:
        """Keep outputs that the client requested by the step's path, and the answer has."""
        for name in names:
            spec, tensor = self._declared[name], outputs.get(name)
            if tensor is None:
                continue
            if misfit(tensor, spec, has_batch=self._is_batching, num_rows=num_rows):
                raise self._fault(spec, tensor, outputs, num_rows)
            captured[f"{self._path}/{name}"] = restored[name]

    def _fault(
        self, spec: TensorSpec, tensor: WireTensor | None, outputs: Mapping[str, WireTensor], num_rows: int
    ) -> InternalError:
        """What is wrong with an output."""
        if tensor is None:
            return InternalError(
                f"output '{spec.name}' of step '{self._step_name}' is missing in the answer, which has "
                f"{', '.join(outputs) or 'no output'}; model '{self.model}' declares it. A model that may leave it out "
                f'says so in its configuration: parameters {{ key: "{OPTIONAL_OUTPUTS_PARAMETER}" value {{ '
                f'string_value: "{spec.name}" }} }}'
            )
        fault = misfit(tensor, spec, has_batch=self._is_batching, num_rows=num_rows)
        return broken_promise(self.model, spec, fault)
