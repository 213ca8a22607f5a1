"""quant_model_description.json: what the engines read to know the type of every tensor."""

from __future__ import annotations

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.types import INDEXER_CACHE_SUFFIX, INDEXER_CACHE_TYPE
from glm5_ascend.quantize.plan import QuantizationPlan


def description(plan: QuantizationPlan) -> dict[str, object]:
    """Content of quant_model_description.json: one type per tensor, then the meta keys."""
    entries: dict[str, object] = {t.name: t.scheme for t in plan.outputs() if t.scheme is not None}
    static = schemes.W8A8 in entries.values()
    entries |= {"model_quant_type": schemes.W8A8 if static else schemes.W8A8_DYNAMIC} | schemes.DESCRIPTION_META
    for layer in plan.cache_layers():
        entries["indexer_quant_type"] = INDEXER_CACHE_TYPE
        entries[f"{plan.config.spec.layer_prefix(layer)}self_attn{INDEXER_CACHE_SUFFIX}"] = INDEXER_CACHE_TYPE
    if plan.recipe.rotates:
        entries["is_rot_used"] = True
        entries["optional"] = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
    return entries
