"""The card of a checkpoint: what Hugging Face and ModelScope read, made of the provenance; nobody's README is lost."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5_ascend.errors import OutputError
from glm5_ascend.quantize.model_card import PROFILES, add_accuracy
from glm5_ascend.verify import verify
from tests.conftest import Copy
from tests.support.command import assert_one_clear_line, in_process, worked
from tests.support.tiny_model import quantize_tiny, write_calibration, write_tiny_model

RECORD = "glm5_ascend_provenance.json"


def parts(card: str) -> tuple[dict[str, Any], str]:
    """YAML head and text."""
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def shard_hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.rglob("*.safetensors")}


def test_the_card_of_a_run(tiny_w4a8: Path) -> None:
    head, body = parts((tiny_w4a8 / "README.md").read_text())
    assert head["pipeline_tag"] == "text-generation" and head["tasks"] == ["text-generation"]
    assert {"glm_moe_dsa", "vllm-ascend", "w4a8", "w4a8_dynamic"} <= set(head["tags"])
    assert "license" not in head and "base_model" not in head  # neither is known of a folder
    record = json.loads((tiny_w4a8 / RECORD).read_text())
    for words in (
        record["tool"]["version"], record["versions"]["torch"], record["recipe"]["sha256"],
        record["source"]["config_sha256"], record["calibration"]["sha256"], str(record["seed"]),
        record["outputs"]["config.json"]["sha256"], "Not measured", "a3-single-w4a8", "a2-single-w4a8",
        "W4A8_DYNAMIC", "quantization ascend",
    ):  # fmt: skip
        assert words in body, words
    configuration = json.loads((tiny_w4a8 / "configuration.json").read_text())
    assert configuration["framework"] == "pytorch" and configuration["task"] == "text-generation"


def test_a_source_of_the_hub_with_its_licence(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "models--zai-org--GLM-5" / "snapshots" / "0123")
    (source / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\n---\n# GLM-5\n")
    out = quantize_tiny(source, tmp_path / "out", "rtn-w4a8")
    head, body = parts((out / "README.md").read_text())
    assert (head["license"], head["base_model"]) == ("mit", "zai-org/GLM-5") and body.startswith("\n# GLM-5, ")


LINK = "https://huggingface.co/zai-org/GLM-5.3/blob/main/LICENSE"
OTHER = {"license": "other", "license_name": "glm-5.3-community", "license_link": LINK}


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (f"license: other\nlicense_name: glm-5.3-community\nlicense_link: {LINK}", OTHER),
        (f"license_link: '{LINK}'\nlicense: \"other\"\nlicense_name: glm-5.3-community  ", OTHER),
        ("license: other\r\nlicense_name: GLM 5.3\r\nlicense_link: LICENSE\r",
         {"license": "other", "license_name": "GLM 5.3", "license_link": "LICENSE"}),
        ("license: [mit, x]\nlicense_name: '<script>'\nlanguage: [en]", {}),
    ],
)  # fmt: skip
def test_a_licence_with_name_link_and_file(head: str, expected: dict[str, str], tmp_path: Path) -> None:
    """GLM-5.3's card says `license: other`; its text is in LICENSE."""
    source = write_tiny_model(tmp_path / "source")
    (source / "README.md").write_bytes(f"---\n{head}\n---\n# GLM-5.3\nlicense: not this line\n".encode())
    (source / "LICENSE").write_text("GLM-5.3 Community Licence\n")
    (source / "NOTICE.txt").write_text("of others\n")
    (source / "LICENSE.py").write_text("print('never')\n")
    out = quantize_tiny(source, tmp_path / "out", "rtn-w4a8")
    stated = {key: value for key, value in parts((out / "README.md").read_text())[0].items() if "license" in key}
    assert stated == expected
    assert (out / "LICENSE").read_bytes() == (source / "LICENSE").read_bytes() and (out / "NOTICE.txt").is_file()
    assert not (out / "LICENSE.py").exists()
    assert "LICENSE" in json.loads((out / RECORD).read_text())["outputs"]
    assert not verify(out, against=source).findings


def test_an_edited_card_is_no_finding(tiny_w4a8: Path, editable: Copy) -> None:
    out = editable(tiny_w4a8)
    (out / "README.md").write_text("# Mine\n")
    assert not verify(out).findings


def test_a_readme_of_the_user_is_kept(tiny_source: Path, tiny_w4a8: Path, editable: Copy, tmp_path: Path) -> None:
    """In a folder that is not ours, and in ours after an edit."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("years of work")
    edited = editable(tiny_w4a8)
    (edited / "README.md").write_text("years of work")
    for out in (mine, edited):
        for flags in ((), ("--overwrite",)):
            done = in_process("quantize", tiny_source, out, "--recipe", "rtn-w4a8", *flags)
            assert_one_clear_line(done, 2, str(out))
            assert (out / "README.md").read_text() == "years of work"


def test_names_of_strangers_do_not_shape_the_card(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a|b`c<img src=x>\n# d")
    _, body = parts((quantize_tiny(source, tmp_path / "out", "rtn-w4a8") / "README.md").read_text())
    assert "<img" not in body and "\n# d" not in body and "a|b" not in body


def test_eval_fills_in_the_accuracy(tiny_w4a8: Path, tiny_source: Path, editable: Copy) -> None:
    out = editable(tiny_w4a8)
    text, before = write_calibration(out.parent / "text.jsonl"), shard_hashes(out)
    arguments = ["eval", out, "--against", tiny_source, "--text", text, "--window", "32", "--windows", "4", "--card"]
    for _ in range(2):  # a second time replaces the first
        done = worked(in_process(*arguments, "--json"))
        kl = json.loads(done.stdout)["kl_mean"]
        body = (out / "README.md").read_text()
        assert f"{kl:.6f}" in body and body.count("KL to the reference, mean") == 1
        assert "124 positions of text.jsonl" in body and "Not measured" not in body
    assert shard_hashes(out) == before and not verify(out).findings
    # the record knows the card that eval wrote
    worked(in_process("quantize", tiny_source, out, "--recipe", "rtn-w4a8", "--overwrite"))


def test_a_card_without_the_section_is_left_alone(tiny_w4a8: Path, tiny_source: Path, editable: Copy) -> None:
    out = editable(tiny_w4a8)
    (out / "README.md").write_text("# Mine\n")
    assert_one_clear_line(in_process("eval", out, "--against", tiny_source, "--card"), 2, "README.md", "left as it is")
    with pytest.raises(OutputError):
        add_accuracy(out, [("a", "b")], "c")
    assert (out / "README.md").read_text() == "# Mine\n"
    assert_one_clear_line(
        in_process("eval", "--url", "http://127.0.0.1:1", "--against", tiny_source, "--card"), 2, "--card"
    )


def test_profiles_of_the_card_take_these_weights() -> None:
    from glm5_ascend.deploy.profiles.load import load

    for experts, profiles in PROFILES.items():
        for _, name in profiles:
            assert load(name).weights["experts"] == experts
