"""Pipeline stages: the layers of each, and the weights that only the first and the last stage have."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from glm5_ascend.errors import PlanError


@dataclass(frozen=True)
class PipelineStage:
    """Layers [first, end) of the target. The first stage has the embedding, the last one head and MTP layer."""

    first: int
    end: int
    is_first: bool = True
    is_last: bool = True

    @property
    def whole(self) -> bool:
        return self.is_first and self.is_last

    def holds(self, layer: int, is_mtp: bool) -> bool:
        return self.is_last if is_mtp else self.first <= layer < self.end


def equal_parts(layers: int, count: int) -> tuple[int, ...]:
    """Layers of each stage by vLLM's rule: remaining layers go to the stages before the last."""
    base, rest = divmod(layers, count)
    return tuple(base + (count - 1 - rest <= stage < count - 1) for stage in range(count))


def stages(layers: int, count: int, partition: tuple[int, ...] = ()) -> tuple[PipelineStage, ...]:
    """Divide `layers` layers into `count` stages; partition: layers of each (VLLM_PP_LAYER_PARTITION).

    Raises:
        PlanError: the partition has another number of stages or layers.
    """
    parts = partition or equal_parts(layers, count)
    if len(parts) != count or sum(parts) != layers:
        text = ",".join(map(str, parts))
        raise PlanError(f"layers {text}: not {count} stages of {layers} layers in all", "one number per stage")
    bounds = pairwise(accumulate(parts, initial=0))
    return tuple(PipelineStage(*bound, index == 0, index == count - 1) for index, bound in enumerate(bounds))
