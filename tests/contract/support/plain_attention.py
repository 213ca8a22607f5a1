"""GLM-5's attention and indexer written out in fp32, from a checkpoint's dequantized tensors; shares no code with ours.

Keys and values are expanded per head (no absorption, no cache, no pages); activations are not quantized.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

LAYER = "model.layers.1.self_attn"


class Attention:
    """One layer's attention in fp32."""

    def __init__(self, checkpoint: Path) -> None:
        self.config = json.loads((checkpoint / "config.json").read_text())
        self.tensors: dict[str, torch.Tensor] = {}
        for file in sorted(checkpoint.rglob("*.safetensors")):
            self.tensors |= load_file(file)

    def weight(self, name: str) -> torch.Tensor:
        weight = self.tensors[f"{LAYER}.{name}.weight"].float()
        scale = self.tensors.get(f"{LAYER}.{name}.weight_scale")
        return weight if scale is None else weight * scale.float()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weight(name)

    def rope(self, x: torch.Tensor, positions: torch.Tensor, neighbours: bool = True) -> torch.Tensor:
        """x [T, ..., P] rotated as complex numbers: pairs of neighbours, or of the two halves."""
        size = x.shape[-1]
        angle = positions[:, None] * self.config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        turn = torch.polar(torch.ones_like(angle), angle).view(len(x), *[1] * (x.dim() - 2), size // 2)
        pairs = x.unflatten(-1, (-1, 2)) if neighbours else x.unflatten(-1, (2, -1)).transpose(-1, -2)
        rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        return (rotated if neighbours else rotated.transpose(-1, -2)).flatten(-2)

    def forward(self, states: torch.Tensor, asked: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """states [L, D] of one request from its start; outputs of positions `asked`, each over allowed [n, L]."""
        c, positions = self.config, torch.arange(len(states)).float()
        heads, nope, rope, rank = (
            c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
        )
        x = states.float()
        q = (self.norm(x[asked] @ self.weight("q_a_proj").T, "q_a_layernorm") @ self.weight("q_b_proj").T).unflatten(
            -1, (heads, nope + rope)
        )
        latent, k_rope = (x @ self.weight("kv_a_proj_with_mqa").T).split([rank, rope], dim=-1)
        expanded = self.norm(latent, "kv_a_layernorm") @ self.weight("kv_b_proj").T
        k, v = expanded.unflatten(-1, (heads, -1)).split([nope, c["v_head_dim"]], dim=-1)
        scores = torch.einsum("thd,shd->hts", q[..., :nope], k)
        scores += torch.einsum("thd,sd->hts", self.rope(q[..., nope:], positions[asked]), self.rope(k_rope, positions))
        scores = (scores * (nope + rope) ** -0.5).masked_fill(~allowed, float("-inf"))
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1) @ self.weight("o_proj").T

    def index_scores(self, states: torch.Tensor, asked: torch.Tensor, neighbours: bool) -> torch.Tensor:
        """The indexer's scores [n, L], with its rotary embedding over pairs of neighbours (GLM-5's) or of halves."""
        c, x, positions = self.config, states.float(), torch.arange(len(states)).float()
        heads, rope = c["index_n_heads"], c["qk_rope_head_dim"]
        q_c = self.norm(x[asked] @ self.weight("q_a_proj").T, "q_a_layernorm")
        q = (q_c @ self.weight("indexer.wq_b").T).unflatten(-1, (heads, -1))
        bias = self.tensors[f"{LAYER}.indexer.k_norm.bias"].float()
        key = x @ self.weight("indexer.wk").T
        k = torch.nn.functional.layer_norm(key, key.shape[-1:], self.weight("indexer.k_norm"), bias, 1e-6)
        q = torch.cat([self.rope(q[..., :rope], positions[asked], neighbours), q[..., rope:]], dim=-1)
        k = torch.cat([self.rope(k[..., :rope], positions, neighbours), k[..., rope:]], dim=-1)
        weights = x[asked] @ self.weight("indexer.weights_proj").T
        return (torch.einsum("thd,sd->ths", q, k).relu() * weights[..., None]).sum(1)
