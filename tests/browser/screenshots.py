"""Pictures of the page for docs/ui.md: the samples under load. ``make screenshots``; ``--only NAME`` takes one.

Look at each before it is committed.
"""

import argparse
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from tests.browser.conftest import SAMPLES, mesh_with_page, running_browser, under_load
from tests.browser.repository import write_repository

IMAGES = SAMPLES.parent / "docs" / "images"
MAX_BYTES = 250_000
#: What numbers need to settle, in milliseconds.
SETTLE_MS = 6000


class Picture(NamedTuple):
    """One picture: where it is taken, what is done first, and on what screen."""

    view: str
    prepare: Callable[[Any], None] = lambda page: None
    scheme: str = "light"
    width: int = 1280
    height: int = 800


def send_digit(page: Any) -> None:
    """A picture sent by the form."""
    page.get_by_label("File for IMAGE").set_input_files(SAMPLES / "data/digits/3.png")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("region", name="Waterfall").wait_for()


def open_request(page: Any) -> None:
    """The latest request of `triage`."""
    page.get_by_role("row", name="triage/1").first.get_by_role("link").click()
    page.get_by_role("region", name="Waterfall").wait_for()


def open_step(page: Any) -> None:
    """The step that most requests end at."""
    page.get_by_role("button", name="tiny").first.click()


PICTURES = {
    "graph": Picture("#/graphs/digits_cascade/1", open_step),
    "failing": Picture("#/graphs/roots/1", scheme="dark", height=700),
    "try": Picture("#/try/digits", send_digit, height=900),
    "request": Picture("#/requests", open_request, scheme="dark"),
    "models": Picture("#/models"),
    "phone": Picture("#/graphs/digits_ab/1", width=390, height=844),
}


def main() -> None:
    """Start the samples, load them, take every picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PICTURES, action="append")
    parser.add_argument("--output", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        repository = write_repository(Path(folder) / "repository", SAMPLES, is_hostile=False)
        with mesh_with_page(repository, Path(folder) / "log") as mesh, under_load(mesh), running_browser() as browser:
            for name in arguments.only or PICTURES:
                take(browser, mesh.url, PICTURES[name], arguments.output / f"ui-{name}.png")


def take(browser: Any, url: str, picture: Picture, path: Path) -> None:
    """Write one picture, in at most 256 colours. Raises ValueError if it is too large for a repository."""
    screen = {"width": picture.width, "height": picture.height}
    page = browser.new_page(viewport=screen, color_scheme=picture.scheme, device_scale_factor=1)
    page.goto(url + picture.view)
    picture.prepare(page)
    page.wait_for_timeout(SETTLE_MS)
    taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    taken.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    page.close()
    if (num_bytes := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path} has {num_bytes} bytes; at most {MAX_BYTES}: take a smaller screen")
    print(f"{path}: {num_bytes} bytes")


if __name__ == "__main__":
    main()
