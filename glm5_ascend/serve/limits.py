"""What a server on a CPU does not do with a model, by its flags. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm5_ascend.errors import ConfigError
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.serve.flags import number_of, value_of

FLAG = "--tensor-parallel-size"
#: Keys of config.json, and what a rank's part must be a multiple of: two rows of INT4 share a byte.
_DIVIDED = {"num_attention_heads": 1, "linear_num_heads": 1, "intermediate_size": 1, "moe_intermediate_size": 2}
_NOT_ON_CPU = (
    "--data-parallel-size", "--pipeline-parallel-size", "--decode-context-parallel-size",
    "--prefill-context-parallel-size", "--enable-expert-parallel",
)  # fmt: skip
OTHER_RANKS = f"use {FLAG}, which splits every expert, or several servers"
#: Drafts of a step that linear attention was tested with; each has a state of its own.
MOST_DRAFTS = 5
#: Tokens of a pool of the released GLM-5.3-Flash; the server was tested with no other number.
POOL = 4


def ranks_of(argv: Sequence[str]) -> int:
    """The number of ranks that a command line asks for by --tensor-parallel-size; 1 without it."""
    return max(1, number_of(argv, FLAG))


def drafts_of(argv: Sequence[str]) -> int:
    """Draft tokens of a step by --speculative-config; 0 without it, or where it is no JSON."""
    drafts = _speculative(argv).get("num_speculative_tokens", 0)
    return drafts if isinstance(drafts, int) and drafts > 0 else 0


def refuse_flags(config: ModelConfig, argv: Sequence[str]) -> None:
    """Raise `ConfigError` for flags, in normal form, that a server on a CPU does not have, or not for this model."""
    for flag in _NOT_ON_CPU:
        if flag in argv and value_of(argv, flag) != "1":
            raise ConfigError(f"{flag} is not implemented for the CPU", OTHER_RANKS)
    require_even_split({key: getattr(config, key) for key in _DIVIDED}, ranks_of(argv))
    drafts = drafts_of(argv)
    if _speculative(argv).get("method") == "mtp" and not config.num_nextn_predict_layers:
        raise ConfigError(f"{config.path}: the model has no MTP layer that could draft", "drop --speculative-config")
    if all(config.attention_kind(layer) == "sparse" for layer in range(config.num_hidden_layers)):
        return
    if config.index_kpool != POOL:
        raise ConfigError(
            f"{config.path}: index_kpool is {config.index_kpool}, a CPU server pools {POOL} tokens as the released one",
            "restore config.json of the released model",
        )
    if drafts > MOST_DRAFTS:
        raise ConfigError(
            f"num_speculative_tokens is {drafts}: linear attention keeps states for 1 to {MOST_DRAFTS} drafts",
            f"give {MOST_DRAFTS} at most",
        )


def require_even_split(config: Mapping[str, Any], ranks: int) -> None:
    """Raise `ConfigError` if heads or widths of config.json do not divide among so many ranks."""
    for key, multiple in _DIVIDED.items():
        if ranks > 1 and config.get(key, 0) % (ranks * multiple):
            parts = f"{ranks} equal parts" if multiple == 1 else f"{ranks} equal parts of an even size"
            raise ConfigError(
                f"{FLAG} {ranks}: {key} {config[key]} of config.json does not divide into {parts}",
                "give a divisor, at best the number of this machine's NUMA nodes",
            )


def _speculative(argv: Sequence[str]) -> dict[str, Any]:
    try:
        values = parse_json(value_of(argv, "--speculative-config") or "{}")
    except ValueError:  # vLLM's parser says what is wrong
        return {}
    return values if isinstance(values, dict) else {}
