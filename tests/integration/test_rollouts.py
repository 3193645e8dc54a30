"""Rollouts over real routers, and workers of one: a kill of the owner, restarts, reloads, clients that steer them."""

import fcntl
import json
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from tests.integration.group import channel_to, workers_of
from tests.integration.routing import (
    Client,
    NamingCore,
    graph,
    message,
    naming_service,
    running_router,
    write,
)
from tests.processes import WAIT_S, Running, kill_and_wait, wait_until
from tests.unit.router.rollouts.kubernetes import serving_leases

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InternalError
from weft.cli.__main__ import main
from weft_protos import graph_service_pb2 as graph_pb

NUM_USERS = 60
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")


class FailingCore(NamingCore):
    """The models of ``failing`` fail; alpha's answer is the fallback of all."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        if call.model_name in self.failing:
            raise InternalError("as the test says")
        return await super().infer(call, context)


def split(candidate: str, *, every: str = "0s", steps: str = "20, 50, 100", num: int = 60) -> str:
    """A graph of users that move from alpha to the candidate, whose failures the fallback hides."""
    step = f'step {{ name: "{candidate}" model_name: "{candidate}" fallback {{ model_name: "alpha" }} }}'
    rollout = f'rollout {{ steps: [{steps}] every: "{every}" guard {{ max_error_rate: 0.3 min_requests: {num} }} }}'
    sticky = 'sticky_by: \'get(headers, "x-user", "")\''
    return graph(
        "named", f'splitter {{ {sticky} {rollout} step {{ name: "alpha" model_name: "alpha" weight: 1 }} {step} }}'
    )


class Users:
    """Each user asks again and again, by turns over all routers that live; what failed there is asked elsewhere."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.channels = {address: grpc.insecure_channel(address) for address in addresses}
        self.steps: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.faults: list[str] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(part,)) for part in range(4)]

    def __enter__(self) -> "Users":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        for channel in self.channels.values():
            channel.close()

    def _ask(self, part: int) -> None:
        turn = part
        while not self._is_over.is_set():
            for user in range(part, NUM_USERS, 4):
                turn += 1
                self._one(f"u{user}", turn)

    def _one(self, user: str, turn: int) -> None:
        addresses = list(self.channels)
        errors = []
        for i in range(len(addresses)):
            address = addresses[(turn + i) % len(addresses)]
            client = Client(self.channels[address])
            try:
                _, call = client.v2.ModelInfer.with_call(message("named"), timeout=WAIT_S, metadata=(("x-user", user),))
            except grpc.RpcError as error:
                errors.append(str(error.code()))
            else:
                path = str(dict(call.trailing_metadata())["x-graph-path"])
                self.steps[user, address].append(path.partition("[")[2][:4])
                return
        self.faults.append(f"{user}: {errors}")

    def num_moves(self) -> int:
        """How often another step answered than before, of a user at a router: of those that moved most."""
        return max(sum(a != b for a, b in pairwise(steps)) for steps in self.steps.values())


def status(address: str, node: str = "root", action: int = 0) -> graph_pb.RolloutStatus:
    """How the rollout of ``named`` stands as this router knows it."""
    with grpc.insecure_channel(address) as channel:
        request = graph_pb.RolloutRequest(action=action, graph="named", node=node)  # type: ignore[arg-type]
        return Client(channel).graphs.Rollout(request, timeout=WAIT_S).rollout[0]


def percent(router: Running, candidate: str = "beta") -> float:
    return router.scrape()[f'weft_rollout_percent{{candidate="{candidate}",graph="named",node="root"}}']


@pytest.fixture
def core() -> FailingCore:
    return FailingCore()


@pytest.fixture
def target(core: FailingCore) -> Iterator[str]:
    with naming_service(core) as address:
        yield address


@contextmanager
def routers(repository: Path, target: str, num: int, *arguments: str) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_router(repository, target, arguments)) for _ in range(num)]


@contextmanager
def owning_router(repository: Path, target: str, *arguments: str) -> Iterator[Running]:
    """The owner, as it is the first."""
    with running_router(repository, target, arguments) as router:
        wait_until(lambda: status(router.grpc).owner, "an owner")
        yield router


