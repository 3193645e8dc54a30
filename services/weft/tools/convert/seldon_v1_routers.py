"""Routers that are part of Seldon Core 1: an A/B test, and bandits by the images that Seldon publishes."""

import re

from weft.tools.convert.yaml_tree import Source, YamlValue

_BANDIT_IMAGES = {"mab_epsilon_greedy": "EPSILON_GREEDY", "mab_thompson_sampling": "THOMPSON"}
_IMAGE_NAME = re.compile(r"(?:.*/)?([^/:@]*)")


def bandit_of(source: Source, entries: dict[str, YamlValue], image: str) -> str:
    """The fields of a splitter's ``bandit`` for a router of Seldon that learns; "" for any other image."""
    found = _IMAGE_NAME.match(image)
    algorithm = _BANDIT_IMAGES.get(found[1]) if found else None
    if algorithm is None:
        return ""
    return f"algorithm: {algorithm}{_epsilon(source, entries) if algorithm == 'EPSILON_GREEDY' else ''}"


def _epsilon(source: Source, entries: dict[str, YamlValue]) -> str:
    """The field of a bandit, if the router of Seldon has the parameter."""
    for parameter in source.sequence(entries.get("parameters"), "parameters"):
        if parameter.entries.get("name", parameter).text == "epsilon":
            given = parameter.entries.get("value", parameter)
            epsilon = source.number(given, "epsilon")
            if epsilon is not None and not 0 < epsilon <= 1:
                source.error(given, f"epsilon is {epsilon:g}; it must be above 0 and at most 1")
            return "" if epsilon is None else f" epsilon: {epsilon:g}"
    return ""


def ratio_of_first(source: Source, value: YamlValue, entries: dict[str, YamlValue], num_children: int) -> float:
    """Share of the first child of an A/B test."""
    if num_children != 2:
        source.error(value, f"RANDOM_ABTEST has 2 children, this one has {num_children}")
    for parameter in source.sequence(entries.get("parameters"), "parameters"):
        if parameter.entries.get("name", value).text == "ratioA":
            given = parameter.entries.get("value", parameter)
            ratio = source.number(given, "ratioA")
            if ratio is not None and not 0 < ratio < 1:
                source.error(given, f"ratioA is {ratio:g}; it must be above 0 and below 1")
            return 0.5 if ratio is None else ratio
    source.error(value, "RANDOM_ABTEST has no parameter 'ratioA'")
    return 0.5
