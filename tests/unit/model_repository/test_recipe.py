import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from recipes import recipe as recipe_module
from recipes.modes import let_others_read
from recipes.recipe import Figures, MissingPackageError, Recipe, build, built_figures, fingerprint, in_order

LETTERS = Recipe("letters", "fake_letters", outputs=("model/a", "model/b"), sources=("letters.txt",))
WORDS = Recipe("words", "fake_words", outputs=("model/words",), sources=(), needs=("letters",))
RECIPES = {"words": WORDS, "letters": LETTERS}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the committed repository."""
    folder = tmp_path / "source"
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes/recipe.py").write_text("")
    (folder / "letters.txt").write_text("ab")
    monkeypatch.setattr(recipe_module, "SOURCE", folder)
    return folder


@pytest.fixture
def builds_letters(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path, Path], Figures]], None]:
    """Makes a function the build of ``letters``."""

    def install(function: Callable[[Path, Path], Figures]) -> None:
        module = ModuleType("fake_letters")
        module.build = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_letters", module)

    return install


def write_both(repository: Path, stage: Path) -> Figures:
    """A build that works."""
    (stage / "model/a").write_text("new a")
    (stage / "model/b").write_text("new b")
    return {"accuracy": 0.5}


def test_needed_recipes_come_first_and_once() -> None:
    """A recipe comes after the ones whose outputs it reads, whatever the order in the catalogue."""
    assert [recipe.name for recipe in in_order(RECIPES, [])] == ["letters", "words"]


def test_only_brings_what_it_needs_and_nothing_else() -> None:
    """``--only`` selects one recipe and those it needs."""
    assert [recipe.name for recipe in in_order(RECIPES, ["words"])] == ["letters", "words"]
    assert [recipe.name for recipe in in_order(RECIPES, ["letters"])] == ["letters"]


def test_fingerprint_follows_the_sources_of_a_recipe_and_of_what_it_needs(source: Path) -> None:
    """A changed source changes the fingerprint of its recipe, and of the recipes that need that one."""
    before = [fingerprint(recipe, RECIPES) for recipe in (LETTERS, WORDS)]
    assert [fingerprint(recipe, RECIPES) for recipe in (LETTERS, WORDS)] == before
    (source / "letters.txt").write_text("abc")
    after = [fingerprint(recipe, RECIPES) for recipe in (LETTERS, WORDS)]
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_fingerprint_follows_package_versions(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of a package changes the fingerprint; a missing package has one too."""
    recipe = Recipe("numbers", "fake", outputs=(), sources=(), packages=("numpy",))
    real = fingerprint(recipe, {})
    monkeypatch.setattr(recipe_module, "version", lambda package: "0.0.1")
    assert real != fingerprint(recipe, {})
    missing = Recipe("numbers", "fake", outputs=(), sources=(), packages=("no-such-package",))
    monkeypatch.undo()
    monkeypatch.setattr(recipe_module, "SOURCE", source)
    assert real != fingerprint(missing, {})


def test_a_build_puts_every_output_in_place_and_is_remembered(tmp_path: Path, builds_letters: Callable) -> None:
    """After a build the outputs are there, the figures are known, and no staged file is left."""
    builds_letters(write_both)
    assert build(tmp_path, LETTERS, "stamp") == {"accuracy": 0.5}
    assert [(tmp_path / output).read_text() for output in LETTERS.outputs] == ["new a", "new b"]
    assert built_figures(tmp_path, LETTERS, "stamp") == {"accuracy": 0.5}
    assert [path.name for path in (tmp_path / ".cache").iterdir()] == ["letters.json"]


@pytest.mark.parametrize("written", [["model/a"], ["model/a", "model/b"]], ids=["half", "raises-at-the-end"])
def test_a_failed_build_changes_no_output(tmp_path: Path, builds_letters: Callable, written: list[str]) -> None:
    """A build that fails part way leaves the outputs of the last one, and they still count as built."""
    builds_letters(write_both)
    build(tmp_path, LETTERS, "stamp")

    def fail(repository: Path, stage: Path) -> Figures:
        for output in written:
            (stage / output).write_text("half-written")
        raise ValueError("no luck")

    builds_letters(fail)
    with pytest.raises(ValueError, match="no luck"):
        build(tmp_path, LETTERS, "other stamp")
    assert [(tmp_path / output).read_text() for output in LETTERS.outputs] == ["new a", "new b"]
    assert built_figures(tmp_path, LETTERS, "stamp") == {"accuracy": 0.5}


def test_a_build_that_leaves_an_output_out_fails(tmp_path: Path, builds_letters: Callable) -> None:
    """An output that the recipe names and does not write is an error, and nothing is put in place."""

    def write_one(repository: Path, stage: Path) -> Figures:
        (stage / "model/a").write_text("a")
        return {}

    builds_letters(write_one)
    with pytest.raises(FileNotFoundError, match="model/b"):
        build(tmp_path, LETTERS, "stamp")
    assert not (tmp_path / "model/a").exists()
    assert built_figures(tmp_path, LETTERS, "stamp") is None


@pytest.mark.parametrize("damage", ["missing", "cut", "stamp", "record"])
def test_outputs_that_are_not_those_of_the_build_are_built_again(
    tmp_path: Path, builds_letters: Callable, damage: str
) -> None:
    """A missing or cut output, another fingerprint and a broken record each mean that nothing is up to date."""
    builds_letters(write_both)
    build(tmp_path, LETTERS, "stamp")
    if damage == "missing":
        (tmp_path / "model/a").unlink()
    elif damage == "cut":
        (tmp_path / "model/b").write_text("new")
    elif damage == "record":
        (tmp_path / ".cache/letters.json").write_text(json.dumps({})[:-1])
    assert built_figures(tmp_path, LETTERS, "other" if damage == "stamp" else "stamp") is None


def test_a_missing_package_is_named_with_the_cure(tmp_path: Path) -> None:
    """A recipe whose module cannot be imported says which package is missing and what to run."""
    recipe = Recipe("absent", "recipes_no_such_module", outputs=(), sources=())
    with pytest.raises(MissingPackageError, match=r"recipes_no_such_module.*pip install -e"):
        build(tmp_path, recipe, "stamp")


def test_outputs_can_be_read_by_other_users(tmp_path: Path) -> None:
    """Also those that an earlier build has left with mode 0600, as safetensors writes files; the umask holds."""
    for output in LETTERS.outputs:
        (tmp_path / output).parent.mkdir(exist_ok=True)
        (tmp_path / output).touch(0o600)
    for umask, mode in ((0o077, 0o600), (0o022, 0o644)):
        before = os.umask(umask)
        try:
            let_others_read(tmp_path, LETTERS)
        finally:
            os.umask(before)
        assert {mode} == {(tmp_path / output).stat().st_mode & 0o777 for output in LETTERS.outputs}
