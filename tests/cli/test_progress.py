"""The time that a long job says is left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from glm5_ascend.cli import progress


@pytest.mark.parametrize(
    ("began", "done", "seconds", "left"),
    [(0, 1, 10, 90), (6, 6.5, 5, 35)],
    ids=["a whole run", "a run that goes on after a stop"],
)
def test_the_rest_takes_as_long_as_what_this_run_has_done(
    began: float, done: float, seconds: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000.0, 1000.0 + seconds])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    remaining = progress.RemainingTime()
    assert remaining.seconds(began, 10) is None
    assert remaining.seconds(done, 10) == pytest.approx(left)
