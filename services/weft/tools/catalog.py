"""Models and their signatures as files declare them, for the compiler."""

from weft.base.signature import ModelSignature
from weft.base.versions import version_order


class StaticCatalog:
    """Models that never change: what lock files and repositories have in common."""

    def __init__(self) -> None:
        self._models: dict[str, dict[int, tuple[str, ModelSignature]]] = {}

    def add(self, name: str, version: int, target: str, signature: ModelSignature) -> None:
        """Add a version of a model."""
        self._models.setdefault(name, {})[version] = (target, signature)

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """Target and signature of a model; version "" means the highest."""
        versions = self._models.get(model_name, {})
        return versions.get(version_order(version) if version else max(versions, default=0))

    def names(self) -> list[str]:
        """Every model name."""
        return list(self._models)
