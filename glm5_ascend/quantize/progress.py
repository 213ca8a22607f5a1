"""How a long job reports: a callback, so that a library's user sees what the command line draws."""

from __future__ import annotations

from collections.abc import Callable

from glm5_ascend.checkpoint.output import CHECKING as CHECKING

#: How the text of a first call begins where a stopped run goes on.
GOING_ON = "going on with a stopped run"
#: progress(text, done, total): what was just done, and how many of `total` layers are; a fraction inside a layer, a
#: whole number at the end of one. The first call says where the run begins: at 0, or where a stopped one goes on.
Progress = Callable[[str, float, int], None]


def silent(text: str, done: float, total: int) -> None:
    """A `Progress` that shows nothing."""
