"""Members of a group: one decides, the others follow; what a member counted stays when it ends."""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.router.rollouts.test_shared_state import PLAN
from typing_extensions import override

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.router.rollouts.folder import FolderState
from weft.router.rollouts.owner import MAX_KEPT, RolloutMember, sums_of
from weft.router.rollouts.shared import Document, Ownership, state_of
from weft.router.rollouts.store import Rollout, RolloutStore

SECOND = 1_000_000_000


class Group:
    """Members over one folder with one clock; each looks when it is told, and a look takes ``look_s``."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = 1_000 * SECOND
        self.look_s = 0
        self.folder = folder
        self.members: dict[str, RolloutMember] = {}
        self.stores: dict[str, RolloutStore] = {}
        self.states: dict[str, FolderState] = {}

    async def join(self, name: str) -> Rollout:
        """A member begins, reads what is shared, and loads the graph."""
        store = self.stores[name] = RolloutStore()
        state = self.states[name] = SlowState(self, name)
        member = self.members[name] = RolloutMember(store, state, lambda: self.now_ns)
        await member.start()
        return store.register("g", "root", PLAN)

    async def look(self, *names: str) -> None:
        """They look, and again when all of them follow."""
        for _ in range(2):
            for name in names:
                await self.members[name].look()
            self.now_ns += 6_000 * SECOND


class SlowState(FolderState):
    """It has read the document long before a change of it ends, as on a slow disk."""

    def __init__(self, group: Group, member: str) -> None:
        super().__init__(group.folder, Ownership(member, 15, lambda: 0.0), period_s=3600.0)
        self.group = group

    @override
    def change(self, edit: Callable[[Document], bool]) -> Document:
        document = super().change(edit)
        self.group.now_ns += self.group.look_s * SECOND
        return document


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    made = Group(tmp_path / "shared")
    yield made
    for member in made.members.values():
        await member.close()


def serve(rollout: Rollout, num_requests: int, num_errors: int = 0) -> None:
    """The candidate and the baseline get as many requests; only the candidate fails."""
    for i in range(num_requests):
        rollout.candidate.count(1_000_000, is_ok=i >= num_errors)
        rollout.baseline.count(1_000_000, is_ok=True)


async def test_the_owner_decides_by_the_counts_of_all_and_the_others_follow(group: Group) -> None:
    """Neither member has seen enough alone; a rollout that is over no longer changes."""
    one, two = await group.join("one"), await group.join("two")
    await group.look("one", "two")
    assert one.weights == two.weights != (0.0, 1.0)
    rounds = 0
    while one.state.step == 0:
        serve(one, 20), serve(two, 20)
        await group.look("two", "one", "two")
        rounds += 1
        assert one.weights == two.weights
    assert 1 < rounds < 100
    while one.state.phase == "RUNNING":
        serve(one, 50), serve(two, 50)
        await group.look("two", "one", "two")
    assert ("PROMOTED", (0.0, 1.0)) == (two.state.phase, two.weights)
    document = await group.members["two"].look(two)
    total = one.candidate.num_requests + two.candidate.num_requests
    assert ("one", total) == (document.owner, sums_of(two.key, document)[0].num_requests)
    serve(one, 1000, 1000)
    await group.look("one", "two")
    assert two.state.phase == "PROMOTED"


@pytest.mark.parametrize("look_s", [3000, 40_000])
async def test_all_follow_a_decision_at_one_moment_however_slow_their_looks_are(group: Group, look_s: int) -> None:
    """One that has looked just before it is made reads it before the others follow; nothing is decided until then."""
    one, two = await group.join("one"), await group.join("two")
    group.look_s = look_s
    await group.look("one", "two")
    serve(one, 500)
    await group.members["two"].look()
    began_ns = group.now_ns
    await group.members["one"].look()
    serve(one, 500)
    await group.members["one"].look()
    group.now_ns = began_ns + 3600 * SECOND
    document = await group.members["two"].look()
    assert (1, 0, 0) == (state_of(document.rollouts[one.key]).revision, one.state.revision, two.state.revision)
    group.now_ns = began_ns + (3600 * 3 // 2 + 2 * look_s) * SECOND
    await group.members["two"].look()
    document = await group.members["one"].look()
    assert (1, 2) == (two.state.revision, state_of(document.rollouts[one.key]).revision)


async def test_a_member_that_is_gone_keeps_its_counts_and_its_place_is_taken(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """The next owner judges by what the dead one had told, and it alone logs the verdict with its figures."""
    one, two = await group.join("one"), await group.join("two")
    await group.look("one", "two")
    serve(one, 8, 2)
    await group.look("one")
    group.states["one"].close()  # as the kernel does it
    serve(two, 20, 10)
    assert "RUNNING" == one.state.phase
    with caplog.at_level(logging.WARNING):
        await group.look("two")
    assert ("ROLLED_BACK", (1.0, 0.0)) == (two.state.phase, two.weights)
    (record,) = caplog.records
    assert "rollout of 'new' in graph 'g', node 'root', revision 1, ROLLED_BACK: rolled back" in record.getMessage()
    assert "over 28 requests" in record.getMessage()
    again = await group.join("three")
    assert ("ROLLED_BACK", (1.0, 0.0)) == (again.state.phase, again.weights), "from the first request on"


async def test_any_member_does_what_a_client_says(group: Group) -> None:
    """On the newest state, so that the owner does not undo it; what is not possible is refused."""
    one, two = await group.join("one"), await group.join("two")
    await group.look("one", "two")
    document = await group.members["two"].look(two, action="PAUSE", who="alice")
    state = state_of(document.rollouts[two.key])
    assert ("PAUSED", "PAUSE by alice") == (state.phase, state.verdict)
    await group.look("one", "two")
    assert ("PAUSED", 1) == (one.state.phase, one.state.revision) == (two.state.phase, two.state.revision)
    with pytest.raises(InvalidArgumentError, match="PAUSED, and PAUSE is for"):
        await group.members["one"].look(one, action="PAUSE")
    await group.members["two"].look(two, action="PROMOTE")
    await group.look("one")
    assert (1, 1.0) == (one.state.step, one.weights[1])
    await group.members["two"].look(two, action="ABORT")
    await group.look("two")
    assert ("ABORTED", (1.0, 0.0)) == (two.state.phase, two.weights)


async def test_a_share_never_goes_back_when_the_document_is_lost(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """Members that live write what they know."""
    one = await group.join("one")
    await group.look("one")
    await group.members["one"].look(one, action="PROMOTE")
    (group.folder / "state.json").write_text("no JSON")
    with caplog.at_level(logging.ERROR):
        await group.look("one")
    assert (1, 1) == (one.state.step, one.state.revision)
    two = await group.join("two")
    assert one.weights == two.weights


async def test_tests_that_begin_anew_after_counts_were_lost_go_on(group: Group) -> None:
    """A candidate is judged by what comes from then on, not only when the old numbers are there again."""
    one = await group.join("one")
    serve(one, 500)
    await group.look("one")
    assert 1 == one.state.step
    (group.folder / "state.json").unlink()
    group.states["one"].close()
    two = await group.join("two")
    two.follow(one.state)
    for _ in range(2):
        serve(two, 40, 40)
        await group.look("two")
    assert "ROLLED_BACK" == two.state.phase


async def test_a_rollout_of_a_loaded_graph_is_never_forgotten(group: Group) -> None:
    """However many others there are, and however long ago it was decided."""
    one = await group.join("one")
    await group.members["one"].look(one, action="PROMOTE")
    many = [group.stores["one"].register("g", f"n{i}", PLAN) for i in range(MAX_KEPT + 1)]
    group.now_ns += SECOND
    document = await group.members["one"].look()
    assert {one.key, *(other.key for other in many)} == document.rollouts.keys()
    assert 1 == document.rollouts[one.key]["state"]["step"]


async def test_a_changed_definition_begins_anew_and_the_old_one_goes_on_where_it_was(group: Group) -> None:
    """Each has a state of its own, so a rollback of the graph brings the old one back as it stood."""
    old = await group.join("one")
    await group.look("one")
    await group.members["one"].look(old, action="ABORT")
    began_ns = group.now_ns
    new = group.stores["one"].register("g", "root", replace(PLAN, digest="other"))
    await group.look("one")
    assert ("RUNNING", 0) == (new.state.phase, new.state.step)
    assert "ABORTED" == group.stores["one"].register("g", "root", PLAN).state.phase
    assert began_ns == new.state.changed_unix_ns, "its first share is kept from now on"


async def test_an_unreadable_folder_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests go on by the weights that are known; a client is told to try again."""
    (tmp_path / "file").write_text("")
    store = RolloutStore()
    member = RolloutMember(store, FolderState(tmp_path / "file" / "shared", Ownership("one", 15), period_s=3600.0))
    await member.start()
    rollout = store.register("g", "root", PLAN)
    with pytest.raises(UnavailableError, match=r"the shared state of rollouts fails, try again: .*Not a directory"):
        await member.look(rollout, action="PROMOTE")
    assert rollout.state.step == 0
    with caplog.at_level(logging.ERROR):
        await member.close()
    assert 1 == len(caplog.records)
