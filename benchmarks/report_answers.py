"""Ask a checkpoint the demo model's held-out questions through vLLM on this CPU; prints the score as one JSON line.

python benchmarks/report_answers.py DIR [N]

`tokens` counts what was generated, `digest` is that of all of it: where it is the same, every token is, as with
GLM5_KERNELS=reference and cpu.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    from glm5_ascend.deploy.profiles.load import load

    for name, value in {
        **load("cpu").role(None).env,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    from training.held_out import held_out_questions, render_question, score
    from vllm import LLM, SamplingParams

    directory, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 210
    quantized = (Path(directory) / "quant_model_description.json").is_file()
    llm = LLM(model=directory, quantization="ascend" if quantized else None, max_model_len=1024, max_num_seqs=32)
    tokenizer = llm.get_tokenizer()
    questions = held_out_questions(n=count)
    prompts = [
        {"prompt_token_ids": tokenizer(render_question(tokenizer, q), add_special_tokens=False)["input_ids"]}
        for q in questions
    ]
    greedy = SamplingParams(temperature=0, max_tokens=96, skip_special_tokens=False)
    outputs = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
    tokens = [list(output.token_ids) for output in outputs]
    result = score(questions, [output.text for output in outputs])
    result.pop("wrong")
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    print(json.dumps({**result, "tokens": sum(map(len, tokens)), "digest": digest}))


if __name__ == "__main__":
    main()
