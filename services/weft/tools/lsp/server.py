"""The language server: an editor's requests to answers. What reads files, or computes, runs on threads."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lsprotocol import types as lsp
from pygls.capabilities import get_capability
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

import weft
from weft.base.errors import WeftError
from weft.base.text.pbtxt import Diagnostic, PbtxtError, parse
from weft.base.text.pbtxt_format import format_pbtxt
from weft.base.text.pbtxt_scan import TOKEN
from weft.tools.check import FILENAMES
from weft.tools.lsp.assist import Place
from weft.tools.lsp.workspace import Texts, Workspace, message_of

Answer = TypeVar("Answer")

#: How long nothing must be typed before texts are checked.
_QUIET_S = 0.15
#: In the order of the protocol's numbers, from 1.
_SEVERITIES = ("error", "warning", "info")
#: The table of codes, which a checkout has.
_CODES = Path(weft.__file__).parents[2] / "docs" / "graphs.md"
_CHANGES = (
    *(lsp.TEXT_DOCUMENT_DID_OPEN, lsp.TEXT_DOCUMENT_DID_CHANGE, lsp.TEXT_DOCUMENT_DID_SAVE),
    *(lsp.TEXT_DOCUMENT_DID_CLOSE, lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES),
)
_MEANT = re.compile(r"did you mean '([^']+)'\?")
_SPACE = re.compile(r"(?:\b(?:inputs|outputs)\.)?\Z")


class GraphServer(LanguageServer):
    """Serves one editor; its state belongs to the event loop."""

    def __init__(self) -> None:
        super().__init__("weft", weft.__version__, lsp.TextDocumentSyncKind.Full)
        self._models = Workspace()
        self._num_changes = 0
        handlers: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(_CHANGES, self._check),
            lsp.TEXT_DOCUMENT_COMPLETION: self._complete,
            lsp.TEXT_DOCUMENT_HOVER: self._hover,
            lsp.TEXT_DOCUMENT_DEFINITION: self._define,
            lsp.TEXT_DOCUMENT_FORMATTING: self._format,
            lsp.TEXT_DOCUMENT_CODE_ACTION: self._fix,
        }
        options = {lsp.TEXT_DOCUMENT_COMPLETION: lsp.CompletionOptions(trigger_characters=list("\"'. "))}
        for name, handler in handlers.items():
            self.feature(name, options.get(name))(partial(handler))  # pygls writes attributes to what it is given

    async def _check(self, params: lsp.DidChangeTextDocumentParams | lsp.DidChangeWatchedFilesParams) -> None:
        """Check all open files, the changed one first, unless something changes meanwhile."""
        self._num_changes = number = self._num_changes + 1
        changed = getattr(getattr(params, "text_document", None), "uri", "")
        if changed and changed not in self.workspace.text_documents:  # closed
            self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(changed, []))
        await asyncio.sleep(_QUIET_S)
        texts = self._texts()
        documents = sorted(self.workspace.text_documents.items(), key=lambda item: item[0] != changed)
        for uri, document in documents:
            path = self._path(document)
            if number != self._num_changes or path not in texts:
                continue
            diagnostics = await asyncio.to_thread(self._diagnostics, path, texts)
            if number == self._num_changes:
                self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, diagnostics, document.version))

    async def _complete(self, params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        snippets = "text_document.completion.completion_item.snippet_support"
        has_snippets = get_capability(self.client_capabilities, snippets, False)

        def items(place: Place) -> list[lsp.CompletionItem]:
            return [
                lsp.CompletionItem(
                    one.label,
                    kind=lsp.CompletionItemKind.Field if "$0" in one.text else lsp.CompletionItemKind.Value,
                    detail=one.detail,
                    documentation=one.comment or None,
                    insert_text_format=lsp.InsertTextFormat.Snippet if has_snippets else None,
                    text_edit=lsp.TextEdit(
                        lsp.Range(self._position(place.text, one.start), params.position),
                        one.text if has_snippets else one.text.replace("$0", ""),
                    ),
                )
                for one in place.completions()
            ]

        return await self._ask(params, items) or []

    async def _hover(self, params: lsp.HoverParams) -> lsp.Hover | None:
        text = await self._ask(params, Place.hover)
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, text)) if text else None

    async def _define(self, params: lsp.DefinitionParams) -> lsp.Location | None:
        def location(place: Place) -> lsp.Location | None:
            found = place.definition()
            if found is None:
                return None
            path, offset = found
            here = self._position(place.text, offset)
            return lsp.Location(path.as_uri(), lsp.Range(here, here))

        return await self._ask(params, location)

    async def _format(self, params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit] | None:
        path = self._path(params.text_document)
        text = self._texts().get(path, "")
        formatted = await asyncio.to_thread(_formatted, path, text) if text else None
        return None if formatted is None else [lsp.TextEdit(self._range(text, 0, len(text)), formatted)]

    async def _fix(self, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
        """What a message suggests in place of the word that it names."""
        text, actions = self._texts().get(self._path(params.text_document), ""), []
        for found in params.context.diagnostics:
            start, end = self._offset(text, found.range.start), self._offset(text, found.range.end)
            meant = _MEANT.search(found.message)
            if meant is not None and start < end and f"'{text[start:end]}'" in found.message:
                if "." in meant[1]:  # inputs.X for X, or for outputs.X
                    start = _SPACE.search(text, 0, start).start()  # type: ignore[union-attr]  # matches ""
                edit = lsp.TextEdit(self._range(text, start, end), meant[1])
                change = lsp.WorkspaceEdit(changes={params.text_document.uri: [edit]})
                kind = lsp.CodeActionKind.QuickFix
                actions.append(lsp.CodeAction(f"write '{meant[1]}'", kind, [found], is_preferred=True, edit=change))
        return actions

    async def _ask(
        self, params: lsp.CompletionParams | lsp.HoverParams | lsp.DefinitionParams, ask: Callable[[Place], Answer]
    ) -> Answer | None:
        path, texts = self._path(params.text_document), self._texts()
        if path not in texts:
            return None
        offset = self._offset(texts[path], params.position)
        with contextlib.suppress(
            OSError, RuntimeError, WeftError
        ):  # a file around it is gone meanwhile, or a link to itself
            return await asyncio.to_thread(lambda: ask(Place(self._models, path, texts, offset)))
        return None

    def _path(self, document: lsp.TextDocumentIdentifier | TextDocument) -> Path:
        return Path(self.workspace.get_text_document(document.uri).path).resolve()

    def _texts(self) -> Texts:
        paths = {self._path(one): one.source for one in self.workspace.text_documents.values()}
        return {path: text for path, text in paths.items() if path.name in FILENAMES}

    def _diagnostics(self, path: Path, texts: Texts) -> list[lsp.Diagnostic]:
        return [self._diagnostic(path, texts[path], one) for one in self._models.check(path, texts)]

    def _diagnostic(self, path: Path, text: str, found: Diagnostic) -> lsp.Diagnostic:
        """As an editor shows it; what is wrong in another file stands at the top."""
        is_here = found.file == str(path)
        where = "" if is_here else f"{found.file}:{found.line}:{found.column}: "
        start, end = 0, len(text.partition("\n")[0])
        if is_here and found.line:
            start = sum(len(line) + 1 for line in text.split("\n")[: found.line - 1]) + found.column - 1
            token = TOKEN.match(text, start)
            end = token.end() if token is not None else start
            if token is not None and token.lastgroup == "string" and len(token[0]) > 2:
                start, end = start + 1, end - (token[0][-1] == token[0][0])
        is_listed = found.code and _CODES.is_file()
        return lsp.Diagnostic(
            self._range(text, start, end),
            where + found.message,
            lsp.DiagnosticSeverity(1 + _SEVERITIES.index(found.severity)),
            found.code or None,
            lsp.CodeDescription(f"{_CODES.as_uri()}#what-weft-check-says") if is_listed else None,
            "weft",
        )

    def _range(self, text: str, start: int, end: int) -> lsp.Range:
        return lsp.Range(self._position(text, start), self._position(text, end))

    def _position(self, text: str, offset: int) -> lsp.Position:
        """Line and column, in the units that the editor counts."""
        units = self.workspace.position_codec.client_num_units(text[text.rfind("\n", 0, offset) + 1 : offset])
        return lsp.Position(text.count("\n", 0, offset), units)

    def _offset(self, text: str, position: lsp.Position) -> int:
        lines = text.split("\n")
        at = self.workspace.position_codec.position_from_client_units(lines, position)
        return sum(len(line) + 1 for line in lines[: at.line]) + at.character


def _formatted(path: Path, text: str) -> str | None:
    """The text in canonical layout; None if it does not parse."""
    try:
        before, _ = parse(text, message_of(path, text), file=str(path))
        formatted = format_pbtxt(text)
        after, _ = parse(formatted, message_of(path, text), file=str(path))
    except PbtxtError:
        return None
    return formatted if before == after else None
