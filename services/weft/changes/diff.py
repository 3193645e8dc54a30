"""What a change of a graph means for its clients, its steps, its users and its worst case: text, Markdown, JSON."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.base.signature import ModelSignature
from weft.language.description import (
    condition_text,
    limit_texts,
    policy_texts,
    share,
    slot_name,
    target_text,
    value_texts,
)
from weft.language.plan import CallPlan, GraphPlan, NodePlan, StepPlan
from weft.router.operators.splitter import SplitterPlan, WeightedChoice
from weft.tools.explain.question import read_question
from weft.tools.explain.render import calls_text, costs, time_text
from weft.tools.explain.tree import explain
from weft.tools.lock import signature_changes, type_text

#: Classes of change.
CLASSES = ("breaking", "signature", "steps", "users", "cost", "answers")
#: Keys of which it is counted how many get another step.
NUM_KEYS = 20_000
_WORDS = {"+": "added", "-": "removed", "~": "changed"}


class Section(NamedTuple):
    """One aspect of a difference, with those of ``CLASSES`` that it has.

    Each line is a change, with ``+``, ``-``, ``~`` or a space in front; ``facts`` is the same for JSON.
    """

    title: str
    headline: str
    lines: Sequence[str]
    facts: Any
    classes: Sequence[str]


class _Entry(NamedTuple):
    """A step, or the root, in words; ``node``: the one that it runs."""

    path: str
    facts: dict[str, str]
    node: NodePlan | None


#: By names of steps from the root on, those of fallbacks behind a ``>``.
_Entries = Mapping[tuple[str, ...], _Entry]


def compare(before: GraphPlan, after: GraphPlan) -> Iterator[Section]:
    """Compare two compiled graphs, the graphs inside them included; every aspect, also those without a change."""
    had, has = (dict(_entries(plan)) for plan in (before, after))
    yield _clients(before.signature, after.signature)
    yield _steps(had, has)
    yield _users(had, has)
    explained = [explain(plan, read_question(plan)) for plan in (before, after)]
    old, new = map(costs, explained)
    dearer = ("cost",) if old != new else ()
    yield Section("calls at most", _arrow(*map(calls_text, explained)), (), (old, new), dearer)
    yield Section("time at most", _arrow(*map(time_text, explained)), (), (old["max_ms"], new["max_ms"]), dearer)


def step_marks(before: GraphPlan, after: GraphPlan) -> dict[str, str]:
    """``added``, ``removed`` or ``changed`` by path of a step."""
    found = _steps(dict(_entries(before)), dict(_entries(after)))
    return {one["path"]: _WORDS[one["sign"]] for one in found.facts}


def _clients(before: ModelSignature, after: ModelSignature) -> Section:
    changes = [*signature_changes(before, after)]
    lines = [f"{'- BREAKING' if breaks else '  compatible'}: {text}" for text, breaks in changes]
    breaking = sum(breaks for _, breaks in changes)
    headline = f"{breaking} BREAKING" if breaking else "compatible"
    facts = [{"change": text, "breaks": breaks} for text, breaks in changes]
    return Section("clients", headline, lines, facts, CLASSES[not breaking : 2] if changes else ())


def _steps(had: _Entries, has: _Entries) -> Section:
    lines, facts, nothing = list[str](), list[dict[str, Any]](), _Entry("", {}, None)
    for key in {**has, **had}:
        sign = "+" if key not in had else "-" if key not in has else "~"
        old, new = had.get(key, nothing), has.get(key, nothing)
        pairs = {name: (old.facts.get(name, ""), new.facts.get(name, "")) for name in {**new.facts, **old.facts}}
        changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        path = new.path or old.path
        if not changed:
            continue
        facts.append({"sign": sign, "path": path, "facts": changed})
        if sign == "~":
            lines += [f"~ {path}  {name}: {_arrow(*pair)}" for name, pair in changed.items()]
        else:
            shown = (f"{name} {''.join(pair)}" for name, pair in changed.items() if name in ("target", "taken"))
            lines.append(f"{sign} {path}  {', '.join(shown)}")
    signs = [one["sign"] for one in facts]
    headline = ", ".join(f"{signs.count(sign)} {word}" for sign, word in _WORDS.items() if sign in signs)
    return Section("steps", headline or "no change", lines, facts, ("steps",) if facts else ())


def _entries(plan: GraphPlan) -> Iterator[tuple[tuple[str, ...], _Entry]]:
    limits = [*limit_texts(plan.timeout_ms, plan.max_inflight), *([plan.cache.text()] if plan.cache else [])]
    yield (), _Entry(plan.root.path, _node_facts(plan.root) | {"policy": "; ".join(limits)}, plan.root)
    yield from _inner_entries(plan.root, ())


def _inner_entries(node: NodePlan, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], _Entry]]:
    description = node.describe()
    for index, step in enumerate(description.steps):
        notes = [*description.notes_to(index), *description.step_notes.get(index, ())]
        one: StepPlan | None = step
        own = (*key, step.name)
        while one is not None:
            inner = one.action if isinstance(one.action, NodePlan) else None
            yield own, _Entry(one.path, _step_facts(one, node, notes) | (_node_facts(inner) if inner else {}), inner)
            yield from _inner_entries(inner, own) if inner is not None else ()
            one, notes = one.fallback, ["if it fails"]
            own = (*own, f">{one.name}") if one is not None else own


def _node_facts(node: NodePlan) -> dict[str, str]:
    description = node.describe()
    ends = [end for end in (description.entry, description.exit) if not end.is_plain]
    notes = [*(note for end in ends for note in end.notes), *description.notes]
    limits = limit_texts(node.timeout_ms, node.max_inflight)
    ways = "; ".join(end.title for end in ends)
    return {"kind": node.kind, "way": ways, "settings": "; ".join(notes), "limits": "; ".join(limits)}


def _step_facts(step: StepPlan, node: NodePlan, notes: Sequence[str]) -> dict[str, str]:
    action, facts = step.action, {"target": target_text(step.action)}
    if isinstance(action, CallPlan):
        model = action.signature
        facts["served version"] = f"{model.version} on '{action.target}'"
        facts |= {f"input {spec.name}": type_text(spec) for spec in model.inputs}
        facts |= {f"output {spec.name}": type_text(spec) for spec in model.outputs}
    sources = {slot: f"{one.name}.{name}" for one in node.steps for name, slot in one.outputs}
    return facts | {
        "streams": "yes" * action.streams,
        "taken": ", ".join([*notes, *([step.shadow.text()] if step.shadow is not None else [])]),
        "accepted if": condition_text(step.accept) if step.accept is not None else "",
        "failure": "the request goes on without it" * step.is_soft,
        "policy": "; ".join(policy_texts(step)),
        "values": "; ".join(value_texts(step, node)),
        "inputs": ", ".join(f"{name} from {sources.get(slot, slot_name(node, slot))}" for name, slot in step.inputs),
        "outputs": ", ".join(f"{name} as {slot_name(node, slot)}" for name, slot in step.outputs),
    }


def _users(had: _Entries, has: _Entries) -> Section:
    lines, facts = list[str](), list[dict[str, Any]]()
    for key in {**has, **had}:
        nodes = (side[key].node if key in side else None for side in (had, has))
        before, after = (node if isinstance(node, SplitterPlan) else None for node in nodes)
        if before is None or after is None:
            if one := before or after:
                sign, what = ("-", "is no splitter any more") if before else ("+", "is a new splitter")
                lines.append(f"{sign} {one.path}  {what}")
                facts.append({"path": one.path, "before": _shares(before), "after": _shares(after), "moves": []})
            continue
        old, new = _shares(before), _shares(after)
        was, now = (condition_text(one.sticky_by) if one.sticky_by else "" for one in (before, after))
        why = "; another key" if was != now else "; another salt" if before.salt != after.salt else ""
        if old == new and not why:
            continue
        moves = _moves(before, after, " " * (was != now)) if was and now else []
        lines.append(f"~ {after.path}  {f'sticky by {now}' if now else 'drawn anew for each request'}{why}")
        for name in {**old, **new}:
            lines.append(f"    {name}: {_arrow(share(old.get(name, 0), 1), share(new.get(name, 0), 1))}")
        lines += [f"    {share(moved, 1)} of the users move from {a} to {b}" for a, b, moved in moves]
        facts.append({"path": after.path, "before": old, "after": new, "is_drawn_anew": bool(why), "moves": moves})
    most = max((sum(moved for *_, moved in one["moves"]) for one in facts), default=0.0)
    headline = f"{share(most, 1.0)} get another step" if most else "shares change" if facts else "no change"
    return Section("users", headline, lines, facts, ("users",) if facts else ())


def _shares(plan: SplitterPlan | None) -> dict[str, float]:
    if plan is None:
        return {}
    total = sum(plan.weights)
    return {step.name: weight / total for step, weight in zip(plan.steps, plan.weights, strict=True)}


def _moves(before: SplitterPlan, after: SplitterPlan, suffix: str) -> list[tuple[str, str, float]]:
    """Of many keys, how many go elsewhere, by the router's own choice; those of ``after`` end in ``suffix``."""
    (old, was), (new, now) = (
        ([*shares], WeightedChoice([*shares], [*shares.values()], plan.salt, random.SystemRandom()))
        for plan, shares in ((before, _shares(before)), (after, _shares(after)))
    )
    numbers = map(str, range(NUM_KEYS))
    found = Counter((old[was.by_key(number)], new[now.by_key(number + suffix)]) for number in numbers)
    return [(source, step, count / NUM_KEYS) for (source, step), count in found.most_common() if source != step]


