"""Progress of a long job on stderr: a live bar on a terminal, a line per layer elsewhere, nothing when quiet."""

from __future__ import annotations

import time

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from glm5_ascend.report.units import format_bytes

console = Console(stderr=True, highlight=False)


class ProgressBar:
    """A `glm5_ascend.quantize.progress.Progress` that draws; a context manager.

    The time left counts from the end of this run's first layer on, where there is one: what happens only once (reading
    headers, compiling kernels) lies before.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.live = quiet, console.is_terminal and not quiet
        self.bar: Progress | None = None
        self.began = time.monotonic()
        self.first: tuple[float, float] | None = None  # (layers done, time) when the first layer of this run was done

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, text: str, done: float, total: int) -> None:
        whole = done == int(done)
        if self.live:
            self._draw("" if whole else text, done, total)
        if whole and not self.quiet:
            memory = format_bytes(psutil.Process().memory_info().rss)
            console.print(
                f"layer {int(done)}/{total}  {text}  {self._left(done, total)}RSS {memory}",
                soft_wrap=True,
                markup=False,
            )

    def _draw(self, text: str, done: float, total: int) -> None:
        if self.bar is None:
            self.bar = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[rss]}"),
                console=console, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task(text, total=total, rss="")
            self.bar.start()
        rss = f"RSS {format_bytes(psutil.Process().memory_info().rss)}"
        self.bar.update(self.task, description=text or f"layer {int(done)}", completed=done, rss=rss)

    def _left(self, done: float, total: int) -> str:
        now = time.monotonic()
        if self.first is None:
            self.first = done, now
            return f"eta {(now - self.began) * (total - done):.0f} s  "
        layers, began = self.first
        return f"eta {(now - began) / (done - layers) * (total - done):.0f} s  "
