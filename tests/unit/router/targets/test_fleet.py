"""Replicas of a target as scripts: how they are, what is called, and where the calls go.

The first line of a case in fleet.txt is ``replicas a b [policy=P] [models=m,n]``; each line behind it is one of

- ``call [N] [MODEL[@VERSION]] [seq=ID] [start] [end] [order] [tried] [NAME=VALUE]``: N calls, in a sequence, whose
  replicas are told in order, which know where those before them went, or with a parameter that is a header too;
  ``{n}`` is the number of the call;
- ``a answers``, ``a refuses``, ``a loses`` (the call may have run), ``a fails`` (INTERNAL);
- ``a is serving``, ``not_serving`` or ``unreachable``; ``later S``: so many seconds; ``budget N`` of repeated calls;
- ``a has m@1 m@2:8 n-``: its models, with a maximum batch size, not ready; ``a has nothing``, ``a is gone``,
  ``a loads m``: a discovery follows.

What is written: of calls the replicas that were asked, how often, and errors; of discoveries the models; and at the end
what is ejected, how many calls were moved, and the log.
"""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.targets.test_replicated import Fleet, lost, raising, refusal, replicated

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError, WeftError
from weft.router.target import RetryBudget, TargetModel
from weft.router.targets.replicas import Health

ANSWERS = {"refuses": refusal, "loses": lost, "fails": lambda: RemoteError("INTERNAL", "broken")}


def model(text: str) -> TargetModel:
    """``name[@version][:max_batch_size][-]``."""
    name, version, batch, is_unready = re.fullmatch(r"(\w+)(?:@(\d+))?(?::(\d+))?(-?)", text).groups()  # type: ignore[union-attr]
    signature = replace(make.signature(name, version=version or "1"), max_batch_size=int(batch or 0))
    return TargetModel(signature, not is_unready)


class Script:
    """A fleet, and what has come of the lines so far."""

    def __init__(self, first: str) -> None:
        names, options = [], {}
        for word in first.split()[1:]:
            name, _, value = word.partition("=")
            options |= {name: value} if value else {}
            names += [] if value else [name]
        self.policy = options.get("policy", "least_outstanding")
        self.fleet = Fleet(names, *map(model, options.get("models", "m").split(",")))
        self.lines: list[str] = []

    async def play(self, lines: list[str]) -> None:
        """Do what the lines say."""
        by_grpc = FakeTarget("grpc") if self.policy == "weighted_round_robin" else None
        async with replicated(self.fleet, self.policy, by_grpc) as target:
            for line in lines:
                await self._do(target, *line.split())
            ejected = [f"{one.address} ejected" for one in target.replicas if target.is_ejected(one)]
            ejected += [f"{target.num_moved} moved"] * bool(target.num_moved)
            ejected += [f"{target.budget.num_refused} not repeated"] * bool(target.budget.num_refused)
            self.lines += ejected

    async def _do(self, target: Any, subject: str, verb: str = "1", *words: str) -> None:
        if subject == "call":
            count, rest = (int(verb), words) if verb.isdigit() else (1, (verb, *words))
            await self._call(target, count, rest)
        elif subject == "later":
            self.fleet.now_ns += int(float(verb) * 1e9)
        elif subject == "budget":
            target.budget = RetryBudget(max_tokens=int(verb))
        elif verb == "is" and words != ("gone",):
            self.fleet.tells[subject](Health[words[0].upper()])
        elif verb in ("has", "loads", "is"):
            fake = self.fleet.fakes[subject]
            fake.models = [model(word) for word in words if word != "nothing"]
            if verb == "loads":
                fake.models = [TargetModel.undescribed(word, "1", "LOADING", "") for word in words]
            if verb == "is":
                fake.models = RemoteError("UNAVAILABLE", f"{subject} is gone")
            await self._discover(target)
        else:
            fake = self.fleet.fakes[subject]
            fake.answers = {} if verb == "answers" else dict.fromkeys("mn", raising(ANSWERS[verb]))

    async def _discover(self, target: Any) -> None:
        try:
            found = await target.discover(timeout_s=1)
        except WeftError as error:
            self.lines.append(f"{error.code}: {error.message}")
            return
        told = [
            f"{one.signature.name}@{one.signature.version}:{one.signature.max_batch_size}{'-' * (not one.is_ready)}"
            for one in found
        ]
        self.lines.append(" ".join(["models", *told]))

    async def _call(self, target: Any, count: int, words: tuple[str, ...]) -> None:
        asked: list[str] = []
        errors: Counter[str] = Counter()
        for number in range(1, count + 1):
            parameters: dict[str, Any] = {}
            name, version = "m", ""
            for word in (word.replace("{n}", str(number)) for word in words if word not in ("order", "tried")):
                key, is_given, value = word.partition("=")
                if word in ("start", "end"):
                    parameters[f"sequence_{word}"] = True
                elif is_given:
                    parameters["sequence_id" if key == "seq" else key] = int(value) if value.isdigit() else value
                else:
                    name, _, version = word.partition("@")
            headers = {f"x-{key}": str(value) for key, value in parameters.items()}
            context = CallContext(headers=headers, tried=list(asked) if "tried" in words else [])
            num_known = len(context.tried or ())
            try:
                await target.infer(InferCall(name, version, parameters=parameters), context)
            except WeftError as error:
                errors[f"{error.code}: {error.message}"] += 1
            asked += (context.tried or [])[num_known:]
        in_order = asked if "order" in words or "tried" in words else sorted(asked)
        runs = [(one, len(list(group))) for one, group in groupby(in_order)]
        told = [f"{one}*{times}" if times > 1 else one for one, times in runs]
        self.lines.append(" ".join(["call", *told]))
        self.lines += [f"  {times} x {text}" for text, times in errors.items()]


@cases(Path(__file__).with_name("fleet.txt"))
async def test_a_fleet(case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where calls go, and what is known of models, is as is written down."""
    for name in ("MAX_WAIT_S", "SHORT_WAIT_S"):
        monkeypatch.setattr(f"weft.router.targets.replicated.{name}", 0.01)
    first, *lines = case.lines
    script = Script(first)
    await script.play(lines)
    await asyncio.sleep(0)
    case.check("\n".join([*script.lines, *(f"log {message}" for message in caplog.messages)]))
