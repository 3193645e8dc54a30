"""Collects the faults of a configuration."""

from weft.base.text.pbtxt import Diagnostic, PbtxtError, Positions


class ConfigReport:
    """The faults of one configuration; ``positions`` of its fields are None where it is not from a file."""

    def __init__(self, file: str, positions: Positions | None = None) -> None:
        self.diagnostics: list[Diagnostic] = []
        self._file = file
        self._positions = positions

    def error(self, path: str, message: str) -> None:
        """Add a fault of the field ``path``, for example ``input[0].dims[1]``; "" is the file as a whole."""
        self.diagnostics.append(self._diagnostic(path, message))

    def fault(self, path: str, message: str) -> PbtxtError:
        """The error of one fault that is found only when the model loads."""
        return PbtxtError([self._diagnostic(path, message)])

    def raise_if_any(self) -> None:
        """Raise PbtxtError with every fault, in the order of the file, if there is one."""
        if self.diagnostics:
            raise PbtxtError(sorted(self.diagnostics, key=lambda diagnostic: (diagnostic.line, diagnostic.column)))

    def _diagnostic(self, path: str, message: str) -> Diagnostic:
        line, column, source_line = 0, 0, ""
        if self._positions is not None:
            line, column = self._positions.find(path)
            source_line = self._positions.source_line(line)
        return Diagnostic(self._file, line, column, message, source_line=source_line)
