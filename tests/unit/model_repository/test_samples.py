"""What the committed files of the samples must agree on, without building anything."""

import json
import re
from pathlib import Path

import pytest
from recipes.catalog import RECIPES, TEAMS

from weft.base.text.pbtxt import render
from weft.tools.check import check, find_files


def test_every_configuration_and_graph_is_right(repository: Path) -> None:
    """`weft check` finds neither an error nor a warning in the repository."""
    files = find_files([repository / folder for folder in ("graphs", "preprocess", "model", "postprocess")])
    assert len(files) >= 21
    assert render(check(files, repository)) == ""


def test_every_source_of_a_build_is_there(repository: Path) -> None:
    """Each recipe names sources that exist, its own module among them."""
    for recipe in RECIPES.values():
        assert f"{recipe.module.replace('.', '/')}.py" in recipe.sources
        assert [source for source in recipe.sources if not (repository / source).is_file()] == []


def test_triage_has_one_branch_and_one_answer_model_for_each_label(repository: Path) -> None:
    """The labels are the switch's cases, the last of them its otherwise, and each has an answer model."""
    graph = (repository / "graphs/triage/1/graph.pbtxt").read_text()
    assert (*re.findall(r'case: "(\w+)"', graph), "general") == TEAMS
    branches = re.findall(r'step \{ \w+: "\w+" .*?model_name: "answer_(\w+)"', graph)
    assert tuple(branches) == TEAMS


@pytest.mark.parametrize("team", TEAMS)
def test_each_answer_has_questions(repository: Path, team: str) -> None:
    """A team has as many lists of questions as answers, and no list is empty."""
    folder = repository / f"postprocess/answer_{team}/1"
    questions = json.loads((folder / "questions.json").read_text())
    assert len(questions) == len(json.loads((folder / "entries.json").read_text()))
    assert all(questions)


def test_messages_cover_every_team_and_name_answers_that_exist(repository: Path) -> None:
    """There are a dozen held-out messages for each team, and none of them is used for tuning."""
    messages = json.loads((repository / "data/triage/messages.json").read_text())
    assert tuple(messages["held_out"]) == tuple(messages["tuning"]) == TEAMS
    for team in TEAMS:
        num_answers = len(json.loads((repository / f"postprocess/answer_{team}/1/entries.json").read_text()))
        held_out = messages["held_out"][team]
        assert len(held_out) == 12
        assert all(0 <= message["answer"] < num_answers for message in held_out)
        assert not {message["text"] for message in held_out} & {message["text"] for message in messages["tuning"][team]}
