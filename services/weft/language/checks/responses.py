"""What a graph says of the number of its responses, against what it gives."""

from weft.language.syntax.file import GraphFile, GraphReport

_DECOUPLED = "model_transaction_policy.decoupled"


def check_responses(file: GraphFile, report: GraphReport, *, streams: bool, is_known: bool) -> None:
    """Report what only a decoupled graph has (G018), what such a graph does not have (G019), and a wrong claim (G040).

    Args:
        file: The graph.
        report: Receives what is wrong.
        streams: Whether it may give several responses to a request.
        is_known: Whether anything is known of each step.
    """
    message, is_checked = file.message, file.dialect.checks_decoupled
    if not streams:
        if is_known and message.model_transaction_policy.decoupled and is_checked:
            text = "'decoupled' has no effect: no step streams, so each request gets one response"
            report.error("G018", file, _DECOUPLED, text, is_name=True)
        return
    if _DECOUPLED in file.positions and not message.model_transaction_policy.decoupled and is_checked:
        text = (
            "'decoupled: false' says that each request gets one response, but a step streams; write true, or leave it "
            "out"
        )
        report.error("G040", file, _DECOUPLED, text, is_name=True)
    for path, is_given in (
        ("policy.cache", message.policy.HasField("cache")),
        ("response_cache.enable", message.response_cache.enable),
    ):
        if is_given:
            name = path.removesuffix(".enable").rpartition(".")[2]
            text = f"'{name}' is not for a decoupled graph: the graph gives several responses to a request"
            report.error("G019", file, path, text, is_name=True)
