"""Target model and MTP draft of one rank: built, loaded from headers, post-processed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from .meta import Account, BigOnMeta, storage

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
Headers = dict[str, tuple[str, list[int]]]
#: Of a list in the result: a loader that fails fails for every layer.
SHOWN = 40
#: Parameters that vllm-ascend makes for marked C8 layers and no code of it reads.
UNREAD = (".indexer.q_rot", ".indexer.k_rot")
_LAYER = re.compile(r"model\.layers\.\d+\.")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.")


class RehearsedModel:
    """One model of the rank.

    Attributes:
        model: vllm-ascend's own class.
        found: what goes into the result.
        used: tensors of the checkpoint that it took.
    """

    def __init__(self, config: VllmConfig, model_config: Any) -> None:
        self.model_config = model_config
        self.factory = BigOnMeta()
        with self.factory, torch.no_grad():
            self.model = initialize_model(vllm_config=config, model_config=model_config)
        self.used: set[str] = set()
        self.account = Account(dict(self.model.named_parameters()))
        self.found: dict[str, Any] = {
            "class": type(self.model).__name__,
            "parameters": len(self.account.names),
            "built_bytes": sum(parameter.nbytes for parameter in self.model.parameters()),
            "schemes": dict(Counter(_schemes(self.model))),
        }

    def load(self, headers: Headers) -> None:
        """Hand the real loader every tensor of the checkpoint by name, shape and type."""
        with torch.no_grad(), self.account:
            self.model.load_weights(self.account.handed_out(tensors(headers)))
        self._judge()

    def _judge(self) -> None:
        parameters = dict(self.model.named_parameters())
        self.used = self.account.used
        left = self.account.unwritten(parameters)
        defaulted = {
            name for name, count in left.items()
            if name.endswith(UNREAD)
            or (storage(parameters[name]) in self.factory.filled and count == parameters[name].numel())
        }  # fmt: skip
        never = [f"{name}: {count} of {parameters[name].numel()} elements" for name, count in left.items()
                 if name not in defaulted]  # fmt: skip
        problems = {**self.account.problems, "uninitialised": never}
        self.found["problems"] = {kind: listed(lines) for kind, lines in problems.items() if lines}
        self.found["left_at_default"] = listed(sorted(defaulted))

    def process(self) -> None:
        """vllm-ascend's own post-processing; `resident_bytes` is every tensor that is alive afterwards."""
        with BigOnMeta("meta"), torch.no_grad():
            process_weights_after_loading(self.model, self.model_config, torch.device("cpu"))
        self.weigh()

    def weigh(self) -> None:
        self.found["resident_bytes"] = sum(resident(self.model).values())
        self.found["parameter_bytes"] = sum(parameters(self.model).values())

    def foreign_experts(self) -> dict[str, set[int]]:
        """Module of a stack of experts -> those that another rank holds."""
        absent: dict[str, set[int]] = {}
        for name, module in self.model.named_modules():
            expert_map = getattr(module, "_expert_map", None)
            expert_map = getattr(module, "expert_map", None) if expert_map is None else expert_map
            if isinstance(expert_map, torch.Tensor):
                absent[name] = {i for i, local in enumerate(expert_map.tolist()) if local < 0}
        return absent


def tensors(headers: Headers) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the right shape and type; only single numbers have a value, because loaders ask for it."""
    for name, (dtype, shape) in headers.items():
        if math.prod(shape) == 1:
            yield name, torch.zeros(shape, dtype=DTYPES[dtype])
        else:
            yield name, torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def parameters(*models: torch.nn.Module) -> dict[int, int]:
    """Bytes by storage of the parameters and of what post-processing made of them: shared ones count once.

    The attention keeps its own forms of some, beside them (MLAPO's copies) or in their place (kv_b_proj).
    """
    found = {storage(value): value.nbytes for model in models for value in model.parameters()}
    for module in (module for model in models for module in model.modules() if hasattr(module, "impl")):
        made = {name: value for name, value in vars(module.impl).items() if isinstance(value, torch.Tensor)}
        found |= {storage(value): value.nbytes for name, value in made.items() if "buffer" not in name}
    return found


def resident(*models: torch.nn.Module) -> dict[int, int]:
    """Bytes by storage of all tensors that the modules and their attention implementations hold."""
    found: dict[int, int] = {}
    for model in models:
        for module in model.modules():
            owners = [vars(module), module._parameters, module._buffers]
            owners += [vars(module.impl)] if hasattr(module, "impl") else []
            for value in (value for owner in owners for value in owner.values()):
                if isinstance(value, torch.Tensor):
                    found[storage(value)] = value.untyped_storage().nbytes()
    return found


def unused(headers: Headers, models: list[RehearsedModel], stages: int) -> list[str]:
    """Tensors that no model took, without what other ranks hold: experts, layers, with stages what is of no layer."""
    used = set[str]().union(*(model.used for model in models))
    elsewhere = set[int]().union(*(absent for model in models for absent in model.foreign_experts().values()))
    names = {name for model in models for name in model.account.names.values()}
    layers = {match[0] for name in names if (match := _LAYER.match(name))}

    def here(name: str) -> bool:
        layer, expert = _LAYER.match(name), _EXPERT.match(name)
        return (stages == 1 if layer is None else layer[0] in layers) and (
            expert is None or int(expert[2]) not in elsewhere
        )

    return [name for name in headers if name not in used and here(name)]


def listed(lines: list[str]) -> dict[str, Any]:
    return {"count": len(lines), "first": lines[:SHOWN]}


def _schemes(model: torch.nn.Module) -> Iterator[str]:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            yield type(getattr(method, "quant_method", method)).__name__
