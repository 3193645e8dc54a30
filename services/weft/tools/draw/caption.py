"""Small text of boxes and edges: cut where it is long, in full for the tooltip."""

from weft.tools.wording import shortened

#: More lines than that are counted instead.
MAX_LINES = 8


class Caption:
    """Lines in the order added; each is cut, the whole text is kept beside it."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    def add(self, *texts: str) -> None:
        """Add lines; one that is there already is not repeated."""
        self._texts += [text for text in texts if text and text not in self._texts]

    @property
    def lines(self) -> list[str]:
        """What is shown."""
        shown = [shortened(text) for text in self._texts]
        rest = len(shown) - MAX_LINES
        return shown if rest <= 1 else [*shown[:MAX_LINES], f"and {rest} more"]

    @property
    def tooltip(self) -> str:
        """Every line in full, or "" where ``lines`` says it all."""
        return "" if self.lines == self._texts else "\n".join(self._texts)
