"""`Architecture`: a model as data. Which weights exist, what reads what, and the basis of each side of a weight.

Every algorithm (norm fusion, rotation, smoothing, calibration, checks) walks these tables; none of them names a tensor.
Names inside a layer are relative to the layer's prefix; the others are full names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from glm5_ascend.model.sizes import ModelSizes

# A basis names the space that a vector lives in. QuaRot gives each an orthogonal matrix (model/rotation.py).
HIDDEN = "hidden"  # the residual stream
HIDDEN_PAIR = "hidden_pair"  # concat(embedding, hidden), input of eh_proj
FIXED = "fixed"  # never rotated


@dataclass(frozen=True)
class Linear:
    """A weight [out, in]; `norm` names the norms of its input, whose gains can be folded into the weight.

    `why_float` says why no engine runs this one quantized, beside `EngineView.why_float`.
    """

    name: str
    out: str
    inp: str
    norm: tuple[str, ...] = ()
    basis_in: str = FIXED
    basis_out: str = FIXED
    role: str = "linear"  # linear | embedding
    why_float: str = ""

    @property
    def tensor_name(self) -> str:
        return f"{self.name}.weight"

    @property
    def is_table(self) -> bool:
        """True if there is a row per vocabulary entry: such a weight is processed in blocks of rows."""
        return self.out == "vocab"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return sizes[self.out], sizes[self.inp]


@dataclass(frozen=True)
class Vector:
    """A 1-D tensor: a norm's gain, a LayerNorm bias, the router's correction bias."""

    name: str
    size: str
    role: str  # norm (its readers can take its gain) | layernorm (they cannot) | layernorm_bias | router_bias
    is_table = False

    @property
    def tensor_name(self) -> str:
        suffix = {"layernorm_bias": "bias", "router_bias": "e_score_correction_bias"}.get(self.role, "weight")
        return f"{self.name}.{suffix}"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return (sizes[self.size],)


@dataclass(frozen=True)
class Parameter:
    """A tensor of any shape that is carried over bit for bit; `name` is all of its name, suffix included."""

    name: str
    dims: tuple[str | int, ...]  # numbers, or names of sizes
    is_table = False

    @property
    def tensor_name(self) -> str:
        return self.name

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


Weight = Linear | Vector | Parameter


@dataclass(frozen=True)
class Tower:
    """Weights beside the language model, such as a vision encoder's: carried over, never quantized.

    `block` is repeated as `blocks.N.NAME`, as often as the size `depth` says; all names lie below `prefix`.
    """

    prefix: str
    depth: str
    block: tuple[Parameter, ...]
    others: tuple[Parameter, ...]

    def weights(self, sizes: Mapping[str, int]) -> tuple[Parameter, ...]:
        numbers = range(sizes[self.depth])
        blocks = (replace(weight, name=f"blocks.{n}.{weight.name}") for n in numbers for weight in self.block)
        return tuple(replace(weight, name=self.prefix + weight.name) for weight in (*blocks, *self.others))


@dataclass(frozen=True)
class Block:
    """Weights that some layers have; `name` is one of `blocks_of_layer`, and a row in tables of modules."""

    name: str
    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class Subgraph:
    """A pair between which a per-channel scale can move: `source` is divided by it, `targets` are multiplied."""

    kind: str  # norm-linear | ov | up-down
    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Basis:
    """Which values of a vector QuaRot rotates, and by which matrix; sizes are names of `Architecture.sizes`.

    Attributes:
        signs: name that seeds the random signs; bases of the same name share a matrix.
        block: size of the Hadamard matrix, repeated along the values.
        offset, period: of every `period` values, the `block` from `offset` on are rotated; all of them without a
            period.
        shifted: a second pass with the blocks shifted by half a block.
    """

    signs: str
    block: str | int
    offset: str | None = None
    period: str | None = None
    shifted: bool = False

    def block_size(self, sizes: Mapping[str, int]) -> int:
        return sizes[self.block] if isinstance(self.block, str) else self.block

    def starts(self, sizes: Mapping[str, int], length: int) -> range | None:
        """First indices of the rotated blocks among `length` values; None if all values are rotated."""
        if self.period is None:
            return None
        return range(sizes[self.offset] if self.offset else 0, length, sizes[self.period])


@dataclass(frozen=True)
class Architecture:
    """One architecture; `ModelConfig` has the sizes of one model of it.

    Attributes:
        architecture: class name in config.json's `architectures`.
        sizes: the numbers behind the size names that the tables use.
        blocks: weights that layers have, without the routed experts. blocks_of_layer: names of those of one layer.
        expert: linears of one routed expert, in the order of vLLM's w13 and w2; names relative to the expert.
        fixed_keys: keys of config.json that the layer maths relies on, and their values; a missing one has that value.
        label: the family's name in messages.
        text_config, vision_config: keys of config.json that hold the language model's keys and the tower's.
        defaults: transformers' values of keys that config.json may leave out; outputs state them for other engines.
        vision_defaults: the same in `vision_config`.
        groups: keys of config.json that hold several others, by their names inside and outside; the inside counts.
        more_sizes, more_numbers: further keys that must be integers > 0, or numbers; fields of `ModelConfig`.
        shared_indexers: a layer may work on the positions that an earlier layer's indexer selects.
        attention_kinds: values of `layer_types`, and the kind of attention that each means; empty without that key.
        spellings: parts of tensor names as another writer spells them, and as the tables do.
        tower: weights beside the language model.
        processor_files: files that turn images into the tower's input; one of them is needed.
        token_keys: further keys of config.json that are token ids.
        mtp_input: MTP modules that compute the layer's input, besides the embedding.
        mtp_copies: MTP modules that a source may leave out, and the module that each is a copy of.
        down_projections: linears of the attention's normalised input that engines fuse: one static input scale.
        other_names: pairs (regular expression, replacement) that turn names of other writers into the hub's.
        fused_experts: tensors of transformers that hold a linear of all experts, [experts, rows, columns], and the
            linears in each, one behind the other.
        fused_parameters: tensors of transformers that hold several parameters of a layer, and those, likewise.
    """

    model_type: str
    architecture: str
    sizes: Callable[[ModelSizes], dict[str, int]]
    global_weights: tuple[Weight, ...]
    blocks_of_layer: Callable[[ModelSizes, int], tuple[str, ...]]
    blocks: tuple[Block, ...]
    expert: tuple[Linear, ...]
    subgraphs_of_layer: tuple[Subgraph, ...]
    subgraph_of_expert: Subgraph | None
    bases: Mapping[str, Basis]
    fixed_keys: Mapping[str, object]
    mtp_copies: Mapping[str, str]
    mtp_input: tuple[str, ...] = ("enorm", "hnorm", "eh_proj")
    down_projections: tuple[str, ...] = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layers_prefix: str = "model.layers."
    experts_prefix: str = "mlp.experts."
    indexer: str = "self_attn.indexer"
    label: str = "GLM-5"
    text_config: str | None = None
    vision_config: str | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    vision_defaults: Mapping[str, object] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    more_sizes: tuple[str, ...] = ()
    more_numbers: tuple[str, ...] = ()
    shared_indexers: bool = True
    attention_kinds: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    tower: Tower | None = None
    processor_files: tuple[str, ...] = ()
    token_keys: tuple[str, ...] = ()
    router: str = "mlp.gate"
    other_names: tuple[tuple[str, str], ...] = ()
    fused_experts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    )
    fused_parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_routed(self, module: str) -> bool:
        """Return True for a linear of a routed expert, by its full name."""
        return f".{self.experts_prefix}" in module

    def layer_of(self, name: str) -> int | None:
        """Return the layer of a tensor or module, by its full name; None outside of the layers."""
        index = name.removeprefix(self.layers_prefix).partition(".")[0]
        return int(index) if name.startswith(self.layers_prefix) and index.isdecimal() else None

    def layer_prefix(self, layer: int) -> str:
        return f"{self.layers_prefix}{layer}."

    def expert_prefix(self, expert: int) -> str:
        return f"{self.experts_prefix}{expert}"

    def expert_linears(self, expert: int) -> tuple[Linear, ...]:
        """Linears of one routed expert, names relative to the layer."""
        prefix = self.expert_prefix(expert)
        return tuple(replace(linear, name=f"{prefix}.{linear.name}") for linear in self.expert)

    def expert_subgraphs(self, expert: int) -> tuple[Subgraph, ...]:
        """Smoothing pairs of one routed expert, names relative to the layer."""
        prefix, pair = self.expert_prefix(expert), self.subgraph_of_expert
        if pair is None:
            return ()
        return (Subgraph(pair.kind, f"{prefix}.{pair.source}", tuple(f"{prefix}.{name}" for name in pair.targets)),)

    def spelled(self, name: str) -> str:
        """Return a tensor's name as the tables spell it."""
        for other, ours in self.spellings.items():
            name = name.replace(other, ours, 1)
        return name


def find(weights: Iterable[Weight], name: str) -> Weight:
    return next(weight for weight in weights if weight.name == name)


def input_readers(weights: Iterable[Weight]) -> dict[str, str]:
    """Every linear's name -> the first linear that reads the same normalised input (itself if none does).

    The first one runs for every token; `indexer.wq_b` does not in sequences shorter than `index_topk`.
    """
    first: dict[tuple[str, ...], str] = {}
    readers = {}
    for weight in weights:
        if isinstance(weight, Linear):
            readers[weight.name] = first.setdefault(weight.norm, weight.name) if weight.norm else weight.name
    return readers
