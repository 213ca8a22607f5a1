"""What a server on a CPU does not do with a model, by its flags. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glm5_ascend.errors import ConfigError
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.serve.flags import value_of
from glm5_ascend.serve.tensor_parallel import FLAG, ranks_of

#: Drafts of a step that linear attention was tested with; each has a state of its own.
MOST_DRAFTS = 5
#: Tokens of a pool of the released GLM-5.3-Flash; the server was tested with no other number.
POOL = 4


def drafts_of(argv: Sequence[str]) -> int:
    """Draft tokens of a step by --speculative-config; 0 without it, or where it is no JSON."""
    drafts = _speculative(argv).get("num_speculative_tokens", 0)
    return drafts if isinstance(drafts, int) and drafts > 0 else 0


def refuse_flags(config: ModelConfig, argv: Sequence[str]) -> None:
    """Raise `ConfigError` for flags, in normal form, that this model has no layers for, or that were not made right."""
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
    if ranks_of(argv) > 1:
        raise ConfigError(f"{FLAG}: linear attention is not split among ranks on a CPU yet", f"drop {FLAG}")


def _speculative(argv: Sequence[str]) -> dict[str, Any]:
    try:
        values = parse_json(value_of(argv, "--speculative-config") or "{}")
    except ValueError:  # vLLM's parser says what is wrong
        return {}
    return values if isinstance(values, dict) else {}
