"""The story of docs/rollouts.md: recorded traffic, CI on a change, a candidate rolled back and one promoted."""

import asyncio
import itertools
import random
import re
import shlex
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.guide import steps_of
from tests.integration.group import workers_of
from tests.processes import Running, kill_and_wait, running

from weft.base.core import InferCall
from weft.base.errors import WeftError
from weft.base.tensors import decode, encode
from weft.cli.__main__ import main
from weft.mesh.running import running_mesh
from weft.v2.client.v2_client import V2Client
from weft_protos import graph_service_pb2 as pb
from weft_protos import grpc_service_pb2 as v2

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/rollouts.md"
NUM_USERS = 200
#: Requests in flight at once, each of a user of its own.
NUM_CLIENTS = 40
WAIT_S = 100.0
CALL_S = 60.0
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")
LONG = pytest.mark.long


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The page's files, with versions 2 and 3 of the model as it says."""
    folder = tmp_path / "mesh"
    for step in steps_of(PAGE.read_text()):
        if step.kind == "file":
            (folder / step.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / step.name).write_text(step.text)
    model = folder / "model/score"
    for version, fails in (("2", "{7, 8, 9}"), ("3", "set()")):
        assert f"`FAILS = {fails}`" in PAGE.read_text()
        (model / version).mkdir()
        (model / version / "model.py").write_text((model / "1/model.py").read_text().replace("{7}", fails))
    (folder / "change.pbtxt").rename(tmp_path / "change.pbtxt")
    return folder


def change(repository: Path, version: int) -> None:
    """Version 2 or 3 of the model is the candidate."""
    text = (repository.parent / "change.pbtxt").read_text()
    text = text.replace('"v2"', f'"v{version}"').replace("model_version: 2", f"model_version: {version}")
    (repository / "graphs/rank/1/graph.pbtxt").write_text(text)


class Traffic:
    """Users that ask again and again, each at one router as long as it lives, then at the next.

    Attributes:
        steps: Of each user, the steps of the splitter that it came to.
        lost: Requests that no router answered.
    """

    def __init__(self, routers: Sequence[str]) -> None:
        self.routers = list(routers)
        self.steps: dict[int, list[str]] = defaultdict(list)
        self.lost: list[str] = []
        self.numbers = itertools.count()
        self._chance = random.Random(0)

    @asynccontextmanager
    async def flowing(self, num: int | None = None) -> AsyncIterator[None]:
        """It flows in the block; with ``num`` so many requests have been answered at its end."""
        is_over, before = asyncio.Event(), next(self.numbers)

        def goes_on() -> bool:
            return not is_over.is_set() if num is None else next(self.numbers) - before <= num

        async with asyncio.TaskGroup() as group:
            for client in range(NUM_CLIENTS):
                group.create_task(self._client(client, goes_on))
            yield
            is_over.set()

    async def _client(self, client: int, goes_on: Callable[[], bool]) -> None:
        channels: dict[str, V2Client] = {}
        try:
            for user in itertools.cycle(range(client, NUM_USERS, NUM_CLIENTS)):
                if not goes_on():
                    return
                await self._ask(user, self._chance.randrange(100_000), channels)
        finally:
            for channel in channels.values():
                await channel.close()

    async def _ask(self, user: int, number: int, channels: dict[str, V2Client]) -> None:
        call = InferCall("rank", inputs={"X": encode(np.array([number], np.float32))})
        faults = []
        for turn in range(2 * len(self.routers)):
            address = self.routers[(user + turn) % len(self.routers)]
            if address not in channels:
                channels[address] = V2Client(address)
            trailer: dict[str, str] = {}
            try:
                header = (("x-user", f"user-{user}"),)
                answer = await channels[address].infer(call, timeout_s=CALL_S, metadata=header, trailer=trailer)
            except WeftError as error:
                faults.append(f"{address}: {error}")
                continue
            assert decode(answer.outputs["Y"])[0] in (0, 2 * number)
            self.steps[user].append(re.search(r"root(?:\.|\[)(v\d)", trailer["x-graph-path"])[1])  # type: ignore[index]
            return
        self.lost.append(f"user {user}: {faults}")


async def status(router: str) -> pb.RolloutStatus:
    async with V2Client(router) as client:
        request = pb.RolloutRequest(graph="rank")
        response: pb.RolloutResponse = await client.graph_service("Rollout", request, timeout_s=CALL_S)
        return response.rollout[0]


async def until(holds: Callable[[pb.RolloutStatus], bool], router: str) -> pb.RolloutStatus:
    """The first status for which it holds, among those within WAIT_S."""
    end_s = time.monotonic() + WAIT_S
    while not holds(now := await status(router)):
        assert time.monotonic() < end_s, str(now)
        await asyncio.sleep(0.1)
    return now


async def load(*routers: str) -> None:
    for router in routers:
        async with V2Client(router) as client:
            await client.call("RepositoryModelLoad", v2.RepositoryModelLoadRequest(model_name="rank"), timeout_s=CALL_S)


CI = {2: "github.yml", 3: "gitlab.yml"}


