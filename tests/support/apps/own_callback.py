"""A callback of the app's own."""

from typing import Any

from hydra.experimental.callback import Callback


class Mine(Callback):
    def on_job_start(self, **_: Any) -> None:
        print("MINE start")

    def on_job_end(self, **_: Any) -> None:
        print("MINE end")
