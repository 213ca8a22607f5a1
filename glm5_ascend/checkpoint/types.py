"""Names of the quantized format. No torch here: the server's launcher and the plugin read them too."""

from __future__ import annotations

FLOAT, W8A8_DYNAMIC, W8A8, W4A8_DYNAMIC = "FLOAT", "W8A8_DYNAMIC", "W8A8", "W4A8_DYNAMIC"
QUANTIZED = (W8A8_DYNAMIC, W8A8, W4A8_DYNAMIC)
#: What a linear layer and what routed experts can be in an engine that reads the format.
LINEAR_TYPES = (FLOAT, W8A8_DYNAMIC, W8A8)
EXPERT_TYPES = (FLOAT, W8A8_DYNAMIC, W4A8_DYNAMIC)

#: Q^T diag(g) Q of the final norm's gain g: what a rotated model hands to its MTP layer. No entry in the description.
ROT_NAME = "rot.weight"
#: The file that holds it and nothing else: SGLang opens it by this name, vLLM by the index.
ROT_FILE = "rot.safetensors"

GIB = 2**30  # bytes

DESCRIPTION_NAME = "quant_model_description.json"
#: Meta keys the two vllm-ascend lines need; `group_size` 0 and `version` 1.0.0 select per-channel packed int4.
DESCRIPTION_META: dict[str, object] = {"version": "1.0.0", "group_size": 0, "metadata": {}}
