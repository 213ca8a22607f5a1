"""What a finished run of `quantize` reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.quantize.run.job import QuantizedLayer


@dataclass
class QuantizeResult:
    """What a finished run reports. kept: what stood at `out` and was not ours to remove, under its new name."""

    out: Path
    output_bytes: int
    source_bytes: int
    seconds: float
    peak_rss_bytes: int
    calibration_tokens: int
    layers: list[QuantizedLayer] = field(default_factory=list)
    kept: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `--json` says of a run."""
        return {
            "seconds": round(self.seconds, 2),
            "peak_rss_bytes": self.peak_rss_bytes,
            "source_bytes": self.source_bytes,
            "calibration_tokens": self.calibration_tokens,
            "kept": None if self.kept is None else str(self.kept),
            "layers": [
                {"layer": r.layer, "cold_experts": r.cold_experts, "relative_weight_error": r.errors.relative()}
                for r in self.layers
            ],
        }
