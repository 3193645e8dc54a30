"""The time that a step asks for before it starts: the inner one of those of step, node and graph."""

from weft.language.syntax.file import GivenPolicies, GraphFile, GraphReport


def min_remaining_ms(file: GraphFile, given: GivenPolicies, path: str, report: GraphReport) -> int:
    """``min_remaining_ms`` that holds for one step; 0: none.

    Args:
        file: Where the step stands.
        given: What step, node and graph say.
        path: Of the step, for positions.
        report: Receives that the step never runs, because it wants more time than there is around it (G021).
    """
    wanted_ms = next((policy.min_remaining_ms for policy in given.inherited if policy.min_remaining_ms), 0)
    limit_ms = min((policy.timeout_ms for policy in given.around if policy.timeout_ms), default=0)
    if 0 < limit_ms <= wanted_ms:
        text = (
            f"the step never runs: it wants 'min_remaining_ms: {wanted_ms}', but all the time there is, the "
            f"'timeout_ms' around it, is {limit_ms}; make the first less than the second"
        )
        report.error("G021", file, f"{path}.policy.min_remaining_ms", text)
    return wanted_ms
