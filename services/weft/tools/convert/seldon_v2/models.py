"""What ``Model`` documents say that a graph can repeat.

Source:
    https://github.com/SeldonIO/seldon-core/blob/v2/operator/apis/mlops/v1alpha1/model_types.go
"""

from weft.tools.convert.yaml_tree import Source, YamlValue, shortened


def read_model(source: Source, document: YamlValue) -> tuple[str, str]:
    """Name of a model, and a remark for the steps that call it."""
    metadata = source.mapping(document.entries["metadata"], "metadata") if "metadata" in document.entries else {}
    spec = source.mapping(document.entries["spec"], "spec") if "spec" in document.entries else {}
    name = source.string(metadata.get("name"), "metadata.name")
    uri = source.string(spec.get("storageUri"), "storageUri")
    needs = [source.string(one, "a requirement") for one in source.sequence(spec.get("requirements"), "requirements")]
    text = f"Seldon loads it from {shortened(uri)}" if uri else ""
    text += f", for a server with {shortened(', '.join(needs))}" if text and any(needs) else ""
    for kind in ("explainer", "llm"):
        given = source.mapping(spec[kind], kind) if kind in spec else {}
        for target in ("modelRef", "pipelineRef"):
            called = source.string(given.get(target), target)
            if called:
                text += (
                    f"; by itself it calls {shortened(called)}" if text else f"by itself it calls {shortened(called)}"
                )
    return name, text
