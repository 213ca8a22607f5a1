"""Progress of a walk through a model's layers, on stderr."""

from __future__ import annotations

import time

import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from glm5_ascend.cli.progress import console
from glm5_ascend.report.page import size


class LayerProgress:
    """A live bar on a terminal, one line per layer elsewhere, nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.live = quiet, console.is_terminal and not quiet
        self.began = time.monotonic()
        self.layers = self.experts = 0
        self.bar: Progress | None = None

    def __enter__(self) -> LayerProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, layers: int, experts: int) -> None:
        self.layers, self.experts, self.began = layers, experts, time.monotonic()
        if self.live:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("eta"), TimeRemainingColumn(), console=console, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task("layer 0", total=layers)
            self.bar.start()

    def expert(self, layer: int, expert: int) -> None:
        if self.bar is not None:
            done = layer + min(1.0, expert / self.experts)
            self.bar.update(self.task, description=f"layer {layer} expert {expert}", completed=done)

    def layer(self, layer: int, note: str) -> None:
        done = layer + 1
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
        if not self.quiet:
            left = (time.monotonic() - self.began) / done * (self.layers - done)
            memory = size(psutil.Process().memory_info().rss)
            console.print(
                f"layer {done}/{self.layers}  {note}  eta {left:.0f} s  RSS {memory}".replace("    ", "  "),
                soft_wrap=True,
            )
