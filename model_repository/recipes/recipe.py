"""What a sample's build is: files made of sources, once, all or none of them."""

import fcntl
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent
CACHE = ".cache"

Figures = dict[str, float]


class MissingPackageError(Exception):
    """A package that a recipe needs is not installed; the message says how to install it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the built files of one sample are made.

    Attributes:
        name: As given to ``--only``.
        module: Imported when there is something to build. Its ``build(repository, stage)`` may read the repository,
            writes each output at its relative path below the empty folder ``stage``, and returns what it measured.
        outputs: Every file that it makes, relative to the repository.
        sources: Files whose content decides the outputs, relative to the repository.
        packages: Distributions whose versions decide the outputs.
        needs: Recipes whose outputs it reads.
    """

    name: str
    module: str
    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    packages: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def in_order(recipes: Mapping[str, Recipe], only: list[str]) -> list[Recipe]:
    """The recipes asked for, and before each the ones that it needs; all of them if ``only`` is empty."""
    chosen: dict[str, Recipe] = {}

    def choose(name: str) -> None:
        for needed in recipes[name].needs:
            choose(needed)
        chosen[name] = recipes[name]

    for name in only or recipes:
        choose(name)
    return list(chosen.values())


def fingerprint(recipe: Recipe, recipes: Mapping[str, Recipe]) -> str:
    """A hash that changes when the outputs may change: sources, package versions, the same of what it needs."""
    digest = hashlib.sha256()
    for source in sorted({"recipes/recipe.py", *recipe.sources}):
        digest.update(f"{source}\0".encode() + hashlib.sha256((SOURCE / source).read_bytes()).digest())
    for package in sorted(recipe.packages):
        digest.update(f"{package}=={_version(package)}\0".encode())
    for needed in sorted(recipe.needs):
        digest.update(fingerprint(recipes[needed], recipes).encode())
    return digest.hexdigest()


def built_figures(repository: Path, recipe: Recipe, stamp: str) -> Figures | None:
    """What the last build measured if its outputs are all there and its fingerprint is ``stamp``, else None."""
    try:
        record = json.loads(_record_path(repository, recipe).read_text())
        sizes = {output: (repository / output).stat().st_size for output in recipe.outputs}
    except (OSError, ValueError):
        return None
    if record["fingerprint"] != stamp or record["sizes_bytes"] != sizes:
        return None
    return dict(record["figures"])


def build(repository: Path, recipe: Recipe, stamp: str) -> Figures:
    """Every output is in place and recorded under ``stamp``; if the recipe fails, none has changed.

    Raises:
        MissingPackageError: A package that the recipe needs is not installed.
    """
    stage = repository / CACHE / f"stage-{recipe.name}"
    record = _record_path(repository, recipe)
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    for output in recipe.outputs:
        (stage / output).parent.mkdir(parents=True, exist_ok=True)
    figures: Figures = _module(recipe).build(repository, stage)
    sizes = {output: (stage / output).stat().st_size for output in recipe.outputs}
    record.unlink(missing_ok=True)
    for output in recipe.outputs:
        (repository / output).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / output, repository / output)
    partial = stage / record.name
    partial.write_text(json.dumps({"fingerprint": stamp, "sizes_bytes": sizes, "figures": figures}, indent=2))
    os.replace(partial, record)
    shutil.rmtree(stage)
    return figures


@contextmanager
def only_builder(repository: Path, name: str) -> Iterator[None]:
    """No other process builds the recipe of that name inside the block; waits for one that does."""
    folder = repository / CACHE
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _module(recipe: Recipe) -> Any:
    try:
        return importlib.import_module(recipe.module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"{error}; run: pip install -e '.[model,preprocess,samples]'") from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the build says what to install
        return "missing"


def _record_path(repository: Path, recipe: Recipe) -> Path:
    return repository / CACHE / f"{recipe.name}.json"
