"""Fixtures of ``weft.testing``, as they are where Weft is installed."""

from weft.testing.plugin import weft_model  # noqa: F401  # a fixture
