"""int8 caches in both spellings of vllm-ascend."""

from __future__ import annotations

import json
from typing import Any

import pytest
from packaging.version import Version

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rules.preflight import preflight
from glm5_ascend.engine_lines import VLLM_ASCEND_LINES
from glm5_ascend.serve.flags import with_flags

BOTH = {"enable_sparse_sfa_c8": True, "enable_sparse_li_c8": True}


def test_a_profile_is_written_in_the_spelling_of_its_version() -> None:
    args: dict[str, Any] = {"max-num-seqs": 4, "additional-config": {"enable_dsa_cp": True, **BOTH}}
    assert with_flags(args) == {
        "max-num-seqs": 4, "additional-config": {"enable_dsa_cp": True}, "kv-cache-dtype": "int8",
        "attention-config": {"indexer_kv_dtype": "int8"},
    }  # fmt: skip
    assert with_flags({"additional-config": {"enable_sparse_sfa_c8": False}}) == {}
    assert with_flags({"max-num-seqs": 4}) == {"max-num-seqs": 4}
    profile = load("a3-1m")
    old, new = (profile.role(None).for_line(line) for line in VLLM_ASCEND_LINES)
    assert old == profile.role(None)
    assert "enable_sparse_li_c8" not in new.args["additional-config"]
    assert new.args["attention-config"] == {"indexer_kv_dtype": "int8"}


def test_rules_read_what_the_installed_version_would_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5_ascend.deploy.profiles import command
    from glm5_ascend.serve import versions

    profile = load("a3-1m")
    monkeypatch.setattr(command, "version_of", lambda name: "0.30.0rc2")
    monkeypatch.setattr(versions, "facts", lambda name: ({"vllm_ascend": Version("0.30.0rc2")}, True))
    (result,) = preflight(profile, None)
    assert "P53" not in {broken.id for broken in result.broken}
    (result,) = preflight(profile, None, None, ["--additional-config", json.dumps(BOTH)])
    assert "P53" in {broken.id for broken in result.broken}  # the user's own words are not rewritten, but refused
