"""GLM-5's target and draft (MTP) models: vLLM's models with `rot.weight` and a check for missing tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.model_executor.models.deepseek_v2 import GlmMoeDsaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.errors import CheckpointError
from glm5_ascend.serve.plugin.experts import use_one_group
from glm5_ascend.serve.plugin.linear import use_our_norms, use_our_products
from glm5_ascend.serve.plugin.loading import SeenTensors, expert_tensors, require_complete
from glm5_ascend.serve.plugin.mapped_files import Reader, Step, mapped_tensors, read_ahead
from glm5_ascend.serve.plugin.recorded_steps import RecordedSteps
from glm5_ascend.serve.servable import topk_pattern
from glm5_kernels import ops

#: mallopt's parameters (glibc's malloc.h) and their values in bytes: allocations up to 32 MiB (the maximum) come from
#: the heap, 256 MiB of free heap are kept, the heap grows by 16 MiB.
_MALLOC_OPTIONS = {-3: 32 << 20, -1: 256 << 20, -2: 16 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next step; other allocators ignore it.

    A prefill of 2048 tokens allocates results of several MiB in every layer. By default glibc maps each of them anew,
    and the kernel clears their pages, which took a fifth of the prefill.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)


def read_weights(
    model: torch.nn.Module, seen: SeenTensors, directory: Path, cache_bytes: int, steps: Sequence[Step]
) -> bool:
    """Read this rank's part of the mapped weights before a token needs them: now, or in each step if they do not fit.

    Args:
        steps: modules of the model in the order of their calls, and the module that has the weights of each.

    Returns:
        True if they fit.
    """
    tables: Any = (module for module in model.modules() if type(module) is VocabParallelEmbedding)
    embeddings = [table.weight for table in tables]
    weights = [
        weight
        for parameter in model.parameters()
        if not any(parameter is embedding for embedding in embeddings)
        for weight in (getattr(parameter, "parts", {}).values() or [parameter.data])
    ]
    for tensors in seen.experts.values():
        weights += [weight for part in tensors.weights.values() for weight in part.values()]
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    fits = read_ahead(directory, weights, rank, ranks, cache_bytes, embeddings)
    if not fits:
        Reader(directory, ranks).follow(model, steps)
    return fits


def use_our_ops(model: torch.nn.Module) -> None:
    """Replace vLLM's products, norms and routing where ours are faster; to be called before the weights are loaded."""
    use_our_products(model)
    use_our_norms(model)
    use_one_group(model)


class Glm5ForCausalLM(GlmMoeDsaForCausalLM):  # type: ignore[misc]
    """The target model. A rotated checkpoint's `rot.weight` is used by the draft model only."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        pattern = topk_pattern(config.to_dict())
        if pattern is not None:
            config.index_topk_pattern = pattern  # vLLM builds no indexer in layers with an S
        keep_freed_memory()
        self.directory = Path(vllm_config.model_config.model)
        self.cache_bytes = vllm_config.cache_config.kv_cache_memory_bytes or 0
        self.is_eager: bool = vllm_config.model_config.enforce_eager
        self.recorded: RecordedSteps | None = None
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        use_our_ops(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        seen = SeenTensors(mapped_tensors(self.directory, weights), expert_tensors(self), extract=(ROT_NAME,))
        loaded: set[str] = super().load_weights(seen)
        require_complete(self, seen)
        layers = [(layer, layer) for layer in self.model.layers]
        steps = [*layers, (self.logits_processor, self.lm_head)]
        fits = read_weights(self, seen, self.directory, self.cache_bytes, steps)
        if fits and not self.is_eager and ops.new_recording() is not None:
            self.recorded = RecordedSteps(super().forward, self.config.index_topk)
        return loaded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        if self.recorded is None or input_ids is None or inputs_embeds is not None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        return self.recorded.run(input_ids, positions)


class Glm5MTP(DeepSeekMTP):  # type: ignore[misc]
    """The draft model. In a QuaRot-rotated checkpoint the hidden state passes `rot` before the layer's hnorm.

    `rot.weight` = Q^T diag(g) Q [h, h] restores the final norm's weight g, which rotation folded into lm_head. It is
    applied at every draft step, as vllm-ascend does.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.directory = Path(vllm_config.model_config.model)
        self.cache_bytes = vllm_config.cache_config.kv_cache_memory_bytes or 0
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        description = getattr(vllm_config.quant_config, "description", None)
        self.is_rot_used = description is not None and description.is_rot_used
        if self.is_rot_used:
            hidden = self.config.hidden_size
            self.rot = torch.nn.Linear(hidden, hidden, bias=False)
        use_our_ops(self)

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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        seen = SeenTensors(mapped_tensors(self.directory, weights), expert_tensors(self), extract=(ROT_NAME,))
        loaded: set[str] = super().load_weights(seen)
        if self.is_rot_used != (ROT_NAME in seen.extracted):
            raise CheckpointError(
                f"is_rot_used is {str(self.is_rot_used).lower()} in quant_model_description.json but the checkpoint "
                f"has {'no' if self.is_rot_used else 'a'} tensor {ROT_NAME}",
                "re-create the checkpoint: without rot the draft model proposes wrong tokens",
            )
        if self.is_rot_used:
            self.rot.weight.data.copy_(seen.extracted[ROT_NAME])
            loaded.add(ROT_NAME)
            self._keep_own_head(seen.names)
        require_complete(self, seen, is_draft=True)
        (layer,) = self.model.layers.values()
        steps = [(layer, layer.mtp_block), (self.model.logits_processor, layer.shared_head)]
        read_weights(self, seen, self.directory, self.cache_bytes, steps)
        return loaded

    def _keep_own_head(self, tensors: set[str]) -> None:
        """Keep the draft's head, which vLLM would replace by the target's lm_head.

        Rotation folded the target's final norm into lm_head and shared_head.norm into the draft's head: they differ.
        """
        number, layer = next(iter(self.model.layers.items()))
        if f"model.layers.{number}.shared_head.head.weight" not in tensors:
            raise CheckpointError(
                f"the checkpoint is rotated but lacks model.layers.{number}.shared_head.head.weight",
                "re-create the checkpoint (glm5-ascend quantize writes it)",
            )
        self.lm_head, self.has_own_lm_head = layer.shared_head.head, True


def register() -> None:
    """Register both under the names that vLLM looks up; strings keep the imports lazy."""
    for architecture, name in (("GlmMoeDsaForCausalLM", "Glm5ForCausalLM"), ("DeepseekV32MTPModel", "Glm5MTP")):
        ModelRegistry.register_model(architecture, f"{__name__}:{name}")
