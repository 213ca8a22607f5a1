"""What SGLang's loader made of a checkpoint, against the files: parameters as they came."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from glm5_ascend.checkpoint.schemes import FLOAT
from tests.contract.support.loaded import FUSED, STACKS, Checkpoint, Tensors, equal, read_back

#: Modules that SGLang alone fuses, and the checkpoint's.
FUSED_HERE = FUSED | {f"qkv_{kind}": tuple(f"{side}_{kind}" for side in "qkv") for kind in ("proj", "conv1d")}
#: The draft shares these with the target (`set_embed_and_head`).
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
#: And of the MTP layer in the files. The rotation is read by the model class, not by the loader.
LEFT = ("embed_tokens.weight", "shared_head.head.weight")


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
        self.language = "model.language_model." if checkpoint.renamed else "model."
        self.mtp = f"{self.language}layers.{checkpoint.config['num_hidden_layers']}."

    def stored_name(self, name: str) -> str:
        """The checkpoint's name for a parameter or module."""
        if self.draft:
            name = name.replace("model.decoder.", self.mtp)
            return re.sub(r"^model\.(enorm|hnorm|eh_proj|shared_head)", rf"{self.mtp}\1", name)
        if name.startswith("visual."):
            return f"model.{name}".replace(".attn.qkv_proj.", ".attn.qkv.")
        return re.sub(r"^model\.", self.language, name)

    def compare_processed(self) -> Found:
        """Numbers of the quantized modules, and both halves of kv_b_proj, after post-processing."""
        comparison, modules = Found(), {name.rpartition(".")[0] for name in self.after}
        for module in sorted(modules):
            if module.endswith(".mlp.experts"):
                kind, meant = self.checkpoint.stacks(self.stored_name(f"{module}.")[:-1], self.used)
                parts = {
                    name.removeprefix(f"{module}."): x for name, x in self.after.items() if name.startswith(module)
                }
            elif f"{module}.weight_scale" in self.after:
                kind, meant = self.checkpoint.meant(self.stored_name(f"{module}.")[:-1], self.used)
                parts = {suffix: self.after[f"{module}.{suffix}"] for suffix in ("weight", "weight_scale")}
            elif f"{module}.w_kc" in self.after:
                kind, meant = self.checkpoint.split_kv_b(self.stored_name(module).split(".self_attn")[0], self.used)
                parts = {"W_UK_T": self.after[f"{module}.w_kc"], "W_UV": self.after[f"{module}.w_vc"]}
            else:
                continue
            if kind == FLOAT and module.endswith(".mlp.experts"):
                continue
            actual = read_back(kind, parts, meant)
            for suffix in actual.keys() & meant.keys():
                comparison.add(
                    f"{module}.{suffix}", equal(suffix, actual[suffix].view_as(meant[suffix]), meant[suffix])
                )
        return comparison

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
        return [[f"{parent}.{part}.{suffix}" for part in FUSED_HERE[last]]] if last in FUSED_HERE else [[name]]


def check_parameters(loaded: dict[str, Any]) -> None:
    """All tensors of the files but `LEFT` and the rotation are in parameters, bit for bit; the rest are zero biases."""
    used = {"rot.weight"}
    for name, model in loaded.items():
        parameters, absent = model.compare_parameters()
        used |= model.used
        print(f"{name}: {len(parameters.equal)} parameters equal")
        assert parameters.different == set() and len(parameters.equal) > 20
        assert not [key for key, value in absent.items() if "norm" not in key or value.any()]
    left = loaded["target"].checkpoint.files.entries.keys() - used
    assert left == {loaded["draft"].mtp + name for name in LEFT}


def models(folder: Path, directory: Path) -> dict[str, Any]:
    """Both models of a job of `load`."""
    checkpoint = Checkpoint(directory)
    return {name: SGLangModel(checkpoint, folder, name) for name in ("target", "draft")}
