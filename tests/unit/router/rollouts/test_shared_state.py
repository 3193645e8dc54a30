"""Where a group of routers keeps its rollouts: one owner at a time, and no change is lost."""

import fcntl
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.unit.router.rollouts.kubernetes import Leases, serving_leases

from weft.language.rollouts import RolloutPlan
from weft.router.rollouts import folder
from weft.router.rollouts.counts import ArmCounts
from weft.router.rollouts.folder import FolderState
from weft.router.rollouts.lease import LeaseState
from weft.router.rollouts.machine import begin
from weft.router.rollouts.owner import shared_state, sums_of
from weft.router.rollouts.place import place_of
from weft.router.rollouts.shared import Document, Ownership, SharedState, state_of

PLAN = RolloutPlan("new", 1, (1.0, 1.0), (0.1, 1.0), limits={"max_error_rate": 0.1}, digest="d")
ENTRY = {
    "graph": "g",
    "node": "root",
    "plan": asdict(PLAN),
    "state": json.loads(json.dumps(begin(PLAN, 1).to_json())),
    "counts": [],
    "from_unix_ns": 0,
}


@pytest.fixture
def leases() -> Iterator[Leases]:
    with serving_leases() as served:
        yield served


@pytest.fixture
def now() -> list[float]:
    """The time of the members' clocks, in seconds."""
    return [1000.0]


@pytest.fixture(params=["folder", "lease"])
def member(
    request: pytest.FixtureRequest, leases: Leases, tmp_path: Path, now: list[float]
) -> Callable[[str], SharedState]:
    """Makes members of one group; ownership runs out after 15 s."""

    def made(name: str) -> SharedState:
        if request.param == "folder":
            return FolderState(tmp_path / "shared", Ownership(name, 15, lambda: now[0]))
        return LeaseState("weft", "rollouts", Ownership(name, 15, lambda: now[0]), url=leases.url)

    return made


def add(document: Document) -> bool:
    """Count one more of what the test counts."""
    document.rollouts.setdefault("g/root@d", json.loads(json.dumps(ENTRY)))["state"]["step"] += 1
    return True


def look(_: Document) -> bool:
    return False


def test_one_member_owns_and_the_next_after_it(member: Callable[[str], SharedState]) -> None:
    """All see the same document; when the owner gives up, another has it at once."""
    one, two = member("one"), member("two")
    assert "one" == one.change(add).owner
    seen = two.change(look)
    assert ("one", 1) == (seen.owner, seen.rollouts["g/root@d"]["state"]["step"])
    one.close()
    assert "two" == two.change(look).owner == two.change(look).owner
    assert "two" == member("three").change(look).owner
    two.close()


def test_no_change_is_lost(member: Callable[[str], SharedState]) -> None:
    """Of eight members at once, each edit is made on what the one before it left."""
    members = [member(f"m{i}") for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: [one.change(add) for _ in range(5)], members))
    assert 40 == members[0].change(look).rollouts["g/root@d"]["state"]["step"]
    for one in members:
        one.close()


