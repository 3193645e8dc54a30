"""`weft diff`: what is said of a change, and where its two sides come from."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases
from tests.unit.changes.test_replay import repository as pipes  # noqa: F401
from tests.unit.changes.test_replay import write
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.test_feedback import graph
from tests.unit.tools.graphs import REPOSITORY

from weft.base.signature import ModelSignature, TensorSpec
from weft.changes.diff import Section, compare, text_of
from weft.cli.__main__ import main
from weft.tools.lock import signature_changes
from weft.tools.offline import load_plan
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services

Run = Callable[..., tuple[int, str, str]]
GRAPH = "graphs/{}/1/graph.pbtxt"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Graphs and configurations of the samples, with a second version of `embed`."""
    folder = tmp_path / "repository"
    for path in [*REPOSITORY.glob("*/*/config.pbtxt"), *REPOSITORY.glob("graphs/*/1/graph.pbtxt")]:
        (folder / path.relative_to(REPOSITORY)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(REPOSITORY))
    shutil.copytree(folder / "graphs/embed/1", folder / "graphs/embed/2")
    edit(
        folder / "graphs/embed/2/graph.pbtxt", 'model_name: "minilm"', 'model_name: "minilm" policy { timeout_ms: 50 }'
    )
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], repository: Path) -> Run:
    """Runs `weft` in the repository: status, output, errors."""
    monkeypatch.chdir(repository)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main([*arguments, "--repository", "."])
        return status, *capsys.readouterr()

    return run


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def git(*arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments], check=True, capture_output=True)


def committed() -> None:
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")


def changed(repository: Path, name: str, edits: list[str]) -> list[Section]:
    after = repository / "after.pbtxt"
    shutil.copy(repository / GRAPH.format(name), after)
    for line in edits:
        edit(after, *(part.strip() for part in line.split("==>")))
    return [*compare(load_plan(name, repository), load_plan(str(after), repository))]


@cases(Path(__file__).with_name("diff.txt"))
def test_what_is_said_of_a_change(case: Case, repository: Path) -> None:
    """Steps, clients, users, calls and time are as is written down."""
    case.check(text_of("before", "after", changed(repository, case.option("graph"), case.lines)).rstrip())


SPEC = {"name": "X", "datatype": "FP32", "dims": (3,)}


def signature(what: str = "inputs", spec: dict[str, Any] | None = None, **fields: Any) -> ModelSignature:
    tensors = {"inputs": (), "outputs": ()} | ({what: (TensorSpec(**{**SPEC, **spec}),)} if spec is not None else {})
    return ModelSignature("m", "1", "", **{"max_batch_size": 8, **tensors, **fields})


@pytest.mark.parametrize(
    ("before", "after", "breaks"),
    [
        (signature(spec={}), signature(), True),
        (signature(), signature(spec={}), True),
        (signature(), signature(spec={"is_optional": True}), False),
        (signature(spec={}), signature(spec={"is_optional": True}), False),
        (signature(spec={"is_optional": True}), signature(spec={}), True),
        (signature(spec={}), signature(spec={"datatype": "FP64"}), True),
        (signature(spec={}), signature(spec={"dims": (-1,)}), False),
        (signature(spec={"dims": (-1,)}), signature(spec={}), True),
        (signature(spec={}), signature(spec={"dims": (3, 1)}), True),
        (signature("outputs", {}), signature(), True),
        (signature(), signature("outputs", {}), False),
        (signature("outputs", {}), signature("outputs", {"is_optional": True}), True),
        (signature("outputs", {"is_optional": True}), signature("outputs", {}), False),
        (signature("outputs", {}), signature("outputs", {"dims": (-1,)}), True),
        (signature("outputs", {"dims": (-1,)}), signature("outputs", {}), False),
        (signature(), signature(max_batch_size=4), True),
        (signature(), signature(max_batch_size=16), False),
        (signature(max_batch_size=0), signature(), True),
        (signature(allows_empty_batch=True), signature(), True),
        (signature(), signature(is_decoupled=True), True),
        (signature(), signature(is_decoupled=True, can_collect=True), False),
    ],
)
def test_which_changes_break_clients(before: ModelSignature, after: ModelSignature, breaks: bool) -> None:
    """Inputs may take more and outputs give less; all else breaks requests, or the reading of answers."""
    assert [breaks] == [one for _, one in signature_changes(before, after)]


@pytest.mark.parametrize(
    ("weights", "moved"), [((80, 80), 0.3), ((80, 20), 0.0), ((20, 20), 0.3), ((80, 5), 0.2 - 5 / 85)]
)
def test_moved_users_are_as_many_as_they_must(repository: Path, weights: tuple[int, int], moved: float) -> None:
    """As many keys move as shares change, the least that there can be; and all of them to the step that gained."""
    users = changed(
        repository, "digits_ab", [f"weight: 80 ==> weight: {weights[0]}", f"weight: 20 ==> weight: {weights[1]}"]
    )[2]
    found = [share for change in users.facts for _, _, share in change["moves"]]
    assert len(found) == (moved > 0)
    assert sum(found) == pytest.approx(moved, abs=0.01)


