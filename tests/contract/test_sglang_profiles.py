"""Every SGLang profile through 0.5.23's own parser and resolver, and the published lines that no longer start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glm5_ascend.deploy.profiles.command import command
from glm5_ascend.deploy.profiles.load import Profile, Role, load, names
from glm5_ascend.deploy.rules.facts import OLD_SGLANG_FLAGS
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.serve.options import ServeOptions
from tests.contract.support.sglang import SGLang, require
from tests.deploy.support.rendered import switches
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.contract
ROLES = [
    (profile, role, node)
    for profile in map(load, names())
    if profile.engine == SGLANG
    for role in profile.roles.values()
    for node in range(role.nodes)
]
SINGLE = "a3-single-w4a8-sglang"
#: Behind the single profile's line: what SGLang's documents print, and what the rule S3 says instead.
OLD = {
    "--cuda-graph-bs": ["--cuda-graph-bs", "16"],
    "--cuda-graph-max-bs": ["--cuda-graph-max-bs", "16"],
    "--enable-nsa-prefill-context-parallel": ["--enable-nsa-prefill-context-parallel"],
    "--nsa-prefill-cp-mode": ["--nsa-prefill-cp-mode", "in-seq-split"],
    "--prefill-round-robin-balance": ["--prefill-round-robin-balance"],
}
NEW = {
    "--cuda-graph-bs-decode": ["--cuda-graph-bs-decode", "16"],
    "--enable-prefill-cp": ["--enable-prefill-cp", "--cp-strategy", "zigzag", "--attn-cp-size", "4"],
}


def key(profile: Profile, role: Role, node: int) -> str:
    return f"{profile.name} {role.name} {node}"


@pytest.fixture(scope="module")
def answers(sglang: SGLang, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Resolved command lines for a tiny model with GLM-5's number of positions."""
    folder = tmp_path_factory.mktemp("sglang-profiles")
    model = write_tiny_model(folder / "glm5", max_position_embeddings=202752)
    (model / "quant_model_description.json").write_text(json.dumps({"group_size": 0, "version": "1.0.0"}))
    lines = {}
    for profile, role, node in ROLES:
        options = ServeOptions("DIR", node=node, rank=0, head="127.0.0.1", ip="127.0.0.1", nic="lo")
        lines[key(profile, role, node)] = command(profile, role, options, str(model), []).argv
    single = load(SINGLE)
    for name, flags in (OLD | NEW).items():
        lines[name] = command(single, single.role(None), ServeOptions("DIR"), str(model), flags).argv
    jobs = [
        {"do": "resolve", "argv": argv[3:], "out": folder / str(number)} for number, argv in enumerate(lines.values())
    ]
    sglang.run(jobs, folder)
    files = (require(folder / str(number)) / "answer.json" for number in range(len(lines)))
    return dict(zip(lines, (json.loads(path.read_text()) for path in files), strict=True))


@pytest.mark.parametrize(("profile", "role", "node"), ROLES, ids=lambda v: getattr(v, "name", str(v)))
def test_it_is_accepted_and_means_what_the_profile_says(
    answers: dict[str, Any], profile: Profile, role: Role, node: int
) -> None:
    became = answers[key(profile, role, node)]
    assert "error" not in became, became["error"]
    on = switches(profile, role)
    assert (became["quantization"], became["page_size"]) == ("modelslim", 128)
    assert became["tp_size"] == became["ep_size"] == role.args["tp-size"]  # or W4A8 is computed wrongly
    assert (became["nnodes"], became["node_rank"]) == (role.nodes, node)
    assert became["speculative_draft_model_quantization"] is None  # unquant
    assert (became["speculative_algorithm"] is not None) == on["mtp"]
    assert became["disable_radix_cache"] is not on["prefix_cache"]
    assert became["disable_overlap_schedule"] is not on["async_scheduling"]
    assert (became["dp_size"] > 1) == on["attention_dp"]
    if on["graph"]:
        assert became["decode_graphs"] == role.args["cuda-graph-bs-decode"]
    assert became["disaggregation_mode"] == role.args.get("disaggregation-mode", "null")
    assert became["context_length"] == role.args["context-length"]
    assert (became["reasoning_parser"], became["tool_call_parser"]) == ("glm45", "glm47")
    assert (became["host"], became["port"], became["served_model_name"]) == ("0.0.0.0", role.port, "glm-5")


@pytest.mark.parametrize("flag", OLD)
def test_published_flags_no_longer_start(flag: str, answers: dict[str, Any]) -> None:
    """deploy/upstream/sglang-documented-flags.md; the rule S3 finds each."""
    assert flag.removeprefix("--") in OLD_SGLANG_FLAGS
    assert "ambiguous option" in answers[flag]["error"] or "unrecognized arguments" in answers[flag]["error"]


@pytest.mark.parametrize("flag", NEW)
def test_what_the_rule_says_instead_starts(flag: str, answers: dict[str, Any]) -> None:
    assert "error" not in answers[flag], answers[flag]["error"]


def test_sglang_reads_the_variables_that_are_its_own(sglang: SGLang) -> None:
    package = next(sglang.python.parents[1].glob("lib/python*/site-packages/sglang/srt"))
    defined = (package / "environ.py").read_text()
    used = {name for _, role, _ in ROLES for name in role.env if name.startswith("SGLANG_")}
    assert used and not [name for name in used if f"    {name} = " not in defined]
    assert '"ASCEND_MF_STORE_URL"' in (package / "disaggregation/ascend/transfer_engine.py").read_text()
