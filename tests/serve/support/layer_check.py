"""Serve a quantized checkpoint and recompute every quantized layer from its file.  python layer_check.py DIR RESULT

For each module vLLM runs: take the input it really got, read the integers and scales from the safetensors file, compute
with int64 sums, compare with the output it really gave. Nothing of the plugin's arithmetic is on the expected side.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from glm5_kernels import registry
from tests.serve.support.engine import generate, model_of, start

#: The first one is longer than index_topk: up to it the indexer computes no queries.
PROMPTS = [[7 + i % 200 for i in range(80)], [9, 8, 7]]
SHARDS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


class Reference:
    """Integer arithmetic from the file's tensors."""

    def __init__(self, directory: Path) -> None:
        files = [load_file(path) for path in directory.glob("*.safetensors")]
        self.tensors = {k: t.float() if t.is_floating_point() else t for file in files for k, t in file.items()}
        self.types = json.loads((directory / "quant_model_description.json").read_text())

    def linear(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """Output of one vLLM linear, fused or not: its shards side by side."""
        parent, _, last = module.rpartition(".")
        names = [f"{parent}.{shard}" for shard in SHARDS.get(last, (last,))]
        return torch.cat([self.one_linear(x, name) for name in names], dim=-1)

    def one_linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, kind = self.tensors[f"{name}.weight"], self.types[f"{name}.weight"]
        if kind == "FLOAT":
            return x @ weight.T
        if kind == "W8A8":
            get = lambda suffix: self.tensors[f"{name}.{suffix}"]  # noqa: E731
            x_q = torch.round(x / get("input_scale") + get("input_offset")).clamp(-128, 127).long()
            return (x_q @ weight.long().T + get("quant_bias")).float() * get("deq_scale")
        if kind == "W4A8_DYNAMIC":
            weight = torch.stack([((p << 4) >> 4, p >> 4)[i] for p in weight for i in (0, 1)])
        s = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        x_q = torch.round(x / s).clamp(-128, 127).long()
        return (x_q @ weight.long().T).float() * s * self.tensors[f"{name}.weight_scale"].flatten()

    def experts(self, module: str, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in range(x.shape[0]):
            for k in range(ids.shape[1]):
                expert = f"{module}.{int(ids[t, k])}"
                row = x[t : t + 1]
                hidden = torch.nn.functional.silu(self.one_linear(row, f"{expert}.gate_proj"))
                hidden = hidden * self.one_linear(row, f"{expert}.up_proj")
                out[t] += self.one_linear(hidden, f"{expert}.down_proj")[0] * weights[t, k]
        return out

    def preprocess(self, attention: str, args: Any, op_q_c: torch.Tensor, eps: float = 1e-5) -> list[torch.Tensor]:
        """ql_nope, q_pe, q_c of mla_preprocess from its hidden_states, cos, sin.

        op_q_c: the op's q_c, from which the queries are computed: its last bit can change a rounded code.
        """
        x, cos, sin = args[:3]
        heads, nope, rank = args[5].shape
        rope = 2 * cos.shape[1]
        norm = lambda v, name: (  # noqa: E731
            v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * self.tensors[f"{attention}.{name}.weight"]
        )
        q_lora = self.tensors[f"{attention}.q_a_layernorm.weight"].numel()
        y = self.linear(x, f"{attention}.fused_qkv_a_proj")
        q_c = norm(y[:, :q_lora], "q_a_layernorm")
        z = self.linear(op_q_c.float(), f"{attention}.q_b_proj").view(-1, heads, nope + rope)
        kv_b = self.tensors[f"{attention}.kv_b_proj.weight"].view(heads, -1, rank)
        ql = torch.einsum("thn,hnr->thr", z[..., :nope], kv_b[:, :nope])
        a, b = z[..., nope::2], z[..., nope + 1 :: 2]
        c, s = cos[:, None], sin[:, None]
        return [ql, torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2), q_c]


class Record:
    """Counts of our ops, and inputs and outputs of every mla_preprocess call, in layer order."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.calls: list[tuple[Any, Any]] = []
        self.function = registry.function

    def recorded(self, op: str, device: str) -> Any:
        """The implementation of an op, which also records its calls; takes the place of `registry.function`."""

        def call(*args: Any) -> Any:
            out = self.function(op, device)(*args)
            self.counts[op] += 1
            if op == "mla_preprocess":
                self.calls.append((args, out))
            return out

        return call


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference relative to the largest value of the layer's output."""
    return float((got.float() - want).abs().max() / want.abs().max().clamp_min(1e-6))


def checked(directory: Path) -> dict[str, Any]:
    llm = start({"model": str(directory), "dtype": "float32", "quantization": "ascend", "enforce_eager": True})
    reference, model = Reference(directory), model_of(llm)
    errors: dict[str, float] = {}
    steps = 0

    def check(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            error = worst(output[0], reference.linear(inputs[0], name))
            errors[name] = max(errors.get(name, 0.0), error)

        return hook

    def count_step(*_: Any) -> None:
        nonlocal steps
        steps += 1

    model.model.layers[0].register_forward_pre_hook(count_step)
    for name, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__.startswith("W8A8"):
            module.register_forward_hook(check(name))
        if type(module).__name__ == "RoutedExperts":
            watch_experts(module, name.split(".routed_experts")[0], reference, errors)
    record = Record()
    with patch.object(registry, "function", record.recorded):
        generate(llm, PROMPTS, 4)
    layers = len(model.model.layers)
    for i, (args, out) in enumerate(record.calls):
        attention = f"model.layers.{i % layers}.self_attn"
        expected = reference.preprocess(attention, args, out[2])
        for name, actual, exact in zip(("ql_nope", "q_pe", "q_c"), out, expected, strict=True):
            key = f"{attention}.mla_preprocess.{name}"
            errors[key] = max(errors.get(key, 0.0), worst(actual, exact))
    return {"errors": errors, "ops": dict(record.counts), "steps": steps}


def watch_experts(module: Any, name: str, reference: Reference, errors: dict[str, float]) -> None:
    """Wrap this one instance's own quant method (ours) so that its arguments can be seen."""
    apply = module.quant_method.apply

    def watched(layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *rest: Any, **kw: Any) -> Any:
        out = apply(layer, x, topk_weights, topk_ids, *rest, **kw)
        errors[name] = max(errors.get(name, 0.0), worst(out, reference.experts(name, x, topk_weights, topk_ids)))
        return out

    module.quant_method.apply = watched


def main() -> None:
    Path(sys.argv[2]).write_text(json.dumps(checked(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
