"""Ask a checkpoint questions through vLLM on this CPU; prints the score as one JSON line.

python benchmarks/report_answers.py DIR [N | everyday]

N: so many of the demo model's held-out questions. everyday: the fifty of tools/everyday_questions.tsv, for SmolLM2; an
answer is right if it has one of the expected words, and `verdicts` has a character for each.
`tokens` counts what was generated, `digest` is that of all of it: where it is the same, every token is, as with
GLM5_KERNELS=reference and cpu.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

EVERYDAY = Path(__file__).parent / "tools" / "everyday_questions.tsv"


def score_everyday(expected: list[str], answers: list[str]) -> dict[str, Any]:
    """Score answers by the words that are expected of each, with "|" between them."""
    right = [
        re.search(rf"\b({words})\b", text, re.IGNORECASE) is not None
        for words, text in zip(expected, answers, strict=True)
    ]
    return {"n": len(right), "right": sum(right), "verdicts": "".join("-+"[verdict] for verdict in right)}


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

    directory, count = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "210"
    quantized = (Path(directory) / "quant_model_description.json").is_file()
    llm = LLM(model=directory, quantization="ascend" if quantized else None, max_model_len=1024, max_num_seqs=32)
    tokenizer = llm.get_tokenizer()
    if count == "everyday":
        asked, expected = zip(*(line.split("\t") for line in EVERYDAY.read_text().splitlines()), strict=True)
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            for question in asked
        ]
    else:
        questions = held_out_questions(n=int(count))
        texts = [render_question(tokenizer, question) for question in questions]
    prompts = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    greedy = SamplingParams(temperature=0, max_tokens=96, skip_special_tokens=False)
    outputs = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
    tokens, answers = [list(output.token_ids) for output in outputs], [output.text for output in outputs]
    result = score_everyday(list(expected), answers) if count == "everyday" else score(questions, answers)
    result.pop("wrong", None)
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    print(json.dumps({**result, "tokens": sum(map(len, tokens)), "digest": digest}))


if __name__ == "__main__":
    main()
