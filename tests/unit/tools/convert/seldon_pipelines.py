"""Random pipelines of Seldon Core 2, and what they answer by its documents: a plain reading of them, step by step.

Source:
    https://docs.seldon.ai/seldon-core-2/pipelines
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

REQUEST = ("A", "B", "R0", "R1", "T0")
_NAME = "p"


def random_pipeline(rng: random.Random) -> dict[str, Any]:
    """The spec of a pipeline; a step "one3" has the input A, "two3" also B, and all have outputs X and, at times, Y."""
    steps: list[dict[str, Any]] = []
    for i in range(rng.randint(1, 6)):
        step: dict[str, Any] = {"name": f"{rng.choice(('one', 'one', 'two'))}{i}"}
        wanted = ["A", "B"] if step["name"].startswith("two") else ["A"]
        if rng.random() < 0.75:
            places = list(_places(steps, rng))
            if wanted == ["A"] and len(places) > 2 and rng.random() < 0.3:
                of_steps = rng.sample([place for place in places if not place.startswith(_NAME)], 1)
                step["inputs"] = [*of_steps, f"{_NAME}.inputs.{rng.choice(('R0', 'R1'))}"]
                step["inputsJoinType"] = rng.choice(("any", "outer"))
                step["tensorMap"] = dict.fromkeys(step["inputs"], "A")
            else:
                step["inputs"] = rng.sample(places, len(wanted))
                step["tensorMap"] = dict(zip(step["inputs"], wanted, strict=True))
        if rng.random() < 0.4:
            places = [*_places(steps, rng), f"{_NAME}.inputs.T0", *(one["name"] for one in steps)]
            step["triggers"] = rng.sample(places, min(len(places), rng.randint(1, 2)))
            step["triggersJoinType"] = rng.choice(("inner", "any", "outer"))
        steps.append(step)
    ends = rng.sample(steps, min(len(steps), rng.randint(1, 3)))
    join = rng.choice(("inner", "any", "outer"))
    given = [f"{end['name']}.outputs.{rng.choice('XXY')}" for end in ends]
    names = ["O"] * len(given) if join != "inner" else [f"O{i}" for i in range(len(given))]
    output = {"steps": given, "stepsJoin": join, "tensorMap": dict(zip(given, names, strict=True))}
    return {"steps": steps, "output": output}


def model(name: str, inputs: Mapping[str, float]) -> dict[str, float]:
    """What the model of a step answers."""
    total = sum(inputs.values()) + int(name[3:]) + 1
    return {"X": total} | ({"Y": 2 * total} if total % 2 == 0 else {})


def answers(spec: Mapping[str, Any], request: Mapping[str, float]) -> list[dict[str, float]] | None:
    """What a pipeline may answer; nothing where it gives no answer, None where a model fails for want of an input."""
    run = _Run(spec["steps"], request)
    if run.has_failed:
        return None
    output = spec["output"]
    found = {place: run.tensor(place) for place in output["steps"]}
    present = {output["tensorMap"][place]: value for place, value in found.items() if value is not None}
    if output["stepsJoin"] == "inner":
        return [present] if len(present) == len(found) else []
    return [{"O": value} for value in found.values() if value is not None]


def _places(steps: list[dict[str, Any]], rng: random.Random) -> Iterator[str]:
    """Tensors that a step can read."""
    yield from (f"{_NAME}.inputs.{name}" for name in ("R0", "R1"))
    for step in steps:
        yield from (f"{step['name']}.outputs.X", f"{step['name']}.outputs.Y")
        if rng.random() < 0.3:
            yield f"{step['name']}.inputs.A"


class _Run:
    """One request."""

    def __init__(self, steps: list[dict[str, Any]], request: Mapping[str, float]) -> None:
        self._inputs: dict[str, dict[str, float] | None] = {}
        self._outputs: dict[str, dict[str, float] | None] = {}
        self._request = request
        self.has_failed = False
        for step in steps:
            name = step["name"]
            self._inputs[name] = got = self._message(step)
            wanted = {"A", "B"} if name.startswith("two") else {"A"}
            runs = got is not None and wanted <= set(got)
            self.has_failed |= got is not None and not runs
            self._outputs[name] = model(name, {key: (got or {})[key] for key in wanted}) if runs else None

    def tensor(self, place: str) -> float | None:
        """The value at a reference, or 0 where a whole message is there."""
        owner, *rest = place.split(".")
        side, tensor = (*rest, "outputs", "")[:2] if rest else ("outputs", "")
        message = self._request if owner == _NAME else (self._inputs if side == "inputs" else self._outputs)[owner]
        return None if message is None else message.get(tensor) if tensor else 0.0

    def _message(self, step: Mapping[str, Any]) -> dict[str, float] | None:
        """What a step gets; None where it gets nothing."""
        triggers = [self.tensor(place) is not None for place in step.get("triggers", ())]
        if triggers and not (all if step["triggersJoinType"] == "inner" else any)(triggers):
            return None
        if "inputs" not in step:
            return dict(self._request)
        found = {place: self.tensor(place) for place in step["inputs"]}
        is_any = step.get("inputsJoinType", "inner") != "inner"
        if not (any if is_any else all)(value is not None for value in found.values()):
            return None
        got: dict[str, float] = {}
        for place, value in found.items():
            if value is not None:
                got.setdefault(step["tensorMap"][place], value)
        return got
