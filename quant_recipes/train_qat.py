"""Quantization-aware training of transformers' GLM-5: `train_qat.py SRC TEXT OUT`, by torchrun on several processes.

Quantize OUT with qat-w4a8: its integers are those training saw. All lines are one batch; yours come from a data loader.
"""

import os
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, GlmMoeDsaForCausalLM

from glm5_ascend.quantize.training.prepare import export_trained, prepare_qat

source, text, out = map(Path, sys.argv[1:])
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
batch = torch.tensor([tokenizer.encode(line)[:32] for line in text.read_text().splitlines()])[rank::ranks]
plain = GlmMoeDsaForCausalLM.from_pretrained(
    source, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
)
plain = model = prepare_qat(plain, "qat-w4a8")
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(plain)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
for step in range(int(os.environ.get("STEPS", "5"))):
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} step {step} loss {loss.item():.6f}", flush=True)
if rank == 0:
    export_trained(plain, out)
