"""What a plan costs and draws: money of prompts and of answers apart, energy."""

from __future__ import annotations

from dataclasses import dataclass

from glm5_ascend.plan.hardware import Cluster, Figure
from glm5_ascend.plan.layout import Layout
from glm5_ascend.plan.predict import Prediction
from glm5_ascend.plan.workload import Workload

WHOLE = "cost_per_million_output_tokens"
PROMPTS, ANSWERS = "cost_per_million_input_tokens", "cost_per_million_decoded_tokens"
ENERGY, PER_KWH = "kwh_per_million_output_tokens", "output_tokens_per_kwh"
_MILLION, _HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class NodeRates:
    """Of one machine. price: of an hour, in any currency. power: watts, with their source. None: not known."""

    price: float | None = None
    power: Figure | None = None


UNKNOWN = NodeRates()


def prefill_share(layout: Layout, found: Prediction, load: Workload) -> float:
    """Share of the machines' time that prompts take: dies of prefill engines, or the steps that hold up an engine."""
    if layout.prefill is not None:
        return layout.prefill_engines * layout.prefill.dies / layout.dies
    engine = layout.decode
    prompts = found.output_per_second / load.output / layout.replicas
    ranks = min(float(engine.dp), max(1.0, found.running / layout.replicas))
    return min(1.0, prompts * found.prefill_seconds / engine.pp / ranks)


def spending(
    cluster: Cluster, layout: Layout, found: Prediction, load: Workload, output_per_second: float, rates: NodeRates
) -> dict[str, float]:
    """By name; machines that stay idle are paid for, too.

    Cost of all tokens over the output tokens; the share of prompts over the prompt tokens (cached ones, too); the rest
    over the output tokens. Energy: all machines at their power, whatever they do.
    """
    numbers = {}
    if rates.price is not None:
        whole = rates.price * cluster.nodes / _HOUR / output_per_second * _MILLION
        share = prefill_share(layout, found, load)
        numbers = {WHOLE: whole, PROMPTS: whole * share * load.output / load.prompt, ANSWERS: whole * (1.0 - share)}
    if rates.power is not None:
        kilowatt_hours = rates.power.value * cluster.nodes / 1e3 / _HOUR / output_per_second * _MILLION
        numbers |= {ENERGY: kilowatt_hours, PER_KWH: _MILLION / kilowatt_hours}
    return numbers
