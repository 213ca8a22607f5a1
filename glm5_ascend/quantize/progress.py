"""Progress of a long job as a callback: Python callers see what the command line draws."""

from __future__ import annotations

from collections.abc import Callable

from glm5_ascend.report.units import format_bytes

#: First words of the first call's text where an interrupted run is resumed.
RESUMING = "resuming an interrupted run"
#: progress(text, done, total): what was just done, and how many of `total` layers are; a fraction inside a layer, a
#: whole number at the end of one. The first call gives the start of the run: 0, or the finished layers.
Progress = Callable[[str, float, int], None]


#: Begin of the note behind the first call's text where memory is predicted.
MEMORY = "predicted peak memory"


def with_memory(text: str, nbytes: int) -> str:
    """Text of the first call of a job that is predicted to need so much memory."""
    return f"{text}; {MEMORY} {format_bytes(nbytes)}"


def silent(text: str, done: float, total: int) -> None:
    """A `Progress` that shows nothing."""
