"""Build the sample models of this repository: ``python model_repository/build.py``.

Nothing is downloaded: weights and data come from installed packages. A sample whose sources and packages have not
changed since its last build is left alone.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.catalog import RECIPES
from recipes.modes import let_others_read
from recipes.recipe import (
    SOURCE,
    Figures,
    MissingPackageError,
    Recipe,
    build,
    built_figures,
    fingerprint,
    in_order,
    only_builder,
)
from tqdm import tqdm

_FOLDERS = ("graphs", "preprocess", "model", "postprocess", "data")


def main(argv: Sequence[str] | None = None) -> int:
    """Build what is asked for; 0 when all of it is there, 1 when a package is missing."""
    arguments = _parse(argv)
    repository = arguments.output.resolve()
    if repository != SOURCE:
        _copy_committed_files(repository)
    chosen = [recipe for recipe in in_order(RECIPES, arguments.only) if recipe.name not in arguments.skip]
    with tqdm(chosen, unit="sample", disable=None, leave=False) as progress:
        for recipe in progress:
            progress.set_description(recipe.name)
            try:
                with only_builder(repository, recipe.name):
                    line = _up_to_date(repository, recipe, is_forced=arguments.force)
            except MissingPackageError as error:
                tqdm.write(f"{recipe.name}: {error}", file=sys.stderr)
                return 1
            tqdm.write(line)
            sys.stdout.flush()
    return 0


def _up_to_date(repository: Path, recipe: Recipe, *, is_forced: bool) -> str:
    """Build the sample unless it is built; what was done. Raises MissingPackageError."""
    stamp = fingerprint(recipe, RECIPES)
    figures = None if is_forced else built_figures(repository, recipe, stamp)
    state = "up to date"
    if figures is None:
        start_s = time.perf_counter()
        figures = build(repository, recipe, stamp)
        state = f"built in {time.perf_counter() - start_s:.1f} s"
    let_others_read(repository, recipe)
    return _line(recipe.name, state, figures)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the sample models.")
    parser.add_argument(
        "--only", action="append", default=[], choices=RECIPES, metavar="NAME", help="this sample and what it needs"
    )
    parser.add_argument(
        "--skip", action="append", default=[], choices=RECIPES, metavar="NAME", help="leave this sample out"
    )
    parser.add_argument("--force", action="store_true", help="build even what is up to date")
    parser.add_argument(
        "--output", type=Path, default=SOURCE, metavar="DIR", help="build into a copy of the repository"
    )
    return parser.parse_args(argv)


def _copy_committed_files(repository: Path) -> None:
    """``repository`` holds every file of this one that is not built; equal files are not touched."""
    built = {SOURCE / output for recipe in RECIPES.values() for output in recipe.outputs}
    for path in (path for folder in _FOLDERS for path in sorted((SOURCE / folder).rglob("*"))):
        copy = repository / path.relative_to(SOURCE)
        if path in built or not path.is_file() or "__pycache__" in path.parts:
            continue
        content = path.read_bytes()
        if not copy.is_file() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def _line(name: str, state: str, figures: Figures) -> str:
    measured = ", ".join(f"{what} {value:.3g}" for what, value in figures.items())
    return f"{name:<10} {state:<16} {measured}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
