"""What `--additional-config` switches on, by vllm-ascend's keys. Light: the platform reads it before vLLM is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from glm5_ascend.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LI_C8, SFA_C8 = "enable_sparse_li_c8", "enable_sparse_sfa_c8"
#: Latents that share a scale.
TILE = 128


class Switches(NamedTuple):
    """Which caches are int8."""

    indexer: bool
    latents: bool


def switches(vllm_config: VllmConfig) -> Switches:
    """From `additional_config`.

    Raises:
        ConfigError: a switch is no boolean, or the model's sizes do not fit the int8 layout.
    """
    given: dict[str, Any] = vllm_config.additional_config or {}
    for name in (LI_C8, SFA_C8):
        if not isinstance(given.get(name, False), bool):
            raise ConfigError(f"additional_config {name} is {given[name]!r}", "use true or false")
    found = Switches(given.get(LI_C8, False), given.get(SFA_C8, False))
    config = vllm_config.model_config.hf_text_config
    if found.latents and config.kv_lora_rank % TILE:
        raise ConfigError(f"{SFA_C8}: kv_lora_rank is {config.kv_lora_rank}, no multiple of {TILE}", "drop the switch")
    if found.indexer and config.index_head_dim & (config.index_head_dim - 1):
        raise ConfigError(f"{LI_C8}: index_head_dim is {config.index_head_dim}, no power of 2", "drop the switch")
    return found
