"""The time that a long job says is left."""

from __future__ import annotations

import pytest

from glm5_ascend.cli import progress
from glm5_ascend.cli.progress import ProgressBar, RemainingTime
from glm5_kernels.registry import cache


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    monkeypatch.setattr(cache.compilation, "seconds", 0.0)
    return found


def test_compiling_does_not_count(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = RemainingTime()
    assert remaining.seconds(0, 10) is None
    clock.now += 30
    monkeypatch.setattr(cache.compilation, "seconds", 20.0)
    assert remaining.seconds(1, 10) == pytest.approx(90)


def test_a_stopped_run_counts_from_where_it_goes_on(clock: Clock) -> None:
    remaining = RemainingTime()
    assert remaining.seconds(6, 10) is None
    clock.now += 5
    assert remaining.seconds(6.5, 10) == pytest.approx(35)


def test_compiling_is_said_and_only_while_the_job_runs(capsys: pytest.CaptureFixture[str]) -> None:
    before = cache.compilation.say
    with ProgressBar(quiet=False) as bar:
        cache.compilation.say("compiling kernels")
        bar("", 0, 3)
        bar("noise 0.1", 1, 3)
    assert cache.compilation.say is before
    said = capsys.readouterr().err
    assert "compiling kernels\nlayer 1/3  noise 0.1  eta " in said
