"""YAML as a tree in which every value knows its line and column, with limits on size and depth.

It uses only the parser events of PyYAML. Its loaders keep no positions, and recurse: ``yaml.load`` of 100,000 ``[``
with ``CSafeLoader`` ends the process with a segmentation fault (PyYAML 6).
"""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from weft.base.text.pbtxt import Diagnostic, suggestion

#: Kubernetes itself takes objects of 1.5 MiB at most.
MAX_FILE_BYTES = 2 << 20
_MAX_DEPTH = 64
#: Values of one document, those that aliases repeat counted again.
_MAX_VALUES = 100_000
_NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(slots=True, eq=False)
class YamlValue:
    """One value of a file.

    Attributes:
        kind: "mapping", "list", "text" for a quoted scalar, "plain" for an unquoted one.
        line, column: 1-based.
        text: Of a scalar.
        entries: Of a mapping, without those that are null.
        num_values: Number of values in it, itself included.
    """

    kind: str
    line: int
    column: int
    text: str = ""
    entries: dict[str, "YamlValue"] = field(default_factory=dict)
    items: list["YamlValue"] = field(default_factory=list)
    num_values: int = 1

    @property
    def is_null(self) -> bool:
        """Whether it is null."""
        return self.kind == "plain" and self.text in _NULLS


class UnreadableError(Exception):
    """The file is not readable YAML; ``diagnostic`` says why and where."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic
        super().__init__(diagnostic.message)


class Source:
    """One YAML file and its diagnostics.

    A value of a wrong type is reported and read as an empty one, so that one run finds every error; so is a missing
    one, without a report.

    Attributes:
        left_out: Fields of the current document that were not read so far.
    """

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.diagnostics: list[Diagnostic] = []
        self.left_out: list[str] = []
        self._lines = text.splitlines()
        self._text = text

    @property
    def has_errors(self) -> bool:
        """Whether anything found is an error."""
        return any(found.severity == "error" for found in self.diagnostics)

    def documents(self) -> list[YamlValue]:
        """Every non-empty document, parsed without recursion and with limits. Raises UnreadableError."""
        import yaml  # noqa: PLC0415  # an extra: only this command needs it

        builder, found = _TreeBuilder(self), []
        try:
            for event in yaml.parse(self._text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
                builder.take(event)
                if isinstance(event, yaml.DocumentEndEvent) and builder.document and not builder.document.is_null:
                    found.append(builder.document)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
            problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise self.unreadable(line, column, f"not YAML: {problem}") from None
        return found

    def error(self, value: YamlValue, message: str) -> None:
        """Report an error at a value."""
        self.diagnostics.append(self._found(value.line, value.column, message, "error"))

    def warning(self, value: YamlValue, message: str) -> None:
        """Report a warning at a value."""
        self.diagnostics.append(self._found(value.line, value.column, message, "warning"))

    def _found(self, line: int, column: int, message: str, severity: str) -> Diagnostic:
        shown = self._lines[line - 1] if 0 < line <= len(self._lines) else ""
        text = "".join(character if character.isprintable() else " " for character in message)
        return Diagnostic(self.file, line, column, text, severity=severity, source_line=shown)

    def unreadable(self, line: int, column: int, message: str) -> UnreadableError:
        """Make the error that ends the reading."""
        hint = "; it looks like a Helm template: render it first, with `helm template`" if "{{" in self._text else ""
        return UnreadableError(self._found(line, column, message + hint, "error"))

    def mapping(self, value: YamlValue | None, what: str) -> dict[str, YamlValue]:
        """Entries of a mapping."""
        return value.entries if value and self._is(value, ("mapping",), f"{what} must be a mapping") else {}

    def sequence(self, value: YamlValue | None, what: str) -> list[YamlValue]:
        """Items of a list."""
        return value.items if value and self._is(value, ("list",), f"{what} must be a list") else []

    def string(self, value: YamlValue | None, what: str) -> str:
        """Text of a scalar."""
        return value.text if value and self._is(value, ("text", "plain"), f"{what} must be a string") else ""

    def number(self, value: YamlValue | None, what: str) -> float | None:
        """A finite number; None if absent."""
        text = self.string(value, what)
        if not text or value is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not abs(number) < float("inf"):
            self.error(value, f"{what} must be a number, got '{shortened(text)}'")
            return None
        return number

    def boolean(self, value: YamlValue | None, what: str) -> bool:
        """True or false; false if absent."""
        text = self.string(value, what).lower()
        if value is not None and text not in ("true", "false", ""):
            self.error(value, f"{what} must be true or false, got '{shortened(text)}'")
        return text == "true"

    def choice(self, value: YamlValue | None, what: str, allowed: tuple[str, ...]) -> str:
        """One of ``allowed``; "" after reporting another value."""
        text = self.string(value, what)
        if value and text not in allowed and value.kind in ("text", "plain"):
            self.error(value, f"unknown {what} '{shortened(text)}'{suggestion(text, allowed)}")
            return ""
        return text

    def unknown(self, entries: dict[str, YamlValue], known: frozenset[str], what: str) -> None:
        """Warn of fields that the converter does not read."""
        for name, value in entries.items():
            if name not in known:
                hint = suggestion(name, known).partition("; use one of")[0]
                text = f"unknown field '{shortened(name)}' of {what} is left out{hint}"
                self.left_out.append(text)
                self.warning(value, text)

    def _is(self, value: YamlValue, kinds: tuple[str, ...], message: str) -> bool:
        if value.kind in kinds and not value.is_null:
            return True
        if not value.is_null:
            got = "a string" if value.kind in ("text", "plain") else f"a {value.kind}"
            self.error(value, f"{message}, got {got}")
        return False


def shortened(text: str) -> str:
    """One printable line of at most 80 characters."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= 80 else line[:77] + "..."


