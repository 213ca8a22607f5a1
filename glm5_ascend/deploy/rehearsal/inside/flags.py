"""Write the engine's flags as `glm5_parser.flags` does: `python -m glm5_rehearsal.flags OUT ENGINE`."""

from __future__ import annotations

import importlib.util

from glm5_parser.flags import main

if __name__ == "__main__":
    if importlib.util.find_spec("torch_npu") is not None:
        from . import machine

        machine.prepare()
    main()
