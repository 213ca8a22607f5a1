"""With vllm-ascend: checks versions, corrects the indexer's rotation, and replaces or compares kernels on request.

By default vllm-ascend computes with its own kernels. Changes are applied when the platform is first asked for GLM-5's
attention: vllm-ascend's own patches are applied by then.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from packaging.version import Version

from glm5_ascend.engine_lines import VLLM_ASCEND_LINES
from glm5_ascend.serve import versions
from glm5_ascend.serve.environment import version_of

logger = logging.getLogger("vllm.glm5_ascend")
_MARK = "_glm5_ascend"
#: The backend that vllm-ascend gives GLM-5.
SPARSE_BACKEND = "AscendSFABackend"


def register() -> None:
    """Hook into vllm-ascend's platform, once per process. Other platforms are not changed."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not platform.__module__.startswith("vllm_ascend") or getattr(platform, _MARK, False):
        return
    warn_of_versions()
    original = platform.get_attn_backend_cls

    @functools.wraps(original.__func__)
    def get_attn_backend_cls(cls: Any, *arguments: Any, **named: Any) -> Any:
        path = original(*arguments, **named)
        if str(path).endswith(SPARSE_BACKEND):
            from glm5_ascend.serve.plugin.ascend import attention

            attention.prepare()
        return path

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    setattr(platform, _MARK, True)


def warn_of_versions() -> None:
    """Log a warning if the installed packages are not a tested set."""
    release = version_of("vllm-ascend")
    if release is None:  # a source tree on sys.path has no version
        return
    name, expected = versions.expected_packages(release)
    mixed = versions.differences(expected, version_of, None)
    if not any(line.covers(Version(release)) for line in VLLM_ASCEND_LINES):
        tested = " and ".join(line.tested[0] for line in VLLM_ASCEND_LINES)
        logger.warning("glm5-ascend was tested with vllm-ascend %s, this is %s (%s)", tested, release, name)
    if mixed:
        packages = ", ".join(f"{package} {have} (the set: {want})" for package, have, want in mixed)
        logger.warning("glm5-ascend: not the versions of %s: %s; `glm5-ascend doctor` says more", name, packages)
