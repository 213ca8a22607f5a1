"""What an engine would do with a checkpoint, as data: the answer of `verify --engine`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class ServingEngine(StrEnum):
    """Who is asked."""

    sglang = "sglang"
    vllm_ascend = "vllm-ascend"
    vllm = "vllm"


#: What was looked at.
VERSIONS = {
    ServingEngine.sglang: "SGLang 0.5.23",
    ServingEngine.vllm_ascend: "vllm-ascend 0.23.0",
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
