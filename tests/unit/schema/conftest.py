"""The configs of these tests."""

from hydra_app import composed  # noqa: F401 - a fixture
