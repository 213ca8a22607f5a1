"""Units, whose types can change independently: a linear, linears that the engine fuses, or a layer's routed experts."""

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
        scheme: its type in the recipe; several types, joined by "+", where the recipe gives its linears different ones.
        noise: by type, the energy that its rounding adds to the residual stream, relative to the stream's energy,
            computed per token (as norms are), mean over tokens. FLOAT adds none.
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
        """Patterns that select it in a recipe."""
        return [f"{self.prefix}mlp.experts.*"] if self.experts else self.full_names


def units(plan: QuantizationPlan, layer: int) -> Iterator[Unit]:
    """The quantized units of a layer, routed experts last, with the bytes of every type they could have."""
    prefix, weights = plan.config.spec.layer_prefix(layer), plan.config.layer_weights(layer)
    linears = {prefix + weight.name: weight for weight in weights if isinstance(weight, Linear)}
    groups = _float_groups(plan, layer)
    grouped = {name for group in groups for name in group}
    for group in sorted([*((name,) for name in linears if name not in grouped), *groups], key=len):
        types = {name: plan.linears[name].scheme for name in group}
        modules = [name for name in group if types[name] != schemes.FLOAT]
        if modules:
            scheme = "+".join(sorted({types[name] for name in modules}))
            unit = Unit(layer, tuple(name.removeprefix(prefix) for name in modules), scheme, prefix=prefix)
            unit.nbytes[scheme] = sum(stored_bytes(plan, prefix, linears[name], types[name]) for name in modules)
            for wider in fallbacks(scheme):
                unit.nbytes[wider] = sum(stored_bytes(plan, prefix, linears[name], wider) for name in modules)
            unit.noise[schemes.FLOAT] = 0.0
            yield unit


def _float_groups(plan: QuantizationPlan, layer: int) -> list[tuple[str, ...]]:
    """Full names of linears that become FLOAT together: fused ones, and both query projections."""
    queries = {plan.config.spec.layer_prefix(layer) + name for name in plan.config.engines.query_projections}
    groups = plan.config.fused_groups(layer)
    return [(*group, *sorted(queries.difference(group))) if queries & set(group) else group for group in groups]


def fallbacks(scheme: str) -> tuple[str, ...]:
    """Types with more bits, the next one first."""
    return (schemes.W8A8_DYNAMIC, schemes.FLOAT) if scheme == schemes.W4A8_DYNAMIC else (schemes.FLOAT,)


def stored_bytes(plan: QuantizationPlan, prefix: str, linear: Linear, scheme: str) -> int:
    out, inp = linear.shape(plan.config.sizes)
    if scheme == schemes.FLOAT:
        return int(plan.source.dtype(prefix + linear.tensor_name).itemsize * out * inp)
    tensors = schemes.stored_tensors(scheme, (out, inp), linear.name)
    return sum(tensor.nbytes for tensor in tensors)
