"""What a request asks for, and everything that may be wrong with it."""

import json
from pathlib import Path
from typing import Any

from tests.case_files import Case, cases
from tests.unit.backends.llm.builders import make_request

from weft.backends.llm.tensors import GenerationRequest, RequestReader
from weft.backends.llm.text import TextCodec
from weft.base.errors import InvalidArgumentError


def _shown(asked: GenerationRequest, name: str, codec: TextCodec) -> Any:
    if name == "prompt":
        return [codec.shown_token(token_id).text for token_id in asked.prompt_ids.tolist()]
    shown = {
        "ids": asked.prompt_ids.tolist(),
        "streamed": asked.is_streamed,
        "echo": asked.echo,
        "outputs": sorted(asked.outputs),
        "salt": asked.salt.decode(),
    }
    return shown[name] if name in shown else getattr(asked.params, name)


@cases(Path(__file__).with_name("requests.txt"))
def test_request(codec: TextCodec, case: Case) -> None:
    """A request is read as the case says, or refused with what is wrong."""
    reader = RequestReader(None if case.option("tokenizer") == "none" else codec, max_choices=4)

    def read(line: str) -> list[str]:
        inputs = json.loads(line)
        for name, value in inputs.items():
            if isinstance(value, str):
                inputs[name] = value.encode("utf-8", "surrogateescape")
        try:
            asked = reader.read(make_request(**inputs))
        except InvalidArgumentError as error:
            return [error.message]
        return [json.dumps({name: _shown(asked, name, codec) for name in case.option("shows").split()})]

    case.check_script(read)
