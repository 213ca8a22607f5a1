"""What doctor reads from a machine: recorded outputs and files, and this machine itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from packaging.version import Version

from glm5_ascend.checkpoint.index import read_weight_map
from glm5_ascend.checkpoint.summary import summarize
from glm5_ascend.deploy import doctor
from glm5_ascend.deploy.diagnosis.doctor import profile_rows
from glm5_ascend.deploy.diagnosis.machine import DRIVER, set_row
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rules import machine, preflight
from glm5_ascend.engine_lines import SGLANG_05, VLLM_ASCEND_023, VLLM_ASCEND_030, vllm_ascend_line
from glm5_ascend.serve import environment
from glm5_ascend.serve import versions as sets
from tests.conftest import Copy
from tests.support.command import in_process
from tests.support.tiny_model import change_json

#: Two dies of an A3 as npu-smi prints them: vllm-ascend issue 12980.
NPU_SMI = (Path(__file__).parent / "npu_smi.txt").read_text()
#: The toolkit's install file, in the form vllm-ascend's collect_env.py prints it.
TOOLKIT = "package_name=Ascend-cann-toolkit\nversion={}\ninnerversion=V100R001C23SPC001B235\narch=aarch64\nos=linux\n"
MOUNTS = [("/", "ext4"), ("/mnt/models", "autofs"), ("/mnt/models", "nfs4"), ("/mnt/models/local", "ext4")]


def atlas(root: Path, dies: int, cann: str) -> Path:
    (root / "dev").mkdir()
    for name in [*(f"davinci{i}" for i in range(dies)), "davinci_manager"]:
        (root / "dev" / name).touch()
    folder = root / "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux"
    folder.mkdir(parents=True)
    (folder / "ascend_toolkit_install.info").write_text(TOOLKIT.format(cann))
    driver = root / DRIVER
    driver.parent.mkdir(parents=True)
    driver.write_text("Version=25.5.1\nascendhal_version=7.35.23\n")
    return root


@pytest.mark.parametrize("cann", ["9.1.0", "8.2.RC1"])
def test_an_atlas_is_read(cann: str, tmp_path: Path) -> None:
    root = atlas(tmp_path, 16, cann)
    facts = machine.facts(root)
    assert facts["device_count"] == 16 and facts["cann"] == cann
    assert machine.version_in(root / DRIVER) == "25.5.1"


def test_hbm_from_npu_smi() -> None:
    assert machine.hbm_gib(NPU_SMI) == 64 and machine.hbm_gib("") is None


@pytest.mark.parametrize(
    ("directory", "network"),
    [("/mnt/models/glm5", True), ("/mnt/models/local/glm5", False), ("/mnt/modelsx", False), ("/data", False)],
)
def test_network_mounts(directory: str, network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [SimpleNamespace(mountpoint=point, fstype=name) for point, name in MOUNTS]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert machine.on_network_mount(Path(directory)) is network


def test_an_empty_machine_is_not_called_an_atlas(tmp_path: Path) -> None:
    facts = machine.facts(tmp_path)
    assert facts["device_count"] == 0 and "cann" not in facts and "shm_gib" not in facts


IMAGE = {"vllm-ascend": "0.23.0.post1", "vllm": "0.23.0+empty", "torch": "2.10.0+cpu", "torch-npu": "2.10.0.post4"}
#: Of vllm-ascend 0.30.0, the release of the line whose candidate was tried.
NEWER = {
    "vllm-ascend": "0.30.0", "vllm": "0.30.0+empty", "torch": "2.10.0+cpu", "torch-npu": "2.10.0.post7",
    "triton-ascend": "3.2.2", "transformers": "5.14.1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("installed", "cann", "wrong"),
    [
        (IMAGE, "9.1.0", []),
        (IMAGE | {"torch-npu": "2.13.0"}, "9.1.0", ["torch-npu"]),
        (IMAGE | {"vllm": "0.21.0", "transformers": "5.19.0"}, "9.1.0", ["vllm", "transformers"]),
        (IMAGE, "9.0.0", ["cann"]),
        (NEWER, "9.2.0", []),
    ],
)
def test_a_mixed_set_is_told(installed: dict[str, str], cann: str, wrong: list[str]) -> None:
    _, expected = sets.expected_packages(installed["vllm-ascend"])
    assert [package for package, *_ in sets.differences(expected, installed.get, cann)] == wrong


def test_a_pre_release_is_of_its_own_line() -> None:
    assert sets.expected_packages("0.30.0rc2")[1]["transformers"] == "5.14.1"
    for version in ("0.30.0rc1", "0.30.0rc2", "0.30.0", "0.30.0.post1"):
        name, expected = sets.expected_packages(version)
        assert name == "vllm-ascend 0.30" and "vllm-ascend" not in expected
        assert vllm_ascend_line(Version(version)) is VLLM_ASCEND_030
    assert vllm_ascend_line(Version("0.29.0rc1")) is VLLM_ASCEND_023
    assert vllm_ascend_line(Version("0.31.0")) is VLLM_ASCEND_030
    for between in ("0.24.0rc1", "0.29.0rc1"):  # neither 0.23's packages nor 0.30's
        assert sets.expected_packages(between) == (f"vllm-ascend {between}", {"vllm": between[:6]})
    built = "0.30.1.dev0+g182b75e"
    assert sets.expected_packages(built) == (f"vllm-ascend {built}", {})
    assert set_row(built, "9.1.0").status == "info"
    assert sets.expected_packages("0.23.0.post1")[0] == "vllm-ascend 0.23"


def test_a_pre_release_without_a_row_goes_with_the_vllm_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = "0.28.0"
    monkeypatch.setattr(environment, "version_of", lambda *names: vllm if "vllm" in names else None)
    good = set_row("0.28.0rc1", "9.9.9")
    assert good.status == "info" and "goes with vLLM 0.28.0" in good.note
    bad = set_row("0.29.0rc1", "9.9.9")
    assert bad.status == "problem" and "vllm 0.28.0 (the set: 0.29.0)" in bad.value


def test_versions_are_those_of_the_lines_own_engine() -> None:
    """Without SGLang, another engine's transformers says nothing about its servers."""
    installed = {"vllm-ascend": "0.23.0", "transformers": "5.1.0"}
    for packages, transformers, assumed in (
        (installed, "5.19.0", True),
        ({"sglang": "0.5.23", **installed}, "5.1.0", False),
    ):
        versions = sets.facts(SGLANG_05, packages.get)
        assert (versions[0]["transformers"], versions[1]) == (Version(transformers), assumed)


