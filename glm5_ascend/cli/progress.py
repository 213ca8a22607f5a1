"""Progress of a long job on stderr: a live bar on a terminal, a line per layer elsewhere, nothing when quiet."""

from __future__ import annotations

import time

import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from glm5_ascend.quantize.progress import MEMORY, RESUMING
from glm5_ascend.report.terminal import text_console
from glm5_ascend.report.units import format_bytes

console = text_console(stderr=True)


class RemainingTime:
    """Estimate of the remaining time from the finished layers.

    The first call gives the start: 0, or the layers that an interrupted run has finished.
    """

    def __init__(self) -> None:
        self.start: tuple[float, float] | None = None  # (finished layers, seconds) at the start of the run

    def seconds(self, done: float, total: int) -> float | None:
        """Remaining seconds; None before anything is finished."""
        now = time.monotonic()
        if self.start is None or done <= self.start[0]:  # a resumed run reads its units first, and may have lost some
            self.start = done, now
            return None
        before, start = self.start
        return (now - start) / (done - before) * (total - done)


class ProgressBar:
    """A `glm5_ascend.quantize.progress.Progress` that draws; a context manager.

    On a terminal it shows activity from the start, before the number of layers is known.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.live = quiet, console.is_terminal and not quiet
        self.bar: Progress | None = None
        self.remaining = RemainingTime()

    def __enter__(self) -> ProgressBar:
        if self.live:
            self._draw("reading the checkpoint", 0.0, None, None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, text: str, done: float, total: int) -> None:
        whole = done == int(done)
        left = self.remaining.seconds(done, total)
        if self.live:
            self._draw(text if done == 0 or not whole else f"layer {int(done)}", done, total, left)
        if whole and (done > 0 or text.startswith(RESUMING) or MEMORY in text) and not self.quiet:
            eta = "" if left is None else f"eta {left:.0f} s  "
            console.print(f"layer {int(done)}/{total}  {text}  {eta}RSS {_rss()}", soft_wrap=True)

    def _draw(self, text: str, done: float, total: int | None, left: float | None) -> None:
        if self.bar is None:
            self.bar = Progress(
                SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
                MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[eta]}", markup=False),
                TextColumn("{task.fields[rss]}", markup=False), console=console, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task(text, total=total, eta="", rss="")
            self.bar.start()
        eta = "" if left is None else f"eta {int(left) // 60}:{int(left) % 60:02}"
        self.bar.update(self.task, description=text, completed=done, total=total, eta=eta, rss=f"RSS {_rss()}")


def _rss() -> str:
    return format_bytes(psutil.Process().memory_info().rss)
