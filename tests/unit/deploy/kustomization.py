"""Renders the kustomizations of deploy/kubernetes as far as they use kustomize, so that no binary is needed."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Manifest = dict[str, Any]
#: Fields of a kustomization that are understood here.
FIELDS = {
    "apiVersion",
    "kind",
    "namespace",
    "labels",
    "resources",
    "components",
    "patches",
    "images",
    "configMapGenerator",
    "replacements",
}


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector, or the plain selector of a Service, selects these labels."""
    wanted = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(term["key"]) in term["values"] for term in selector.get("matchExpressions", [])
    )


def render(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization, its components applied; without name suffixes and common labels.

    Raises:
        ValueError: It uses a field that is not understood here, or a patch that meets nothing.
    """
    return _applied(folder, [])


def _applied(folder: Path, manifests: list[Manifest]) -> list[Manifest]:
    file = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := file.keys() - FIELDS:
        raise ValueError(f"{folder}: {unknown} is not understood")
    manifests = deepcopy(manifests)
    for name in file.get("resources", []):
        path = folder / name
        manifests += render(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for generated in file.get("configMapGenerator", []):
        data = {name: (folder / name).read_text() for name in generated["files"]}
        manifests.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generated["name"]}, "data": data}
        )
    for name in file.get("components", []):
        manifests = _applied(folder / name, manifests)
    for patch in file.get("patches", []):
        met = [i for i, manifest in enumerate(manifests) if _is_meant(manifest, patch["target"])]
        if not met:
            raise ValueError(f"{folder}: no manifest is {patch['target']}")
        for i in met:
            manifests[i] = jsonpatch.apply_patch(manifests[i], yaml.safe_load(patch["patch"]))
    for replacement in file.get("replacements", []):
        assert "metadata.namespace" == replacement["source"]["fieldPath"]
        for target in replacement["targets"]:
            for manifest in manifests:
                if _is_meant(manifest, target["select"]):
                    for path in target["fieldPaths"]:
                        _replace(manifest, path.split("."), file["namespace"], **target["options"])
    return manifests


def _replace(value: Any, path: list[str], text: str, *, delimiter: str, index: int) -> None:
    """Put the text into the part ``index`` of the strings at this path; ``*`` is every entry of a list."""
    key, *rest = path
    for each in range(len(value)) if key == "*" else [int(key) if isinstance(value, list) else key]:
        if rest:
            _replace(value[each], rest, text, delimiter=delimiter, index=index)
        else:
            parts = value[each].split(delimiter)
            value[each] = delimiter.join([*parts[:index], text, *parts[index + 1 :]])


def _is_meant(manifest: Manifest, target: dict[str, str]) -> bool:
    return manifest["kind"] == target["kind"] and re.fullmatch(target["name"], manifest["metadata"]["name"]) is not None
