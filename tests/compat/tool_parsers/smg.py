"""The tests of lightseekorg/smg's tool parsers, which are Rust, read as texts and what is asserted of their calls."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.compat.tool_parsers.vllm_plugin import check_splits

from weft.gateway.openai.answer import AnswerForm
from weft.gateway.openai.tools import FORMATS

#: The format that stands for a parser.
FORMAT_OF = {
    "QwenParser": "hermes",
    "LlamaParser": "llama3_json",
    "MistralParser": "mistral",
    "PythonicParser": "pythonic",
    "QwenXmlParser": "qwen3_xml",
}
_TEST = re.compile(r"#\[tokio::test\]\s+async fn (\w+)\(\) \{\n(.*?)\n\}", re.DOTALL)
_TEXT = r'(?:r#"(?P<raw>.*?)"#|r"(?P<plain>[^"]*)"|"(?P<escaped>(?:[^"\\]|\\.)*)")'
#: What a test does, in the order in which it does it.
_STEP = re.compile(
    rf"let (?:mut )?(?P<name>\w+)(?:: &str)? =\s*{_TEXT};"
    r"|let (?:mut )?(?P<pieces>\w+) = vec!\[(?P<items>.*?)\];"
    r"|(?P<parser>\w+Parser)::new\(\)"
    r"|(?P<whole>parse_complete)\((?P<given>[&\w]+)\)"
    r"|parse_incremental\((?P<piece>[&\w]+), &tools\)"
    r"|assert_eq!\(\s*\w*tools\w*\.len\(\), (?P<count>\d+)"
    r"|assert_eq!\(\s*\w*tools\w*\[(?P<index>\d+)\]\.function\.name, \"(?P<called>[^\"]+)\""
    rf"|assert_eq!\(\s*(?:\w+_text|normal),\s*(?:{_TEXT.replace('?P<', '?P<n_')}|(?P<same>\w+))"
    r"|let (?P<args>\w+): serde_json::Value =\s*serde_json::from_str\(&\w+\[(?P<of>\d+)\]"
    r"|assert_eq!\(\s*(?P<looked>\w+)(?P<keys>(?:\[\"?\w+\"?\])+),\s*(?P<value>.*?)\s*,?\s*\);"
    r"|assert_eq!\(name, \"(?P<streamed>\w+)\""
    r"|assert!\(\s*(?P<flag>got|found)_\w*name",
    re.DOTALL,
)


def results(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Format, test, and what differs, "" for nothing, of every test with a parser that the gateway has."""
    named = re.findall(r'name: "(\w+)"', (folder / "common/mod.rs").read_text())
    for file in sorted(folder.glob("*.rs")):
        for name, body in _TEST.findall(file.read_text()):
            format_name = next((FORMAT_OF[p] for p in re.findall(r"(\w+)::new\(\)", body) if p in FORMAT_OF), "")
            has_others = any(p not in FORMAT_OF for p in re.findall(r"(\w+Parser)::new\(\)", body))
            if format_name and not has_others and (difference := _run(body, {each: {} for each in named})) is not None:
                yield format_name, f"{file.name}::{name}", difference


def _run(body: str, schemas: Mapping[str, Any]) -> str | None:
    """What differs; None: the test asserts nothing of calls and content."""
    if "} else {" in body:
        return None
    texts: dict[str, Any] = {}
    streamed = ""
    form, message, arguments, num_asserted = AnswerForm(), {}, {}, 0
    for step in _STEP.finditer(body):
        got = {name: value for name, value in step.groupdict().items() if value is not None}
        calls = message.get("tool_calls", [])
        if any(got[each].strip("&") not in texts for each in ("given", "piece") if each in got):
            return None  # a text that the test computes
        try:
            if "name" in got:
                texts[got["name"]] = _text(step, "")
            elif "pieces" in got:
                texts["chunk"] = "".join(_text(each, "") for each in re.finditer(_TEXT, got["items"], re.DOTALL))
            elif "parser" in got:
                form, message = AnswerForm(tools=FORMATS[FORMAT_OF[got["parser"]]]), {}
                streamed = ""
            elif "whole" in got:
                message = check_splits(form, texts[got["given"].strip("&")])
            elif "piece" in got:
                streamed += texts[got["piece"].strip("&")]
                message = check_splits(AnswerForm(tools=form.tools, schemas=schemas), streamed)
            elif not message:
                continue
            elif "args" in got:
                arguments[got["args"]] = json.loads(calls[int(got["of"])]["function"]["arguments"])
            else:
                num_asserted += _check(step, got, message, arguments, texts)
        except (AssertionError, LookupError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "" if num_asserted else None


def _check(step: re.Match[str], got: Mapping[str, str], message: Any, arguments: Any, texts: Any) -> bool:
    """Whether the step asserts something. Raises AssertionError if it is not so."""
    calls, content = message.get("tool_calls", []), message["content"] or ""
    if "count" in got:
        assert int(got["count"]) == len(calls), f"{len(calls)} calls"
    elif "called" in got:
        assert got["called"] == calls[int(got["index"])]["function"]["name"]
    elif "streamed" in got:
        assert not calls or got["streamed"] in [call["function"]["name"] for call in calls]
    elif "flag" in got:
        assert calls, "no call"
    elif "looked" in got and got["looked"] in arguments:
        value = arguments[got["looked"]]
        for key in re.findall(r"\w+", got["keys"]):
            value = value[int(key) if isinstance(value, list) else key]
        expected = re.sub(r"^json!\((.*)\)$|^serde_json::Value::", r"\1", got["value"], flags=re.DOTALL)
        assert json.loads(expected.replace("Null", "null")) == value, f"{got['keys']} is {value!r}"
    elif "same" in got and got["same"] in texts:
        assert texts[got["same"]] == content, f"content is {content!r}"
    elif any(name.startswith("n_") for name in got):
        assert _text(step, "n_") == content, f"content is {content!r}"
    else:
        return False
    return True


def _text(match: re.Match[str], prefix: str) -> str:
    groups = match.groupdict()
    for name in ("raw", "plain"):
        if groups[prefix + name] is not None:
            return groups[prefix + name]
    return str(json.loads(f'"{groups[prefix + "escaped"]}"', strict=False))
