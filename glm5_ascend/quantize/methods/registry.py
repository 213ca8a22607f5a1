"""All rounding methods by the name that recipes use."""

from __future__ import annotations

from glm5_ascend.quantize.methods.gptq import GPTQ
from glm5_ascend.quantize.methods.method import Method
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.ssz import SSZ

METHODS: dict[str, Method] = {method.name: method for method in (MINMAX, SSZ, GPTQ)}
