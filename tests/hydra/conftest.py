"""The app of these tests."""

from hydra_app import app  # noqa: F401 - a fixture
