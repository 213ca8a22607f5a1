"""GPTQ of a routed expert: every linear takes the `step` that its own recipe entry has."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.quantize.calibration.forward import Routed
from glm5_ascend.quantize.calibration.stream import Stream
from glm5_ascend.quantize.methods.gptq import GPTQState
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import load_recipe
from glm5_ascend.quantize.run.expert import smooth_expert
from glm5_ascend.quantize.run.source_weights import FloatWeights


def test_each_linear_has_its_own_steps(tiny_source: Path, tmp_path: Path) -> None:
    steps = {"gate_proj": 1, "up_proj": 2, "down_proj": 3}
    act = {"scope": "per_token", "dtype": "int8", "symmetric": True}
    weight = {"scope": "per_channel", "dtype": "int8", "symmetric": True, "method": "gptq"}
    process = [
        {
            "type": "linear_quant",
            "qconfig": {"act": act, "weight": weight | {"ext": {"step": count}}},
            "include": [f"*mlp.experts.*.{name}"],
        }
        for name, count in steps.items()
    ]
    recipe = {"apiversion": "glm5_ascend_v1", "metadata": {"config_id": "mine"}, "spec": {"process": process}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    plan = QuantizationPlan(open_source(tiny_source), load_recipe(tmp_path / "mine.yaml"))
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
