"""Public results as data, and their predictions."""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from glm5_ascend.errors import PlanError
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.data_files import Cache, Count, Keys, Positive, data_file
from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware, load_hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import PlannedModel, named
from glm5_ascend.plan.predict import Prediction, predict, run_output, run_ttft
from glm5_ascend.plan.workload import Workload

#: Outputs of a row: tokens per second of the deployment, and mean seconds of first and further tokens.
OUTPUTS = ("tok_s", "ttft", "tpot")
#: Rows with a smaller weight are shown but not judged: their sources contradict themselves or each other.
JUDGED = 0.15


class RunKeys(Keys):
    """Keys of a row of data/baselines.yaml without a default in the file."""

    id: str
    case: str
    model: str
    quant: str
    nodes: Count
    tp: Count
    dp: Count
    prompt: Count
    output: Count
    concurrency: Count
    requests: Count
    out_tok_s: Positive | None = None
    total_tok_s: Positive | None = None
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    engine: Literal["vllm-ascend", "sglang"] = "vllm-ascend"
    pp: Count = 1
    eager: bool = False
    layers: Count | None = None
    split_prefill: bool = True
    cache: Cache | None = None
    index_cache: bool = False
    prefix_hit: float = 0.0
    warm_ranks: int = 0
    rate: Positive | None = None
    prefill_tp: Count | None = None
    prefill_dp: Count | None = None
    prefill_pp: Count = 1
    prefills: Count = 1
    prefill_tokens: Count = 8192
    prefill_sequences: Count = 64
    note: str = ""


class SetupKeys(Keys):
    """Keys of `defaults`, which a row may override."""

    source: str
    version: str
    date: datetime.date
    hardware: str
    drafts: int
    utilization: Positive
    buffer_mb: int
    batched_tokens: Count
    sequences: Count


class RowKeys(RunKeys):
    """A row in the file; missing values are in `defaults`."""

    source: str | None = None
    version: str | None = None
    date: datetime.date | None = None
    hardware: str | None = None
    drafts: int | None = None
    utilization: Positive | None = None
    buffer_mb: int | None = None
    batched_tokens: Count | None = None
    sequences: Count | None = None


class LeadKeys(Keys):
    """A public number that cannot be predicted, and the reason."""

    id: str
    source: str
    date: datetime.date
    text: str
    reason: str


class BaselinesFile(Keys):
    """data/baselines.yaml; see there."""

    defaults: SetupKeys
    rows: tuple[RowKeys, ...]
    leads: tuple[LeadKeys, ...] = ()


class BaselineRow(RunKeys, SetupKeys):
    """A row with its defaults."""

    @property
    def split(self) -> bool:
        return self.prefill_tp is not None

    def measured(self) -> dict[str, float]:
        """Published values by the names of OUTPUTS: output tokens per second, seconds."""
        values = {}
        if self.out_tok_s is not None:
            values["tok_s"] = self.out_tok_s
        elif self.total_tok_s is not None:
            values["tok_s"] = self.total_tok_s * self.output / (self.prompt + self.output)
        for name, value in (("ttft", self.ttft_ms), ("tpot", self.tpot_ms)):
            if value is not None:
                values[name] = value / 1e3
        return values

    def group_key(self) -> tuple[object, ...]:
        """Key of runs with the same workload and layout; model version and weights may differ."""
        return (self.hardware, self.nodes, self.tp, self.dp, self.pp, self.prefill_tp, self.prefill_dp, self.layers,
                self.prompt, self.output, self.concurrency, self.prefix_hit)  # fmt: skip


@dataclass(frozen=True)
class Baseline:
    """A row ready to be predicted."""

    row: BaselineRow
    planned: PlannedModel
    machine: Hardware
    layout: Layout
    workload: Workload

    def predict(self, efficiency: Efficiencies) -> Prediction:
        prediction = predict(self.planned, self.machine, self.layout, efficiency, self.workload)
        if prediction is None:
            raise PlanError(f"baseline {self.row.id} does not fit the machine it ran on", "correct the row")
        return prediction

    def predicted(self, efficiency: Efficiencies) -> dict[str, float]:
        """Predicted results of the benchmark, by the names of OUTPUTS."""
        prediction = self.predict(efficiency)
        return {
            "tok_s": run_output(prediction, self.workload),
            "ttft": run_ttft(prediction, self.workload),
            "tpot": prediction.tpot,
        }


@functools.cache
def _file() -> BaselinesFile:
    return read_yaml(data_file("baselines.yaml"), BaselinesFile)


def leads() -> tuple[LeadKeys, ...]:
    """Public numbers that are listed and not predicted."""
    return _file().leads


@functools.cache
def load_rows() -> tuple[BaselineRow, ...]:
    """All public results that can be predicted."""
    defaults = _file().defaults.model_dump()
    return tuple(BaselineRow.model_validate(defaults | row.model_dump(exclude_unset=True)) for row in _file().rows)


_load_hardware = functools.cache(load_hardware)  # rows share two machines


def case(row: BaselineRow) -> Baseline:
    """Model, machine, layout and workload of a row."""
    decode = Engine(
        row.tp, row.dp, drafts=row.drafts, sequences=row.sequences, batched_tokens=row.batched_tokens,
        utilization=row.utilization, buffer_mb=row.buffer_mb, split_prefill=row.split_prefill, pp=row.pp,
        eager_decode=row.eager,
    )  # fmt: skip
    layout = Layout(decode)
    if row.prefill_tp is not None and row.prefill_dp is not None:
        # Batched tokens of the decode node (CI): 164; the prefill node takes 8192 and runs without graphs.
        prefill = Engine(row.prefill_tp, row.prefill_dp, drafts=row.drafts, sequences=row.prefill_sequences,
                       batched_tokens=row.prefill_tokens, utilization=row.utilization, buffer_mb=row.buffer_mb,
                       eager_decode=True, pp=row.prefill_pp)  # fmt: skip
        decode = Engine(row.tp, row.dp, drafts=row.drafts, sequences=row.sequences, batched_tokens=164,
                        utilization=row.utilization, buffer_mb=min(256, row.buffer_mb))  # fmt: skip
        layout = Layout(decode, prefill, prefills=row.prefills)
    ranks = row.dp if row.prefill_dp is None else row.prefill_dp * row.prefills
    warm = row.warm_ranks >= min(ranks, row.concurrency)
    workload = Workload(row.prompt, row.output, row.concurrency, row.prefix_hit, row.rate, row.requests, warm)
    return Baseline(
        row, named(row.model, row.quant, row.cache, row.index_cache, row.layers), _load_hardware(row.hardware), layout,
        workload,
    )  # fmt: skip


@functools.cache
def cases() -> tuple[Baseline, ...]:
    return tuple(case(row) for row in load_rows())


def judged() -> tuple[Baseline, ...]:
    """Rows of vllm-ascend without contradictions: the planner's errors are counted on them."""
    return tuple(c for c in cases() if c.row.engine == "vllm-ascend" and c.row.weight >= JUDGED)