def _arrow(old: str, new: str) -> str:
    return old if old == new else f"{old or 'none'} -> {new or 'none'}"


def text_of(before: str, after: str, found: Sequence[Section]) -> str:
    """For a terminal."""
    if not any(one.classes or one.lines for one in found):
        return f"{before} -> {after}: no difference\n"
    parts = [[f"{one.title}: {one.headline}", *(f"  {line}" for line in one.lines)] for one in found]
    return "\n".join([f"{before} -> {after}", *(line for part in parts for line in part)]) + "\n"


def markdown_of(before: str, after: str, found: Sequence[Section]) -> str:
    """For a pull request: a table, and the changes folded below it, in the colours of ``diff`` blocks."""
    rows = [f"| {one.title} | {_escaped(one.headline)} |" for one in found]
    lines = [f"### {_escaped(f'{before} -> {after}')}", "", "| | |", "|---|---|", *rows, ""]
    for one in (one for one in found if one.lines):
        body = [f"!{line[1:]}" if line.startswith("~") else line for line in one.lines]
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`*", "\n".join(body))))
        lines += [f"<details><summary>{one.title}</summary>", "", f"{fence}diff", *body, fence, "", "</details>", ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]&#])", r"\\\1", " ".join(text.split()))


def json_of(before: str, after: str, found: Sequence[Section]) -> str:
    """As one object."""
    classes = sorted({name for one in found for name in one.classes})
    facts = {one.title.replace(" ", "_"): one.facts for one in found}
    return json.dumps({"before": before, "after": after, "classes": classes, **facts}, indent=2) + "\n"
