"""What the configuration of a language model is completed to, also by what a Hugging Face folder says of chats."""

import json
from pathlib import Path
from typing import Any

from tests.case_files import Case, cases

from weft.backends.llm.tensors import INPUTS, OUTPUTS, complete
from weft.base.errors import InvalidArgumentError


@cases(Path(__file__).with_name("completions.txt"))
def test_completion(tmp_path: Path, case: Case) -> None:
    """A configuration is completed from the folder as the case says, or refused."""
    for name, value in case.options:
        file, _, content = value.partition(" ")
        if name in ("file", "hex"):
            (tmp_path / file).write_bytes(content.encode() if name == "file" else bytes.fromhex(content))

    def shown(completed: dict[str, Any], name: str) -> Any:
        if name not in ("inputs", "outputs"):
            return completed.get(name)
        tensors = completed[name.removesuffix("s")]
        assert {tensor["name"] for tensor in tensors} == {*(INPUTS if name == "inputs" else OUTPUTS)}
        return [len(tensors), tensors[0], all(tensor.get("optional", False) for tensor in tensors)]

    def run(line: str) -> list[str]:
        try:
            completed = complete({"name": "m", **json.loads(line)}, tmp_path)
        except InvalidArgumentError as error:
            return [error.message.replace(str(tmp_path), "FOLDER")]
        values = {name: shown(completed, name) for name in case.option("shows").split()}
        return [json.dumps(values, ensure_ascii=False, sort_keys=True)]

    case.check_script(run)
