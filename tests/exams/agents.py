"""Others' tests of the interfaces that agents speak, before a model that repeats its prompt, or one that is given.

    python -m tests.exams.agents --python FILE [--smg DIR] [--url URL --model NAME] [--only FOLDER ...]

``FILE`` is a Python with what the tests import: openresponses-types, openai, anthropic, pytest, httpx, requests, yaml,
numpy. ``DIR`` is a checkout of lightseekorg/smg. Prints what failed, and a row for each exam: its cases,
and how many passed.
"""

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copyfile

from tests.integration.routing import naming_service, running_router
from tests.integration.talking import TalkerCore, running_gateway

#: Files of tests by folder; the others are of pictures, and of tools and storage of a server.
FILES = {
    "completions": ("basic",),
    "messages": ("basic", "tool_use"),
    "responses": (
        *("basic_crud", "sampling_params", "state_management", "streaming_events", "structured_output", "tools_call"),
        "validation",
    ),
    "chat_completions": (
        *("enable_thinking", "function_calling", "openai_server", "reasoning_content", "sampling_defaults"),
        *("structured_output", "validation"),
    ),
}
#: In place of smg's, whose own start its gateway and its workers.
CONFTEST = """
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import anthropic
import openai
import pytest

try:
    import infra  # what some tests take addresses from; it starts workers
except ImportError:
    sys.modules["infra"] = MagicMock()
try:
    from smg_client import SmgClient
except ImportError:  # it has to be generated; tests name its errors

    class Stub(ModuleType):
        def __getattr__(self, name):
            return type(name, (Exception,), {})

    SmgClient, sys.modules["smg_client"] = None, Stub("smg_client")

URL, MODEL = os.environ["EXAM_URL"].removesuffix("/v1"), os.environ["EXAM_MODEL"]


@pytest.fixture(scope="class")
def setup_backend(request):
    kind = getattr(request, "param", "grpc")
    client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=30)
    if kind == "anthropic":
        client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=30)
    return kind, MODEL, client, SimpleNamespace(base_url=URL)


@pytest.fixture
def model(setup_backend):
    return MODEL


@pytest.fixture
def api_client(request, setup_backend):
    if getattr(request, "param", "openai") == "openai":
        yield setup_backend[2]
        return
    if SmgClient is None:
        pytest.skip("smg's client is not generated")
    client = SmgClient(base_url=URL, max_retries=0)
    yield client
    client.close()
"""


@contextlib.contextmanager
def repeating_model() -> Iterator[str]:
    """The URL of a gateway before a model that says what it is told, and calls what that asks it to."""
    with (
        tempfile.TemporaryDirectory() as graphs,
        naming_service(TalkerCore()) as service,
        running_router(Path(graphs), service) as router,
        running_gateway(router.grpc) as gateway,
    ):
        yield gateway.url


def open_responses(python: str, url: str, model: str) -> tuple[int, int]:
    """Cases, and those that pass; prints the others."""
    script = Path(__file__).with_name("open_responses.py")
    done = subprocess.run([python, script, url, model], capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    print(*lines, sep="\n")
    counts = json.loads(last)
    return counts["cases"], counts["passed"]


def smg(python: str, checkout: Path, folder: str, url: str, model: str) -> tuple[int, int]:
    """The same of a folder of smg's end-to-end tests; those that skip themselves or cannot be imported are no cases."""
    with tempfile.TemporaryDirectory() as place:
        tests, report = Path(place) / folder, Path(place) / "report.xml"
        tests.mkdir()
        for name in FILES[folder]:
            copyfile(checkout / f"e2e_test/{folder}/test_{name}.py", tests / f"test_{name}.py")
        (tests / "conftest.py").write_text(CONFTEST)
        paths = (str(checkout / "clients/python"), str(checkout / "e2e_test"))
        environment = {**os.environ, "EXAM_URL": url, "EXAM_MODEL": model, "PYTHONPATH": os.pathsep.join(paths)}
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "--continue-on-collection-errors",
            "-W",
            "ignore",
            "-p",
            "no:cacheprovider",
            f"--junit-xml={report}",
            "--rootdir",
            place,
            tests,
        ]
        subprocess.run(command, env=environment, capture_output=True, check=False)
        counts: Counter[str] = Counter()
        for case in ET.parse(report).getroot().iter("testcase"):  # our own pytest wrote it
            result = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
            if result is not None and result.get("message") == "collection failure":
                continue
            counts["passed" if result is None else result.tag] += 1
            if result is not None and result.tag != "skipped":
                name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
                print(f"{folder}: {name}: {result.get('message', '')[:160]!r}")
    return counts["passed"] + counts["failure"] + counts["error"], counts["passed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--smg", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--model", default="caller")
    parser.add_argument("--only", nargs="*", default=FILES)
    given = parser.parse_args()
    with contextlib.nullcontext(given.url) if given.url else repeating_model() as url:
        rows = [("Open Responses", partial(open_responses, given.python, url, given.model))]
        for folder in given.only if given.smg else ():
            rows.append((f"smg {folder}", partial(smg, given.python, given.smg, folder, url, given.model)))
        for name, run in rows:
            cases, passed = run()
            print(f"| {name} | {cases} | {passed} |", flush=True)


if __name__ == "__main__":
    main()
