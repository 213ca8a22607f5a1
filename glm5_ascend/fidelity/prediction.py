"""Time and memory that a job will need, said before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """Predicted at the rates of this machine, measured for a second or two.

    Attributes:
        layers: seconds of each layer, and last of what comes behind them.
        read_bytes: bytes of the checkpoints, each counted once.
    """

    layers: tuple[float, ...]
    threads: int
    peak_rss_bytes: int
    read_bytes: int

    @property
    def seconds(self) -> float:
        return sum(self.layers)


#: Gets the prediction when it is made.
OnPrediction = Callable[[Prediction], None]


def unheard(prediction: Prediction) -> None:
    """An `OnPrediction` that does nothing."""
