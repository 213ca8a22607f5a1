"""Cost of a plan, also divided into prompts and answers, and its energy."""

from __future__ import annotations

from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Layout
from glm5_ascend.plan.predict import Prediction
from glm5_ascend.plan.workload import Workload

#: Names of the numbers.
COST_TOTAL = "cost_per_million_output_tokens"
COST_INPUT, COST_OUTPUT = "cost_per_million_input_tokens", "cost_per_million_decoded_tokens"
ENERGY, TOKENS_PER_KWH = "kwh_per_million_output_tokens", "output_tokens_per_kwh"
_MILLION, _HOUR = 1e6, 3600.0


def prefill_share(layout: Layout, prediction: Prediction, load: Workload) -> float:
    """Share of the machines' time for prompts: dies of prefill engines, or prefill steps that block an engine."""
    if layout.prefill is not None:
        return layout.prefill_engines * layout.prefill.dies / layout.dies
    engine = layout.decode
    prompts_per_second = prediction.output_per_second / load.output / layout.replicas
    ranks = min(float(engine.dp), max(1.0, prediction.running / layout.replicas))
    return min(1.0, prompts_per_second * prediction.prefill_seconds / engine.pp / ranks)


def spending(
    cluster: Cluster, layout: Layout, prediction: Prediction, load: Workload, output_per_second: float,
    price: float | None,
) -> dict[str, float]:  # fmt: skip
    """Cost and energy by name; idle machines count, too.

    COST_TOTAL is all cost over the output tokens. COST_INPUT is the share of prompts over the prompt tokens (cached
    ones, too), COST_OUTPUT the rest over the output tokens. Energy: all machines always draw their power under load.

    Args:
        price: of one node and hour, in any currency; None: no cost.
    """
    numbers = {}
    if price is not None:
        total = price * cluster.nodes / _HOUR / output_per_second * _MILLION
        share = prefill_share(layout, prediction, load)
        numbers = {
            COST_TOTAL: total, COST_INPUT: total * share * load.output / load.prompt, COST_OUTPUT: total * (1.0 - share)
        }  # fmt: skip
    power = cluster.hardware.power_watts
    if power is not None:
        kilowatt_hours = power.value * cluster.nodes / 1e3 / _HOUR / output_per_second * _MILLION
        numbers |= {ENERGY: kilowatt_hours, TOKENS_PER_KWH: _MILLION / kilowatt_hours}
    return numbers