def test_facts_of_a_checkpoint(tiny_w4a8: Path, editable: Copy) -> None:
    facts = preflight.checkpoint_facts(summarize(tiny_w4a8))
    assert (facts["weights"], facts["attention"], facts["group_size"]) == ("w4a8", "W8A8_DYNAMIC", 0)
    assert facts["mtp_layers"] == 1 and facts["mtp_tensors"] > 0 and facts["layers_without_indexer"] == 0
    assert not facts["kv_b_quantized"] and not facts["shared_indexers"]
    broken = editable(tiny_w4a8)
    for keys, shared in (({}, False), ({"index_topk_pattern": "FSF"}, True)):  # vLLM reads the second
        change_json(broken / "config.json", indexer_types=["full", "shared", "full"], **keys)
        assert preflight.checkpoint_facts(summarize(broken))["shared_indexers"] is shared
    path = broken / "quant_model_description.json"
    name = next(key for key in json.loads(path.read_text()) if key.endswith(".kv_b_proj.weight"))
    change_json(path, **{name: "W8A8_DYNAMIC", "group_size": 256})
    facts = preflight.checkpoint_facts(summarize(broken))
    assert facts["kv_b_quantized"] and facts["group_size"] == 256


@pytest.mark.parametrize("name", ["a.safetensors.index.json", "quant_model_weight_w4a8.safetensors.index.json"])
def test_the_index_is_the_one_vllm_reads(name: str, tiny_w4a8: Path, editable: Copy) -> None:
    """msModelSlim names its own otherwise; both can lie in one directory, in any order of the file system."""
    two = editable(tiny_w4a8)
    (two / name).write_text(json.dumps({"weight_map": {"lm_head.weight": "other.safetensors"}}))
    assert read_weight_map(two) == read_weight_map(tiny_w4a8)
    (two / "model.safetensors.index.json").unlink()
    assert read_weight_map(two) is None


def test_doctor_tells_the_truth_about_this_machine() -> None:
    """Against what can be seen without doctor: device files, installed distributions."""
    rows = {row.item: row for row in doctor().rows}
    here = len(list(Path("/dev").glob("davinci[0-9]*")))
    assert rows["NPUs"].value == (str(here) if here else "none")
    assert rows["torch"].value == environment.version_of("torch")
    assert ("set" in rows) == (environment.version_of("vllm-ascend") is not None)


def test_a_profile_is_judged_with_the_checkpoint(tiny_w4a8: Path) -> None:
    done = in_process("doctor", tiny_w4a8, "--profile", "a3-single-w8a8", "--json")
    report = json.loads(done.stdout)
    assert report == doctor(str(tiny_w4a8), profile="a3-single-w8a8").to_dict()
    rows = {row["item"]: row for row in report["rows"]}
    values = {row["value"]: row for row in report["rows"] if row["item"] == "checkpoint"}
    assert [row["status"] for row in values.values()] == ["ok", "problem"]
    (refused,) = (value for value, row in values.items() if row["status"] == "problem")
    assert f"profile a3-single-w8a8 is for experts in W8A8_DYNAMIC, {tiny_w4a8} has W4A8_DYNAMIC" in refused
    assert refused in in_process("serve", tiny_w4a8, "--profile", "a3-single-w8a8", "--dry-run").stderr
    assert "C3" in rows  # W8A8's flags on a W4A8 checkpoint: MLAPO without effect
    assert rows["C3"]["source"] and rows["C3"]["note"]
    assert done.returncode == report["exit_code"]


def test_a_profile_that_the_checkpoint_rules_out(tiny_w4a8: Path, editable: Copy) -> None:
    broken = editable(tiny_w4a8)
    change_json(broken / "config.json", num_nextn_predict_layers=0)
    rows = profile_rows(load("a3-single-w4a8"), summarize(broken), None)
    assert [row.status for row in rows if row.id == "C1"] == ["problem"]
