"""Pipeline stages: which layers lie on a die, and what lies on the first and on the last stage alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from glm5_ascend.errors import PlanError


@dataclass(frozen=True)
class PipelineStage:
    """Layers [first, end) of the target. The embedding lies on the first stage, head and MTP layer on the last."""

    first: int
    end: int
    is_first: bool = True
    is_last: bool = True

    @property
    def whole(self) -> bool:
        """Whether there is no other stage."""
        return self.is_first and self.is_last

    def holds(self, layer: int, is_mtp: bool) -> bool:
        """Whether a layer of the checkpoint lies here."""
        return self.is_last if is_mtp else self.first <= layer < self.end


def equal_parts(layers: int, count: int) -> tuple[int, ...]:
    """Layers of each stage where nothing is said: what remains goes to the stages before the last (vLLM's rule)."""
    own, more = divmod(layers, count)
    return tuple(own + (count - 1 - more <= stage < count - 1) for stage in range(count))


def stages(layers: int, count: int, partition: tuple[int, ...] = ()) -> tuple[PipelineStage, ...]:
    """The stages of a model of `layers` layers; partition: layers of each (VLLM_PP_LAYER_PARTITION).

    Raises:
        PlanError: the partition is of another number of stages or of layers.
    """
    parts = partition or equal_parts(layers, count)
    if len(parts) != count or sum(parts) != layers:
        said = ",".join(map(str, parts))
        raise PlanError(f"layers {said}: not {count} stages of {layers} layers in all", "one number per stage")
    bounds = pairwise(accumulate(parts, initial=0))
    return tuple(PipelineStage(*bound, place == 0, place == count - 1) for place, bound in enumerate(bounds))