@pytest.mark.parametrize(("num", "changes"), [(1_000, CI), pytest.param(20_000, {2: CI[2]}, marks=LONG)])
async def test_ci_tells_what_a_change_does(
    repository: Path,
    num: int,
    changes: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of traffic that was recorded: which answers change, for both changes, by the commands of both CI files."""
    monkeypatch.chdir(repository)
    recordings = repository.parent / "recordings"
    arguments = (*EXPLICIT, "--service-args", f"router=--record-dir={recordings}")
    with running_mesh(repository, arguments, log=subprocess.DEVNULL) as mesh:
        url = mesh["router"].grpc
        assert 0 == await asyncio.to_thread(main, ["record", "rank", "--percent", "100", "--url", url])
        traffic = Traffic([url])
        async with traffic.flowing(num):
            pass
        assert 0 == await asyncio.to_thread(main, ["record", "rank", "--stop", "--url", url])
    assert [] == traffic.lost
    (recorded,) = (path for path in recordings.rglob("*") if path.is_file())
    (repository / "traffic").mkdir()
    recorded.rename(repository / "traffic/rank.weft.zst")
    for action in ("init -q", "add .", "commit -qm base", "update-ref refs/remotes/origin/main HEAD"):
        git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *action.split()]
        await asyncio.to_thread(subprocess.run, git, check=True)
    capfd.readouterr()
    for version, name in changes.items():
        change(repository, version)
        commands = re.findall(r"- (?:run: )?weft (.*)", (ROOT / "examples/ci" / name).read_text())
        assert ["check", "test", "diff", "replay"] == [command.split()[0] for command in commands]
        said = {}
        for command in commands:
            code = await asyncio.to_thread(main, shlex.split(command.partition(" > ")[0]))
            out, err = capfd.readouterr()
            assert code == 0, f"weft {command}: {out}\n{err}"
            said[command.split()[0]] = out
        assert "| clients | compatible |" in said["diff"]
        assert f"+ root[v{version}]  target score@{version}, taken 20 %" in said["diff"]
        (different,) = re.findall(rf"\| answers \| ([\d,]+) of {num:,} change \|", said["diff"])
        assert f"{different} of {num:,} answers differ: recorded -> rank" in said["replay"]
        of_candidate = num * 0.2 * (0.02 if version == 2 else 0.01)  # answers that the rule gives, or no longer
        assert of_candidate / 3 - 3 < int(different.replace(",", "")) < 3 * of_candidate + 10


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=LONG)])
async def test_a_bad_candidate_is_rolled_back_and_a_good_one_gets_everyone(repository: Path, is_long: bool) -> None:
    """Through kills and reloads no request is lost, and users move once to a candidate, and back at its rollback."""
    if not is_long:  # a clearer fault, 9 % for 3 %, needs fewer requests
        edit(repository / "model/score/2/model.py", "{7, 8, 9}", "set(range(7, 16))")
        edit(repository.parent / "change.pbtxt", "1200", "150")
    with ExitStack() as stack:
        up = (*EXPLICIT, "--router-workers", "2")
        mesh = stack.enter_context(running_mesh(repository, up, log=subprocess.DEVNULL))
        router = ("--repository", str(repository / "graphs"), "--target", f"model={mesh['model'].grpc}", *EXPLICIT)

        def another() -> Running:
            return stack.enter_context(running("weft.services.router", *router, log=subprocess.DEVNULL))

        first, second = mesh["router"].grpc, another()
        traffic = Traffic([first, second.grpc])
        async with traffic.flowing():
            change(repository, 2)
            await load(first, second.grpc)
            await until(lambda now: now.candidate_arm.num_requests > 20, first)
            kill_and_wait(workers_of(mesh["router"].pid)[1])
            await load(second.grpc)
            bad = await until(lambda now: now.phase == now.ROLLED_BACK, first)
            await until(lambda now: now.phase == now.ROLLED_BACK, second.grpc)
            change(repository, 3)
            await load(first, second.grpc)
            await until(lambda now: now.candidate == "v3" and now.step > 0, first)
            second.kill()
            traffic.routers[1] = (await asyncio.to_thread(another)).grpc
            await load(first)
            good = await until(lambda now: now.phase == now.PROMOTED, first)
            await until(lambda now: now.phase == now.PROMOTED, traffic.routers[1])
            before = {user: len(steps) for user, steps in traffic.steps.items()}
            await until(lambda _: all(len(steps) > before[user] + 1 for user, steps in traffic.steps.items()), first)
    assert [] == traffic.lost
    assert "rolled back at" in bad.verdict
    assert "max_error_rate is 0.01: errors" in bad.verdict
    assert bad.candidate_arm.num_requests <= (4_500 if is_long else 500)
    assert (100.0, "v3") == (good.percent, good.candidate)
    ways = {" ".join(step for step, _ in itertools.groupby(steps)) for steps in traffic.steps.values()}
    assert {"v1 v2 v1 v3", "v1 v3"} <= ways <= {"v1 v2 v1 v3", "v1 v3", "v2 v1 v3", "v1 v2 v3", "v2 v3"}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
