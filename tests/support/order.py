"""Which process of a run gets which files, and in which order.

By itself pytest-xdist starts with the files of many tests and ends with the servers, of which one process then waits
for the other. Nothing here decides whether a test passes: only how long the run takes.
"""

from __future__ import annotations

from typing import Any

import pytest

#: Files that share what is slow to start: "server" is the `server` fixture, "engine" a process that has imported vLLM.
TOGETHER = {
    "tests/deploy/test_plan_commands.py": "engine",
    "tests/serve/test_against_transformers.py": "engine",
    "tests/serve/test_c8_caches.py": "engine",
    "tests/serve/test_every_source.py": "engine",
    "tests/serve/test_mtp_acceptance.py": "engine",
    "tests/serve/test_plugin.py": "engine",
    "tests/serve/test_quantized.py": "engine",
    "tests/serve/test_vllm_defects.py": "engine",
    "tests/serve/test_api.py": "server",
    "tests/serve/test_api_key.py": "server",
    "tests/serve/test_cut_call.py": "server",
    "tests/serve/test_readme_chat.py": "server",
    "tests/serve/test_smoke.py": "server",
    "tests/serve/test_watch.py": "server",
    "tests/serve/test_chat.py": "server",
    "tests/fidelity/test_eval_served.py": "server",
}
#: What takes longest comes first.
LONGEST = (
    "tests/deploy/test_fleet.py",
    "tests/hostile/test_hostile_cases.py",
    "tests/serve/test_api.py",
    "tests/install/test_install_cpu.py",
    "tests/test_packaging.py",
    "tests/deploy/test_render_kubernetes.py",
    "tests/cli/test_bad_input.py",
    "tests/serve/test_against_transformers.py",
    "tests/cli/test_demo.py",
    "tests/deploy/test_accept.py",
    "tests/serve/test_long_prompt.py",
    "tests/proof/test_kernel_levels.py",
    "tests/quantize/estimate/test_memory.py",
    "tests/demo_model/test_shipped.py",
    "tests/install/test_locked_down.py",
    "tests/deploy/test_check_scripts.py",
)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file; the order within a file stays."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(file_of(item.nodeid), len(rank)))


def scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's scheduler of whole files, with some files together, in the order of the collection."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(file_of(nodeid), file_of(nodeid))

    config.option.loadscopereorder = False
    return Scheduling(config, log)
