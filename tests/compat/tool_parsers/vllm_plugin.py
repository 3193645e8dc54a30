"""A pytest plugin that runs vLLM's tests of tool parsers with the gateway's: modules that stand for its own.

Every text that a test gives to a parser is also read in pieces, cut at every place.
"""

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from weft.gateway.openai.answer import AnswerForm, AnswerReader, message_of
from weft.gateway.openai.tools import FORMATS

#: The format that stands for a parser of vLLM, by the class that it comes in or the name that it is asked for by.
FORMAT_OF = {
    "Hermes2ProToolParser": "hermes",
    "Granite4ToolParser": "hermes",
    "Llama3JsonToolParser": "llama3_json",
    "Qwen3EngineToolParser": "qwen3_xml",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
}


@dataclass
class FunctionCall:
    name: str | None = None
    arguments: str | None = None


@dataclass
class ToolCall:
    function: FunctionCall
    id: str | None = None
    type: str | None = "function"
    index: int = 0


@dataclass
class Message:
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    tools_called: bool = False
    role: str | None = None


class Given:
    """Any request or tool, with the fields that it is made of."""

    def __init__(self, **given: Any) -> None:
        self.__dict__ |= {"tools": None} | given
        if isinstance(given.get("function"), dict):
            self.function = Given(**given["function"])


def schemas_of(tools: Any) -> dict[str, Any]:
    functions = [getattr(tool, "function", tool) for tool in tools or ()]
    return {each.name: each.parameters or {} for each in functions}


def check_splits(form: AnswerForm, text: str) -> dict[str, Any]:
    """The message that a text is, which is the same for any two pieces, and for single characters."""

    def read(*pieces: str) -> dict[str, Any]:
        reader = AnswerReader(form)
        deltas = [delta for piece in pieces for delta in reader.read(piece)]
        message = message_of([*deltas, *reader.finish()])
        for index, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call_{index}"
        return message

    whole = read(text)
    for pieces in (text, *((text[:place], text[place:]) for place in range(1, len(text)))):
        assert whole == read(*pieces), f"pieces {pieces!r} are read differently"
    return whole


class Parser:
    """A parser of vLLM."""

    format_name = ""

    def __init__(self, tokenizer: Any, tools: Any = None, **_: Any) -> None:
        self.model_tokenizer, self.vocab, self._tools = tokenizer, {}, tools
        self._reader: AnswerReader | None = None

    def _form(self, request: Any) -> AnswerForm:
        tools = self._tools or (request.tools if isinstance(request, Given) else None)
        return AnswerForm(tools=FORMATS[self.format_name], schemas=schemas_of(tools))

    def extract_tool_calls(self, model_output: str, request: Any) -> Message:
        message = check_splits(self._form(request), model_output)
        calls = [ToolCall(FunctionCall(**call["function"]), call["id"]) for call in message.get("tool_calls", ())]
        return Message(message["content"], calls, bool(calls))

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: Any, request: Any = None, **__: Any
    ) -> Message | None:
        if not self._reader or (current_text and not previous_text):
            self._reader = AnswerReader(self._form(request))
        message = Message()
        for delta in self._reader.read(delta_text):
            if "content" in delta:
                message.content = (message.content or "") + delta["content"]
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if message.tool_calls and message.tool_calls[-1].index == call["index"]:
                    message.tool_calls[-1].function.arguments += function["arguments"]
                else:
                    given = FunctionCall(function.get("name"), function["arguments"])
                    message.tool_calls.append(ToolCall(given, call.get("id"), call.get("type"), call["index"]))
        return message if message.content or message.tool_calls else None


class Tokenizer:
    """Tokens are words, or characters if WEFT_TOKENS says so."""

    pattern = re.compile("." if os.environ.get("WEFT_TOKENS") == "characters" else r" ?\w+|.", re.DOTALL)

    def __init__(self) -> None:
        self._texts: list[str] = []

    def tokenize(self, text: str) -> list[str]:
        return self.pattern.findall(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        first = len(self._texts)
        self._texts += self.tokenize(text)
        return list(range(first, len(self._texts)))

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(self._texts[each] for each in ([ids] if isinstance(ids, int) else ids))

    def get_vocab(self) -> dict[str, int]:
        return {}


def detokenize_incrementally(*, tokenizer: Tokenizer, all_input_ids: list[int], **_: Any) -> tuple[Any, ...]:
    return [], tokenizer.decode(all_input_ids[-1]), 0, 0


def parser_of(name: str) -> type[Parser]:
    return type(name, (Parser,), {"format_name": FORMAT_OF[name]})


NAMES: dict[str, Any] = {
    "FunctionCall": FunctionCall,
    "DeltaFunctionCall": FunctionCall,
    "ToolCall": ToolCall,
    "DeltaToolCall": ToolCall,
    "DeltaMessage": Message,
    "ExtractedToolCallInformation": Message,
    "ToolParser": Parser,
    "ToolParserManager": types.SimpleNamespace(get_tool_parser=parser_of),
    "AutoTokenizer": types.SimpleNamespace(from_pretrained=lambda *_, **__: Tokenizer()),
    "get_tokenizer": lambda *_, **__: Tokenizer(),
    "detokenize_incrementally": detokenize_incrementally,
    **{name: parser_of(name) for name in FORMAT_OF},
    **dict.fromkeys(("ChatCompletionRequest", "ChatCompletionToolsParam", "FunctionDefinition", "FunctionTool"), Given),
}


class StandIn(types.ModuleType):
    """A module with the names above; others are mocks."""

    __path__: list[str] = []  # noqa: RUF012  # as of every package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NAMES.get(name) or MagicMock()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of vLLM, and of what its tests import besides."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_stood_in = name.split(".", maxsplit=1)[0] in ("vllm", "transformers", "xgrammar", "openai")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stood_in else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@pytest.fixture
def default_tokenizer() -> Tokenizer:
    return Tokenizer()


RESULTS: dict[str, str] = {}


def pytest_configure() -> None:
    """From now on the modules are found."""
    sys.meta_path.insert(0, Finder())


def pytest_runtest_logreport(report: Any) -> None:
    """Keep how each test ended; a test is named without its parameters."""
    name = f"{Path(report.fspath).name}::{report.nodeid.rpartition('::')[2].partition('[')[0]}"
    if report.when == "call" or report.outcome != "passed":
        worst = max((RESULTS.get(name, "passed"), report.outcome), key=["passed", "skipped", "failed"].index)
        RESULTS[name] = worst


def pytest_sessionfinish() -> None:
    """Write them where the exam reads them."""
    Path(os.environ["WEFT_RESULTS"]).write_text(json.dumps(RESULTS))
