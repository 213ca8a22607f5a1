"""What vllm-ascend's loader made of a checkpoint, against what the checkpoint means by our own reading.

Both sides become the same thing, named tensors per module: `read_back` undoes the loader's layouts, `Checkpoint` reads
our files with our own `dequantize`. They must be equal bit by bit, also where the loader narrows a scale to bf16: the
scales of our checkpoints are bf16-representable.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME, FLOAT, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC, dequantize

Tensors = dict[str, torch.Tensor]
#: Modules that vLLM fuses, and the checkpoint's that they are made of, one below the other.
FUSED = {
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),  # SGLang's name
    "gate_up_proj": ("gate_proj", "up_proj"),
    "wk_weights_proj": ("wk", "weights_proj"),
    "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
}
#: vLLM's names of GLM-5.3-Flash's modules, and the checkpoint's: of the target and of the draft.
FLASH = {
    "target": {"language_model.model.": "model.language_model.", "language_model.": "", "visual.": "model.visual."},
    "draft": {"model.": "model.language_model."},
}
#: The stacks of all experts.
STACKS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
#: vllm-ascend's class for a type.
LINEAR = {W8A8_DYNAMIC: "AscendW8A8DynamicLinearMethod", W8A8: "AscendW8A8LinearMethod"}
EXPERTS = {W8A8_DYNAMIC: "AscendW8A8DynamicFusedMoEMethod", W4A8_DYNAMIC: "AscendW4A8DynamicFusedMoEMethod"}
#: The rotation's module in a checkpoint, and in 0.30's draft.
ROT = "rot"
INNER_EXPERTS = ".experts.routed_experts"
#: Counted while it serves.
COUNTERS = ("moe_load",)
#: One per module, not one per row.
PER_TENSOR = ("input_scale", "input_offset")
#: scale_bias alone is a sum (of 16 columns) in fp32: relative to the largest of the module.
SUM_TOLERANCE = 2.0**-20


@dataclass
class Loaded:
    """One model (the target or the MTP draft) as `load.py` left it."""

    tensors: Tensors
    report: dict[str, Any]

    def modules(self) -> dict[str, Tensors]:
        actual: dict[str, Tensors] = defaultdict(dict)
        for name, tensor in self.tensors.items():
            module, _, suffix = name.rpartition(".")
            # The loader empties kv_b_proj, once it is split into W_UK_T and W_UV.
            if tensor.numel() and suffix not in COUNTERS:
                actual[module][suffix] = tensor
        return actual


#: Loads a checkpoint: its target and its draft by name.
Load = Callable[[Path], dict[str, Loaded]]


def read_loaded(folder: Path) -> dict[str, Loaded]:
    """Modules by 0.23's names: 0.30 has one more in a layer's experts."""
    report = json.loads((folder / "report.json").read_text().replace(INNER_EXPERTS, ".experts"))
    stored = {name: load_file(folder / f"{name}.safetensors") for name in ("target", "draft")}
    renamed = {
        model: {name.replace(INNER_EXPERTS, ".experts"): tensor for name, tensor in tensors.items()}
        for model, tensors in stored.items()
    }
    return {name: Loaded(tensors, report[name]) for name, tensors in renamed.items()}


@dataclass
class Comparison:
    equal: set[str] = field(default_factory=set)  # `module.suffix`
    different: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)  # tensors of the checkpoint


class Checkpoint:
    """Our own reading of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.files = CheckpointDir(directory)
        self.description = json.loads((directory / DESCRIPTION_NAME).read_text())
        config = json.loads((directory / "config.json").read_text())
        self.config = config.get("text_config", config)
        self.renamed = FLASH if "text_config" in config else {}
        self.suffixes: dict[str, list[str]] = defaultdict(list)
        for name in self.files.entries:
            module, _, suffix = name.rpartition(".")
            self.suffixes[module].append(suffix)

    def compare(self, loaded: dict[str, Loaded]) -> Comparison:
        """Every module of the target and of the draft that holds a tensor."""
        result = Comparison()
        for model, item in loaded.items():
            for module, tensors in item.modules().items():
                kind, expected = self.meant(self.stored_name(module, model), result.used)
                if "weight_fp32" in tensors:  # 0.30 keeps a router's weight twice
                    expected["weight_fp32"] = expected["weight"].to(tensors["weight"].dtype).float()
                actual = read_back(kind, tensors, expected)
                for suffix in actual.keys() | expected.keys():
                    same = suffix in actual and suffix in expected and equal(suffix, actual[suffix], expected[suffix])
                    (result.equal if same else result.different).add(f"{module}.{suffix}")
        return result

    def stored_name(self, module: str, model: str) -> str:
        """The checkpoint's name for a loaded module."""
        mtp = f"model.layers.{self.config['num_hidden_layers']}"
        names = {"model.embed_tokens": f"{mtp}.embed_tokens", f"{mtp}.rot": ROT} if model == "draft" else {}
        name = names.get(module, module.replace(".mtp_block", ""))
        pairs = self.renamed.get(model, {}).items()
        return next((ours + name.removeprefix(theirs) for theirs, ours in pairs if name.startswith(theirs)), name)

    def meant(self, module: str, used: set[str]) -> tuple[str, Tensors]:
        """Type of a module and what its tensors mean, fused as the loader fuses them."""
        parent, _, last = module.rpartition(".")
        if last == "impl":
            return self.split_kv_b(module.split(".self_attn.")[0], used)
        if last == "experts":
            return self.stacks(module, used)
        parts = [self.read(f"{parent}.{name}" if parent else name, used) for name in FUSED.get(last, (last,))]
        kind = parts[0][0]
        meant = join(kind, [tensors for _, tensors in parts])
        if kind == W8A8_DYNAMIC:
            meant["weight_scale_fp32"] = meant["weight_scale"]
        if kind == W8A8:  # what its `apply` takes: one per column, in bf16
            columns = meant["weight"].shape[1]
            reciprocal = 1 / meant["input_scale"].bfloat16()
            meant["aclnn_input_scale"] = meant["input_scale"].expand(columns)
            meant["aclnn_input_scale_reciprocal"] = reciprocal.double().expand(columns)
            meant["aclnn_input_offset"] = meant["input_offset"].expand(columns)
        return kind, meant

    def read(self, module: str, used: set[str]) -> tuple[str, Tensors]:
        """Type and stored tensors of a module of the checkpoint, by suffix."""
        tensors = {suffix: self.files.read(f"{module}.{suffix}") for suffix in self.suffixes[module]}
        used |= {f"{module}.{suffix}" for suffix in tensors}
        return self.description.get(f"{module}.weight", FLOAT), tensors

    def split_kv_b(self, layer: str, used: set[str]) -> tuple[str, Tensors]:
        heads, nope = self.config["num_attention_heads"], self.config["qk_nope_head_dim"]
        weight = self.read(f"{layer}.self_attn.kv_b_proj", used)[1]["weight"]
        per_head = weight.view(heads, -1, weight.shape[1])  # [heads, nope + v, kv_lora]
        return FLOAT, {"W_UK_T": per_head[:, :nope], "W_UV": per_head[:, nope:].transpose(1, 2)}

    def stacks(self, module: str, used: set[str]) -> tuple[str, Tensors]:
        """All routed experts of a layer."""
        kind, meant = FLOAT, {}
        for stack, linears in STACKS.items():
            experts: list[Tensors] = []
            while f"{module}.{len(experts)}.{linears[0]}" in self.suffixes:
                parts = [self.read(f"{module}.{len(experts)}.{linear}", used) for linear in linears]
                kind = parts[0][0]
                experts.append(join(kind, [tensors for _, tensors in parts]))
            for suffix in experts[0]:
                meant[f"{stack}_{suffix}"] = torch.stack([expert[suffix] for expert in experts])
        if kind == W8A8_DYNAMIC:
            meant["w13_weight_scale_fp32"] = meant["w13_weight_scale"]
        return kind, meant


