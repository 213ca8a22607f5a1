"""Small checkpoints for the serving tests: a random GLM-5 with an MTP layer, and round-to-nearest quantized copies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint.schemes import scale_bias
from tests.support.tiny_model import write_tokenizer
from tests.verify.support.integers import pack

SPECIALS = [
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
TEMPLATE = "[gMASK]<sop>{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
ATTENTION = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "indexer.wq_b")


def write_float_checkpoint(directory: Path, indexers: str = "FFF", context: int = 4096) -> Path:
    """Random fp32 model; `indexers`: F = layer with an indexer, S = layer that shares the last one's choice (GLM-5.2).

    16 index heads: with fewer, exact score ties sit at the top-k border (serving-cpu.md 6).
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, SPECIALS, TEMPLATE)
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=512, hidden_size=192, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=96, qk_rope_head_dim=64, qk_nope_head_dim=32,
        v_head_dim=32, n_group=1, topk_group=1, norm_topk_prob=True, max_position_embeddings=context, index_topk=32,
        index_head_dim=128, index_n_heads=16, first_k_dense_replace=1, pad_token_id=0, bos_token_id=None,
        eos_token_id=[0, 4, 6], rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False, dtype="float32", scoring_func="sigmoid", topk_method="noaux_tc",
        indexer_rope_interleave=True, ep_size=1, moe_layer_freq=1, num_nextn_predict_layers=1,
        index_topk_pattern=indexers, indexer_types=["full" if kind == "F" else "shared" for kind in indexers],
    )  # fmt: skip
    model = GlmMoeDsaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            spread(name, tensor)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file(with_mtp_layer(load_file(path), config), path, metadata={"format": "pt"})
    return directory


def spread(name: str, tensor: torch.Tensor) -> None:
    """Fill one tensor so that logits are far apart and every part of the model matters."""
    if "e_score_correction_bias" in name:
        tensor.copy_(torch.randn(tensor.shape) * 0.05)
    elif tensor.ndim >= 2:
        factor = 1.0 if "embed" in name else (3.0 if "lm_head" in name else 2.0 if "indexer" in name else 1.0)
        tensor.copy_(torch.randn(tensor.shape) * factor * (1.0 if "embed" in name else tensor.shape[-1] ** -0.5))
    elif "norm" in name and not name.endswith("bias"):
        tensor.copy_(1.0 + 0.1 * torch.randn(tensor.shape))


def with_mtp_layer(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Add MTP layer L: the last decoder layer again, with an indexer, reading mostly the hidden state."""
    last, mtp = f"model.layers.{config.num_hidden_layers - 1}.", f"model.layers.{config.num_hidden_layers}."
    h = config.hidden_size
    extra = {mtp + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)}
    full = f"model.layers.{max(n for n, kind in enumerate(config.indexer_types) if kind == 'full')}."
    indexer = {name: t.clone() for name, t in tensors.items() if name.startswith(f"{full}self_attn.indexer.")}
    extra |= {mtp + name.removeprefix(full): t for name, t in indexer.items()}
    extra[mtp + "eh_proj.weight"] = torch.cat([torch.zeros(h, h), torch.eye(h)], 1) + 0.01 * torch.randn(h, 2 * h)
    extra[mtp + "enorm.weight"], extra[mtp + "hnorm.weight"] = torch.ones(h), torch.ones(h)
    extra[mtp + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    extra[mtp + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    extra[mtp + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    return tensors | extra


def quantize(source: Path, directory: Path) -> Path:
    """Round to nearest, without calibration worth the name; every type that can be served, FLOAT in the MTP layer."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, directory)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    tensors: dict[str, torch.Tensor] = {}
    types: dict[str, Any] = {"version": "1.0.0", "group_size": 0, "metadata": {}}
    for name, weight in load_file(source / "model.safetensors").items():
        module, kind = name.removesuffix(".weight"), kind_of(name, layers)
        parts = quantized(weight, kind, module) if kind != "FLOAT" else {name.rpartition(".")[2]: weight}
        for suffix, tensor in parts.items():
            key = f"{name.rpartition('.')[0]}.{suffix}"
            tensors[key], types[key] = tensor.contiguous(), kind
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "quant_model_description.json").write_text(json.dumps(types, indent=1))
    return directory


def kind_of(name: str, layers: int) -> str:
    """FLOAT in the MTP layer; attention dynamic in layer 0, then static; experts INT4 in layer 1, then INT8."""
    module = name.removesuffix(".weight")
    if not name.endswith(".weight") or f".layers.{layers}." in name:
        return "FLOAT"
    if ".mlp.experts." in name:
        return "W4A8_DYNAMIC" if ".layers.1." in name else "W8A8_DYNAMIC"
    if module.endswith(ATTENTION):
        return "W8A8_DYNAMIC" if ".layers.0." in name else "W8A8"
    return "W8A8_DYNAMIC" if module.endswith(("gate_proj", "up_proj", "down_proj")) else "FLOAT"


def quantized(weight: torch.Tensor, kind: str, module: str) -> dict[str, torch.Tensor]:
    """The tensors of one linear, in the order and shapes of checkpoint-format.md 5."""
    largest = 7 if kind == "W4A8_DYNAMIC" else 127
    scale = (weight.abs().amax(1, keepdim=True) / largest).to(torch.bfloat16).float()  # as loaders will round it
    codes = torch.round(weight / scale).clamp(-largest - 1, largest).to(torch.int8)
    out = {"weight": codes, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    if kind == "W4A8_DYNAMIC":
        out["weight"] = pack(codes[0::2], codes[1::2])
        out["scale_bias"] = scale_bias(codes, scale, 16 if module.endswith("down_proj") else 1)
    if kind == "W8A8":
        # The inputs of these layers are normalised or close to it: +-5 covers them; o_proj's is narrower.
        input_scale = torch.tensor([2.0**-6 if module.endswith("o_proj") else 0.04]).to(torch.bfloat16).float()
        input_offset = torch.tensor([3.0])
        out["input_scale"], out["input_offset"] = input_scale, input_offset
        out["deq_scale"] = (input_scale * scale).flatten()
        out["quant_bias"] = (-3 * codes.long().sum(1)).to(torch.int32)
    return out
