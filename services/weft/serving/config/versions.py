"""Which versions of a model are served."""

from collections.abc import Sequence

from weft.base.versions import versions_to_serve
from weft.serving.config.report import ConfigReport
from weft_protos.model_config_pb2 import ModelConfig


def select_versions(config: ModelConfig, available: Sequence[int], report: ConfigReport) -> list[int]:
    """Versions that ``version_policy`` picks, lowest first; without a policy the highest.

    Args:
        config: ``version_policy`` gets its default.
        available: Numbers of the version folders.
        report: Receives the faults; without a version folder that is one.
    """
    policy = config.version_policy
    if policy.WhichOneof("policy_choice") is None:
        policy.latest.num_versions = 1
    if not available:
        report.error("", f"model '{config.name}' has no version folder; put its files into a folder named 1")
    elif policy.HasField("latest") and policy.latest.num_versions < 1:
        report.error("version_policy.latest", "num_versions must be at least 1, got 0")
    elif policy.HasField("specific"):
        _check_specific(policy.specific.versions, available, report)
    return versions_to_serve(policy, available)


def _check_specific(versions: Sequence[int], available: Sequence[int], report: ConfigReport) -> None:
    if not versions:
        report.error("version_policy.specific", "specific names no version; list at least one")
    for i, version in enumerate(versions):
        if version not in available:
            report.error(
                f"version_policy.specific.versions[{i}]",
                f"version {version} has no folder; there is {', '.join(map(str, sorted(available)))}",
            )
