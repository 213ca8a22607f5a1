"""config.json: every mistake is one line that names the file and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.errors import ConfigError
from glm5_ascend.model.config_file import load_config, parse_config, read_config
from tests.support.tiny_model import SHARED_INDEXER, tiny_config

PATH = Path("here/config.json")
REQUIRED = [
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor", "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps",
    "max_position_embeddings",
]  # fmt: skip


def refused(key: str, raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(raw, PATH)
    message = error.value.message
    assert "\n" not in message and str(PATH) in message and key in message, message
    assert error.value.tip
    return message


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key(key: str) -> None:
    refused(key, tiny_config(**{key: None}))


@pytest.mark.parametrize("key", [key for key in REQUIRED if key != "norm_topk_prob"])
def test_impossible_value(key: str) -> None:
    for value in (0, -1, "64", True, float("nan"), float("inf"), [1]):
        assert repr(value) in refused(key, tiny_config() | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_type", {"rope_type": "yarn", "rope_theta": 1e6}),
        ("rope_parameters", {"rope_theta": float("nan")}),
        ("rope_parameters", "default"),
        ("num_nextn_predict_layers", -1),
        ("num_nextn_predict_layers", "1"),
        ("first_k_dense_replace", "1"),
        ("mlp_layer_types", 3),
        ("mlp_layer_types", ["dense"]),
        ("mlp_layer_types", ["dense", "sparse", {}]),
        ("mlp_layer_types", ["sparse"] * 3),
        ("indexer_types", "full"),
        ("indexer_types", ["full"] * 2),
        ("indexer_types", ["full", "shared", ["full"]]),
        ("indexer_types", ["shared", "full", "full"]),
        ("index_topk_freq", "4"),
        ("index_skip_topk_offset", 2.5),
        ("index_topk_pattern", 7),
        ("index_topk_pattern", "FF"),
        ("index_topk_pattern", "SFF"),
        ("index_topk_pattern", "ffs"),
        ("index_topk_freq", None),
        ("index_topk_freq", 0),
        ("index_topk_freq", -4),
        ("index_skip_topk_offset", None),
        ("quantization_config", "fp8"),
        ("text_config", []),
        ("scoring_func", "softmax"),
        ("rope_interleave", False),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
        ("num_experts_per_tok", 5),
        ("num_hidden_layers", 10**30),
        ("num_nextn_predict_layers", 10**30),
        ("n_routed_experts", 10**30),
        ("first_k_dense_replace", -1),
        ("n_group", 3),
        ("topk_group", 2),
        ("qk_rope_head_dim", 7),
    ],
)
def test_value_that_does_not_fit(key: str, value: object) -> None:
    refused(key, tiny_config() | {"rope_parameters" if key == "rope_type" else key: value})


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v32", "llama", None, 3, [], {"a": {}}])
def test_other_architectures(model_type: object, tmp_path: Path) -> None:
    config = tiny_config() | {"model_type": model_type}
    assert "glm_moe_dsa" in refused("model_type", config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config


def test_missing_directory_and_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json: not found"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="a file, not a directory"):
        load_config(Path(__file__))


def test_layer_kinds() -> None:
    config = parse_config(tiny_config(), PATH)
    assert [config.is_moe(i) for i in range(4)] == [False, True, True, True]
    assert [config.is_mtp(i) for i in range(4)] == [False, False, False, True]
    assert all(config.has_indexer(i) for i in range(4))
    listed = tiny_config(first_k_dense_replace=None, mlp_layer_types=["dense", "sparse", "sparse"])
    assert parse_config(listed, PATH).mlp_layer_types == config.mlp_layer_types


def schedule(**keys: object) -> list[bool]:
    config = parse_config(tiny_config(num_hidden_layers=78, first_k_dense_replace=3, **keys), PATH)
    return [config.has_indexer(i) for i in range(79)]


def test_indexer_schedule_of_glm_5_2() -> None:
    """21 of 78 layers own an indexer: 0, 1, 2, 6, 10, ..., 74; the MTP layer always does."""
    full = [0, 1, 2, *range(6, 75, 4)]
    assert len(full) == 21
    expected = [i in full or i == 78 for i in range(79)]
    assert schedule(index_topk_freq=4, index_skip_topk_offset=3) == expected
    types = ["full" if i in full else "shared" for i in range(78)]
    assert schedule(index_topk_freq=4, index_skip_topk_offset=3, indexer_types=types) == expected
    pattern = "".join("F" if i in full else "S" for i in range(78))
    assert schedule(index_topk_pattern=pattern) == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "index_topk_freq 4 and index_skip_topk_offset 0"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_topk_freq 2 and index_skip_topk_offset 0"),
        ({"index_topk_pattern": "SFF"}, "index_topk_pattern 'SFF'"),
        ({"index_topk_pattern": "SFF", "indexer_types": ["full"] * 3}, "index_topk_pattern 'SFF'"),
    ],
)
def test_the_first_layer_shares_nothing(keys: dict[str, Any], named: str) -> None:
    """The key that stands in the file is named, and not another one (transformers issue 48764)."""
    message = refused(named, tiny_config() | keys)
    assert "first layer" in message and ("indexer_types" in keys or "indexer_types" not in message)


def test_a_pattern_decides_alone() -> None:
    """null beside a pattern is read by nobody."""
    keys = {"index_topk_freq": None, "index_skip_topk_offset": None, "index_topk_pattern": "FSF"}
    assert parse_config(tiny_config() | keys, PATH).indexer_types == ("full", "shared", "full")


def test_default_offset_is_two() -> None:
    """Losing index_skip_topk_offset moves the schedule: 0, 1, 5, 9, ... instead of 0, 1, 2, 6, ..."""
    assert [i for i, full in enumerate(schedule(index_topk_freq=4)) if full][:4] == [0, 1, 5, 9]
    assert parse_config(tiny_config(**SHARED_INDEXER), PATH).indexer_types[3] == "shared"


def test_real_file_round_trip(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(num_nextn_predict_layers=None)))
    config = load_config(tmp_path)
    assert config.num_layers_with_mtp == config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", 2.5), ("num_hidden_layers", [1]),
        ("num_hidden_layers", None), ("num_hidden_layers", True), ("num_nextn_predict_layers", 10**9),
        ("first_k_dense_replace", 2e8), ("index_topk_freq", "4"), ("indexer_types", 5), ("indexer_types", ["full"]),
        ("mlp_layer_types", "dense"), ("max_position_embeddings", "long"), ("max_position_embeddings", 10**30),
        ("hidden_size", -1), ("vocab_size", {}), ("rope_parameters", [1]), ("text_config", "x"),
    ],
)  # fmt: skip
def test_every_reader_of_config_json_checks_the_same_values(key: str, value: object, tmp_path: Path) -> None:
    from glm5_ascend.checkpoint.summary import summarize
    from glm5_ascend.serve.servable import check_directory

    (tmp_path / "config.json").write_text(json.dumps(tiny_config() | {key: value}))
    for read in (load_config, summarize, check_directory):
        with pytest.raises(ConfigError, match=key) as error:
            read(tmp_path)
        assert len(error.value.message) < 300
