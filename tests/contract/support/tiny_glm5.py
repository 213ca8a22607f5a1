"""A tiny GLM-5 for configuring engines: heads enough for TP16, a tokenizer with GLM-5's special tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from glm5_ascend.demo_model.resources import write_demo_model
from tests.support.tiny_model import write_tiny_model

#: MLAPO's weights are cut into blocks of 16 rows: q_lora + kv_lora + rope must be a multiple (64 + 32 + 16).
SIZES: dict[str, Any] = {"qk_rope_head_dim": 16, "qk_head_dim": 32, "head_dim": 16, "index_head_dim": 32}


def tiny_glm5(folder: Path) -> Path:
    """Described as quantized; parsers of tools and thinking ask its tokenizer."""
    model = write_tiny_model(folder / "glm5", num_attention_heads=16, max_position_embeddings=1048576, **SIZES)
    (model / "quant_model_description.json").write_text(json.dumps({"group_size": 0, "version": "1.0.0"}))
    for path in write_demo_model(folder / "demo").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, model)
    return model
