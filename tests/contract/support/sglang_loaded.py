"""What SGLang's loader made of a checkpoint, against the files: parameters as they came, matrices as they ended."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from glm5_ascend.checkpoint.schemes import FLOAT, W4A8_DYNAMIC, W8A8
from tests.contract.support.loaded import FUSED, STACKS, Checkpoint, Tensors, equal, read_back, read_back_int4

#: The draft shares these with the target (`set_embed_and_head`).
SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass
class Found:
    """Names of parameters, or of modules, by what came of the comparison."""

    equal: set[str] = field(default_factory=set)
    different: set[str] = field(default_factory=set)

    def add(self, name: str, same: bool) -> None:
        (self.equal if same else self.different).add(name)


class SGLangModel:
    """One model, `target` or `draft`, of the folder that a job has left."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, name: str, rank: int = 0, ranks: int = 1) -> None:
        self.checkpoint, self.draft = checkpoint, name == "draft"
        self.rank, self.ranks = rank, ranks  # of a job with tensor parallel ranks, experts distributed over them
        self.before, self.after = (load_file(folder / f"{name}-{when}.safetensors") for when in ("before", "after"))
        self.used: set[str] = set()
        self.mtp = f"model.layers.{checkpoint.config['num_hidden_layers']}."

    def stored_name(self, name: str) -> str:
        """The checkpoint's name for a parameter or module."""
        if self.draft:
            name = name.replace("model.decoder.", self.mtp)
            name = re.sub(r"^model\.(enorm|hnorm|eh_proj|shared_head)", rf"{self.mtp}\1", name)
        return name

    def compare_parameters(self) -> tuple[Found, Tensors]:
        """Bit for bit, in the parameter's dtype; also those that no file holds."""
        comparison, absent = Found(), {}
        for name, parameter in self.before.items():
            if self.draft and name in SHARED:
                continue
            names = self.stored(self.stored_name(name))
            if not all(item in self.checkpoint.files.entries for row in names for item in row):
                absent[name] = parameter
                continue
            self.used |= {item for row in names for item in row}
            comparison.add(name, self._same(parameter, names))
        return comparison, absent

    def _same(self, parameter: torch.Tensor, names: list[list[str]]) -> bool:
        rows = [[self.checkpoint.files.read(item) for item in row] for row in names]
        whole = torch.cat(rows[0])
        stacked = ".mlp.experts." in names[0][0]
        if stacked:
            expected = torch.stack([torch.cat(row) for row in self._mine(rows)])
        elif parameter.numel() == 1:  # one input scale for the fused parts
            expected = whole.flatten()[:1]
        else:
            expected = torch.cat([self._part(tensor, parameter, whole) for tensor in rows[0]])
        if expected.numel() != parameter.numel():
            return False
        return torch.equal(parameter, expected.to(parameter.dtype).view_as(parameter))

    def _mine(self, experts: Any) -> Any:
        """This rank's experts."""
        item = len(experts) // self.ranks
        return experts[self.rank * item : (self.rank + 1) * item]

    def _part(self, tensor: torch.Tensor, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of one of the fused tensors, along the dimension in which the parameter is smaller."""
        if parameter.dim() != whole.dim():
            return tensor
        split = [
            d for d in range(whole.dim()) if parameter.shape[d] * self.ranks == whole.shape[d] != parameter.shape[d]
        ]
        return tensor.chunk(self.ranks, split[0])[self.rank] if split else tensor

    def stored(self, name: str) -> list[list[str]]:
        """The file's tensors that make up a parameter: rows are stacked, those of a row stand one below the other."""
        if match := re.match(r"(.*\.mlp\.experts)\.(w13|w2)_(.*)$", name):
            module, stack, suffix = match.groups()
            experts = range(self.checkpoint.config["n_routed_experts"])
            return [[f"{module}.{e}.{linear}.{suffix}" for linear in STACKS[stack]] for e in experts]
        module, _, suffix = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        return [[f"{parent}.{part}.{suffix}" for part in FUSED[last]]] if last in FUSED else [[name]]

    def compare_matrices(self) -> Found:
        """Every module as it ended, as numbers: layouts undone, integers times scales. Of several ranks the experts."""
        modules: dict[str, Tensors] = defaultdict(dict)
        for name, tensor in self.after.items():
            module, _, suffix = name.rpartition(".")
            modules[module][suffix] = tensor
        comparison = Found()
        for module, tensors in modules.items():
            stored = self.stored_name(module)
            if self.ranks > 1 and not module.endswith(".experts"):
                continue
            if "w_kc" in tensors:
                expected = self.checkpoint.split_kv_b(stored.split(".self_attn")[0], set())[1]
                same = torch.equal(tensors["w_kc"], expected["W_UK_T"]) and torch.equal(
                    tensors["w_vc"], expected["W_UV"]
                )
                comparison.add(f"{module}.w_kc, w_vc", same)
            quantized = self.kind(stored) != FLOAT and any(name.endswith("weight") for name in tensors)
            if quantized:
                self._compare(module, stored, tensors, comparison)
        return comparison

    def kind(self, stored: str) -> str:
        parent, _, last = stored.rpartition(".")
        first = f"{stored}.0.gate_proj" if last == "experts" else f"{parent}.{FUSED.get(last, (last,))[0]}"
        return str(self.checkpoint.description.get(f"{first}.weight", FLOAT))

    def _compare(self, module: str, stored: str, tensors: Tensors, comparison: Found) -> None:
        kind, expected = self.checkpoint.meant(stored, set())
        if module.endswith(".experts"):
            expected = {suffix: self._mine(tensor) for suffix, tensor in expected.items()}
        if kind == W4A8_DYNAMIC:
            got = read_back_int4(tensors)
        elif kind == W8A8:  # its scales become those of the columns, in bf16; deq_scale stays
            scale = (tensors["deq_scale"].double() / expected["input_scale"][:1]).unsqueeze(-1)
            got = {"weight": tensors["weight"].t().double() * scale, "deq_scale": tensors["deq_scale"].double()}
            got["quant_bias"] = tensors["quant_bias"].double()
            same = torch.allclose(got.pop("weight"), expected["weight"], rtol=1e-6, atol=0)
            comparison.add(f"{module}.weight", same)
        else:
            got = read_back(
                kind, tensors | {s: t.flatten(-2) for s, t in tensors.items() if shaped_as_column(s, t)}, expected
            )
        for suffix in got.keys() & expected.keys():
            if not suffix.endswith("weight_offset"):
                value = got[suffix]
                if value.numel() == expected[suffix].numel():
                    value = value.reshape(expected[suffix].shape)
                comparison.add(f"{module}.{suffix}", equal(suffix, value, expected[suffix]))


def shaped_as_column(suffix: str, tensor: torch.Tensor) -> bool:
    """A scale with a dimension of one behind its rows."""
    return suffix.endswith("_scale") and tensor.dim() > 1 and tensor.shape[-1] == 1


def models(folder: Path, directory: Path) -> dict[str, Any]:
    """Both models of a job of `load`."""
    checkpoint = Checkpoint(directory)
    return {name: SGLangModel(checkpoint, folder, name) for name in ("target", "draft")}
