"""The operators our NPU forwarders call are those of the real packages, argument by argument."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

from glm5_ascend.deploy.rehearsal.environment import BUILD, RehearsalEnvironment
from tests.ops.support import npu_mla_prolog
from tests.ops.support.npu_operators import SCHEMAS
from tests.support.command import ROOT

pytestmark = pytest.mark.contract


def normal(namespace: str, schema: str) -> str:
    """A schema as torch writes it, whatever its spaces and quotes were."""
    text = schema if "::" in schema.split("(")[0] else f"{namespace}::{schema}"
    return str(torch._C.parse_schema(text))


def declared(source: str) -> dict[str, str]:
    """Schemas of `ops.def("..." "...");` in C++, by name."""
    schemas = {}
    for literals in re.findall(r'ops\.def\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\)', source):
        text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals)).replace('\\"', '"')
        schemas[text.split("(")[0].strip()] = text
    return schemas


def sources(environment: RehearsalEnvironment, folder: Path) -> Path:
    """The C++ sources of the release on PyPI; wheels do not have them."""
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm-ascend", "--dest", str(folder)]
    command = [str(environment.python), "-m", "pip", "download", *flags, f"vllm-ascend=={environment.version}"]
    subprocess.run(command, check=True, env=os.environ | BUILD)
    (archive,) = folder.glob("vllm_ascend-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "csrc"


def test_vllm_ascend_declares_the_operators_we_call(vllm_ascend: RehearsalEnvironment, tmp_path: Path) -> None:
    schemas = declared((sources(vllm_ascend, tmp_path) / "torch_binding.cpp").read_text())
    assert len(schemas) > 50
    for schema in SCHEMAS["_C_ascend"]:
        name = schema.split("(")[0]
        assert normal("_C_ascend", schema) == normal("_C_ascend", schemas[name])


def test_torch_npu_takes_our_arguments_and_answers_with_our_shape(
    vllm_ascend: RehearsalEnvironment, tmp_path: Path
) -> None:
    names, out = tmp_path / "names.json", tmp_path / "report.json"
    names.write_text("[]")
    vllm_ascend.run("vllm_ascend_on_cpu.schemas", ROOT / "kernels", names, out)
    schemas = json.loads(out.read_text())
    assert schemas["schemas"] == [normal("npu", SCHEMAS["npu"][0]), normal("npu", npu_mla_prolog.SCHEMA)]
    assert any("Tensor" in schema and "int acl_format" in schema for schema in schemas["format_cast"])
    assert schemas["lightning_indexer"] == {"shape": [7, 2048], "dtype": "torch.int32"}
