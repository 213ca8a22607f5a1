"""Verdicts of reports, and all their thresholds with the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["good", "fair", "poor", "open"]


@dataclass(frozen=True)
class Threshold:
    """A limit and the reason for its value."""

    value: float
    reason: str


@dataclass(frozen=True)
class ReportVerdict:
    """One sentence, the threshold, the reason for the threshold, and warnings.

    Attributes:
        grade: gives the colour of the page; "open" if there is nothing to judge.
    """

    grade: Grade
    text: str
    threshold: str
    reason: str
    warnings: tuple[str, ...] = ()


_LLAMA = (
    "Mean KL to FP16 that llama.cpp publishes for LLaMA 3 8B (tools/perplexity/README.md, Wikitext-2): 8 bits 0.0014, "
    "6 bits 0.0055, 5 bits 0.011, 4 bits (q4_K_M) 0.031, 2 bits 0.45 nats. "
)
#: Nats; judged is the upper end of the interval.
KL_CLOSE = Threshold(0.01, _LLAMA + "Up to 0.01 is what 5 or more bits cost there.")
KL_USABLE = Threshold(0.03, _LLAMA + "Up to 0.03 is what its most used 4-bit type costs; above, test your tasks first.")
#: Windows (or prompts).
FEW_WINDOWS = Threshold(
    20,
    "a percentile bootstrap is too narrow for few windows: with 2, what is printed as 95 % covers 60 %; with 5, 85 %; "
    "with 10, 90 %; with 20, 93 % (exact for windows whose means are normally distributed)",
)
