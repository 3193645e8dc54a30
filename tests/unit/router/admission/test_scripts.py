"""Requests at the admission controller of a router as scripts: who is admitted, waits, is refused, on a virtual clock.

The first line of a case in scripts.txt is ``router [max=N] [client_max=N] [header=NAME] [workers=N] [adaptive]``; each
line behind it is one of

- ``graph [max=N] [stream]``: the policy of the graph, for requests from now on;
- ``enter NAME[*N] [priority=1] [client=KEY] [header=VALUE] [left=S] [stream]``: N requests, S seconds before their
  deadline;
- ``leave NAME[*N] [failed]``: the first N, or all, of that name end; ``cancel NAME``: they give up;
- ``answer N S``: so many requests, one after the other, which take so long; ``later S``: so many seconds;
- ``check [priority=1]``: a request that would be admitted or not; ``state``: in flight and waiting.

What is written: how many of each line were admitted, wait and are refused, with the error of the first of them; who
comes in or gives up later; and at the end what was refused, by reason and level. Then nothing may be left.
"""

import asyncio
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import WeftError
from weft.router.admission.controller import AdmissionController, AdmissionSettings, Permit, admissible_priority


def options_of(words: list[str]) -> dict[str, Any]:
    """``name=value`` and words alone, which are true."""
    return {name: value or "true" for name, _, value in (word.partition("=") for word in words)}


class Script:
    """A controller, and what has come of the lines so far."""

    def __init__(self, first: str, clock: VirtualClock) -> None:
        options = options_of(first.split()[1:])
        settings = AdmissionSettings(
            max_inflight=int(options.get("max", 0)),
            is_adaptive="adaptive" in options,
            max_inflight_per_client=int(options.get("client_max", 0)),
            client_key_header=options.get("header", ""),
        )
        self.clock = clock
        self.admission = AdmissionController(
            settings, num_workers=int(options.get("workers", 1)), generator=random.Random(1), clock_ns=clock
        )
        self.policy: dict[str, str] = {}
        self.requests: dict[str, list[tuple[asyncio.Task[None], asyncio.Future[None]]]] = defaultdict(list)
        self.lines: list[str] = []

    @property
    def limit(self) -> Any:
        """The graph's."""
        return self.admission.limit("graph", "g", int(self.policy.get("max", 0)), is_stream="stream" in self.policy)

    async def play(self, lines: list[str]) -> None:
        """Do what the lines say, and let all go."""
        for line in lines:
            verb, *words = line.split()
            told = await getattr(self, verb)(*words)
            self.lines += [f"{line}: {told}"] if told else []
            for _ in range(4):
                await asyncio.sleep(0)
        refusals = dict(self.limit.refusals)
        for name in list(self.requests):
            await self.leave(name)
        await asyncio.sleep(0)
        limit, router = self.limit, self.admission.router
        assert (0, 0, 0) == (limit.num_inflight, router.num_inflight, len(limit.queue))
        told = " ".join(f"{reason}/{level}={count}" for (reason, level), count in sorted(refusals.items()))
        self.lines += [f"refused {told}"] * bool(told)

    async def graph(self, *words: str) -> None:
        """Another policy."""
        self.policy = options_of(list(words))

    def _admit(self, words: list[str], *, is_check: bool = False) -> Any:
        options = options_of(words)
        now_ns = self.clock()
        deadline_ns = now_ns + int(float(options["left"]) * 1e9) if "left" in options else None
        headers = {"x-client": options["header"]} if "header" in options else {}
        context = CallContext(
            headers=headers, client_key=options.get("client", ""), arrival_ns=now_ns, deadline_ns=deadline_ns
        )
        priority = {"priority": json.loads(options["priority"])} if "priority" in options else {}
        self.policy |= {"stream": ""} if "stream" in options else {}
        level, client = self.admission.level_of(admissible_priority(priority)), self.admission.client_of(context)
        do = self.admission.check if is_check else self.admission.admit
        return do(self.limit, level, client, context)

    async def enter(self, name: str, *words: str) -> str:
        """Requests come."""
        name, _, times = name.partition("*")
        found: Counter[str] = Counter()
        error = ""
        for _ in range(int(times or 1)):
            try:
                permit = self._admit(list(words))
            except WeftError as refused:
                error = error or f"\n  {refused.code}: {refused.message}"
                found["refused" if refused.is_refused else "failed"] += 1
                continue
            found["waiting" if permit.is_waiting else "in"] += 1
            end = asyncio.get_running_loop().create_future()
            self.requests[name].append((asyncio.ensure_future(self._request(name, permit, end)), end))
        return ", ".join(f"{count} {what}" for what, count in found.items()) + error

    async def check(self, *words: str) -> str:
        """Whether one would be admitted."""
        try:
            return "in" if self._admit(list(words), is_check=True) else "waiting"
        except WeftError as error:
            return f"{error.code}: {error.message}"

    async def _request(self, name: str, permit: Permit, end: asyncio.Future[None]) -> None:
        try:
            with permit:
                await permit.wait()
                self.lines += [f"  {name} comes in"] * permit.is_waiting
                await end
        except WeftError as error:
            self.lines += [f"  {name} {error.code}: {error.message}"] * (error.message != "failed")

    async def leave(self, name: str, *words: str) -> None:
        """They end."""
        name, _, times = name.partition("*")
        count = int(times or len(self.requests[name]))
        ended, self.requests[name] = self.requests[name][:count], self.requests[name][count:]
        for task, end in ended:
            if end.done():
                continue
            if words:
                end.set_exception(WeftError("failed"))
            else:
                end.set_result(None)
            await asyncio.wait((task,))

    async def cancel(self, name: str) -> None:
        """They give up."""
        for task, _ in self.requests.pop(name):
            task.cancel()
            await asyncio.wait((task,))

    async def answer(self, times: str, seconds: str, *words: str) -> None:
        """Requests, one after the other."""
        for _ in range(int(times)):
            await self.enter("answered")
            await asyncio.sleep(float(seconds))
            await self.leave("answered", *words)

    async def later(self, seconds: str) -> None:
        """Time goes by."""
        await asyncio.sleep(float(seconds))

    async def state(self) -> str:
        """What is in flight."""
        limit, router = self.limit, self.admission.router
        busy = ", busy" if limit.is_busy else ""
        waiting = f", {len(limit.queue)} waiting" if len(limit.queue) else ""
        return f"{limit.num_inflight} of {limit.limit}, {router.num_inflight} in the router{waiting}{busy}"


@cases(Path(__file__).with_name("scripts.txt"))
async def test_a_script(case: Case, virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    """What becomes of requests is what is written down, and nothing is left of them."""
    first, *lines = case.lines
    script = Script(first, virtual_clock)
    await script.play(lines)
    logged = [f"log of {record.num_refused}" for record in caplog.records]  # type: ignore[attr-defined]
    case.check("\n".join([*script.lines, *logged]))
