"""Ask a checkpoint the demo model's held-out questions through vLLM on this CPU; prints the score as one JSON line.

python benchmarks/answer_questions.py DIR [N]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    from glm5_ascend.serve.launch import CPU_ENVIRONMENT, ENVIRONMENT

    for name, value in {**ENVIRONMENT, **CPU_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    from glm5_ascend.demo_model.held_out import held_out_questions, render_question, score

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
    completions = [output.outputs[0].text for output in llm.generate(prompts, greedy, use_tqdm=False)]
    result = score(questions, completions)
    result.pop("wrong")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
