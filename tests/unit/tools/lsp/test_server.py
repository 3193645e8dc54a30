"""`weft lsp` in a process of its own, by an editor's client over its standard input and output, and over TCP."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient
from tests.unit.tools.lsp.repository import GRAPH, MODEL, make_repository

from weft.cli.__main__ import main

COMMAND = [sys.executable, "-m", "weft.cli", "lsp"]
SNIPPETS = lsp.ClientCapabilities(
    text_document=lsp.TextDocumentClientCapabilities(
        completion=lsp.CompletionClientCapabilities(
            completion_item=lsp.ClientCompletionItemOptions(snippet_support=True)
        )
    )
)


class Editor:
    """An editor with open files; ``exit_status`` is that of the server."""

    def __init__(self) -> None:
        self.client = LanguageClient("editor", "1")
        self.published: asyncio.Queue[lsp.PublishDiagnosticsParams] = asyncio.Queue()
        self.messages: list[str] = []
        # pygls writes attributes to what it is given, which a bound method does not take
        self.client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(partial(self.published.put_nowait))
        self.client.feature(lsp.WINDOW_SHOW_MESSAGE)(lambda told: self.messages.append(told.message))

    def open(self, path: Path, text: str) -> lsp.TextDocumentIdentifier:
        """Open a file with a text that is not saved."""
        item = lsp.TextDocumentItem(path.as_uri(), "pbtxt", 1, text)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        return lsp.TextDocumentIdentifier(item.uri)

    def change(self, path: Path, text: str) -> None:
        """Replace the text of an open file."""
        changes = [lsp.TextDocumentContentChangeWholeDocument(text)]
        document = lsp.VersionedTextDocumentIdentifier(2, path.as_uri())
        self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, changes))

    async def diagnostics(self, path: Path) -> list[lsp.Diagnostic]:
        """The next diagnostics of a file."""
        async with asyncio.timeout(60):
            while (found := await self.published.get()).uri != path.as_uri():
                pass
        return list(found.diagnostics)


@pytest.fixture
async def editor() -> AsyncIterator[Editor]:
    """An editor that has started a server; after the test the server ends with status 0, and has told no error."""
    editor = Editor()
    await editor.client.start_io(*COMMAND)
    await editor.client.initialize_async(lsp.InitializeParams(capabilities=SNIPPETS, process_id=None, root_uri=None))
    editor.client.initialized(lsp.InitializedParams())
    yield editor
    await editor.client.shutdown_async(None)
    editor.client.exit(None)
    assert editor.client._server is not None
    async with asyncio.timeout(60):
        assert 0 == await editor.client._server.wait()
    await editor.client.stop()
    assert [] == editor.messages


async def test_an_error_and_its_cure(editor: Editor, tmp_path: Path) -> None:
    """Code, severity and place, counted in UTF-16, of what is not saved; the fix writes what the message suggests."""
    path = make_repository(tmp_path)
    text = GRAPH.replace('step { name: "first"', 'step { name: "😀" when: \'text(inputs.TXT) == "😀"\'')
    document = editor.open(path, text)
    (found,) = [one for one in await editor.diagnostics(path) if "TXT" in one.message]
    line = text.split("\n")[8]
    start = len(line[: line.index("TXT")].encode("utf-16-le")) // 2
    assert found.range == lsp.Range(lsp.Position(8, start), lsp.Position(8, start + 3))
    assert ("G011", lsp.DiagnosticSeverity.Error) == (found.code, found.severity)
    assert "unknown tensor 'TXT'; did you mean 'TEXT'?" == found.message
    context = lsp.CodeActionContext([found])
    (action,) = await editor.client.text_document_code_action_async(
        lsp.CodeActionParams(document, found.range, context)
    )
    (edit,) = action.edit.changes[document.uri]
    assert (found.range, "TEXT") == (edit.range, edit.new_text)
    editor.change(path, text.replace("TXT", "TEXT"))
    assert [] == [one for one in await editor.diagnostics(path) if "TXT" in one.message]


async def test_a_graph_is_checked_again_when_a_model_changes(editor: Editor, tmp_path: Path) -> None:
    """An unsaved configuration counts for the open graphs; once it is closed, the saved one does."""
    path = make_repository(tmp_path)
    config = tmp_path / "model/lang_id/config.pbtxt"
    editor.open(path, GRAPH)
    assert [] == await editor.diagnostics(path)
    document = editor.open(config, MODEL.replace('"LANG"', '"LANGUAGE"'))
    assert [] == await editor.diagnostics(config)
    assert "G017" in [one.code for one in await editor.diagnostics(path)]
    editor.change(config, "input: 3")
    assert ["'input' holds other fields; write input { ... }"] == [
        one.message for one in await editor.diagnostics(config)
    ]
    assert ["G002"] == [one.code for one in await editor.diagnostics(path)]
    editor.client.text_document_did_close(lsp.DidCloseTextDocumentParams(document))
    assert [] == await editor.diagnostics(path)


async def test_requests_of_an_editor(editor: Editor, tmp_path: Path) -> None:
    """Completions as snippets, documentation, a definition, the text in canonical layout; of other files nothing."""
    path = make_repository(tmp_path)
    document = editor.open(path, GRAPH.replace("step {", "step {  "))
    here = lsp.Position(8, 12)
    completions = await editor.client.text_document_completion_async(lsp.CompletionParams(document, here))
    assert "model_version: $0" in [one.text_edit.new_text for one in completions]
    hover = await editor.client.text_document_hover_async(lsp.HoverParams(document, lsp.Position(8, 33)))
    assert "A model of a target of the router, or else a graph." in hover.contents.value
    where = await editor.client.text_document_definition_async(lsp.DefinitionParams(document, lsp.Position(8, 45)))
    assert (tmp_path / "model/lang_id/config.pbtxt").as_uri() == where.uri
    asked = lsp.DocumentFormattingParams(document, lsp.FormattingOptions(8, insert_spaces=False))
    (edit,) = await editor.client.text_document_formatting_async(asked)
    assert (lsp.Position(0, 0), GRAPH) == (edit.range.start, edit.new_text)
    editor.change(path, "node {")
    assert await editor.client.text_document_formatting_async(asked) is None
    other = editor.open(tmp_path / "notes.pbtxt", "node { }")
    completions = await editor.client.text_document_completion_async(lsp.CompletionParams(other, lsp.Position(0, 7)))
    assert [] == completions


async def test_files_that_are_not_open(editor: Editor, tmp_path: Path) -> None:
    """What is asked about a file that is not there, or was closed, has no answer; closing twice is as once."""
    path = tmp_path / "graphs/gone/1/graph.pbtxt"
    document = editor.open(path, GRAPH)
    for _ in range(2):
        editor.client.text_document_did_close(lsp.DidCloseTextDocumentParams(document))
        assert [] == await editor.diagnostics(path)
    here = lsp.Position(1, 1)
    asked = lsp.DocumentFormattingParams(document, lsp.FormattingOptions(2, insert_spaces=True))
    assert await editor.client.text_document_formatting_async(asked) is None
    found = lsp.Diagnostic(lsp.Range(here, here), "unknown field 'nod'; did you mean 'node'?")
    context = lsp.CodeActionContext([found])
    fixes = await editor.client.text_document_code_action_async(lsp.CodeActionParams(document, found.range, context))
    assert not fixes
    assert await editor.client.text_document_hover_async(lsp.HoverParams(document, here)) is None


async def test_a_configuration_that_is_a_link_to_itself(editor: Editor, tmp_path: Path) -> None:
    """It is named, and what needs it has no answer."""
    path = make_repository(tmp_path)
    config = tmp_path / "model/lang_id/config.pbtxt"
    config.unlink()
    config.symlink_to(config)
    document = editor.open(path, GRAPH)
    (found,) = await editor.diagnostics(path)
    assert str(config) in found.message
    hover = await editor.client.text_document_hover_async(lsp.HoverParams(document, lsp.Position(8, 45)))
    assert hover is None


async def test_one_editor_over_tcp() -> None:
    """With `--tcp` it answers there, and ends with its editor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(*COMMAND, "--tcp", str(port), stderr=subprocess.PIPE)
    client = LanguageClient("editor", "1")
    async with asyncio.timeout(60):
        while True:
            try:
                await client.start_tcp("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.1)
        asked = lsp.InitializeParams(capabilities=lsp.ClientCapabilities(), process_id=None, root_uri=None)
        answer = await client.initialize_async(asked)
        assert ("weft", True) == (answer.server_info.name, answer.capabilities.hover_provider)
        await client.shutdown_async(None)
        client.exit(None)
        assert 0 == await process.wait()
    await client.stop()


def test_without_pygls_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an extra, because only editors need it."""
    monkeypatch.setitem(sys.modules, "lsprotocol", None)
    monkeypatch.delitem(sys.modules, "weft.tools.lsp.server", raising=False)
    monkeypatch.delitem(sys.modules, "weft.cli.commands.lsp", raising=False)
    assert 1 == main(["lsp"])
    assert "weft lsp needs 'lsprotocol': pip install 'weft-mesh[lsp]'" in capsys.readouterr().err


def test_nothing_that_runs_models_is_imported() -> None:
    """The server starts without what runs models or serves."""
    heavy = ("torch", "onnxruntime", "tokenizers", "PIL", "grpc", "starlette")
    code = f"import sys, weft.tools.lsp.server; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
