"""`glm5-ascend verify DIR`."""

from __future__ import annotations

from glm5_ascend.cli.command import Output, command
from glm5_ascend.verify.options import VerifyOptions


@command(
    "verify", "verify glm5-w4a8 --against GLM-5", "verify glm5-w4a8 --engine sglang", "verify glm5-w4a8 --json",
    json=True,
)  # fmt: skip
def run(options: VerifyOptions, output: Output) -> int:
    """Read a quantized checkpoint as the engine's loader would, and report what the loader would not."""
    from glm5_ascend.verify import verify

    report = verify(options)
    output.write(report.to_dict(), report.lines())
    return 0 if report.ok else 1
