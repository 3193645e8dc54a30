"""Runs a page as a reader does: its files, its sessions of Python and its commands, in their order.

A block that begins with ``# path`` is a file; one with ``>>>`` is run by doctest, all of them in one process; a line
with ``$`` is a command, and lines below it are what it prints, with ``...`` for anything. A command with ``&`` has
printed these lines before the next is run, and ends with the page. Ports are free ones in place of 8001.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from tests.ports import free_port

WAIT_S = 120.0
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./]+\.\w+)\n")
_SESSION = """
import doctest, io, json, sys
names, told = {"__name__": "__main__"}, sys.stdout
for line in sys.stdin:
    test = doctest.DocTestParser().get_doctest(json.loads(line), names, "page", None, 0)
    text = io.StringIO()
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=text.write, clear_globs=False).failed
    names.update(test.globs)
    print(json.dumps(text.getvalue() if failed else ""), file=told, flush=True)
"""


@dataclass(frozen=True)
class Step:
    """``kind`` is file, session or command; ``name`` the file or command; ``text`` its content or what it prints."""

    kind: str
    name: str
    text: str


def steps_of(page: str) -> Iterator[Step]:
    """What a reader writes, types and reads."""
    for language, block in _BLOCK.findall(page):
        if file := _FILE.match(block):
            yield Step("file", file[1], block[file.end() :])
        elif language == "pycon":
            yield Step("session", "", block)
        elif not language:
            for command in re.split(r"(?m)^\$ ", block)[1:]:
                line, _, shown = command.partition("\n")
                yield Step("command", line, shown)


class Reader:
    """Follows a page in a folder.

    Args:
        python: The interpreter of the environment in which Weft is installed.
        variables: Its environment.
        skipped: Beginnings of commands that the page has for another place.
    """

    def __init__(self, folder: Path, python: str, variables: Mapping[str, str], skipped: tuple[str, ...] = ()) -> None:
        self._folder, self._python, self._skipped = folder, python, skipped
        self._variables = {**variables, "PYTHONPATH": f"{variables.get('PYTHONPATH', '')}{os.pathsep}."}
        self._port = free_port()
        self._stack = ExitStack()
        self._session: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def follow(self, step: Step) -> None:
        """Do what the page says. Raises AssertionError: it came out otherwise."""
        if step.kind == "file":
            path = self._folder / step.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._with_port(step.text))
        elif step.kind == "session":
            self._say(self._with_port(step.text))
        elif not step.name.startswith(self._skipped or "$"):
            self._run(step)

    def _with_port(self, text: str) -> str:
        return text.replace("8001", str(self._port))

    def _say(self, text: str) -> None:
        if self._session is None:
            self._session = self._stack.enter_context(
                _ended(
                    subprocess.Popen(
                        [self._python, "-c", _SESSION], cwd=self._folder, env=self._variables, text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    )
                )
            )  # fmt: skip
        assert self._session.stdin
        assert self._session.stdout
        self._session.stdin.write(json.dumps(text) + "\n")
        self._session.stdin.flush()
        said = self._session.stdout.readline()
        assert said, "the session has ended"
        assert not (failed := json.loads(said)), failed

    def _run(self, step: Step) -> None:
        line = self._with_port(step.name)
        command = shlex.split(line.removesuffix("&"))
        if command[:2] in (["weft", "infer"],):
            command += ["--url", f"127.0.0.1:{self._port}"]
        if command[:2] == ["weft", "up"]:
            command += ["--router-port", str(self._port), "--metrics-port", "0"]
        pattern = "(.*\n)*?".join(re.escape(one).replace(r"\.\.\.", ".*") + " *\n" for one in step.text.splitlines())
        shown = re.compile(f"(?m)^{self._with_port(pattern)}")
        if line.endswith("&"):
            self._stack.enter_context(self._serving(command, shown))
            return
        done = subprocess.run(
            command, cwd=self._folder, env=self._variables, text=True, timeout=WAIT_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert shown.search(done.stdout), f"{line} prints\n{done.stdout}"

    @contextmanager
    def _serving(self, command: list[str], shown: "re.Pattern[str]") -> Iterator[None]:
        log = self._folder / f"{command[1]}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, cwd=self._folder, env=self._variables, text=True,
                stdout=stream, stderr=stream, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        with _ended(process):
            deadline_s = time.monotonic() + WAIT_S
            while not shown.search(log.read_text()):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.1)
            yield


@contextmanager
def _ended(process: "subprocess.Popen[str]") -> "Iterator[subprocess.Popen[str]]":
    """A process that is ended with the block."""
    with process:
        try:
            yield process
        finally:
            process.terminate()


def follow(page: Path, folder: Path, skipped: tuple[str, ...] = ()) -> None:
    """Follow a page with this Python and its environment."""
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if "weft" not in entry_points(group="pytest11").names:  # the installed package is older than the checkout
        variables["PYTEST_PLUGINS"] = "weft.testing.plugin"
    with Reader(folder, sys.executable, variables, skipped) as reader:
        for step in steps_of(page.read_text()):
            reader.follow(step)
