"""Pictures of graphs."""

from collections.abc import Callable, Mapping

from weft.tools.draw.diagram import Group
from weft.tools.draw.dot import render_dot
from weft.tools.draw.mermaid import render_mermaid
from weft.tools.draw.outline import render_text
from weft.tools.draw.svg import render_svg

#: The formats of drawings.
FORMATS: Mapping[str, Callable[[Group], str]] = {
    "mermaid": render_mermaid,
    "dot": render_dot,
    "svg": render_svg,
    "text": render_text,
}
