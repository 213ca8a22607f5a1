"""GLM-5.3-Flash's target and draft (MTP) models: vLLM's models with our attention layers, from the mapped files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.glm5_next import GLM5_NEXT
from glm5_ascend.serve.plugin import linear_attention, residual_streams
from glm5_ascend.serve.plugin.compat import change_class
from glm5_ascend.serve.plugin.mapped_files import MappedFiles
from glm5_ascend.serve.plugin.models import FromMappedFiles
from glm5_ascend.serve.plugin.quantization import FloatConfig
from glm5_ascend.serve.plugin.text_model import glm5next, mtp

#: What vLLM reads of a configuration and older versions of transformers leave out; other values are refused before.
_KEYS = {**GLM5_NEXT.fixed_keys, "indexer_rope_interleave": True}


def complete(vllm_config: Any, *configs: Any) -> None:
    """Add to transformers' configurations the keys that vLLM reads, and see `FloatConfig`."""
    if vllm_config.quant_config is None:
        vllm_config.quant_config = FloatConfig()
    for config in configs:
        for key, value in _KEYS.items():
            if not hasattr(config, key):
                setattr(config, key, value)


class Glm5NextForCausalLM(FromMappedFiles, glm5next.Glm5NextForCausalLM):  # type: ignore[misc]
    """The target model, without its vision tower."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        complete(vllm_config, vllm_config.model_config.hf_text_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        linear_attention.install(self)
        residual_streams.install(self)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        shapes: tuple[tuple[int, ...], ...] = super().get_mamba_state_shape_from_config(vllm_config)
        return (*shapes, linear_attention.LENGTH_SHAPE)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        dtypes: tuple[torch.dtype, ...] = super().get_mamba_state_dtype_from_config(vllm_config)
        return (*dtypes, linear_attention.LENGTH_DTYPE)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        convolution, recurrent = super().get_mamba_state_copy_func()
        return convolution, recurrent, recurrent


class DraftLayer(mtp.Glm5NextMultiTokenPredictorLayer):  # type: ignore[misc]
    """vLLM's layer, whose forward begins with a GPU kernel."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        previous_hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        spec_step_index: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, hidden_size] for the logits, and the same for the next draft."""
        embeds = self.enorm(inputs_embeds.masked_fill(positions[:, None] == 0, 0))
        hidden = self.eh_proj(torch.cat([embeds, self.hnorm(previous_hidden_states)], dim=-1))
        hidden, residual, *_ = self.mtp_block(positions=positions, hidden_states=hidden, residual=None)
        hidden, _ = self.shared_head.norm(hidden, residual=residual)
        return hidden, hidden


class _Draft(glm5next.Glm5NextMTP):  # type: ignore[misc]
    """vLLM's draft model, which has the target's head."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        pairs = (pair for pair in weights if ".shared_head.head." not in pair[0])
        loaded: set[str] = super().load_weights(pairs)
        return loaded


class Glm5NextMTP(FromMappedFiles, _Draft):
    """The draft model."""

    is_draft = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        draft = vllm_config.speculative_config.draft_model_config
        complete(vllm_config, vllm_config.model_config.hf_text_config, draft.hf_text_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers.values():
            change_class(layer, DraftLayer)

    def after_loading(self, files: MappedFiles, loaded: set[str]) -> None:
        if ROT_NAME in files.checkpoint:
            raise CheckpointError(
                f"{self.directory}: the MTP layer of a rotated GLM-5.3-Flash is not implemented for the CPU",
                "drop --speculative-config",
            )