@pytest.mark.parametrize("place", ["repository", "lease"])
def test_the_death_of_the_owner_costs_no_request_and_no_share(tmp_path: Path, target: str, place: str) -> None:
    """Of three routers on one repository, another decides after it; users move once, and a new router knows the end."""
    write(tmp_path, split("beta"), "named")
    with ExitStack() as stack:
        more = []
        if place == "lease":
            more = ["--rollouts", f"lease:weft/mesh@{stack.enter_context(serving_leases()).url}"]
        owner = stack.enter_context(owning_router(tmp_path, target, *more))
        left = stack.enter_context(routers(tmp_path, target, 2, *more))
        users = stack.enter_context(Users([router.grpc for router in (owner, *left)]))
        wait_until(lambda: status(owner.grpc).step >= 1, "the second share")
        first = status(owner.grpc)
        owner.kill()
        shares: dict[str, list[float]] = defaultdict(list)

        def is_promoted() -> bool:
            for router in left:
                shares[router.grpc].append(percent(router))
            told = [status(router.grpc) for router in left]
            return {(one.phase, one.percent) for one in told} == {(graph_pb.RolloutStatus.PROMOTED, 100.0)}

        wait_until(is_promoted, lambda: f"all users at the candidate: {status(left[0].grpc)}")
        assert status(left[0].grpc).owner == status(left[1].grpc).owner != first.owner
        assert all(seen == sorted(seen) for seen in shares.values())
        with running_router(tmp_path, target, more) as new, grpc.insecure_channel(new.grpc) as channel:
            assert "root[beta]" == Client(channel).ask()
    assert [] == users.faults
    assert 1 == users.num_moves()


def test_an_owner_that_hangs_loses_the_rollout_and_follows_when_it_goes_on(tmp_path: Path, target: str) -> None:
    """While it is stopped another one decides; it decides nothing any more, and changes nothing."""
    write(tmp_path, split("beta"), "named")
    with owning_router(tmp_path, target) as old, routers(tmp_path, target, 2) as two:
        first = status(old.grpc).owner
        folder = tmp_path / ".weft" / "rollouts"
        with (folder / "state.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # it is in the middle of no change
            old.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: status(two[0].grpc).owner != first, "another owner")
            with Users([router.grpc for router in two]) as users:
                wait_until(lambda: [percent(router) for router in two] == [100, 100], "the end")
            told = status(two[0].grpc)
            kept = (folder / "state.json").read_bytes()
        finally:
            old.process.send_signal(signal.SIGCONT)
        wait_until(lambda: percent(old) == 100, "that it follows")
        assert (told.owner, told.revision, told.verdict) == (
            *(getattr(status(old.grpc), name) for name in ("owner", "revision", "verdict")),
        )
        assert told.owner != first
        assert kept == (folder / "state.json").read_bytes()
    assert 1 == users.num_moves()


def test_a_bad_candidate_is_rolled_back_and_its_verdict_outlives_the_router(
    tmp_path: Path, target: str, core: FailingCore, capsys: pytest.CaptureFixture[str]
) -> None:
    """By two workers of one router, though a fallback answers for it; each tells the counts of both."""
    core.failing = {"beta"}
    write(tmp_path, split("beta"), "named")
    more = ("--workers", "2")
    with running_router(tmp_path, target, more) as router, Users([router.grpc]) as users:
        wait_until(lambda: status(router.grpc).phase == graph_pb.RolloutStatus.ROLLED_BACK, "the rollback")
        wait_until(lambda: percent(router) == 0, "that both workers follow")
        verdict = status(router.grpc)
        assert "max_error_rate is 0.3: errors 100.00% over" in verdict.verdict
        assert verdict.candidate_arm.num_errors == verdict.candidate_arm.num_requests > 0
        samples = router.scrape()
        labels = 'candidate="beta",graph="named",node="root"'
        assert samples[f'weft_rollout_errors_total{{arm="candidate",{labels}}}'] >= verdict.candidate_arm.num_errors
        assert 1 == samples[f'weft_rollout_phase{{{labels},phase="ROLLED_BACK"}}']
        kill_and_wait(workers_of(router.process.pid)[1])
        wait_until(lambda: len(workers_of(router.process.pid)) == 2, "the worker again")
    assert 2 >= users.num_moves()
    with running_router(tmp_path, target, more) as router, grpc.insecure_channel(router.grpc) as channel:
        assert {"root[alpha]"} == {Client(channel).ask() for _ in range(20)}
        assert (verdict.verdict, verdict.revision) == (status(router.grpc).verdict, status(router.grpc).revision)
        assert main(["rollout", "status", "named", "--url", router.grpc]) == 0
        told = capsys.readouterr().out
        assert "named/root: ROLLED_BACK, 'beta' has 0 %, step 1 of 3 (revision 1, owner " in told
    assert ".weft" in {path.name for path in tmp_path.iterdir()}


