"""What the ranks of a tensor parallel server on a CPU divide among them. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.flags import value_of

FLAG = "--tensor-parallel-size"
#: Keys of config.json, and what a rank's part must be a multiple of: two rows of INT4 share a byte.
_DIVIDED = {"num_attention_heads": 1, "intermediate_size": 1, "moe_intermediate_size": 2}
_NOT_ON_CPU = (
    "--data-parallel-size", "--pipeline-parallel-size", "--decode-context-parallel-size",
    "--prefill-context-parallel-size", "--enable-expert-parallel",
)  # fmt: skip
OTHER_RANKS = f"use {FLAG}, which splits every expert, or several servers"


def ranks_of(argv: Sequence[str]) -> int:
    """The number of ranks that a command line asks for by --tensor-parallel-size; 1 without it."""
    text = value_of(argv, FLAG)
    return int(text) if text.isdecimal() else 1


def refuse_ranks(config: Mapping[str, Any], argv: Sequence[str]) -> None:
    """Raise `ConfigError` for flags, in normal form, that ask for ranks that a server on a CPU cannot have."""
    for flag in _NOT_ON_CPU:
        if flag in argv and value_of(argv, flag) != "1":
            raise ConfigError(f"{flag} is not implemented for the CPU", OTHER_RANKS)
    require_even_split(config, ranks_of(argv))


def require_even_split(config: Mapping[str, Any], ranks: int) -> None:
    """Raise `ConfigError` if heads or widths of config.json do not divide among so many ranks."""
    for key, multiple in _DIVIDED.items():
        if ranks > 1 and config[key] % (ranks * multiple):
            parts = f"{ranks} equal parts" if multiple == 1 else f"{ranks} equal parts of an even size"
            raise ConfigError(
                f"{FLAG} {ranks}: {key} {config[key]} of config.json does not divide into {parts}",
                "give a divisor, at best the number of this machine's NUMA nodes",
            )
