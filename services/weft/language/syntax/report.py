"""Collects what is wrong with a graph's files."""

from collections.abc import Iterable

from weft.base.text.pbtxt import Diagnostic
from weft.language.syntax.parse import GraphFile


class GraphReport:
    """Diagnostics of one compilation; what is said twice is kept once.

    Args:
        file: Name of the file that is compiled; what is said of it comes first.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._found: dict[Diagnostic, None] = {}

    def error(self, code: str, file: GraphFile, path: str, message: str, *, is_name: bool = False) -> None:
        """An error at the value of the field ``path``, or at its name."""
        where = file.positions.find_name(path) if is_name else file.positions.find(path)
        self._add(code, file, where, message, "error")

    def error_at(self, code: str, file: GraphFile, path: str, index: int, message: str) -> None:
        """An error at character ``index`` of a string value."""
        self._add(code, file, file.positions.locate(path, index), message, "error")

    def info(self, code: str, file: GraphFile, path: str, message: str) -> None:
        """Something to know about the value of the field ``path``; nothing is wrong."""
        self._add(code, file, file.positions.find(path), message, "info")

    def warning(self, code: str, file: GraphFile, path: str, message: str) -> None:
        """A warning at the value of the field ``path``."""
        self._add(code, file, file.positions.find(path), message, "warning")

    def warning_at(self, code: str, file: GraphFile, path: str, index: int, message: str) -> None:
        """A warning at character ``index`` of a string value."""
        self._add(code, file, file.positions.locate(path, index), message, "warning")

    def refuse(self, file: GraphFile, path: str, fields: Iterable[tuple[str, bool]], why: str) -> None:
        """Report fields without effect (G018): those (name, is given) of the message at ``path`` that are given."""
        for name, is_given in fields:
            if is_given:
                where = f"{path}.{name}" if path else name
                self.error("G018", file, where, f"'{name}' has no effect {why}", is_name=True)

    def extend(self, diagnostics: list[Diagnostic]) -> None:
        """Diagnostics made elsewhere."""
        self._found.update(dict.fromkeys(diagnostics))

    @property
    def has_errors(self) -> bool:
        """Whether the graph cannot run."""
        return any(found.severity == "error" for found in self._found)

    def diagnostics(self) -> list[Diagnostic]:
        """Everything found, by file in the order first mentioned, then by position."""
        files = list(dict.fromkeys([self._file, *(found.file for found in self._found)]))
        return sorted(self._found, key=lambda found: (files.index(found.file), found.line, found.column))

    def _add(self, code: str, file: GraphFile, where: tuple[int, int], message: str, severity: str) -> None:
        source_line = file.positions.source_line(where[0])
        self._found[Diagnostic(file.source.file, *where, message, code, severity, source_line)] = None