def join(kind: str, parts: list[Tensors]) -> Tensors:
    """The linears of a fused module, one below the other; quantized ones as numbers instead of bits."""
    joined = {}
    for suffix in parts[0]:
        item = [tensors[suffix] for tensors in parts]
        if kind == FLOAT:
            joined[suffix] = torch.cat(item)
        elif suffix == "weight":
            joined[suffix] = torch.cat([dequantize(kind, tensors).double() for tensors in parts])
        elif suffix in PER_TENSOR:
            joined[suffix] = item[0].double()
        elif suffix == "scale_bias":
            joined[suffix] = torch.cat([tensor.double().sum(dim=1) for tensor in item])
        else:
            joined[suffix] = torch.cat([tensor.flatten().double() for tensor in item])
    return joined


def read_back(kind: str, tensors: Tensors, expected: Tensors) -> Tensors:
    """Weights [N, K] and scales of a loaded module as its tensors mean them, in fp64; a FLOAT module as it is."""
    if kind == FLOAT and "W_UV" in tensors:  # an attention: it holds more than the two weights that are compared
        return {suffix: tensors[suffix] for suffix in expected}
    if kind == FLOAT:
        stacks = tuple(f"{stack}_weight" for stack in STACKS)
        return {suffix: tensor.transpose(1, 2) if suffix in stacks else tensor for suffix, tensor in tensors.items()}
    if kind == W4A8_DYNAMIC:
        return read_back_int4(tensors)
    actual = {suffix: tensor.double() for suffix, tensor in tensors.items()}
    for suffix in [name for name in tensors if name.endswith("weight")]:
        scale = tensors[f"{suffix}_scale"].float()
        if kind == W8A8:
            scale = tensors["deq_scale"] / tensors["input_scale"].float()
        actual[suffix] = (tensors[suffix].transpose(-1, -2).float() * scale.unsqueeze(-1)).double()
    return actual


