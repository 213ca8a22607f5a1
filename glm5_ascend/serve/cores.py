"""The cores that a server on a CPU computes on. Imports neither torch nor vLLM."""

from __future__ import annotations

import os
from pathlib import Path

from glm5_ascend.errors import ConfigError
from glm5_ascend.files import cgroups

#: vLLM's variable for the CPUs of its workers, e.g. 0-3, or 0-3|4-7 for two; unset: `physical_cores`.
BIND = "VLLM_CPU_OMP_THREADS_BIND"
_TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores() -> list[int]:
    """One logical CPU of each physical core that this process may use, as many as its control groups give time for."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, int] = {}
    for cpu in allowed:
        cores.setdefault(_siblings(cpu), cpu)
    return list(cores.values())[: _quota(len(cores))]


def threads() -> int:
    """Threads of a server: OMP_NUM_THREADS, or one for each of `physical_cores`."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else len(physical_cores())


def thread_groups(ranks: int) -> str:
    """Split the physical cores among ranks, those of a NUMA node together, as `BIND` expects it: "0,1|2,3" for two.

    Each has at most OMP_NUM_THREADS of them.
    """
    cores = sorted(physical_cores(), key=_node)
    size = len(cores) // ranks
    used = min(size, threads())
    return "|".join(",".join(map(str, cores[rank * size : rank * size + used])) for rank in range(ranks))


def variables(ranks: int) -> dict[str, str]:
    """Environment of a server with so many ranks of tensor parallel: its threads, and the cores of each rank."""
    bound = {BIND: thread_groups(ranks)} if ranks > 1 and BIND not in os.environ else {}
    # Idle threads of OpenMP spin for a moment, in which a step's next op begins, then sleep: steps of 8 requests took a
    # sixth longer without. On cores that other programs use, threads that spun for long made an op of 1 ms take 20.
    return {"OMP_NUM_THREADS": str(threads()), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "30000", **bound}


def refuse_ranks_without_core(ranks: int) -> None:
    """Raise `ConfigError` for more ranks of tensor parallel than this machine has cores."""
    if ranks > (count := len(physical_cores())):
        problem = f"{ranks} ranks of tensor parallel on {count} core{'s' * (count != 1)}"
        raise ConfigError(problem, "give at most one rank per core")


def _node(cpu: int) -> int:
    return min((int(node.name[4:]) for node in (_TOPOLOGY / f"cpu{cpu}").glob("node[0-9]*")), default=0)


def _siblings(cpu: int) -> str:
    try:
        return (_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(cores: int) -> int:
    """At most `cores`, at least 1: the CPUs whose time the tightest control group gives."""
    for _, texts in cgroups.limits("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        quota, _, period = " ".join(texts).partition(" ")
        if quota.isdecimal() and period.isdecimal():  # "max", or -1 in version 1, is none
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)
