"""GLM-5's target and draft (MTP) models: vLLM's models with `rot.weight` and a check for missing tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.model_executor.models.deepseek_v2 import GlmMoeDsaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve.plugin import decoder
from glm5_ascend.serve.plugin.linear import use_our_products
from glm5_ascend.serve.plugin.loading import (
    ExpertTensors,
    expert_tensors,
    require_tensors,
    text_tensors,
    without_experts,
)
from glm5_ascend.serve.plugin.mapped_files import MappedFiles, Reader, Step, mapped_files
from glm5_ascend.serve.servable import topk_pattern

#: mallopt's parameters (glibc's malloc.h) and their values in bytes: allocations up to 32 MiB (the maximum) come from
#: the heap, 256 MiB of free heap are kept, the heap grows by 16 MiB.
_MALLOC_OPTIONS = {-3: 32 << 20, -1: 256 << 20, -2: 16 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next step.

    A prefill of 2048 tokens allocates results of several MiB in every layer. By default glibc maps each of them anew,
    and the kernel clears their pages, which took a fifth of the prefill.
    """
    for option, value in _MALLOC_OPTIONS.items():
        ctypes.CDLL(None).mallopt(option, value)


class FromMappedFiles(torch.nn.Module):
    """Loads a model from the checkpoint's files where they are mapped; the files of a name of the hub as vLLM does."""

    is_draft = False
    config: Any
    model: Any
    logits_processor: Any
    lm_head: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.directory = Path(vllm_config.model_config.model)
        self.cache_bytes = vllm_config.cache_config.kv_cache_memory_bytes or 0
        self.description = getattr(vllm_config.quant_config, "description", None)
        keep_freed_memory()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        use_our_products(self)
        decoder.install(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        if not self.directory.is_dir():
            loaded: set[str] = super().load_weights(weights)  # type: ignore[misc]
            return loaded
        next(iter(weights))  # starts vLLM's clock
        files, types = mapped_files(self.directory), self.description.types if self.description else {}
        config = load_config(self.directory)
        require_tensors(files.checkpoint, config, types, self.is_draft)
        experts = expert_tensors(self)
        tensors = without_experts(text_tensors(files.tensors(), config), experts)
        loaded = super().load_weights(tensors)  # type: ignore[misc]
        self.after_loading(files, loaded)
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        if not files.read_ahead(*self._weights(experts), rank=rank, ranks=ranks, cache_bytes=self.cache_bytes):
            Reader(files, ranks).follow(self, self.steps())
        return loaded

    def after_loading(self, files: MappedFiles, loaded: set[str]) -> None:
        """Take the tensors that vLLM's model does not know, and add their names."""

    def steps(self) -> list[Step]:
        """The modules in the order of their calls, and the module that has the weights of each."""
        if self.is_draft:
            (layer,) = self.model.layers.values()
            return [(layer, layer.mtp_block), (self.model.logits_processor, layer.shared_head)]
        return [*((layer, layer) for layer in self.model.layers), (self.logits_processor, self.lm_head)]

    def _weights(self, experts: Mapping[str, ExpertTensors]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's weights, and embeddings, of which a token uses one row."""
        embeddings: Any = (module for module in self.modules() if type(module) is VocabParallelEmbedding)
        tables = [embedding.weight for embedding in embeddings]
        weights = [
            weight
            for parameter in self.parameters()
            if not any(parameter is table for table in tables)
            for weight in (getattr(parameter, "parts", {}).values() or [parameter.data])
        ]
        for tensors in experts.values():
            weights += [weight for by_expert in tensors.weights.values() for weight in by_expert.values()]
        return weights, tables


class Glm5ForCausalLM(FromMappedFiles, GlmMoeDsaForCausalLM):  # type: ignore[misc]
    """The target model. A rotated checkpoint's `rot.weight` is used by the draft model only."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        pattern = topk_pattern(config.to_dict())
        if pattern is not None:
            config.index_topk_pattern = pattern  # vLLM builds no indexer in layers with an S
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class Glm5MTP(FromMappedFiles, DeepSeekMTP):  # type: ignore[misc]
    """The draft model. In a QuaRot-rotated checkpoint the hidden state passes `rot` before the layer's hnorm.

    `rot.weight` = Q^T diag(g) Q [h, h] restores the final norm's weight g, which rotation folded into lm_head. It is
    applied at every draft step, as vllm-ascend does.
    """

    is_draft = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.is_rot_used = self.description is not None and self.description.is_rot_used
        if self.is_rot_used:
            hidden = self.config.hidden_size
            self.rot = torch.nn.Linear(hidden, hidden, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> Any:
        if self.is_rot_used:
            hidden_states = self.rot(hidden_states)
        return super().forward(input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds, spec_step_idx)

    def after_loading(self, files: MappedFiles, loaded: set[str]) -> None:
        """Take `rot.weight`, and keep the draft's head, which vLLM would replace by the target's lm_head.

        Rotation folded the target's final norm into lm_head and shared_head.norm into the draft's head: they differ.
        """
        if not self.is_rot_used:
            return
        self.rot.weight.data.copy_(files.checkpoint.read(ROT_NAME))
        loaded.add(ROT_NAME)
        (layer,) = self.model.layers.values()
        self.lm_head, self.has_own_lm_head = layer.shared_head.head, True


def register() -> None:
    """Register the models under the names that vLLM looks up; strings keep the imports lazy."""
    flash = "glm5_ascend.serve.plugin.glm5_next"
    models = {
        "GlmMoeDsaForCausalLM": f"{__name__}:Glm5ForCausalLM",
        "DeepseekV32MTPModel": f"{__name__}:Glm5MTP",
        "Glm5NextForConditionalGeneration": f"{flash}:Glm5NextForCausalLM",
        "Glm5NextMTPModel": f"{flash}:Glm5NextMTP",
    }
    for architecture, name in models.items():
        ModelRegistry.register_model(architecture, name)
