"""Steps that are never chosen (G013), requests that choose none (G012), quorums that are never met (G016)."""

from weft_protos import graph_pb2 as pb
from weft_router.graph.plan import NodeKind
from weft_router.graph.syntax.parse import GraphFile, NodeDefinition, StepDefinition, is_race
from weft_router.graph.syntax.report import GraphReport
from weft_router.graph.types.expression import read_expression


def check_branches(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    """Report what the tests of one node's steps make impossible, whatever the models answer."""
    match node.kind:
        case NodeKind.SWITCH:
            _check_switch(file, node, report)
        case NodeKind.CASCADE:
            _check_cascade(file, node, report)
        case NodeKind.ENSEMBLE:
            _check_quorum(file, node, report)
        case _:
            pass
    for step in (*node.steps, *node.shadows) if node.kind is not NodeKind.SWITCH else node.shadows:
        if step.message.when and read_expression(step.message.when).constant is False:
            report.error("G013", file, f"{step.path}.when", f"step '{step.name}' never runs: 'when' is always false")


def _check_switch(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    switch = node.message.switch
    cases: dict[str, str] = {}
    tests: dict[str, str] = {}
    otherwise = otherwise_path = certain = ""
    for step in node.steps:
        message, path = step.message, step.path
        given = [name for name in ("when", "case", "otherwise") if getattr(message, name)]
        if len(given) != 1:
            have = " and ".join(f"'{name}'" for name in given) or "none"
            text = f"step '{step.name}' must have one of 'when', 'case' and 'otherwise'; it has {have}"
            report.error("G013", file, path, text)
        if certain and not message.otherwise:
            text = f"step '{step.name}' is never chosen: '{certain}' before it always is"
            report.error("G013", file, path, text)
        for i, case in enumerate(message.case):
            if case in cases:
                text = f"case '{case}' is taken by step '{cases[case]}' already"
                report.error("G013", file, f"{path}.case[{i}]", text)
            cases.setdefault(case, step.name)
        if message.case and not switch.on:
            text = "'case' has no effect in a switch without 'on'; give it the value to compare: on: 'text(inputs.X)'"
            report.error("G018", file, f"{path}.case[0]", text, is_name=True)
        if message.otherwise:
            if otherwise:
                report.error("G013", file, f"{path}.otherwise", f"step '{otherwise}' is 'otherwise' already")
            otherwise, otherwise_path = otherwise or step.name, otherwise_path or f"{path}.otherwise"
        if message.when:
            if message.when in tests:
                text = f"step '{tests[message.when]}' has the same test, so this one is never chosen"
                report.error("G013", file, f"{path}.when", text)
            tests.setdefault(message.when, step.name)
            constant = read_expression(message.when).constant
            certain = certain or (step.name if constant else "")
            if constant is False:
                report.error(
                    "G013", file, f"{path}.when", f"step '{step.name}' is never chosen: 'when' is always false"
                )
    if switch.on and not cases:
        text = "'on' has no effect: no step has a 'case'"
        report.error("G018", file, f"{node.kind_path}.on", text, is_name=True)
    if not otherwise and not certain and not decides_all(node):
        text = (
            f"switch '{node.name}' has no 'otherwise': a request that matches no step fails with INVALID_ARGUMENT; to "
            "answer it, give one step 'otherwise: true'"
        )
        report.warning("G012", file, node.kind_path, text)
    elif otherwise and certain:
        text = f"step '{otherwise}' is never chosen: '{certain}' always is"
        report.error("G013", file, otherwise_path, text, is_name=True)


def decides_all(node: NodeDefinition) -> bool:
    """Whether there is a case for true and one for false, and no other."""
    return {case for step in node.steps for case in step.message.case} == {"true", "false"}


def _check_cascade(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    """Steps behind one that always answers; tests that are always true or never; the idle test of the last step."""
    certain = ""
    for step in node.steps:
        if certain:
            text = (
                f"step '{step.name}' is never reached: the answer of '{certain}' always counts; give that one an "
                "'accept'"
            )
            report.error("G013", file, step.path, text)
        is_last = step is node.steps[-1]
        accept = step.message.accept
        constant = read_expression(accept).constant if accept else None
        if constant is not None:
            what = "always true, as without it" if constant else "always false, so that no answer of the step counts"
            cure = "write a test of 'outputs', for example max(outputs.PROBS) >= 0.9"
            report.error("G013", file, f"{step.path}.accept", f"'accept' is {what}; {cure}")
        elif accept and is_last:
            text = "'accept' of the last step has no effect: there is no step to go on to, so its answer counts anyway"
            report.warning("G018", file, f"{step.path}.accept", text)
        if not certain and not accept and not _may_pass(file, node, step):
            certain = step.name


def _may_pass(file: GraphFile, node: NodeDefinition, step: StepDefinition) -> bool:
    """Whether a cascade may go on behind a step that has no ``accept``."""
    message = step.message
    policies = (message.policy, node.message.policy, file.message.policy)
    around = policies if message.model_name else policies[:1]
    has_limit = any(policy.min_remaining_ms for policy in around)
    return bool(message.when) or message.dependency == pb.Step.SOFT or has_limit


def _check_quorum(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    quorum, path = node.message.ensemble.quorum, f"{node.kind_path}.quorum"
    if not quorum or is_race(node):
        return
    num_steps = len(node.steps)
    num_hard = sum(step.message.dependency == pb.Step.HARD for step in node.steps)
    if quorum > num_steps:
        steps = f"{num_steps} step{'s' * (num_steps != 1)}{', shadows not counted' * bool(node.shadows)}"
        text = f"quorum {quorum} can never be met: ensemble '{node.name}' has {steps}"
        report.error("G016", file, path, text)
    elif quorum < num_hard:
        text = (
            f"quorum {quorum} is less than the {num_hard} HARD steps of ensemble '{node.name}', which must all answer; "
            "make those that may be missing 'dependency: SOFT'"
        )
        report.error("G016", file, path, text)
