"""Where a version comes from, noted in ``config.pbtxt``, of which every other character stays."""

import json
import re
from collections.abc import Mapping

from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import CONFIG_FILENAME
from weft.base.signature import PROVENANCE_PARAMETER
from weft.base.text.pbtxt import parse
from weft_protos.model_config_pb2 import ModelConfig

_VERSION = re.compile(re.escape(PROVENANCE_PARAMETER) + r"([1-9][0-9]*)")


def noted_versions(config: ModelConfig) -> list[int]:
    """Versions of which the configuration says where they come from."""
    return [int(match[1]) for key in config.parameters if (match := _VERSION.fullmatch(key))]


def needed_parameters(config: ModelConfig, wanted: Mapping[str, str]) -> dict[str, str]:
    """The parameters that a configuration lacks.

    Raises:
        InvalidArgumentError: It has one with another value, which its other versions use.
    """
    for key, value in wanted.items():
        if key in config.parameters and config.parameters[key].string_value != value:
            raise InvalidArgumentError(
                f"it needs the parameter {key}: '{value}', and {CONFIG_FILENAME} has "
                f"'{config.parameters[key].string_value}', which holds for all versions"
            )
    return {key: value for key, value in wanted.items() if key not in config.parameters}


def with_provenance(
    text: str, version: int, origin: str, facts: Mapping[str, object], parameters: Mapping[str, str]
) -> str:
    """A configuration with a note on a version, and the parameters that the version needs, at its end.

    Args:
        text: Of ``config.pbtxt``.
        version: The new one.
        origin: In words, for a comment.
        facts: Values that JSON knows.
        parameters: New ones, which hold for all versions.

    Raises:
        InvalidArgumentError: The text with the note would mean something else than the text and the note.
    """
    items = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()]
    literals = [f"{'{' if not index else ' '}{item}" for index, item in enumerate(items)]
    quoted = [_quoted(literal + ("}" if index == len(literals) - 1 else ",")) for index, literal in enumerate(literals)]
    lines = [
        "",
        f"# Version {version}: {' '.join(origin.split())}",
        "parameters {",
        f'  key: "{PROVENANCE_PARAMETER}{version}"',
        "  value {",
        "    string_value:",
        *(f"      {literal}" for literal in quoted),
        "  }",
        "}",
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}  # for version {version}"
            for key, value in parameters.items()
        ),
        "",
    ]
    newline = "\r\n" if "\r\n" in text else "\n"
    edited = text + ("" if not text or text.endswith("\n") else newline) + newline.join(lines)
    before, _ = parse(text, ModelConfig(), file=CONFIG_FILENAME)
    after, _ = parse(edited, ModelConfig(), file=CONFIG_FILENAME)
    note = after.parameters[f"{PROVENANCE_PARAMETER}{version}"].string_value
    for key in (f"{PROVENANCE_PARAMETER}{version}", *parameters):
        del after.parameters[key]
    if before != after or json.loads(note) != json.loads(json.dumps(dict(facts))):
        raise InvalidArgumentError(f"{CONFIG_FILENAME} cannot be extended: what it says would change")
    return edited


def _quoted(text: str) -> str:
    """A literal of protobuf's text format."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"'{escaped}'"
