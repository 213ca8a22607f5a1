"""Calibration of a routed expert: `step` of each linear, and a token that is millions of times as strong as others."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.quantize.calibration.forward import Routed
from glm5_ascend.quantize.calibration.stream import Stream
from glm5_ascend.quantize.methods.gptq import GPTQState
from glm5_ascend.quantize.methods.rounding import quantize_linear
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.quantize.run.expert import run_expert, smooth_expert
from glm5_ascend.quantize.run.source_weights import FloatWeights
from tests.support.recipes import DYNAMIC, INT8, linear, write_recipe


def test_each_linear_has_its_own_steps(tiny_source: Path, tmp_path: Path) -> None:
    steps = {"gate_proj": 1, "up_proj": 2, "down_proj": 3}
    process = [
        linear(DYNAMIC, INT8 | {"method": "gptq", "ext": {"step": count}}, f"*mlp.experts.*.{name}")
        for name, count in steps.items()
    ]
    recipe = load_recipe(write_recipe(tmp_path / "mine.yaml", *process))
    plan = QuantizationPlan(open_source(tiny_source), recipe)
    layer = next(layer for layer in range(plan.config.num_hidden_layers) if plan.config.is_moe(layer))
    parts = plan.config.spec.expert_linears(0)
    tensors = FloatWeights(plan.source, None, torch.device("cpu")).load_all(
        plan.config.spec.layer_prefix(layer), parts, {}
    )
    tokens, hidden = 32, plan.config.hidden_size
    inputs = Stream(tmp_path / "inputs", (tokens,), hidden, torch.float32)
    inputs.set_sequence(0, torch.randn(tokens, hidden))
    routed = Routed(inputs, None, torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int64))
    smoothed = smooth_expert(plan, tensors, layer, 0, routed)
    prepared = {name.rsplit(".", 1)[1]: state for name, state in smoothed.states.items()}
    assert {name: state.steps for name, state in prepared.items() if isinstance(state, GPTQState)} == steps


def test_one_huge_token_does_not_decide_for_the_others(tiny_source: Path, tmp_path: Path) -> None:
    """As the first token of a text in SmolLM2: scales and integers serve the other tokens as if it were not there."""
    plan = QuantizationPlan(open_source(tiny_source), load_recipe(find_recipe("w4a8")))
    layer = next(layer for layer in range(plan.config.num_hidden_layers) if plan.config.is_moe(layer))
    prefix, parts = plan.config.spec.layer_prefix(layer), plan.config.spec.expert_linears(0)
    down, tokens, hidden = parts[-1], 400, plan.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    ordinary, unseen = torch.randn(2, tokens, hidden, generator=generator)

    def routed(name: str, x: torch.Tensor) -> Routed:
        stream = Stream(tmp_path / name, (tokens,), hidden, torch.float32)
        stream.set_sequence(0, x)
        return Routed(stream, None, torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int64))

    def error(x: torch.Tensor) -> float:
        """Of down_proj's output on tokens that calibration has not seen."""
        tensors = FloatWeights(plan.source, None, torch.device("cpu")).load_all(prefix, parts, {})
        smoothed = smooth_expert(plan, tensors, layer, 0, routed("seen", x))
        inner = run_expert(plan.config, tensors, parts, 0, routed("unseen", unseen)).down.rows
        weight, planned = tensors[down.tensor_name], plan.linears[prefix + down.name]
        stored = quantize_linear(down.name, weight, planned.scheme, planned.method, state=smoothed.states[down.name])
        return float(
            (inner @ (schemes.dequantize(planned.scheme, stored.stored) - weight).T).norm() / (inner @ weight.T).norm()
        )

    with_it = ordinary.clone()
    with_it[0] *= 1000
    assert error(with_it) < 1.1 * error(ordinary)
