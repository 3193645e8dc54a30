"""Compiles steps to step plans: target, inputs, outputs, conditions, policies and fallback, bound to slots."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace

from weft.base.signature import OPTIONAL_OUTPUTS_PARAMETER
from weft.base.text.pbtxt import suggestion
from weft.language.checks.fields import min_remaining_ms
from weft.language.compiler.defaults import given_tensor
from weft.language.compiler.name_table import NameTable
from weft.language.compiler.names import MAX_DEPTH, StepNames, describe, target_path
from weft.language.compiler.resolve import (
    ModelTarget,
    NodeTarget,
    UnknownTarget,
    check_nesting,
    cycle_text,
    too_small_text,
    with_limits,
)
from weft.language.compiler.scope import BuiltNode, BuiltStep, NodeUse, ResponseCount, Scope
from weft.language.compiler.state import check_step
from weft.language.compiler.uses import UseBuilder, declared_uses
from weft.language.plan import Binding, CallPlan, ConstantPlan, DefaultPlan, NodePlan, PolicyPlan, ShadowPlan, StepPlan
from weft.language.syntax.file import GivenPolicies, GraphFile, GraphReport, NodeDefinition, StepDefinition, has_field
from weft.language.types.conditions import KEY, WHEN
from weft.language.types.signatures import TensorType, merged
from weft_protos import graph_pb2 as pb

#: Nodes of one plan: a node counts once for each step that runs it.
MAX_NODES = 1000


class StepBuilder(UseBuilder, ABC):
    """Compiles steps."""

    def __init__(self, names: NameTable, report: GraphReport) -> None:
        super().__init__(names, report)
        self.dependencies: set[tuple[str, str]] = set()
        self.num_nodes = 0
        self._is_too_large = False

    @abstractmethod
    def build_node(self, file: GraphFile, node: NodeDefinition, call: NodeUse) -> BuiltNode:
        """Compile a node for one use."""

    def step(
        self,
        scope: Scope,
        index: int,
        slots: Mapping[str, int],
        required: Collection[str] = (),
        *,
        is_whole: bool = False,
    ) -> BuiltStep:
        """Compile step ``index`` of a node.

        Args:
            required: Its outputs that the node itself requires.
            is_whole: If its target is a node, compile all of that node's outputs, read or not.
        """
        names = scope.names.steps[index]
        step = names.definition
        certain, place = self.narrowing(scope, step), scope.step_path(step)
        built = self._build(scope, names, slots, place, certain, frozenset(required), is_whole=is_whole)
        if built.plan is not None:
            built.plan = replace(built.plan, ok_slot=scope.ok_slots.get(index, -1))
        if built.responses > ResponseCount.ONE and not step.is_shadow:
            scope.streaming[index] = built.responses
        return built

    def shadows(self, scope: Scope) -> list[StepPlan]:
        """Compile the shadows of a node that does not run them itself; skip those with errors."""
        plans = []
        for names in scope.names.shadows:
            step = names.definition
            plans.append(self._build(scope, names, {}, scope.step_path(step), self.narrowing(scope, step)).plan)
        return [plan for plan in plans if plan is not None]

    def stand_alone(self, scope: Scope, step: StepDefinition, names: StepNames, slots: Mapping[str, int]) -> BuiltStep:
        """Compile a custom step, which is not one of the node's ``steps``."""
        built = self._build(scope, names, slots, scope.step_path(step), {})
        if built.responses > ResponseCount.ONE:
            kind = scope.node.kind
            what = kind.custom_words if kind is not None else "a custom step"
            text = f"{describe(names.target)} is decoupled, and {what} gives one answer for those that it combines"
            self.report.error("G040", scope.file, target_path(step), f"{text}; use a model that is not")
        return built

    def _build(
        self,
        scope: Scope,
        names: StepNames,
        slots: Mapping[str, int],
        at: str,
        certain: Mapping[str, TensorType],
        required: frozenset[str] = frozenset(),
        defaulted: frozenset[str] = frozenset(),
        *,
        is_whole: bool = False,
    ) -> BuiltStep:
        """Compile a step or a fallback.

        Args:
            certain: Facts proved by its ``when``, or by that of the step it replaces.
        """
        step = names.definition
        message = step.message
        defaulted |= {default.output for default in message.default}
        required = (required | _outputs_of_accept(scope, step)) - defaulted
        given, inputs = self.bound_inputs(scope, names, certain)
        constants = self._constants(scope, names, given)
        optional_outputs = frozenset(
            name
            for name, tensor in names.outputs.items()
            if tensor not in required and (tensor in defaulted or not scope.is_needed(tensor))
        )
        is_whole = is_whole or step.is_shadow
        action, types, responses = self._action(scope, names, slots, at, given, optional_outputs, is_whole=is_whole)
        around = scope.around or scope
        when_certain = certain if around is scope else self.narrowing(around, step)
        when = self.condition(around, f"{step.path}.when", WHEN, when_certain)
        policies_around = (scope.node.message.policy, scope.file.message.policy)
        policies = GivenPolicies(
            message.policy, policies_around, isinstance(action, CallPlan), message.HasField("shadow")
        )
        check_step(scope, names, self.names, policies, self.report)
        policy_plans = self._policies(scope, step, policies, certain)
        if responses > ResponseCount.ONE:
            self._check_stream_policies(scope, step)
        answered = {tensor: types[name] for name, tensor in names.outputs.items()}
        fallback: StepPlan | None = None
        if (own := names.fallback) is not None:
            place = f"{at}>{own.definition.name}"
            built = self._build(scope, own, slots, place, certain, required, defaulted, is_whole=is_whole)
            used = {name: known for name, known in answered.items() if name in slots or scope.names.is_used(name)}
            answered |= self._stood_in(scope, own, used, built.answered)
            fallback, responses = built.plan, max(responses, built.responses)
        defaults = () if step.is_shadow else self._defaults(scope, step, answered, slots)
        outputs = {name: _seen(scope, step, name, known) for name, known in answered.items()}
        completed = {default.output for default in message.default}
        answered = {name: known.present() if name in completed else known for name, known in answered.items()}
        if action is None or (fallback is None and step.fallback is not None):
            return BuiltStep(None, outputs, answered, responses)
        plan = StepPlan(
            name=step.name,
            path=at,
            action=action,
            inputs=inputs,
            constants=constants,
            outputs=tuple(Binding(name, slots[tensor]) for name, tensor in names.outputs.items() if tensor in slots),
            when=when,
            cases=tuple(message.case),
            is_otherwise=message.otherwise,
            weight=message.weight if message.HasField("weight") else 1.0,
            optional_outputs=optional_outputs,
            keeps_rows=scope.file.dialect.keeps_rows,
            timeout_ms=message.policy.timeout_ms,
            is_soft=message.dependency == pb.Step.SOFT,
            defaults=defaults,
            fallback=fallback,
            policies=policy_plans,
            shadow=self._shadow(scope, names) if step.is_shadow else None,
            max_inflight=message.policy.max_inflight,
            min_remaining_ms=min_remaining_ms(scope.file, policies, step.path, self.report),
        )
        return BuiltStep(plan, outputs, answered, responses)

    def _shadow(self, scope: Scope, names: StepNames) -> ShadowPlan:
        shadow, step = names.definition.message.shadow, names.definition
        if not shadow.HasField("mirror_compare"):
            return ShadowPlan(shadow.percent, shadow.max_inflight)
        compare, known = shadow.mirror_compare, [*scope.names.outputs]
        if isinstance(names.target, ModelTarget):
            known = [spec.name for spec in names.target.signature.outputs if spec.name in known]
        elif isinstance(names.target, NodeTarget):
            known = [name for name in self.names.of_target(names.target).outputs if name in known]
        outputs = tuple(compare.output) or tuple(known)
        unknown = next((name for name in outputs if name not in known), None)
        if not outputs or unknown is not None:
            what = "an output" if unknown is None else f"'{unknown}'"
            text = f"{describe(names.target)} and '{scope.node.name}' do not both give {what}, which is compared"
            where = f"{step.path}.shadow.mirror_compare"
            self.report.error("G042", scope.file, where, text + suggestion(unknown or "", known))
        given = compare.rtol, compare.atol, compare.top_1
        return ShadowPlan(shadow.percent, shadow.max_inflight, outputs, *given)

    def _action(
        self,
        scope: Scope,
        names: StepNames,
        slots: Mapping[str, int],
        at: str,
        given: Mapping[str, TensorType],
        optional_outputs: frozenset[str],
        *,
        is_whole: bool,
    ) -> tuple[CallPlan | NodePlan | None, dict[str, TensorType], ResponseCount]:
        """Compile a step's action: the plan (None after an error), its output types, its number of responses."""
        step, target = names.definition, names.target
        where = f"step '{step.name}' ({scope.file.place(step.path)})"
        action: CallPlan | NodePlan | None = None
        outputs: dict[str, TensorType] = {}
        responses = ResponseCount.ONE
        if isinstance(target, ModelTarget):
            action = self._call(scope, step, target)
            if target.signature.is_decoupled:
                responses = ResponseCount.COLLECTABLE if target.signature.can_collect else ResponseCount.MANY
            is_batched = target.signature.max_batch_size > 0
            for spec in target.signature.outputs:
                origin = f"output '{spec.name}' of {describe(target)} in {where}"
                outputs[spec.name] = TensorType.of(spec, is_batched=is_batched, origin=origin)
                if spec.is_optional:
                    cure = f"give it a 'default' for '{names.outputs.get(spec.name, spec.name)}'"
                    absence = f"the model of step '{step.name}' may leave it out: {cure}"
                    outputs[spec.name] = replace(outputs[spec.name], absence=absence)
        elif isinstance(target, NodeTarget) and self._may_enter(scope, step, target):
            wanted = [name for name, tensor in names.outputs.items() if tensor in slots]
            use = NodeUse(
                given,
                {**scope.inputs, **scope.produced} if not target.is_graph else {},
                frozenset(self.names.of_target(target).outputs if is_whole else wanted),
                f"{at}/{target.node.name}",
                (*scope.call.trail, target.key),
                frozenset(names.outputs) - optional_outputs,
            )
            built = self.build_node(target.file, target.node, use)
            action, outputs, responses = built.plan, built.outputs, built.responses
            if action is not None and target.is_graph:
                action = with_limits(action, target.file)
        types = {name: outputs.get(name) or TensorType.unknown(where) for name in names.outputs}
        return action, types, responses

    def stream_text(self, scope: Scope, index: int) -> str:
        """Text for messages: the step of a node, or its fallback, gives several responses to a request."""
        step = scope.names.steps[index]
        for one in step.chain():
            if isinstance(one.target, ModelTarget) and one.target.signature.is_decoupled:
                return f"model '{one.target.signature.name}' of step '{one.definition.name}' is decoupled"
        return f"step '{step.definition.name}' streams, because a model inside it is decoupled"

    def _check_stream_policies(self, scope: Scope, step: StepDefinition) -> None:
        file = scope.file
        for name, kind in file.policies.items():
            if kind.why_no_stream and has_field(step.message.policy, name):
                text = f"'{name}' is not for step '{step.name}', which streams: {kind.why_no_stream}; leave it out"
                self.report.error("G019", file, f"{step.path}.policy.{name}", text, is_name=True)

    def _stood_in(
        self, scope: Scope, fallback: StepNames, own: Mapping[str, TensorType], other: Mapping[str, TensorType]
    ) -> dict[str, TensorType]:
        """Output types of a step (``own``) with its fallback (``other``); checks that they agree."""
        path = target_path(fallback.definition)
        result: dict[str, TensorType] = {}
        for tensor, known in own.items():
            result[tensor], instead = known, other.get(tensor)
            if instead is None:
                if not fallback.is_open:
                    text = f"fallback '{fallback.definition.name}' gives no '{tensor}', which its step gives"
                    self.missing_output(scope.file, path, text, tensor, other)
            elif self.agree(scope.file, path, f"'{tensor}'", instead, known, "a step and its fallback"):
                result[tensor] = merged([known, instead], known.origin)
        return result

    def _defaults(
        self, scope: Scope, step: StepDefinition, known: Mapping[str, TensorType], slots: Mapping[str, int]
    ) -> tuple[DefaultPlan, ...]:
        file = scope.file
        plans: list[DefaultPlan] = []
        for i, message in enumerate(step.message.default):
            path, name = f"{step.path}.default[{i}]", message.output
            if name not in known:
                if name and not any(one.is_open for one in scope.names.steps):
                    text = f"step '{step.name}' gives no '{name}'{suggestion(name, known)}"
                    self.report.error("G006", file, f"{path}.output", text)
                continue
            why = scope.node.kind.why_no_default(step.message) if scope.node.kind is not None else ""
            if why and known[name].is_known and not known[name].is_optional:
                if step.message.model_name:
                    why += f", or let '{OPTIONAL_OUTPUTS_PARAMETER}' of the model's configuration name it"
                self.report.error("G018", file, path, f"'default' has no effect {why}", is_name=True)
            output = known[name]
            is_batched = scope.is_batched and output.is_batched
            if output.is_batched and not is_batched and len(message.dims) == len(output.full_dims):
                output = replace(output, dims=output.full_dims)  # a model's batch is a list here
            tensor = given_tensor(file, path, message, replace(output, is_batched=is_batched), self.report)
            if tensor is not None and name in slots:
                plans.append(DefaultPlan(slots[name], tensor, is_batched))
        return tuple(plans)

    def _constants(self, scope: Scope, names: StepNames, given: dict[str, TensorType]) -> tuple[ConstantPlan, ...]:
        """Compile the step's constants, and add their types to those ``given`` to its target."""
        file, step, plans = scope.file, names.definition, list[ConstantPlan]()
        uses, seen = declared_uses(names, is_batched=scope.is_batched), set(step.message.input_map)
        for i, message in enumerate(step.message.constant):
            path, name = f"{step.path}.constant[{i}]", message.input
            used = uses.get(name)
            if name in seen:
                self.report.error("G005", file, f"{path}.input", f"input '{name}' has a source already; leave one out")
            elif used is not None:
                used = used.present()
                tensor = given_tensor(file, path, message, used, self.report)
                given[name] = used if tensor is None else replace(used, dims=tensor.shape[used.is_batched :])
                plans += [] if tensor is None else [ConstantPlan(name, tensor, used.is_batched)]
            elif not isinstance(names.target, UnknownTarget):
                what = describe(names.target)
                text = f"{what} has no input '{name}'{suggestion(name, uses)}"
                if isinstance(names.target, NodeTarget) and not uses:
                    text = f"{what} declares no inputs, so that the type of '{name}' is not known; let it declare them"
                self.report.error("G006", file, f"{path}.input" if name else path, text)
            seen.add(name)
        if plans and scope.is_batched and not names.wires:
            text = f"the inputs of step '{step.name}' are all constants, of one row, and {scope.file.title} has batches"
            self.report.error("G008", file, f"{step.path}.constant[0]", f"{text}; let it read a tensor of the node")
        return tuple(plans)

    def _policies(
        self, scope: Scope, step: StepDefinition, given: GivenPolicies, certain: Mapping[str, TensorType]
    ) -> tuple[PolicyPlan, ...]:
        plans = []
        for kind in scope.file.policies.values():
            path = kind.condition_path(f"{step.path}.policy")
            plans.append(kind.plan(given, self.condition(scope, path, KEY, certain) if path else None))
        return tuple(plan for plan in plans if plan is not None)

    def _call(self, scope: Scope, step: StepDefinition, target: ModelTarget) -> CallPlan:
        file, signature, path = scope.file, target.signature, target_path(step)
        limit, own = signature.max_batch_size, scope.max_batch_size
        if 0 < limit < own:
            text = too_small_text(file, own, f"model {signature.name}", limit)
            self.report.error("G009", file, path, text)
        self.dependencies.add((target.target, signature.name))
        return CallPlan(target.target, signature.name, target.version, signature)

    def _may_enter(self, scope: Scope, step: StepDefinition, target: NodeTarget) -> bool:
        """Whether a node can be compiled as the step's target: no cycle, not too deep or large; reports misfits."""
        path, trail = target_path(step), scope.call.trail
        if target.key in trail:
            self.report.error("G003", scope.file, path, cycle_text(trail, target))
            return False
        is_deep = len(trail) >= MAX_DEPTH
        if is_deep or self.num_nodes >= MAX_NODES:
            what = (
                f"nodes are nested deeper than {MAX_DEPTH}"
                if is_deep
                else f"the graph expands to more than {MAX_NODES} nodes: one counts once for each step that runs it"
            )
            if not self._is_too_large:
                self.report.error("G024", scope.file, path, f"{what}, which this version of Weft does not support")
            self._is_too_large = True
            return False
        check_nesting(scope.file, scope.max_batch_size, path, target, self.report)
        return True


