"""A real Chromium, driven by Playwright's Python package, before the pages of real meshes."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.browser.repository import write_repository

import weft
from weft.base.processes.process import Endpoint
from weft.mesh.running import running_mesh

SAMPLES = Path(__file__).resolve().parents[2] / "model_repository"
#: The machine may be very slow.
WAIT_MS = 30_000
_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
#: Kept by each page: what broke its Content-Security-Policy, and how far numbers have moved others.
_WATCH = """
window.violations = []; window.shifts = [];
addEventListener("securitypolicyviolation", (event) =>
  violations.push(`${event.violatedDirective} ${event.blockedURI}`));
new PerformanceObserver((list) => list.getEntries().forEach((shift) => {
  if (!shift.hadRecentInput) shifts.push(shift.value);
})).observe({type: "layout-shift", buffered: true});
"""


def chromium() -> str:
    """Path of the browser; skips the test where there is none."""
    named = os.environ.get("WEFT_CHROMIUM")
    found = shutil.which(named) if named else None
    for name in () if named else ("chromium", "chromium-browser", "google-chrome"):
        found = found or shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {named or 'chromium'}; install Debian's chromium, or name a binary by WEFT_CHROMIUM")
    return found


@contextmanager
def running_browser() -> Iterator[Any]:
    """A headless Chromium with a profile of its own, which ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for the session: while it runs, no test can run an event loop."""
    chromium()
    with running_browser() as browser:
        yield browser


class Mesh(NamedTuple):
    """A running mesh with its page."""

    endpoints: dict[str, Endpoint]
    url: str
    repository: Path


@contextmanager
def mesh_with_page(repository: Path, log: Path, *arguments: str) -> Iterator[Mesh]:
    """A mesh of `weft up --ui-port 0`."""
    with log.open("w") as stream, running_mesh(repository, ["--ui-port", "0", *arguments], log=stream) as endpoints:
        yield Mesh(endpoints, f"http://{endpoints['page'].http}/ui/", repository)


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The samples with `hostile` and `roots`; shared, so a test must leave it as it found it."""
    chromium()
    folder = tmp_path_factory.mktemp("samples")
    repository = write_repository(folder / "repository", SAMPLES)
    with mesh_with_page(repository, folder / "log") as mesh:
        yield mesh


@contextmanager
def under_load(mesh: Mesh, pause_s: float = 0.02) -> Iterator[None]:
    """Requests to the samples, in turn, from one thread; also to those that fail."""
    stop = threading.Event()
    digit = (SAMPLES / "data/digits/3.png").read_bytes()
    requests: list[tuple[str, dict[str, Any]]] = [
        ("triage", {"TEXT": "I was charged twice."}), ("triage", {"TEXT": "Where is my parcel?"}),
        ("digits", {"IMAGE": digit}), ("digits_ab", {"IMAGE": digit}), ("digits_cascade", {"IMAGE": digit}),
        ("write", {"text_input": "Return a list of"}), ("hostile", {"TEXT": "a"}), ("hostile", {"TEXT": "fail"}),
        ("roots", {"X": [4.0]}), ("roots", {"X": [-1.0]}),
    ]  # fmt: skip

    def ask() -> None:
        with weft.connect(mesh.endpoints["router"].grpc, timeout_s=60.0) as client:
            while not stop.is_set():
                for name, inputs in requests:
                    with suppress(weft.WeftError):
                        client[name](**inputs)
                    stop.wait(pause_s)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a URL in a tab of its own profile; at the end no tab has broken its policy, and no error was logged."""
    opened: list[Any] = []
    faults: list[str] = []

    def open_tab(url: str, *, allow_errors: bool = False, **options: Any) -> Any:
        context = browser.new_context(reduced_motion="reduce", **options)
        context.set_default_timeout(WAIT_MS)
        context.add_init_script(_WATCH)
        page = context.new_page()
        opened.append(page)
        page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        if not allow_errors:
            page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
        page.goto(url)
        return page

    yield open_tab
    for page in opened:
        faults += page.evaluate("window.violations")
        faults += ["markup ran"] if page.evaluate("window.pwned") else []
        page.context.close()
    assert not faults
