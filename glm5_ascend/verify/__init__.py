"""What is wrong with a quantized checkpoint: `from glm5_ascend.verify import verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5_ascend.checkpoint.checks.report import CheckpointFinding as CheckpointFinding
    from glm5_ascend.checkpoint.checks.report import Report as Report
    from glm5_ascend.checkpoint.checks.report import WeightError as WeightError
    from glm5_ascend.verify.run import verify as verify

__all__ = ["CheckpointFinding", "Report", "WeightError", "verify"]


def __getattr__(name: str) -> object:
    if name == "verify":  # late: it loads torch
        from glm5_ascend.verify.run import verify

        return verify
    if name in __all__:
        from glm5_ascend.checkpoint.checks import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
