"""deploy/Dockerfile: its promises, by reading it. Docker builds it; no test can without a daemon."""

from __future__ import annotations

import re

from tests.support.command import ROOT

TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def test_promises() -> None:
    """Another user than root, a pinned base, a health check, arguments that no shell takes apart."""
    said = dict(re.findall(r"^(FROM|USER|ENTRYPOINT|HEALTHCHECK) ((?:.*\\\n)*.*)", TEXT, re.MULTILINE))
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", said["USER"])
    assert re.fullmatch(r"\S+:(?!latest)\S+", said["FROM"])
    assert "/health" in said["HEALTHCHECK"] and 'exec glm5-ascend \\"$@\\"' in said["ENTRYPOINT"]
    assert "NUMBA_CACHE_DIR=/tmp/" in TEXT


def test_copied_files_exist() -> None:
    for line in re.findall(r"^COPY (.*)", TEXT, re.MULTILINE):
        for source in line.split()[:-1]:
            assert source == "dist/glm5_ascend-*.whl" or (ROOT / source).is_file()
