"""A plan: the first answer, others, and their numbers with ranges; as one JSON object, too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from glm5_ascend.plan.evidence import Case
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.search import MEETS, SHEDS, Candidate, Question
from glm5_ascend.plan.steps import Duration
from glm5_ascend.plan.workload import Slo, Workload

#: Loads of the table in the report, as shares of the workload's clients.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Range:
    """A number, its range, and its basis: measured | derived | fitted | guessed."""

    value: float
    low: float
    high: float
    basis: str

    def text(self, scale: float = 1.0, digits: int = 0) -> str:
        """`12 (10 to 14)`, or the number alone if it has no range."""
        value, low, high = (f"{scale * x:,.{digits}f}" for x in (self.value, self.low, self.high))
        return value if low == high else f"{value} ({low} to {high})"

    def to_json(self) -> dict[str, float | str]:
        return {name: x if isinstance(x, str) else _rounded(x) for name, x in vars(self).items()}


@dataclass(frozen=True)
class PlanCommands:
    """The deployment profile with the plan's engines, if there is one, and command lines that run the plan."""

    profile: str | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The answer to a question.

    Attributes:
        best: the first answer. others: further layouts with a source, best first.
        experimental: a layout that nobody is known to run, if it is worth a trial.
        near: the nearest public result and its distance; None for a measured machine.
    """

    question: Question
    nodes: int
    best: Candidate
    others: list[Candidate]
    experimental: Candidate | None
    numbers: dict[str, Range]
    near: tuple[float, Case] | None
    notes: list[str]
    commands: PlanCommands = field(default_factory=PlanCommands)

    @property
    def model(self) -> PlannedModel:
        return self.question.steps.model

    @property
    def hardware(self) -> Hardware:
        return self.question.steps.hardware

    @property
    def workload(self) -> Workload:
        return self.question.workload

    @property
    def slo(self) -> Slo:
        return self.question.slo

    @property
    def step(self) -> Duration:
        """A decode step of the first answer."""
        p, load = self.best.prediction, self.workload
        return self.question.steps.decode(self.best.layout.decode, p.batch, load.prompt + load.output / 2, p.ranks)

    @property
    def within_slo(self) -> bool:
        return self.best.verdict == MEETS

    @property
    def title(self) -> str:
        """Model, weights and machines."""
        machines = f"{self.nodes} x {self.hardware.title} ({self.nodes * self.hardware.dies_per_node} dies)"
        return f"{self.model.name} {self.model.quantization} on {machines}"

    @property
    def verdict(self) -> str:
        """Says if the printed latencies meet the SLO."""
        if self.best.verdict == SHEDS:
            return f"met for {self.best.admitted:g} of {self.workload.concurrency:g} clients"
        if self.best.verdict != MEETS:
            return "not met (limits on latency, or rate=); this is the closest layout that was evaluated"
        limits = ((self.slo.tpot, self.numbers["tpot_ms"]), (self.slo.ttft, self.numbers["ttft_ms"]))
        if any(limit and number.high > 1e3 * limit for limit, number in limits):
            return "met by the prediction, not at the slow end of its range"
        return "met, also at the slow end of the range"

    def loads(self) -> list[dict[str, float | str]]:
        """Figures of the first answer with a sixteenth to four times the clients."""
        rows = list[dict[str, float | str]]()
        for clients in sorted({max(1, round(share * self.workload.concurrency)) for share in SHARES}):
            load = replace(self.workload, concurrency=float(clients), rate=None, requests=None)
            p = predict(self.question.steps, self.best.layout, load, self.question.acceptance)
            if p is not None:
                rows.append({
                    "clients": clients, "output_tokens_per_s": round(p.output_per_second, 1),
                    "tpot_ms": round(1e3 * p.tpot, 2), "ttft_ms": round(1e3 * p.ttft, 1), "limit": p.bound,
                    "slo": "met" if self.slo.met(p.tpot, p.ttft) else "missed",
                })  # fmt: skip
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `--json`: sizes in bytes, times in ms; `layout.text` is a value of --layout."""
        best, p, near = self.best, self.best.prediction, None
        if self.near is not None:
            near = {"id": self.near[1].row.id, "distance": round(self.near[0], 2), "measured": self.near[1].measured}
        return {
            "schema_version": 2, "command": "plan", "ok": self.within_slo, "exit_code": 0,
            "model": self.model.name, "quantization": self.model.quantization, "cache": self.model.cache,
            "hardware": self.hardware.name, "nodes": self.nodes,
            **{name: number.to_json() for name, number in self.numbers.items()},
            **_candidate(best, speeds=False),
            "engines": {
                role: {"tp": e.tp, "dp": e.dp, "pp": e.pp, "ep": e.ep, "dcp": e.dcp, "mtp": e.drafts}
                for role, e in best.layout.engines.items()
            },
            "bound": p.bound, "running": round(p.running, 1),
            "decode_step_ms": {name: round(1e3 * s, 4) for name, s in self.step.by_op.items()},
            "memory_per_die": {"total": p.memory.total, "usable": p.memory.usable,
                               "parts": {k: round(v) for k, v in p.memory.parts.items()}, "weights": p.memory.weights},
            "slo_met": self.within_slo, "nearest": near, "notes": self.notes,
            "others": [_candidate(c) for c in self.others[:8]],
            "experimental": _candidate(self.experimental) if self.experimental else None,
            "loads": self.loads(),
            "profile": self.commands.profile, "command_lines": list(self.commands.lines),
        }  # fmt: skip


def _candidate(candidate: Candidate, speeds: bool = True) -> dict[str, Any]:
    evidence, p = candidate.evidence, candidate.prediction
    numbers = {"output_tokens_per_s": p.output_per_second, "tpot_ms": 1e3 * p.tpot, "ttft_ms": 1e3 * p.ttft}
    return {
        "layout": {"name": str(candidate.layout), "text": candidate.layout.text(), "nodes": candidate.nodes},
        "evidence": {"tag": evidence.tag, "source": evidence.source, "changes": list(evidence.changes)},
        "clients_within_slo": candidate.admitted,
        **({name: float(f"{value:.5g}") for name, value in numbers.items()} if speeds else {}),
    }


def _rounded(x: float) -> float | int:
    return int(x) if float(x).is_integer() and abs(x) > 1000 else float(f"{x:.5g}")
