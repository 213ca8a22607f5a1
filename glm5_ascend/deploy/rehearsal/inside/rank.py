"""Build, load, measure and step one rank of a deployment with vllm-ascend's code.

    python -m glm5_rehearsal.rank JOB OUT

JOB: JSON {"argv", "env", "rank", "world", "dp_rank", "rank_in_dp", "usable_bytes",
"headers": {name: [dtype, shape]}}. OUT gets the report as JSON. The first stage that fails is
the last one; its error is part of the report.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Stages:
    """Runs stages in order and records their duration; the first error ends them."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {"seconds": {}, "models": {}, "failure": None}
        self.at = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        self.at = name
        yield
        self.report["seconds"][name] = round(time.monotonic() - begin, 1)


def rehearse(job: dict[str, Any], stages: Stages) -> None:
    """All stages in order."""
    report = stages.report
    with stages.stage("import"):
        from . import machine

        machine.prepare()
        from vllm.config import set_current_vllm_config

        from . import caches, engine, models, steps, walk
    report["versions"] = engine.versions()
    with stages.stage("configure"):
        config = engine.engine_config(job["argv"])
        engine.set_rank(config, job)
    with set_current_vllm_config(config):
        with stages.stage("groups"):
            engine.start_worker(config, job)
        rehearsed: dict[str, models.RehearsedModel] = {}
        for name, model_config in engine.models_of(config).items():
            with stages.stage(f"build {name}"):
                model = rehearsed[name] = models.RehearsedModel(config, model_config)
                report["models"][name] = model.report
            with stages.stage(f"load {name}"):
                report["loading"] = model.record
                model.load(job["headers"])
                del report["loading"]
            with stages.stage(f"process {name}"):
                model.process()
        report["unused"] = models.listed(
            models.unused(job["headers"], list(rehearsed.values()), config.parallel_config.pipeline_parallel_size)
        )
        with stages.stage("measure"):
            if "draft" in rehearsed:
                caches.share(config, rehearsed["target"].model, rehearsed["draft"].model)
            resident = models.resident(*(model.model for model in rehearsed.values()))
            report["resident_bytes"] = sum(resident.values())
            report["parameter_bytes"] = sum(models.parameters(*(model.model for model in rehearsed.values())).values())
            usable = job.get("usable_bytes")
            report["cache"] = caches.cache(config, None if usable is None else int(usable) - report["resident_bytes"])
        built = {name: model.model for name, model in rehearsed.items()}
        steps.prepare(built)
        for step in steps.steps_of(config):
            if step.model in built:
                with stages.stage(f"walk {step.name}"):
                    walked = steps.take(config, step, built)
                report.setdefault("walk", {})[step.name] = walk.table(walked.lines) | {"ours": sorted(walked.ours)}


def message(error: Exception) -> str:
    """Type and message of an error; an assertion without a message gives its source line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or f'{last.line} ({Path(last.filename).name}:{last.lineno})'}"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(job["env"])
    stages = Stages()
    try:
        rehearse(job, stages)
    except Exception as error:
        record = stages.report.pop("loading", None)
        stages.report["failure"] = {
            "stage": stages.at,
            "error": message(error)[:2000],
            "tensor": record.current if record else "",
            "trace": traceback.format_exc()[-4000:],
        }
    stages.report["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(sys.argv[2]).write_text(json.dumps(stages.report))


if __name__ == "__main__":
    main()