@pytest.mark.parametrize(
    "text", ["{", "[]", "AAAA", '{"format": 2}', '{"format": 1, "rollouts": {"a": {}}, "counts": {}}']
)
def test_a_damaged_document_is_kept_aside_and_told(
    member: Callable[[str], SharedState], leases: Leases, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is damaged, or written by another version, is no state; the next change begins anew."""
    one = member("one")
    one.change(add)
    path = tmp_path / "shared" / "state.json"
    if path.exists():
        path.write_text(text)
    else:
        leases.by_name["rollouts"]["metadata"]["annotations"]["weft.dev/rollouts"] = text
    with caplog.at_level(logging.ERROR):
        assert 1 == one.change(add).rollouts["g/root@d"]["state"]["step"]
    assert ["is damaged and is kept as"] == [
        found for record in caplog.records for found in ["is damaged and is kept as"] if found in record.getMessage()
    ]
    if path.exists():
        assert text == path.with_suffix(".damaged").read_text()
    else:
        assert text == leases.by_name["rollouts"]["metadata"]["annotations"]["weft.dev/rollouts-damaged"]
    one.close()


def test_a_folder_is_made_when_there_is_something_to_keep(tmp_path: Path) -> None:
    """Looks make nothing; git does not see it."""
    state = FolderState(tmp_path / ".weft" / "rollouts", Ownership("one", 15))
    assert "" == state.change(look).owner
    assert not (tmp_path / ".weft").exists()
    state.change(add)
    assert "*\n" == (tmp_path / ".weft" / "rollouts" / ".gitignore").read_text()
    state.close()


def test_a_member_that_hangs_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it changes the document their looks fail, after a time, and go on when it does."""
    monkeypatch.setattr(folder, "_MAX_WAIT_S", 0.0)
    state = FolderState(tmp_path, Ownership("one", 15))
    with (tmp_path / "state.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"state.lock is held by another process"):
            state.change(lambda document: True)
    assert "one" == state.change(lambda document: True).owner


@pytest.mark.parametrize("text", ["", "host-1a2b", "[1]"])
def test_what_names_no_owner_of_a_folder_is_replaced(tmp_path: Path, text: str) -> None:
    """A member that is killed while it writes its name leaves less than that."""
    one, two = (FolderState(tmp_path, Ownership(name, 15)) for name in ("one", "two"))
    one.change(add)
    (tmp_path / "owner.json").write_text(text)
    assert "two" == two.change(look).owner == one.change(look).owner


def test_ownership_runs_out_by_the_observers_clock(
    member: Callable[[str], SharedState], leases: Leases, tmp_path: Path, now: list[float]
) -> None:
    """An owner that stops renewing loses it ``duration_s`` after another saw its last renewal."""

    def spec() -> dict[str, Any]:
        path = tmp_path / "shared" / "owner.json"
        return json.loads(path.read_text()) if path.exists() else leases.by_name["rollouts"]["spec"]

    one, two = member("one"), member("two")
    one.change(add)
    now[0] += 1e6  # the time of no look counts
    assert "one" == two.change(look).owner
    now[0] += 14
    assert "one" == two.change(look).owner
    one.change(look)  # renewed
    now[0] += 14
    assert "one" == two.change(look).owner
    now[0] += 15.1
    assert "two" == two.change(look).owner
    assert ("two", 15, 1) == (*(spec()[key] for key in ("holderIdentity", "leaseDurationSeconds", "leaseTransitions")),)
    assert datetime.fromisoformat(spec()["renewTime"]).tzinfo is not None
    assert "two" == one.change(add).owner, "the old owner is none, though its edit is kept"


def test_a_conflict_is_tried_again_on_the_newer_document(leases: Leases) -> None:
    """An edit between reading and writing is not overwritten."""
    one, two = (LeaseState("weft", "rollouts", Ownership(name, 15), url=leases.url) for name in ("one", "two"))
    one.change(add)
    leases.rival = lambda: two.change(add)
    assert 3 == one.change(add).rollouts["g/root@d"]["state"]["step"]
    assert leases.num_conflicts == 1


def test_a_lease_has_room_for_what_is_over(leases: Leases) -> None:
    """Verdicts stay; counts of rollouts that are over go when the document grows long, and the rest is compressed."""
    state = LeaseState("weft", "rollouts", Ownership("one", 15), url=leases.url)
    runs = ArmCounts(runs_by_bin=dict.fromkeys(range(300), 1000))
    over = replace(begin(PLAN, 1), phase="PROMOTED", verdict="good", candidate_before=runs, baseline_before=runs)

    def fill(document: Document) -> bool:
        entry = {**ENTRY, "state": over.to_json(), "counts": [runs.to_json(), runs.to_json()]}
        document.rollouts |= {f"g/{i}@d": json.loads(json.dumps(entry)) for i in range(50)}
        document.rollouts["g/open@d"] = {**entry, "state": replace(over, phase="RUNNING").to_json()}
        return True

    assert len(state.change(fill).text) < 100_000
    assert len(leases.by_name["rollouts"]["metadata"]["annotations"]["weft.dev/rollouts"]) < 10_000
    document = state.change(look)
    assert ("good", ArmCounts()) == ((kept := state_of(document.rollouts["g/7@d"])).verdict, kept.candidate_before)
    assert (ArmCounts(), ArmCounts()) == sums_of("g/7@d", document)
    assert runs == state_of(document.rollouts["g/open@d"]).candidate_before


def test_a_full_lease_stays_as_it_is_and_says_so(leases: Leases) -> None:
    """Kubernetes takes no more; what is kept can still be read."""
    state = LeaseState("weft", "rollouts", Ownership("one", 15), url=leases.url)

    def fill(document: Document) -> bool:
        document.rollouts["g/root@d"]["state"]["verdict"] = Random(0).randbytes(1 << 18).hex()
        return add(document)

    state.change(add)
    with pytest.raises(OSError, match=r"HTTP Error 422: .*annotations: Too long: may not be more than 262144 bytes"):
        state.change(fill)
    assert 1 == state.change(look).rollouts["g/root@d"]["state"]["step"]


def test_the_token_is_read_for_each_call(leases: Leases, tmp_path: Path) -> None:
    """Kubernetes changes it; errors of the server say what was asked."""
    state = LeaseState("weft", "rollouts", Ownership("one", 15), url=leases.url, account=tmp_path)
    for token in ("first\n", "second"):
        (tmp_path / "token").write_text(token)
        state.change(look)
    assert ("Bearer first", "Bearer second") == (leases.tokens[0], leases.tokens[-1])
    leases.status = 403
    with pytest.raises(OSError, match=r"namespaces/weft/leases/rollouts: HTTP Error 403: .*as the test says"):
        state.change(look)


def test_where_rollouts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the repository if it can be written, else beside the bandits, else nowhere; as the option says before all."""
    assert str(tmp_path / ".weft" / "rollouts") == place_of("", tmp_path, Path("/state"))
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "/state/rollouts" == place_of("", tmp_path, Path("/state"))
    assert "off" == place_of("", tmp_path, None)
    assert "lease:weft/x" == place_of("lease:weft/x", tmp_path, None)
    assert isinstance(shared_state("lease:weft/x@http://127.0.0.1:1"), LeaseState)
