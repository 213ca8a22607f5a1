"""What can change its type on its own: a linear, linears the engine runs together, or all routed experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from glm5_ascend.checkpoint import schemes
from glm5_ascend.model.spec import Linear
from glm5_ascend.quantize.plan import QuantizationPlan


@dataclass
class Unit:
    """One unit of one layer.

    Attributes:
        modules: names relative to the layer.
        scheme: what the recipe makes of it; its types, joined by "+", where a recipe gives its linears different ones.
        noise: by type, the energy its rounding adds to the residual stream it is written to, relative to that of the
            stream, token by token, mean over tokens: norms look at every token alone. FLOAT adds none.
        nbytes: by type, stored bytes.
    """

    prefix: str = field(kw_only=True)
    layer: int
    modules: tuple[str, ...]
    scheme: str
    noise: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    @property
    def experts(self) -> bool:
        return ".experts." in self.modules[0]

    @property
    def label(self) -> str:
        if self.experts:
            return f"layer {self.layer} routed experts"
        rest = [name.rsplit(".", 1)[1] for name in self.modules[1:]]
        return f"layer {self.layer} {'+'.join([self.modules[0], *rest])}"

    @property
    def full_names(self) -> list[str]:
        return [self.prefix + name for name in self.modules]

    @property
    def patterns(self) -> list[str]:
        """What selects it in a recipe."""
        return [f"{self.prefix}mlp.experts.*"] if self.experts else self.full_names


def units(plan: QuantizationPlan, layer: int) -> Iterator[Unit]:
    """The quantized units of a layer, routed experts last, with the bytes of every type they could have."""
    prefix, parts = plan.config.spec.layer_prefix(layer), list(plan.config.layer_weights(layer))
    linears = {prefix + part.name: part for part in parts if isinstance(part, Linear)}
    groups = _together(plan, layer)
    grouped = {name for group in groups for name in group}
    for group in sorted([*((name,) for name in linears if name not in grouped), *groups], key=len):
        types = {name: plan.linears[name].scheme for name in group}
        modules = [name for name in group if types[name] != schemes.FLOAT]
        if modules:
            scheme = "+".join(sorted({types[name] for name in modules}))
            unit = Unit(layer, tuple(name.removeprefix(prefix) for name in modules), scheme, prefix=prefix)
            unit.nbytes[scheme] = sum(stored_bytes(plan, prefix, linears[name], types[name]) for name in modules)
            for choice in fallbacks(scheme):
                unit.nbytes[choice] = sum(stored_bytes(plan, prefix, linears[name], choice) for name in modules)
            unit.noise[schemes.FLOAT] = 0.0
            yield unit


def _together(plan: QuantizationPlan, layer: int) -> list[tuple[str, ...]]:
    """Full names of linears that become FLOAT together: fused ones, and both query projections."""
    queries = {plan.config.spec.layer_prefix(layer) + name for name in plan.config.spec.query_projections}
    groups = plan.config.fused_groups(layer)
    return [(*group, *sorted(queries.difference(group))) if queries & set(group) else group for group in groups]


def fallbacks(scheme: str) -> tuple[str, ...]:
    """Types with more bits, the next one first."""
    return (schemes.W8A8_DYNAMIC, schemes.FLOAT) if scheme == schemes.W4A8_DYNAMIC else (schemes.FLOAT,)


def stored_bytes(plan: QuantizationPlan, prefix: str, part: Linear, scheme: str) -> int:
    """Bytes a linear takes as `scheme`."""
    out, inp = part.shape(plan.config.sizes)
    if scheme == schemes.FLOAT:
        return int(plan.source.dtype(prefix + part.tensor_name).itemsize * out * inp)
    total = 0
    for stored in schemes.stored_tensors(scheme, (out, inp), part.name):
        size = stored.dtype.itemsize
        for length in stored.shape:
            size *= length
        total += size
    return total
