"""How many rows the step of a map gets at once."""

from weft.language.compiler.names import NodeNames, describe
from weft.language.compiler.resolve import ModelTarget, NodeTarget, Target, UnknownTarget
from weft.language.compiler.state import targets_of
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition


def chunk_size(file: GraphFile, node: NodeDefinition, names: NodeNames, index: int, report: GraphReport) -> int:
    """Rows in a chunk at most: what the step's target takes as a batch, and its fallbacks and shadows; 0: no batch.

    Args:
        file: Has the map.
        node: The map.
        names: Of the node.
        index: Of the step; the others are shadows.
        report: Receives that the file asks for more (G009).
    """
    own = _batch(names.steps[index].target)
    targets = [one for step in names.steps for one in targets_of(step) if not isinstance(one, UnknownTarget)]
    given = node.message.map.max_batch_size
    limits = [(max(_batch(one), 1), describe(one)) for one in targets]
    limit, target = min(limits, key=lambda pair: pair[0], default=(max(given, 1), ""))
    if given > limit:
        takes = f"batches of {limit} rows at most" if limit > 1 else "one row at a time"
        text = f"map '{node.name}' has chunks of {given} rows, but {target} takes {takes}; lower 'max_batch_size'"
        report.error("G009", file, f"{node.kind_path}.max_batch_size", text)
    return min(given or limit, limit) if own > 0 else 0


def _batch(target: Target) -> int:
    """``max_batch_size`` of a target."""
    if isinstance(target, ModelTarget):
        return target.signature.max_batch_size
    return target.file.message.max_batch_size if isinstance(target, NodeTarget) else 0
