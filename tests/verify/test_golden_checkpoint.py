"""Checkpoints that earlier versions have written: this version still verifies and loads them.

A new archive: `quantize_tiny` of `write_tiny_model` with the sizes in the archive's config.json, then `tar -cJf`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.serve.servable import check_directory
from glm5_ascend.verify import verify

ARCHIVES = sorted(Path(__file__).with_name("data").glob("*.tar.xz"))
#: The last token's first logits for tokens 7 to 38, by archive; written by the version that wrote the checkpoint.
LOGITS = {"glm5-w4a8-0.1.0": (-0.627792, 0.813895, -0.032572, -0.040026, -2.182598, 1.597593)}


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_what_an_earlier_version_wrote_is_still_read(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    report = verify(folder)
    assert report.findings == [] and report.tensors == 127
    assert report.schemes == {"FLOAT": 30, "W4A8_DYNAMIC": 6, "W8A8_DYNAMIC": 16}
    assert check_directory(folder).experts == "W4A8_DYNAMIC"
    logits = StoredModel(folder).logits([torch.arange(7, 39)])[0][-1]
    expected = torch.tensor(LOGITS[archive.name.removesuffix(".tar.xz")])
    torch.testing.assert_close(logits[: len(expected)], expected, rtol=0, atol=1e-3)