def read_back_int4(tensors: Tensors) -> Tensors:
    """INT4 experts: eight rows in an int32, the lowest nibble first; scales as the bits of an fp32 in an int64."""
    actual = {}
    for stack in STACKS:
        nibbles = tensors[f"{stack}_weight"].view(torch.uint8)  # [E, K, N / 2]
        q = torch.stack([nibbles & 15, nibbles >> 4], dim=-1).flatten(-2).to(torch.int32)
        q = torch.where(q > 7, q - 16, q).transpose(1, 2)  # [E, N, K]
        words = tensors[f"{stack}_weight_scale"].flatten(1).contiguous().view(torch.int32).unflatten(-1, (-1, 2))
        bits, upper = words.unbind(-1)
        scale = torch.where(upper == 0, bits.contiguous().view(torch.float32), float("nan"))
        actual[f"{stack}_weight"] = (q.float() * scale.unsqueeze(-1)).double()
        actual[f"{stack}_weight_scale"] = scale.double()
        actual[f"{stack}_scale_bias"] = tensors[f"{stack}_scale_bias"].double()
        if f"{stack}_weight_offset" in tensors:  # SGLang drops it
            actual[f"{stack}_weight_offset"] = tensors[f"{stack}_weight_offset"].flatten(1).double()
    return actual | {suffix: tensor for suffix, tensor in tensors.items() if suffix not in actual}


def equal(suffix: str, actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if suffix.endswith("scale_bias") and actual.shape == expected.shape:
        return bool((actual - expected).abs().max() <= SUM_TOLERANCE * expected.abs().max())
    if suffix == "A_log":
        actual = actual.flatten()  # four dimensions in vllm-ascend
    return torch.equal(actual, expected.to(actual.dtype))  # a FLOAT parameter is bf16, the file's may be fp32


def check_schemes(loaded: dict[str, Loaded], stored: Checkpoint) -> None:
    """Every module has the scheme of its type in the checkpoint, and no type is left over."""
    seen = set()
    for model, item in loaded.items():
        for module, scheme in item.report["schemes"].items():
            kind, _ = stored.meant(stored.stored_name(module, model), set())
            expected = (EXPERTS if module.endswith(".experts") else LINEAR).get(kind)
            seen.add(kind)
            assert scheme == expected if expected else "Unquantized" in scheme, (module, scheme)
    assert seen == {kind for name, kind in stored.description.items() if name.endswith(".weight")}