def test_a_revision_of_git_is_a_side(repository: Path, run: Run) -> None:
    """By path or name, with the graphs inside it and the models' configurations as they were then; files stay alone."""
    committed()
    edit(
        repository / GRAPH.format("embed"), 'name: "encode" model_name: "minilm"', 'name: "embed" model_name: "minilm"'
    )
    edit(repository / "model/support_labels/config.pbtxt", "dims: [ 5 ]", "dims: [ -1 ]")
    for before in ("HEAD:triage", f"HEAD:{GRAPH.format('triage')}", f"HEAD:./{GRAPH.format('triage')}"):
        status, out, _ = run("diff", before, "triage")
        assert status == 0
        assert "+ root/embed/root/embed  target minilm" in out
        assert "~ root/score  output SCORES: FP32[5] -> FP32[-1]" in out
        assert "clients" in out
    edit(repository / GRAPH.format("triage"), "max_batch_size: 32", "max_batch_size: 16")
    assert (1, "- BREAKING: max_batch_size was 32, is 16") == (
        (found := run("diff", "HEAD:triage", "triage", "--exit-code"))[0],
        found[1].splitlines()[2].strip(),
    )
    assert 0 == run("diff", "HEAD:triage", "triage", "--exit-code", "users")[0]
    assert (0, "HEAD:triage -> HEAD:triage: no difference\n", "") == run(
        "diff", "HEAD:triage", "HEAD:triage", "--exit-code"
    )


@pytest.mark.parametrize(
    ("before", "status", "words"),
    [
        ("gone:triage", 2, "'gone:triage': no revision 'gone'"),
        ("HEAD --output=x:triage", 2, "no revision 'HEAD --output=x'"),
        ("$(touch x);`touch x`:triage", 2, "no revision '$(touch x);`touch x`'"),
        ("HEAD:graphs/gone/1/graph.pbtxt", 2, "not in 'HEAD': git says 'pathspec 'graphs/gone/1/graph.pbtxt'"),
        ("HEAD:gone", 2, "'gone' is no file and no graph of"),
        ("HEAD:/etc/x.pbtxt", 2, "'/etc/x.pbtxt' is not in the Git repository"),
        ("gone/graph.pbtxt", 2, "'gone/graph.pbtxt' is no file and no graph of"),
        ("triage/7", 2, "graph 'triage' has no version '7'; it has 1"),
        ("HEAD:embed/1", 1, "embed/1/graph.pbtxt:1:"),
    ],
)
def test_a_side_that_cannot_be_had_is_named(repository: Path, run: Run, before: str, status: int, words: str) -> None:
    """Status, what is wrong and which side it is; nothing is run by a shell."""
    (repository / GRAPH.format("embed")).write_text("nonsense {")
    committed()
    found, out, err = run("diff", before, "digits")
    assert (status, "") == (found, out)
    assert words in err
    assert before in err
    assert not (repository / "x").exists()


