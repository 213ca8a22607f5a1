"""With vllm-ascend: corrects the indexer's rotation, and replaces kernels on request.

By default vllm-ascend computes with its own kernels. Changes are applied when the platform is first asked for GLM-5's
attention: vllm-ascend's own patches are applied by then.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_glm5_ascend"
#: The backend that vllm-ascend gives GLM-5.
SPARSE_BACKEND = "AscendSFABackend"


def register() -> None:
    """Hook into vllm-ascend's platform, once per process. Other platforms are not changed."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not platform.__module__.startswith("vllm_ascend") or getattr(platform, _MARK, False):
        return
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
