"""Pictures of graphs."""

from collections.abc import Callable, Mapping

from weft_tools.draw.diagram import Group
from weft_tools.draw.dot import render_dot
from weft_tools.draw.mermaid import render_mermaid
from weft_tools.draw.outline import render_text
from weft_tools.draw.svg import render_svg

#: The formats of drawings.
FORMATS: Mapping[str, Callable[[Group], str]] = {
    "mermaid": render_mermaid,
    "dot": render_dot,
    "svg": render_svg,
    "text": render_text,
}
