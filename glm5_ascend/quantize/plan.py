"""Recipe x model = plan: what every tensor becomes, decided and checked before a byte is read.

The plan is complete: names, dtypes and shapes of all output tensors follow from config.json and the recipe alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.source import Source
from glm5_ascend.checkpoint.types import (
    DOWN_PROJ_PARTIAL_SUMS,
    INDEXER_CACHE_SUFFIX,
    INDEXER_CACHE_TYPE,
    ROT_NAME,
    mixed_types,
    not_runnable,
    type_alias,
)
from glm5_ascend.checkpoint.writer import TensorSpec
from glm5_ascend.errors import RecipeError
from glm5_ascend.model.rotation import has_hadamard
from glm5_ascend.model.spec import Linear, Parameter, Subgraph, Vector, Weight
from glm5_ascend.quantize.methods.method import Method
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.registry import METHODS
from glm5_ascend.quantize.recipe import FlexAwqSsz, FlexSmoothQuant, LinearQuant, Recipe
from glm5_ascend.quantize.selector import Selector, check_literal_layers


@dataclass(frozen=True)
class OutputTensor(TensorSpec):
    """One tensor of the output; `scheme` is its entry in the description, None if it has none (rot.weight)."""

    scheme: str | None


@dataclass(frozen=True)
class LinearPlan:
    """Type and rounding method of one linear; `steps`: passes of coordinate descent, of a method that has them."""

    scheme: str
    method: Method = MINMAX
    steps: int = 0


@dataclass(frozen=True)
class SmoothPlan:
    """One smoothing search: which, over which pair, for the arithmetic of which targets."""

    algorithm: str  # flex_awq_ssz | flex_smooth_quant
    subgraph: Subgraph
    scheme: str
    steps: int = 0


class QuantizationPlan:
    """The decisions for one source and one recipe.

    Raises:
        RecipeError: a module the engine cannot run as the recipe wants; names the module.
    """

    def __init__(self, source: Source, recipe: Recipe) -> None:
        self.source, self.config, self.recipe = source, source.config, recipe
        check_literal_layers(recipe, self.config)
        self._steps = [(Selector(step, self.config), step) for step in recipe.steps if isinstance(step, LinearQuant)]
        self._smoothing = [
            (Selector(step, self.config), step)
            for step in recipe.steps
            if isinstance(step, FlexAwqSsz | FlexSmoothQuant)
        ]
        if recipe.rotates and not self.config.spec.bases:
            raise RecipeError(
                f"recipe {recipe.metadata.config_id}: {self.config.spec.label} cannot be rotated (quarot) yet",
                "give a recipe for it, such as --recipe flash-w4a8",
            )
        if self.cache_layers() and not has_hadamard(size := self.config.index_head_dim):
            raise RecipeError(
                f"{self.config.path}: fa3_quant: no Hadamard matrix of size {size} (index_head_dim)",
                "remove the fa3_quant step from the recipe",
            )
        self.linears: dict[str, LinearPlan] = {}
        self._sizes = self.config.sizes
        for prefix, weight in self.config.all_weights():
            if isinstance(weight, Linear):
                self.linears[prefix + weight.name] = self._decide(
                    prefix + weight.name, weight, weight.shape(self._sizes)
                )
        types = {name: linear.scheme for name, linear in self.linears.items()}
        for module, other in mixed_types(self.config, types):
            raise RecipeError(
                f"recipe: {module} gets {types[module]}, {other} {types[other]}: they are one module in the engine",
                "give all of them one type",
            )

    def _decide(self, module: str, weight: Linear, shape: tuple[int, ...]) -> LinearPlan:
        selected: LinearQuant | None = None
        for selects, step in self._steps:
            if selects(module):
                if selected is not None and selected.qconfig != step.qconfig:
                    raise RecipeError(
                        f"recipe: two linear_quant steps disagree on {module}", "exclude it from one of them"
                    )
                selected = step
        if selected is None:
            return LinearPlan(schemes.FLOAT)
        scheme = selected.qconfig.scheme
        assert scheme is not None  # load_recipe checked
        self._check_runnable(module, weight, scheme, shape)
        quantizer = selected.qconfig.weight
        method = METHODS[quantizer.method]
        return LinearPlan(scheme, method, quantizer.ext.get("step", 0) if method.needs_inputs else 0)

    def _check_runnable(self, module: str, weight: Linear, scheme: str, shape: tuple[int, ...]) -> None:
        if reason := not_runnable(self.config.spec, module, weight, scheme):
            raise RecipeError(
                f"recipe: {module}: {reason}", f'add "*{weight.name}" to exclude, or give it another type'
            )
        if scheme == schemes.W4A8_DYNAMIC and (shape[0] % 8 or shape[1] % DOWN_PROJ_PARTIAL_SUMS):
            raise RecipeError(
                f"recipe: {module} {list(shape)}: INT4 needs rows in multiples of 8 and columns in multiples of "
                f"{DOWN_PROJ_PARTIAL_SUMS}",
                "use int8 weights here",
            )

    def smoothing(self, layer: int, subgraphs: Iterable[Subgraph]) -> Iterator[SmoothPlan]:
        """Searches to run for `subgraphs` of one layer; pairs without a quantized target are left alone."""
        prefix = self.config.spec.layer_prefix(layer)
        for subgraph in subgraphs:
            types = {self.linears[prefix + target].scheme for target in subgraph.targets} - {schemes.FLOAT}
            for selects, step in self._smoothing:
                if types and subgraph.kind in step.enable_subgraph_type and selects(prefix + subgraph.source):
                    # INT4 goes with AWQ, INT8 with smoothing; the search scores with the strictest type it serves.
                    scheme = schemes.W8A8 if schemes.W8A8 in types else sorted(types)[0]
                    steps = 0
                    if isinstance(step, FlexAwqSsz) and step.qconfig is not None:
                        steps = step.qconfig.weight.ext.get("step", 10)
                    yield SmoothPlan(step.type, subgraph, scheme, steps)
                    break

    def cache_layers(self) -> list[int]:
        """Layers whose indexer cache the recipe wants in INT8."""
        selects = [Selector(step, self.config) for step in self.recipe.cache_steps]
        layers = range(self.config.num_layers_with_mtp)
        return [
            layer
            for layer in layers
            if self.config.has_indexer(layer)
            and any(select(self.config.spec.layer_prefix(layer) + self.config.spec.indexer) for select in selects)
        ]

    def description(self) -> dict[str, object]:
        """Content of quant_model_description.json: types by tensor, by SGLang's names of linears, and the meta keys."""
        entries: dict[str, object] = {t.name: t.scheme for t in self.outputs() if t.scheme is not None}
        mtp = self.config.mtp_prefixes
        main = {name: linear.scheme for name, linear in self.linears.items() if not name.startswith(mtp)}
        named = ((type_alias(self.config.spec, module), scheme) for module, scheme in main.items())
        entries |= {f"{alias}.weight": scheme for alias, scheme in named if alias is not None}
        static = schemes.W8A8 in entries.values()
        entries |= {"model_quant_type": schemes.W8A8 if static else schemes.W8A8_DYNAMIC} | schemes.DESCRIPTION_META
        for layer in self.cache_layers():
            entries["indexer_quant_type"] = INDEXER_CACHE_TYPE
            attention = f"{self.config.spec.layer_prefix(layer)}self_attn"
            entries[attention + INDEXER_CACHE_SUFFIX] = INDEXER_CACHE_TYPE
        if self.recipe.rotates:
            entries["is_rot_used"] = True
            entries["optional"] = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
        return entries

    def uses_inputs(self, prefix: str, parts: Iterable[Weight]) -> list[str]:
        """Names of the linears among `parts` whose rounding method needs their inputs."""
        linears = [weight for weight in parts if isinstance(weight, Linear)]
        return [weight.name for weight in linears if self.linears[prefix + weight.name].method.needs_inputs]

    def needs_statistics(self, layer: int) -> bool:
        """True if something in this layer is decided by calibration data."""
        subgraphs, parts = list(self.config.subgraphs(layer)), list(self.config.backbone(layer))
        if self.config.is_moe(layer):
            subgraphs += self.config.spec.expert_subgraphs(0)
            parts += self.config.spec.expert_linears(0)
        prefix = self.config.spec.layer_prefix(layer)
        static = any(
            self.linears[prefix + weight.name].scheme == schemes.W8A8
            for weight in self.config.backbone(layer)
            if isinstance(weight, Linear)
        )
        return static or bool(self.uses_inputs(prefix, parts)) or any(True for _ in self.smoothing(layer, subgraphs))

    @cached_property
    def last_calibrated_layer(self) -> int:
        """Later layers need no forward pass; -1: no calibration at all."""
        return max((i for i in range(self.config.num_layers_with_mtp) if self.needs_statistics(i)), default=-1)

    def outputs(self) -> Iterator[OutputTensor]:
        """All tensors of the output, in the order they are written."""
        for prefix, weight in self.config.all_weights():
            yield from self.stored(prefix, weight)
        yield from self.rotation()

    def rotation(self) -> Iterator[OutputTensor]:
        """The tensor that a rotated model hands to its MTP layer, if the recipe rotates."""
        if self.recipe.rotates:
            hidden = self.config.hidden_size
            yield OutputTensor(
                ROT_NAME, self.source.dtype(f"{self.config.spec.final_norm}.weight"), (hidden, hidden), None
            )

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all tensors of the output and of optional/quarot.safetensors."""
        rotation = 4 * self.config.hidden_size**2 if self.recipe.rotates else 0
        return sum(tensor.nbytes for tensor in self.outputs()) + rotation

    def stored(self, prefix: str, weight: Weight) -> Iterator[OutputTensor]:
        """The tensors one part of the model becomes."""
        module, name, shape = prefix + weight.name, prefix + weight.tensor_name, weight.shape(self._sizes)
        if isinstance(weight, Vector):
            # fp32 as msModelSlim writes them: a smoothed gain must not be rounded twice.
            yield OutputTensor(name, torch.float32, shape, schemes.FLOAT)
        elif isinstance(weight, Parameter) or self.linears[module].scheme == schemes.FLOAT:
            yield OutputTensor(name, self.source.dtype(name), shape, schemes.FLOAT)
        else:
            scheme = self.linears[module].scheme
            for stored in schemes.stored_tensors(scheme, (shape[0], shape[1]), module):
                yield OutputTensor(f"{module}.{stored.suffix}", stored.dtype, stored.shape, scheme)

    def summary(self) -> list[tuple[str, str, int, int]]:
        """Rows for the table shown before work starts: (group of modules, type, number of modules, output bytes)."""
        rows: dict[tuple[str, str], list[int]] = {}
        for prefix, weight in self.config.all_weights():
            for tensor in self.stored(prefix, weight):
                row = rows.setdefault((self.config.group_of(prefix, weight), tensor.scheme or schemes.FLOAT), [0, 0])
                row[0] += tensor.name.endswith(".weight")
                row[1] += tensor.nbytes
        for tensor in self.rotation():
            rows["rot (MTP)", schemes.FLOAT] = [1, tensor.nbytes]
        return [(group, scheme, count, nbytes) for (group, scheme), (count, nbytes) in sorted(rows.items())]
