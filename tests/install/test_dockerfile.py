"""deploy/Dockerfile, by reading it. Docker builds it; no test can without a daemon."""

from __future__ import annotations

import re

from tests.support.command import ROOT

TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def test_copied_files_exist() -> None:
    for line in re.findall(r"^COPY (.*)", TEXT, re.MULTILINE):
        for source in line.split()[:-1]:
            assert source == "dist/glm5_ascend-*.whl" or (ROOT / source).is_file()