def test_without_git_there_are_no_revisions(run: Run, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder outside a repository, and a machine without Git, are told."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.parent))
    assert "no Git repository: git says 'not a git repository" in run("diff", "HEAD:triage", "triage")[2]
    monkeypatch.setenv("PATH", "")
    assert "'git', which is not installed here" in run("diff", "HEAD:triage", "triage")[2]


def test_markdown_and_json(run: Run, repository: Path) -> None:
    """Markdown is a table and folded blocks that no text can leave; JSON has all of it, and which classes there are."""
    committed()
    edit(repository / GRAPH.format("digits_ab"), "weight: 80", "weight: 20")
    edit(repository / GRAPH.format("digits_ab"), 'salt: "digits-cnn-or-mlp"', 'salt: "```</details>|"')
    _, out, _ = run("diff", "HEAD:digits_ab", "digits_ab", "--markdown")
    head, *parts = out.split("<details>")
    assert "### HEAD:digits\\_ab -\\> digits\\_ab" in head
    assert "| steps | 3 changed |" in head
    assert {line.count("|") for line in head.splitlines() if "|" in line} == {3}
    for part in parts:
        fence, body = re.search(r"^(`{3,})diff\n(.*)", part, re.MULTILINE | re.DOTALL).groups()  # type: ignore[union-attr]
        assert f"\n{fence}\n\n</details>\n" in body
        assert body.count(fence) == 1
    assert "! root/classify/ab[A]  taken: 80 % -> 50 %" in out
    found = json.loads(run("diff", "HEAD:digits_ab", "digits_ab", "--json")[1])
    assert ["steps", "users"] == found["classes"]
    assert {"A": 0.8, "B": 0.2} == found["users"][0]["before"]
    assert [2, 2] == [one["num_calls"] for one in found["calls_at_most"]]
    assert {"sign": "~", "path": "root/classify/ab[A]", "facts": {"taken": ["80 %", "50 %"]}} in found["steps"]


@pytest.mark.parametrize("suffix", ["svg", "mmd", "dot", "txt"])
def test_both_are_drawn_in_one_picture(run: Run, repository: Path, suffix: str) -> None:
    """What is added, removed and changed is told by words in every format, and by colour and line in pictures."""
    committed()
    file = repository / GRAPH.format("digits_ab")
    edit(file, 'step { name: "C" model_name: "digits_forest" shadow { percent: 25 max_inflight: 4 } }', "")
    edit(
        file,
        'step { name: "A" weight: 80',
        'step { name: "new" weight: 10 model_name: "digits_mlp" } step { name: "A" weight: 70',
    )
    assert (0, "", "") == run("draw", "digits_ab", "--against", "HEAD:digits_ab", "-o", f"both.{suffix}")
    text = (repository / f"both.{suffix}").read_text()
    assert all(
        words in text
        for words in ("before: digits_ab/1", "after: digits_ab/1", "new (added)", "C (removed)", "A (changed)")
    )
    assert "B (changed)" not in text
    assert all(colour in text for colour in ("#1a7f37", "#cf222e", "#9a6700")) == (suffix != "txt")
    ids = re.findall(r'<g id="(\w+)"', text)
    assert len(ids) == len(set(ids))


async def test_what_a_router_serves_is_a_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, with the signatures that its models have there; a file beside it is the other side."""
    target = FakeTarget()
    make.serve(target, "a", "b")
    make.write(tmp_path / "graphs", graph("a", "b"))
    (after := tmp_path / "after.pbtxt").write_text(graph("a").replace("max_batch_size: 4", "max_batch_size: 2"))
    async with make.started(tmp_path / "graphs", target, model_control="explicit", load_graphs=["*"]) as started:
        server = make_server()
        add_services(server, started.core, "weft.router", started.core.extension())
        url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            lock = ["--lock", str(tmp_path / "lock")]
            assert 0 == await asyncio.to_thread(main, ["lock", "--url", url, "-o", lock[1]])
            assert 0 == await asyncio.to_thread(main, ["diff", "pipe", str(after), "--url", url, *lock])
            out = capsys.readouterr().out
            assert "- BREAKING: max_batch_size was 4, is 2" in out
            assert "- root/ab/ab[b]  target b, taken 50 %" in out
            assert 2 == await asyncio.to_thread(main, ["diff", "pipes", str(after), "--url", url, *lock])
            assert "weft diff: 'pipes': 'pipes' is no graph of this router" in capsys.readouterr().err
            assert 2 == await asyncio.to_thread(main, ["diff", "pipe/x", str(after), "--url", url, *lock])
            assert "version should be an integral value > 0" in capsys.readouterr().err
        finally:
            await server.stop(None)


def test_the_page_shows_what_the_command_prints(run: Run, repository: Path) -> None:
    """Its example, made as it says, prints what stands there."""
    page = (REPOSITORY.parent / "docs/changes.md").read_text()
    command, shown = re.search(r"```\n\$ weft (.*)\n((?:.*\n)*?)```", page).groups()  # type: ignore[union-attr]
    policy = re.search(r"`(policy .*)`", page)[1]  # type: ignore[index]
    committed()
    git("branch", "-M", "main")
    edit(
        repository / GRAPH.format("digits_ab"),
        'weight: 20 model_name: "digits_mlp"',
        f'weight: 80 model_name: "digits_mlp" {policy}',
    )
    assert (0, shown, "") == run(*command.split())


def test_answers_that_change_are_told(
    pipes: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a recording both sides answer its requests, a revision of Git with the models that are here."""
    monkeypatch.chdir(pipes)
    recording = str(write(tmp_path / "a", range(20)))
    committed()
    (pipes / "graphs/pipe/1/graph.pbtxt").write_text((tmp_path / "odd.pbtxt").read_text())
    base = ["diff", "HEAD:pipe", "pipe", "--repository", ".", "--recording", recording]
    assert 1 == main([*base, "--exit-code", "answers"])
    out = capsys.readouterr().out
    assert "answers: 10 of 19 change\n" in out
    assert re.search(r"output Y: 10 differ, for example r10: ", out)
    assert re.search(r"p99 ms: [\d.]+ -> [\d.]+", out)
    assert 0 == main([*base, "--exit-code", "answers", "--replay=--compare Y=ignore", "--json"])
    assert 0 == json.loads(capsys.readouterr().out)["answers"]["different"]
    assert 0 == main(["diff", "pipe", *base[2:]])
    assert "answers: 0 of 19 change\n" in capsys.readouterr().out
