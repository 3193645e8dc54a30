"""Tool calls in the text of models: the table of formats, a module each."""

from collections.abc import Mapping

from weft.gateway.errors import RequestError
from weft.gateway.openai.tools import harmony, hermes, llama, mistral, pythonic, qwen_xml
from weft.gateway.openai.tools.formats import ForcedCalls, ToolFormat, named_in

#: Model parameter with the name of its format.
PARAMETER = "tool_parser"

#: By name. A chat template may show the markers of several; the first one counts.
FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (qwen_xml.FORMAT, hermes.FORMAT, mistral.FORMAT, llama.FORMAT, pythonic.FORMAT, harmony.FORMAT)
}


def format_of(model: str, named: str, template: str) -> ToolFormat:
    """The format with the name that the model's parameter gives, "" for that which its chat template shows.

    Raises:
        RequestError: The template shows none.
        InternalError: The parameter is wrong; clients are not told.
    """
    if named:
        return named_in(FORMATS, named, model, PARAMETER)
    for each in FORMATS.values():
        if any(marker in template for marker in each.markers):
            return each
    raise RequestError(
        f"how the model '{model}' writes tool calls is unknown: its chat template has no known marker; give the model "
        f"the parameter '{PARAMETER}', one of {', '.join(FORMATS)}",
        param="tools",
        code="unsupported_parameter",
    )


def forced(tools: ToolFormat) -> tuple[ToolFormat, ForcedCalls, str]:
    """How forced calls are written by a model of this format: format, form, and the text that the reader begins with.

    Where the format is not made of JSON, they are a list of JSON objects, as Mistral's behind its marker.
    """
    if tools.forced is not None:
        return tools, tools.forced, tools.forced.opening
    return mistral.FORMAT, mistral.FORCED._replace(opening="["), mistral.FORCED.opening