def test_clients_steer_a_rollout_at_any_router_and_reloads_go_on(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command; the same file goes on where it was, another one begins, and a rollback leads back."""
    write(tmp_path, split("beta", every="1h"), "named")

    def rollout(action: str, address: str) -> str:
        code = main(["rollout", action, "named", "--url", address, "--json"])
        out = capsys.readouterr()
        if code:
            return out.err
        (told,) = json.loads(out.out)["rollout"]
        return f"{told['phase']} {told['percent']:g} {told['verdict']}"

    with routers(tmp_path, target, 2, *EXPLICIT) as (one, two), grpc.insecure_channel(one.grpc) as channel:
        wait_until(lambda: status(one.grpc).owner)
        assert "PAUSED 20 PAUSE by hand" == rollout("pause", two.grpc)
        wait_until(lambda: status(one.grpc).phase == graph_pb.RolloutStatus.PAUSED, "the pause at the other router")
        assert "INVALID_ARGUMENT" in rollout("pause", one.grpc)
        assert "RUNNING 20 at 20 %, waits" in rollout("resume", one.grpc)
        assert "RUNNING 50" in rollout("promote", two.grpc)
        wait_until(lambda: percent(one) == 50, "that the other router follows")
        Client(channel).load()
        assert 50 == percent(one)
        write(tmp_path, split("gamma"), "named")
        Client(channel).load()
        assert ("gamma", 20) == (status(one.grpc).candidate, status(one.grpc).percent)
        Client(channel).load(rollback=True)
        assert ("beta", 50) == (status(one.grpc).candidate, status(one.grpc).percent)
        assert 50 == status(two.grpc).percent, "which has not loaded the other file"
        assert "ABORTED 0 ABORT by hand" == rollout("abort", one.grpc)
        wait_until(lambda: percent(one) == 0, "that it follows")
        assert {"root[alpha]"} == {Client(channel).ask() for _ in range(20)}
        assert "NOT_FOUND" in "".join(
            (main(["rollout", "status", name, "--url", one.grpc]), capsys.readouterr().err)[1] for name in ("nothing",)
        )


def test_weights_are_set_at_all_workers_and_taken_back_by_a_rollback(
    tmp_path: Path, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a change of the text, whose other parts stay; in the mode explicit alone."""
    text = graph("named", 'splitter { step { name: "old" model_name: "alpha" weight: 1 }  # serves\n'
                 'step { model_name: "beta" name: "new" fallback { model_name: "alpha" } } }')  # fmt: skip
    write(tmp_path, text, "named")
    options = ("--workers", "2", *EXPLICIT)

    def weights(*arguments: str) -> str:
        capfd.readouterr()
        code = main(["rollout", "weights", *arguments, "--url", router.grpc])
        out, err = capfd.readouterr()
        return err if code else out

    with running_router(tmp_path, target, options) as router, ExitStack() as stack:
        clients = [Client(stack.enter_context(channel_to(router, worker))) for worker in (1, 2)]

        def steps(num: int = 40) -> list[set[str]]:
            return [{client.ask() for _ in range(num)} for client in clients]

        assert [{"root[old]", "root[new]"}] * 2 == steps()
        told = weights("named", "root", "old=0", "new=2.5", "--reason", "a test")
        assert "named/root: new=2.5 old=0 (revision" in told
        assert [{"root[new]"}] * 2 == steps()
        request = graph_pb.GraphSourceRequest(graph="named")
        changed = text.replace("weight: 1", "weight: 0.0").replace(
            'model_name: "beta"', 'weight: 2.5 model_name: "beta"'
        )
        assert changed == clients[0].graphs.GraphSource(request, timeout=WAIT_S).graph[0].text.decode()
        assert "INVALID_ARGUMENT: splitter 'root' has no step 'nwe'; did you mean 'new'?" in weights(
            "named", "root", "nwe=1"
        )
        assert "INVALID_ARGUMENT: weights must be numbers of at least 0" in weights("named", "root", "new=0")
        assert "has no splitter 'roto'; did you mean 'root'?" in weights("named", "roto", "new=0")
        assert [{"root[new]"}] * 2 == steps(5)
        clients[1].load(rollback=True)
        assert [{"root[old]", "root[new]"}] * 2 == steps()
        samples = router.scrape()
        assert samples['weft_graph_step_requests_total{graph="named",status="OK",step="root[new]",version="1"}'] > 90
    with running_router(tmp_path, target) as router:
        assert "UNAVAILABLE: explicit model load / unload is not allowed" in weights("named", "root", "new=1")
