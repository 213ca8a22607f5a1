"""`glm5-ascend verify`: reads a quantized checkpoint as the engine's loader would and says what is wrong with it."""

from glm5_ascend.verify.report import Finding, Report, WeightError
from glm5_ascend.verify.run import verify

__all__ = ["Finding", "Report", "WeightError", "verify"]
