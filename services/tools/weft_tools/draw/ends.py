"""Where a node is entered and left: how it chooses, and how it makes one answer."""

from weft_router.graph.plan import BanditAlgorithm, CombinePlan, NodeKind, NodePlan
from weft_tools.draw.caption import Caption
from weft_tools.draw.diagram import Item, Role
from weft_tools.wording import condition_text, counted, slot_name, target_text


def entry_item(node: NodePlan, name: str) -> Item:
    """The first item of the node's group, called ``name``."""
    caption = Caption()
    match node.kind:
        case NodeKind.SEQUENCE:
            return Item(name, "inputs", role=Role.TENSORS)
        case NodeKind.SWITCH:
            title = "each row: first that holds" if node.per_row else "first that holds"
            if node.on is not None:
                caption.add(f"on {condition_text(node.on)}")
        case NodeKind.SPLITTER:
            title = "one by weight"
            if node.sticky_by is not None:
                caption.add(f"sticky by {condition_text(node.sticky_by)}")
            if node.salt:
                caption.add(f"salt {node.salt}")
            if node.bandit is not None:
                title = "one by feedback"
                explores = node.bandit.algorithm in (BanditAlgorithm.EPSILON_GREEDY, BanditAlgorithm.EXP3)
                caption.add(f"{node.bandit.algorithm.value}{f', epsilon {node.bandit.epsilon:g}' * explores}")
                if node.bandit.min_pulls:
                    caption.add(f"first {counted(node.bandit.min_pulls, 'request')} for each by weight")
        case NodeKind.ENSEMBLE:
            title = "all at once"
        case NodeKind.CASCADE:
            title = "each row: in order until accepted" if node.per_row else "in order until accepted"
    return Item(name, title, caption.lines, caption.tooltip, Role.CHOICE)


def exit_item(node: NodePlan, name: str) -> Item:
    """The last item of the node's group, called ``name``."""
    caption = Caption()
    match node.kind:
        case NodeKind.SEQUENCE:
            return Item(name, "outputs", role=Role.TENSORS)
        case NodeKind.ENSEMBLE:
            title = "first answer" if node.is_race else "combine"
            for combine in node.combines:
                caption.add(f"{slot_name(node, combine.output)}: {_combine_text(combine)}")
            if node.quorum:
                caption.add(f"quorum {node.quorum} of {len(node.steps)}")
            if node.straggler_ms:
                caption.add(f"stragglers {node.straggler_ms} ms")
        case NodeKind.CASCADE:
            title = "first accepted, else the last answer"
        case _:
            title = "rows in order again" if node.per_row else "its answer"
    return Item(name, title, caption.lines, caption.tooltip, Role.MERGE)


def _combine_text(combine: CombinePlan) -> str:
    axis = f" on axis {combine.axis}" if combine.method.takes_axis else ""
    by = f" by {target_text(combine.custom.action)}" if combine.custom is not None else ""
    return f"{combine.method.name}{by}{axis}{', weighted' * combine.is_weighted}"
