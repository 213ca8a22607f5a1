"""Target model and MTP draft of one rank: built, loaded from headers, post-processed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from .meta import BigOnMeta, LoadRecord, storage

#: Name of a tensor -> torch's name of its type, and its shape.
Headers = dict[str, tuple[str, list[int]]]
#: Parameters that vllm-ascend makes for marked C8 layers and never reads.
UNREAD = (".indexer.q_rot", ".indexer.k_rot")
_LAYER = re.compile(r"model\.layers\.\d+\.")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.")


class RehearsedModel:
    """One model of the rank: `model`, of vllm-ascend's class, and the record of what its loader writes."""

    def __init__(self, config: VllmConfig, model_config: Any) -> None:
        self.model_config = model_config
        self.factory = BigOnMeta()
        with self.factory, torch.no_grad():
            self.model = initialize_model(vllm_config=config, model_config=model_config)
        self.record = LoadRecord(dict(self.model.named_parameters()))

    def load(self, headers: Headers) -> None:
        """Run the real loader with every tensor of the checkpoint by name, shape and type."""
        with torch.no_grad(), self.record:
            self.model.load_weights(self.record.tensors(tensors(headers)))

    def problems(self) -> Iterator[str]:
        """One line for each sort of wrong writes, with the first of them, and for elements that nothing wrote."""
        for problem, lines in self.record.problems.items():
            yield f"{len(lines)} {problem}: {lines[0]}"
        parameters = dict(self.model.named_parameters())
        never = [
            f"{name}: {count} of {parameters[name].numel()} elements"
            for name, count in self.record.unwritten(parameters).items()
            if not name.endswith(UNREAD)
            and not (storage(parameters[name]) in self.factory.filled and count == parameters[name].numel())
        ]
        if never:
            yield f"{len(never)} never written by the loader: {never[0]}"

    def process(self) -> None:
        """Run vllm-ascend's post-processing."""
        with BigOnMeta("meta"), torch.no_grad():
            process_weights_after_loading(self.model, self.model_config, torch.device("cpu"))

    def foreign_experts(self) -> dict[str, set[int]]:
        """Module of experts -> numbers of the experts of other ranks."""
        absent: dict[str, set[int]] = {}
        for name, module in self.model.named_modules():
            expert_map = getattr(module, "_expert_map", None)
            expert_map = getattr(module, "expert_map", None) if expert_map is None else expert_map
            if isinstance(expert_map, torch.Tensor):
                absent[name] = {i for i, local in enumerate(expert_map.tolist()) if local < 0}
        return absent


def tensors(headers: Headers) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield meta tensors of the right shape and type. Single numbers are real: loaders read them."""
    for name, (dtype, shape) in headers.items():
        device = "cpu" if math.prod(shape) == 1 else "meta"
        yield name, torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def parameters(*models: torch.nn.Module) -> dict[int, int]:
    """Bytes by storage of parameters and of what post-processing made from them; shared storages count once.

    The attention keeps copies (MLAPO) or replacements (kv_b_proj) of some parameters.
    """
    sizes = {storage(value): value.nbytes for model in models for value in model.parameters()}
    for module in (module for model in models for module in model.modules() if hasattr(module, "impl")):
        derived = {name: value for name, value in vars(module.impl).items() if isinstance(value, torch.Tensor)}
        sizes |= {storage(value): value.nbytes for name, value in derived.items() if "buffer" not in name}
    return sizes


def resident(*models: torch.nn.Module) -> dict[int, int]:
    """Bytes by storage of all tensors of the modules and their attention implementations."""
    modules = [module for model in models for module in model.modules()]
    owners = [owner for module in modules for owner in (vars(module), module._parameters, module._buffers)]
    owners += [vars(module.impl) for module in modules if hasattr(module, "impl")]
    values = (value for owner in owners for value in owner.values() if isinstance(value, torch.Tensor))
    return {storage(value): value.untyped_storage().nbytes() for value in values}


def unused(headers: Headers, models: list[RehearsedModel], stages: int) -> list[str]:
    """Tensors that no model loaded, without those of other ranks: experts, layers; with stages, tensors of no layer."""
    used = set[str]().union(*(model.record.used for model in models))
    elsewhere = set[int]().union(*(absent for model in models for absent in model.foreign_experts().values()))
    names = {name for model in models for name in model.record.names.values()}
    layers = {match[0] for name in names if (match := _LAYER.match(name))}

    def here(name: str) -> bool:
        layer, expert = _LAYER.match(name), _EXPERT.match(name)
        return (stages == 1 if layer is None else layer[0] in layers) and (
            expert is None or int(expert[2]) not in elsewhere
        )

    return [name for name in headers if name not in used and here(name)]
