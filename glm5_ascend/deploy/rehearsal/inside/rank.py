"""Build, load, weigh and walk one rank of a deployment with vllm-ascend's own code.

    python -m glm5_rehearsal.rank JOB OUT

JOB: JSON {"argv", "env", "rank", "world", "dp_rank", "rank_in_dp", "room", "imports": {function: module},
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
    """Runs stages one after the other and keeps what each took; the first error ends them."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"seconds": {}, "models": {}, "failure": None}
        self.at = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        self.at = name
        yield
        self.found["seconds"][name] = round(time.monotonic() - begin, 1)


def rehearse(job: dict[str, Any], stages: Stages) -> None:
    """All stages in order."""
    found = stages.found
    with stages.stage("import"):
        from . import machine

        machine.prepare()
        from vllm.config import set_current_vllm_config

        from . import caches, engine, models, steps, walk
    found["versions"] = engine.versions()
    with stages.stage("configure"):
        config = engine.engine_config(job["argv"], job["imports"])
        engine.place(config, job)
    with set_current_vllm_config(config):
        with stages.stage("groups"):
            engine.start_worker(config, job)
        rehearsed: dict[str, models.RehearsedModel] = {}
        for name, model_config in engine.models_of(config).items():
            with stages.stage(f"build {name}"):
                model = rehearsed[name] = models.RehearsedModel(config, model_config)
                found["models"][name] = model.found
            with stages.stage(f"load {name}"):
                found["loading"] = model.account
                model.load(job["headers"])
                del found["loading"]
            with stages.stage(f"process {name}"):
                model.process()
        found["unused"] = models.listed(
            models.unused(job["headers"], list(rehearsed.values()), config.parallel_config.pipeline_parallel_size)
        )
        with stages.stage("weigh"):
            if "draft" in rehearsed:
                caches.share(config, rehearsed["target"].model, rehearsed["draft"].model)
            held = models.resident(*(model.model for model in rehearsed.values()))
            found["resident_bytes"] = sum(held.values())
            found["parameter_bytes"] = sum(models.parameters(*(model.model for model in rehearsed.values())).values())
            room = job.get("room")
            found["cache"] = caches.cache(config, None if room is None else int(room) - found["resident_bytes"])
        built = {name: model.model for name, model in rehearsed.items()}
        steps.prepare(built)
        for step in steps.steps_of(config):
            if step.model in built:
                with stages.stage(f"walk {step.name}"):
                    walked = steps.take(config, step, built)
                found.setdefault("walk", {})[step.name] = walk.table(walked.lines) | {"ours": sorted(walked.ours)}


def said(error: Exception) -> str:
    """Its message; a bare assertion is named by its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or f'{last.line} ({Path(last.filename).name}:{last.lineno})'}"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(job["env"])
    stages = Stages()
    try:
        rehearse(job, stages)
    except Exception as error:
        account = stages.found.pop("loading", None)
        stages.found["failure"] = {
            "stage": stages.at,
            "error": said(error)[:2000],
            "tensor": account.current if account else "",
            "trace": traceback.format_exc()[-4000:],
        }
    stages.found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(sys.argv[2]).write_text(json.dumps(stages.found))


if __name__ == "__main__":
    main()
