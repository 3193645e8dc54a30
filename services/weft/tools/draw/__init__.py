"""Pictures of graphs."""

from collections.abc import Callable, Mapping

from weft.tools.draw.build import Group
from weft.tools.draw.svg import render_svg
from weft.tools.draw.texts import render_dot, render_mermaid, render_text

#: The formats of drawings.
FORMATS: Mapping[str, Callable[[Group], str]] = {
    "mermaid": render_mermaid,
    "dot": render_dot,
    "svg": render_svg,
    "text": render_text,
}