@dataclass(slots=True)
class _Open:
    """A list or mapping being read; ``key`` is a key whose value is next."""

    value: YamlValue
    anchor: str
    key: YamlValue | None = None
    merged: list[YamlValue] = field(default_factory=list)


class _TreeBuilder:
    def __init__(self, source: Source) -> None:
        self.document: YamlValue | None = None
        self._source = source
        self._anchors: dict[str, YamlValue | None] = {}  # None while the value is being read
        self._open: list[_Open] = []

    def take(self, event: Any) -> None:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        match type(event).__name__:
            case "DocumentStartEvent":
                self.document, self._anchors, self._open = None, {}, []
            case "ScalarEvent":
                is_plain = bool(event.implicit[0]) and event.style in (None, "")
                value = YamlValue("plain" if is_plain else "text", line, column, event.value)
                self._finish(value, event.anchor)
            case "SequenceStartEvent" | "MappingStartEvent" as event_name:
                if len(self._open) >= _MAX_DEPTH:
                    self._refuse(line, column, f"nested deeper than {_MAX_DEPTH}")
                if event.anchor:
                    self._anchors[event.anchor] = None
                kind = "list" if event_name == "SequenceStartEvent" else "mapping"
                self._open.append(_Open(YamlValue(kind, line, column), event.anchor))
            case "SequenceEndEvent" | "MappingEndEvent":
                done = self._open.pop()
                for name, inherited in (entry for mapping in done.merged for entry in mapping.entries.items()):
                    done.value.entries.setdefault(name, inherited)
                self._finish(done.value, done.anchor)
            case "AliasEvent":
                if event.anchor not in self._anchors:
                    self._refuse(line, column, f"unknown anchor '{shortened(event.anchor)}'")
                aliased = self._anchors[event.anchor]
                if aliased is None:
                    self._refuse(line, column, f"anchor '{shortened(event.anchor)}' contains itself")
                self._place(aliased, line, column)

    def _finish(self, value: YamlValue, anchor: str | None) -> None:
        if anchor:
            self._anchors[anchor] = value
        self._place(value, value.line, value.column)

    def _place(self, value: YamlValue, line: int, column: int) -> None:
        """Add a finished value to the list or mapping around it."""
        if not self._open:
            self.document = value
            return
        around = self._open[-1]
        around.value.num_values += value.num_values
        if around.value.num_values > _MAX_VALUES:
            self._refuse(line, column, f"more than {_MAX_VALUES} values, those that aliases repeat counted again")
        if around.value.kind == "list":
            around.value.items.append(value)
        elif around.key is None:
            if value.kind not in ("text", "plain"):
                self._refuse(value.line, value.column, f"a key must be a string, got a {value.kind}")
            around.key = value
        else:
            key, around.key = around.key, None
            self._enter(around, key, value)

    def _enter(self, around: _Open, key: YamlValue, value: YamlValue) -> None:
        if key.text == "<<" and key.kind == "plain":
            given = value.items if value.kind == "list" else [value]
            if any(one.kind != "mapping" for one in given):
                self._refuse(value.line, value.column, "'<<' takes a mapping, or a list of mappings")
            around.merged += given
        elif key.text in around.value.entries:
            self._source.error(key, f"'{shortened(key.text)}' is given twice")
        elif not value.is_null:
            around.value.entries[key.text] = value

    def _refuse(self, line: int, column: int, message: str) -> NoReturn:
        raise self._source.unreadable(line, column, message)
