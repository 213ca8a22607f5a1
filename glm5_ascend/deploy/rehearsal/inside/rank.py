"""Build, load and measure one rank of a deployment with vllm-ascend's code.

    python -m glm5_rehearsal.rank JOB OUT

JOB: JSON {"argv", "env", "rank", "world", "dp_rank", "rank_in_dp", "usable_bytes", "headers": {name: [dtype, shape]}}.
OUT gets the report as JSON. The first stage that fails is the last one; its error is a problem of the report.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


class Rank:
    """A rank, stage by stage. stage: the current one; loading: its model while it is loaded."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.report: dict[str, Any] = {"problems": [], "models": {}}
        self.stage = "import"
        self.loading: Any = None

    def rehearse(self) -> None:
        """Take all stages in order."""
        from . import machine

        machine.prepare()
        from vllm.config import set_current_vllm_config

        from . import engine

        self.report["versions"] = engine.versions()
        self.stage = "configure"
        config = engine.engine_config(self.job["argv"])
        engine.set_rank(config, self.job)
        with set_current_vllm_config(config):
            self.stage = "groups"
            engine.start_worker(config, self.job["rank"], self.job["world"])
            self._load(config)

    def _load(self, config: Any) -> None:
        from . import caches, engine, models

        problems, built = self.report["problems"], dict[str, models.RehearsedModel]()
        for name, model_config in engine.models_of(config).items():
            self.stage = f"build {name}"
            model = built[name] = models.RehearsedModel(config, model_config)
            self.report["models"][name] = type(model.model).__name__
            self.stage, self.loading = f"load {name}", model.record
            model.load(self.job["headers"])
            self.stage, self.loading = f"process {name}", None
            problems += [f"{name}: {problem}" for problem in model.problems()]
            model.process()
        self.stage = "measure"
        loaded = [model.model for model in built.values()]
        stages = config.parallel_config.pipeline_parallel_size
        if unused := models.unused(self.job["headers"], list(built.values()), stages):
            problems.append(f"{len(unused)} tensors of the checkpoint are unused: {unused[0]}")
        if "draft" in built:
            caches.share(config, built["target"].model, built["draft"].model)
        self.report["parameter_bytes"] = sum(models.parameters(*loaded).values())
        self.report["resident_bytes"] = resident = sum(models.resident(*loaded).values())
        usable = self.job.get("usable_bytes")
        self.report["cache"], refused = caches.cache(config, None if usable is None else int(usable) - resident)
        problems += [f"cache: {problem}" for problem in refused]


def message(error: Exception) -> str:
    """Type and message of an error; an assertion without a message gives its source line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or f'{last.line} ({Path(last.filename).name}:{last.lineno})'}"


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    os.environ.update(job["env"])
    rank = Rank(job)
    try:
        rank.rehearse()
    except Exception as error:
        traceback.print_exc()
        at = f" at {rank.loading.current}" if rank.loading and rank.loading.current else ""
        rank.report["problems"].append(f"{rank.stage}{at}: {message(error)[:600]}")
    out.write_text(json.dumps(rank.report))


if __name__ == "__main__":
    main()
