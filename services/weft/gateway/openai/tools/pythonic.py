"""``[f(a=1), g()]``, a list of calls as Python writes them: Llama 3.2 and 4, ToolACE."""

import ast
from typing import Any

from weft.gateway.openai.tools.formats import Schemas, ToolFormat, json_of
from weft.gateway.openai.tools.incoming import Arguments, IncomingText, NotACallError, Parsing

_START, _END = "<|python_start|>", "<|python_end|>"
#: Constants of JSON, which models write too.
_CONSTANTS = {"true": True, "false": False, "null": None}


def _parse(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    while marker := (yield from text.content_until("[", _START, _END)):
        if marker == "[":
            yield from text.attempt(_calls(text, schemas))
        else:
            text.commit()


def _calls(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    while True:
        yield from text.spaces()
        name = yield from text.function_name()
        if (yield from text.peek()) != "(" or (schemas and name not in schemas):
            raise NotACallError
        arguments = _arguments((yield from text.enclosed(quotes="\"'")))
        yield from text.begin_call(name)
        yield Arguments(arguments)
        text.end_call()
        yield from text.spaces()
        if not (yield from text.takes(",")):
            yield from text.expect("]")
            return


def _arguments(source: str) -> str:
    """JSON of the arguments in parentheses. Raises NotACallError if one is not named, or not a constant."""
    try:
        call = ast.parse(f"f{source}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(each.arg for each in call.keywords):
            raise NotACallError
        return json_of({each.arg: _value(each.value) for each in call.keywords})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise NotACallError from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_value(key): _value(value) for key, value in pairs if key is not None}
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    return ast.literal_eval(node)


FORMAT = ToolFormat("pythonic", ("[func_name", _START), _parse, around=("[", "("), has_special_tokens=True)