def _seen(scope: Scope, step: StepDefinition, tensor: str, known: TensorType) -> TensorType:
    """Type of an output for its readers: optional if the step may be skipped or fail softly, and has no default."""
    message = step.message
    if any(default.output == tensor for default in message.default):
        return known.present()
    if known.absence:
        return known
    is_soft = message.dependency == pb.Step.SOFT
    is_skipped = _may_be_skipped(scope, step)
    if not (is_soft or is_skipped):
        return known
    happens = " or ".join(["fail softly"] * is_soft + ["be skipped"] * is_skipped)
    cure = f"give it a 'default' for '{tensor}'" + " or make it 'dependency: HARD'" * (not is_skipped)
    return replace(known, is_optional=True, absence=f"step '{step.name}' may {happens}: {cure}")


def _may_be_skipped(scope: Scope, step: StepDefinition) -> bool:
    """Whether its ``when`` may be false; in a pipeline, not if it only tests steps that always answer."""
    condition, kind = scope.names.conditions.get(f"{step.path}.when"), scope.node.kind
    if condition is None or kind is None or kind.chooses_by_when:
        return False
    expression, index = condition
    earlier = {one.name: one for one in scope.node.steps[:index] if not one.is_shadow}
    if not kind.plan.is_pipeline or not expression.asks_steps_alone:
        return True
    asked = [earlier.get(reference.name) for reference in expression.references]
    return not all(one and one.message.dependency == pb.Step.HARD and not _may_be_skipped(scope, one) for one in asked)


def _outputs_of_accept(scope: Scope, step: StepDefinition) -> set[str]:
    """Outputs of a step that its ``accept`` reads without a presence test."""
    condition = scope.names.conditions.get(f"{step.path}.accept")
    return {ref.name for ref in condition.expression.unproved if ref.space == "outputs"} if condition else set()
