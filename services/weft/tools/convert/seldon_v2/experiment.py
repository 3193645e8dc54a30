"""Converts an ``Experiment`` to a draft: candidates by weight, and a mirror that gets copies.

Source:
    https://github.com/SeldonIO/seldon-core/blob/v2/operator/apis/mlops/v1alpha1/experiment_types.go
"""

from weft.language.compiler.resolve import MAX_ENTRIES
from weft.router.operators import SPLITTER
from weft.tools.convert.draft import Draft, DraftNode, DraftStep, check, differs, legal_name
from weft.tools.convert.yaml_tree import Source, YamlValue, shortened

_SPEC_FIELDS = frozenset({"default", "candidates", "mirror", "resourceType"})
_CANDIDATE_FIELDS = frozenset({"name", "weight"})
_MIRROR_FIELDS = frozenset({"name", "percent"})

_DEFAULT = (
    "requests for '{name}' itself take part in Seldon's experiment; here only those for '{graph}' do, so clients have "
    "to ask for that"
)
_STICKY = (
    "Seldon keeps a client on its candidate by the header x-seldon-route, which it gives with each answer. Here "
    "'sticky_by' does it by any header or parameter, and x-graph-route pins a step where the router allows it"
)


def draft_experiment(source: Source, document: YamlValue, name: str) -> Draft | None:
    """Convert one document; None after a reported error."""
    spec_value = document.entries.get("spec")
    spec = source.mapping(spec_value, "spec")
    source.unknown(spec, _SPEC_FIELDS, "the spec")
    draft = Draft.named(source, document, name)
    given = source.sequence(spec.get("candidates"), "candidates")
    if not 0 < len(given) <= MAX_ENTRIES:
        text = f"has {len(given)} candidates; the limit of Weft is {MAX_ENTRIES}" if given else "has no 'candidates'"
        source.error(spec_value or document, f"the Experiment {text}")
        return None
    is_pipeline = source.choice(spec.get("resourceType"), "resourceType", ("model", "pipeline")) == "pipeline"
    node = draft.nodes["root"] = DraftNode("root", SPLITTER, document)
    for value in given:
        step = _step(source, node, value, _CANDIDATE_FIELDS, "a candidate", is_pipeline=is_pipeline)
        if step is None:
            continue
        step.weight = source.number(value.entries.get("weight"), "weight") or 0
        if step.weight < 0:
            source.error(value.entries["weight"], f"weight {step.weight:g} is below 0")
        elif step.weight == 0:
            text = f"candidate '{step.name}' has weight 0: nothing is sent to it, and it was left out"
            check(source, value, node.remarks, text)
        else:
            node.steps.append(step)
    targets = [_target(step) for step in node.steps]
    if "mirror" in spec:
        _mirror(source, node, spec["mirror"], is_pipeline=is_pipeline)
    default = source.string(spec.get("default"), "default")
    if default and default not in targets:
        source.error(spec["default"], f"the default '{shortened(default)}' is none of the candidates")
    elif default:
        differs(source, spec["default"], draft.remarks, _DEFAULT.format(name=default, graph=draft.name))
    if len(targets) > 1:
        node.remarks.append(_STICKY)
    return None if source.has_errors else draft


def _mirror(source: Source, node: DraftNode, value: YamlValue, *, is_pipeline: bool) -> None:
    step = _step(source, node, value, _MIRROR_FIELDS, "the mirror", is_pipeline=is_pipeline)
    percent = source.number(value.entries.get("percent"), "percent") or 0
    if not 0 <= percent <= 100:
        source.error(value.entries["percent"], f"percent is {percent:g}; it must be between 0 and 100")
    elif step is not None and percent == 0:
        check(source, value, node.remarks, f"mirror '{step.name}' gets 0 percent of the requests, and it was left out")
    elif step is not None:
        step.shadow_percent = percent
        node.steps.append(step)


def _step(
    source: Source, node: DraftNode, value: YamlValue, fields: frozenset[str], what: str, *, is_pipeline: bool
) -> DraftStep | None:
    entries = source.mapping(value, what)
    source.unknown(entries, fields, what)
    target = source.string(entries.get("name"), "name")
    if not target:
        if value.kind == "mapping":
            source.error(value, f"{what} has no 'name'")
        return None
    if target in [_target(step) for step in node.steps]:
        source.error(entries["name"], f"'{shortened(target)}' takes part twice")
    step = DraftStep("", value, graph=target) if is_pipeline else DraftStep("", value, model=target)
    step.name = legal_name(source, value, target, [one.name for one in node.steps], step.remarks)
    return step


def _target(step: DraftStep) -> str:
    return step.model or step.graph
