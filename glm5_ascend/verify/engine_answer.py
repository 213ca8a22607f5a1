"""What an engine would do with a checkpoint, as data: the answer of `verify --engine`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from glm5_ascend.engine_lines import SGLANG_05, VLLM_ASCEND_023


class ServingEngine(StrEnum):
    """Who is asked."""

    sglang = "sglang"
    vllm_ascend = "vllm-ascend"
    vllm = "vllm"


#: Version of the engine whose sources this module describes.
VERSIONS = {
    ServingEngine.sglang: f"SGLang {SGLANG_05.tested[0]}",
    ServingEngine.vllm_ascend: f"vllm-ascend {VLLM_ASCEND_023.tested[0]}",
    ServingEngine.vllm: "vLLM on a CPU, with the plugin of this package",
}


@dataclass(frozen=True)
class EngineNote:
    """One thing that the engine does. `flag` is what to pass for it, if that helps; `source` the line that does it."""

    what: str
    source: str
    flag: str = ""

    def line(self) -> str:
        """As text, the flag first."""
        return f"    {self.flag + ': ' if self.flag else ''}{self.what} ({self.source})"


@dataclass
class EngineAnswer:
    """What an engine would do with the checkpoint; `loads` is False if it would stop or load something else."""

    engine: ServingEngine
    loads: bool = True
    notes: list[EngineNote] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Part of the data of `--json`."""
        notes = [asdict(note) for note in self.notes]
        return {"name": str(self.engine), "version": VERSIONS[self.engine], "loads": self.loads, "notes": notes}

    def lines(self) -> list[str]:
        """Verdict and notes as text."""
        verdict = "loads it" if self.loads else "does not load it as it is meant, see the errors"
        return [f"{VERSIONS[self.engine]}: {verdict}", *(note.line() for note in self.notes)]
