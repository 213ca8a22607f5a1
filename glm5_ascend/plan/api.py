"""`plan()`: what the command `glm5-ascend plan` calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5_ascend.plan.command import PlanRequest, run
from glm5_ascend.plan.html import write
from glm5_ascend.plan.result import Plan, PlanCommands
from glm5_ascend.plan.tails import tails as simulate
from glm5_ascend.plan.text import NO_COMMANDS, lines, show, to_json

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class PlanReport:
    """A plan, percentiles by name where the scheduler was simulated, and the commands that run the plan."""

    plan: Plan
    simulated: dict[str, float] | None = None
    commands: PlanCommands = NO_COMMANDS

    def lines(self) -> list[str]:
        """For a terminal of 80 columns."""
        return lines(self.plan, self.simulated, commands=self.commands)

    def show(self, console: Console) -> None:
        """The same on a console, as wide as that is."""
        show(self.plan, self.simulated, console, self.commands)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return to_json(self.plan, self.simulated, self.commands)


def plan(
    directory: str | Path | None = None,
    *,
    model: str | None = None,
    quant: str = "w4a8",
    hardware: str = "a3",
    nodes: int = 1,
    workload: str = "in=3500,out=1500,concurrency=16",
    mtp: int | None = None,
    slo: str | None = None,
    layout: str | None = None,
    cache: str | None = None,
    index_cache: bool = False,
    seqs: int | None = None,
    batched_tokens: int = 4096,
    utilization: float = 0.95,
    buffer_mb: int = 200,
    acceptance: str | float | None = None,
    price: float | None = None,
    power: float | None = None,
    imbalance: float = 1.0,
    host_time: float = 1.0,
    tails: bool = False,
    html: str | Path | None = None,
) -> PlanReport:
    """Does it fit, which layout, how fast: on paper, with the uncertainty.

    Args:
        directory: a checkpoint, for its real types and bytes; else `model` (glm-5, glm-5.1, glm-5.2) and `quant`
            (bf16, w8a8, w4a8, w8a8c8, w4a8c8).
        hardware: a3, a2, other names of data/hardware, cpu (after `plan --measure`), or a YAML file.
        nodes: how many machines.
        workload: in=TOKENS,out=TOKENS,concurrency=N,prefix_hit=SHARE,rate=PER_SECOND,requests=N.
        mtp: draft tokens per step; None searches the best. slo: tpot=50ms,ttft=2s.
        layout: judge this one instead of searching, e.g. tp=16,dp=1.
        cache: caches in INT8: none, li, li+sfa. index_cache: run-time reuse of the indexer's choice.
        seqs, batched_tokens, utilization, buffer_mb: vLLM's --max-num-seqs, --max-num-batched-tokens,
            --gpu-memory-utilization, and HCCL_BUFFSIZE in MB.
        acceptance: mean accepted length measured with 3 drafts, or shares by position, as in "0.90,0.77,0.63".
        price: of one machine and hour. power: watts of one machine.
        imbalance: load of the die with the hottest experts over the mean, beyond what chance does.
        host_time: what the host's processor takes to launch operators, over the hosts of the public results.
        tails: also simulate the scheduler. html: file to write a report to.
    Raises:
        PlanError, ConfigError: an option that makes no sense, or a plan that cannot be.
    """
    request = PlanRequest(
        directory=None if directory is None else Path(directory), model=model, quant=quant, hardware=str(hardware),
        nodes=nodes, workload=workload, mtp=mtp, slo=slo, layout=layout, cache=cache, index_cache=index_cache,
        seqs=seqs, batched_tokens=batched_tokens, utilization=utilization, buffer_mb=buffer_mb, acceptance=acceptance,
        price=price, power=power, imbalance=imbalance, host_time=host_time,
    )  # fmt: skip
    made = run(request)
    report = PlanReport(made, simulate(made) if tails else None)
    if html is not None:
        write(made, Path(html))
    return report
