"""Public throughput numbers as data, and what the planner says to each."""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass

from glm5_ascend.plan.data_files import Cache, Count, Keys, Positive, data_file
from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware, load_hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import PlannedModel, named
from glm5_ascend.plan.predict import Prediction, predict, run_output
from glm5_ascend.plan.workload import Workload
from glm5_ascend.resources import read_yaml

#: Two rows that differ in the model alone (5.1 or 5.2, which cost the same but for the indexer that CI reuses in both)
#: and are further apart than this cannot both be met: they are shown, and left out of fit and median.
CONSISTENT = 2.0


class RunKeys(Keys):
    """What every row of data/baselines.yaml says for itself."""

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
    out_tok_s: Positive
    split_prefill: bool = True
    cache: Cache | None = None
    index_cache: bool = False
    prefix_hit: float = 0.0
    warm_ranks: int = 0
    rate: Positive | None = None
    prefill_tp: Count | None = None
    prefill_dp: Count | None = None
    note: str = ""


class SetupKeys(Keys):
    """What rows have in common unless they say otherwise."""

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
    """A row as it stands in the file: what it leaves out is in `defaults`."""

    source: str | None = None
    version: str | None = None
    date: datetime.date | None = None
    hardware: str | None = None
    drafts: int | None = None
    utilization: Positive | None = None
    buffer_mb: int | None = None
    batched_tokens: Count | None = None
    sequences: Count | None = None


class BaselinesFile(Keys):
    """data/baselines.yaml; see there."""

    defaults: SetupKeys
    rows: tuple[RowKeys, ...]


class BaselineRow(RunKeys, SetupKeys):
    """A row with its defaults."""

    @property
    def split(self) -> bool:
        return self.prefill_tp is not None

    def group_key(self) -> tuple[object, ...]:
        """What runs of the same workload on the same layout share, whatever the model's version and weights."""
        return (self.hardware, self.nodes, self.tp, self.dp, self.prefill_tp, self.prefill_dp, self.prompt, self.output,
                self.concurrency, self.prefix_hit)  # fmt: skip

    def twin_key(self) -> tuple[object, ...]:
        """What two runs share that differ in the model's version only."""
        return (*self.group_key(), self.quant, self.cache)


@dataclass(frozen=True)
class Baseline:
    """A row ready to be predicted."""

    row: BaselineRow
    planned: PlannedModel
    machine: Hardware
    layout: Layout
    workload: Workload

    def predict(self, efficiency: Efficiencies) -> Prediction:
        found = predict(self.planned, self.machine, self.layout, efficiency, self.workload)
        if found is None:
            raise ValueError(f"baseline {self.row.id} does not fit the machine it ran on")
        return found

    def output_per_second(self, efficiency: Efficiencies) -> float:
        """What the benchmark would print."""
        return run_output(self.predict(efficiency), self.workload)


@functools.cache
def load_rows() -> tuple[BaselineRow, ...]:
    """All public results."""
    found = read_yaml(data_file("baselines.yaml"), BaselinesFile)
    common = found.defaults.model_dump()
    return tuple(BaselineRow.model_validate(common | row.model_dump(exclude_unset=True)) for row in found.rows)


def case(row: BaselineRow) -> Baseline:
    decode = Engine(
        row.tp, row.dp, drafts=row.drafts, sequences=row.sequences, batched_tokens=row.batched_tokens,
        utilization=row.utilization, buffer_mb=row.buffer_mb, split_prefill=row.split_prefill,
    )  # fmt: skip
    layout = Layout(decode)
    if row.prefill_tp is not None and row.prefill_dp is not None:
        # Batched tokens of the decode node (CI): 164; the prefill node takes 8192 and runs without graphs.
        first = Engine(row.prefill_tp, row.prefill_dp, drafts=row.drafts, sequences=64, batched_tokens=8192,
                       utilization=row.utilization, buffer_mb=row.buffer_mb, eager_decode=True)  # fmt: skip
        decode = Engine(row.tp, row.dp, drafts=row.drafts, sequences=32, batched_tokens=164,
                        utilization=row.utilization, buffer_mb=256)  # fmt: skip
        layout = Layout(decode, first)
    ranks = row.dp if row.prefill_dp is None else row.prefill_dp
    cold = max(0, min(ranks, row.concurrency) - row.warm_ranks)  # each computes the shared prefix once
    hit = row.prefix_hit * (1 - cold / row.requests)
    workload = Workload(row.prompt, row.output, row.concurrency, hit, row.rate, row.requests)
    return Baseline(
        row, named(row.model, row.quant, row.cache, row.index_cache), load_hardware(row.hardware), layout, workload
    )


@functools.cache
def cases() -> tuple[Baseline, ...]:
    return tuple(case(row) for row in load_rows())


def inconsistent() -> dict[str, str]:
    """Row id -> id of the row it contradicts, by the rule of CONSISTENT."""
    found = {}
    for one in load_rows():
        for other in load_rows():
            if one.id != other.id and one.twin_key() == other.twin_key():
                low, high = sorted((one.out_tok_s, other.out_tok_s))
                if high > CONSISTENT * low:
                    found[one.id] = other.id
    return found
