"""Clients of OpenAI's protocol before the sample mesh; ``docs/openai.md`` has what came of it.

They come from a virtual environment of their own, ``WEFT_OPENAI_CLIENTS``, with openai, openai-agents, anthropic,
litellm, guidellm and aiperf.
"""

import os
import re
import subprocess
from importlib.metadata import distributions
from pathlib import Path

import pytest
from tests.case_files import blocks

from weft.mesh.running import running_mesh

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/openai.md"
VENV = os.environ.get("WEFT_OPENAI_CLIENTS", "")
_BEGIN = re.compile(r"(<!-- clients: [^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)
_HEAD = """
import openai
U, K = "{server}/v1", {{"api_base": "{server}/v1", "api_key": "none"}}
M = [{{"role": "user", "content": "Hi"}}]
T = [{{"type": "function", "function": {{"name": "f", "parameters": {{"type": "object", "properties": {{}}}}}}}}]
client = openai.OpenAI(base_url=U, api_key="none", max_retries=0, timeout=60)
"""
_OWN_HEADS = {
    "litellm": "import litellm\n",
    "anthropic": 'import anthropic\nclaude = anthropic.Anthropic(base_url="{server}", api_key="none", max_retries=0)\n',
}


def _result(client: str, lines: list[str], server: str, out: Path) -> str:
    folder = ROOT / "model_repository/model/writer/1"
    command = [line.removeprefix("@command ") for line in lines if line.startswith("@command ")]
    if command:
        words = command[0].format(server=server, folder=folder, out=out).split()
        run = [f"{VENV}/bin/{words[0]}", *words[1:]]
    else:
        code = _HEAD.format(server=server) + _OWN_HEADS.get(client, "").format(server=server) + "\n".join(lines)
        run = [f"{VENV}/bin/python", "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        run, capture_output=True, text=True, timeout=240, check=False, env=environment, cwd=out.parent
    )
    text = done.stdout + done.stderr
    if found := re.search(r"Processed (\d+) valid requests and ([1-9]\d*) errors", text):
        return f"fails: {found[2]} of {int(found[1]) + int(found[2])} requests"
    if done.returncode == 0:
        return "works"
    said = re.findall(r"'message': ['\"]((?:[^'\"]|(?<=\w)'|'(?=\w))[^,]{8,80})|(\w+Error: .{1,160})", text)
    last = next(filter(None, said[-1])) if said else text.strip().split("\n")[-1]
    return f"fails: {last.partition(';')[0][:110].strip()}"


@pytest.mark.long
@pytest.mark.skipif(not VENV, reason="WEFT_OPENAI_CLIENTS names no virtual environment")
def test_clients_do_what_the_page_says(tmp_path: Path) -> None:
    """The table of the page is what came of each; ``WEFT_UPDATE_GOLDEN=1`` writes it."""
    (site,) = Path(VENV).glob("lib/*/site-packages")
    versions = {one.metadata["Name"]: one.version for one in distributions(path=[str(site)])}
    rows = ["| client | what was run | result |", "|---|---|---|"]
    _, *cases = blocks((Path(__file__).with_name("openai_clients.txt")).read_text())
    with running_mesh(ROOT / "model_repository", ["--http-port", "0"]) as mesh:
        for index, (title, lines) in enumerate(cases):
            client, _, what = title.partition(": ")
            result = _result(client, lines, f"http://{mesh['gateway'].http}", tmp_path / str(index))
            rows.append(f"| {client} {versions[client]} | {what} | {result} |")
    table = "\n".join([*rows, ""])
    text = GUIDE.read_text()
    (written,) = (match[2] for match in _BEGIN.finditer(text))
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        GUIDE.write_text(_BEGIN.sub(lambda match: match[1] + table + match[3], text))
    assert table == written
