"""What a request asks for, and everything that may be wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases
from tests.unit.backends.llm.builders import make_request

from weft.backends.llm.tensors import GenerationRequest, RequestReader, generation_defaults
from weft.backends.llm.text import TextCodec
from weft.base.errors import InvalidArgumentError


def test_a_bad_generation_config_names_its_file(tmp_path: Path) -> None:
    """And how to do without it."""
    for text, words in (('{"temperature": -1}', "generation_config.json: .*temperature.*to none"), ("[]", "object")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(InvalidArgumentError, match=words):
            generation_defaults(tmp_path)


def _shown(asked: GenerationRequest, name: str, codec: TextCodec) -> Any:
    if name == "prompt":
        return [codec.shown_token(token_id).text for token_id in asked.prompt_ids.tolist()]
    shown = {
        "ids": asked.prompt_ids.tolist(),
        "streamed": asked.is_streamed,
        "echo": asked.echo,
        "outputs": sorted(asked.outputs),
        "salt": asked.salt.decode(),
        "words": asked.bad_words,
        "dropped": asked.num_dropped,
        "resumed": (asked.resume_token_ids, asked.resume_logprob),
    }
    return shown[name] if name in shown else getattr(asked.params, name)


@cases(Path(__file__).with_name("requests.txt"))
def test_request(codec: TextCodec, case: Case, tmp_path: Path) -> None:
    """A request is read as the case says, or refused with what is wrong."""
    if generation := case.option("generation_config"):
        (tmp_path / "generation_config.json").write_text(generation)
    defaults = generation_defaults(tmp_path)
    reader = RequestReader(None if case.option("tokenizer") == "none" else codec, 4, defaults, 50)

    def read(line: str) -> list[str]:
        inputs = json.loads(line)
        for name, value in inputs.items():
            if isinstance(value, str):
                inputs[name] = value.encode("utf-8", "surrogateescape")
        try:
            request = make_request(**inputs)
            if (prompt := reader.prompt_outputs(request)) is not None:
                return [json.dumps({name: array.tolist() for name, array in prompt.items()}, default=bytes.decode)]
            asked = reader.read(request)
        except InvalidArgumentError as error:
            return [error.message]
        return [json.dumps({name: _shown(asked, name, codec) for name in case.option("shows").split()})]

    case.check_script(read)
