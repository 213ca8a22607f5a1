"""The time that a long job says is left."""

from __future__ import annotations

import pytest

from glm5_ascend.cli import progress
from glm5_ascend.cli.progress import RemainingTime


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def test_the_rest_takes_as_long_as_what_is_done(clock: Clock) -> None:
    remaining = RemainingTime()
    assert remaining.seconds(0, 10) is None
    clock.now += 10
    assert remaining.seconds(1, 10) == pytest.approx(90)


def test_a_stopped_run_counts_from_where_it_goes_on(clock: Clock) -> None:
    remaining = RemainingTime()
    assert remaining.seconds(6, 10) is None
    clock.now += 5
    assert remaining.seconds(6.5, 10) == pytest.approx(35)
