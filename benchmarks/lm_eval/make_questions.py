"""Write questions.jsonl for lm-evaluation-harness: lists the demo model never saw, each number a possible answer.

    python -m benchmarks.lm_eval.make_questions > benchmarks/lm_eval/questions.jsonl

Prompts are the chat template's text up to the answer, without thinking, so that `local-completions` needs no template.
"""

from __future__ import annotations

import json
import re

from benchmarks.training.held_out import held_out_questions, render_question
from benchmarks.training.loading import load_tokenizer
from glm5_ascend.demo_model.resources import data_folder

COUNT = 40


def main() -> None:
    tokenizer = load_tokenizer(data_folder())
    questions = [q for q in held_out_questions(n=2000) if q.category == "lookup" and not q.enable_thinking]
    for question in questions[:COUNT]:
        name, right = str(question.expected).rstrip(".").rsplit(" ", 1)
        numbers = re.findall(r"\d+", question.messages[0]["content"])
        record = {
            "prompt": render_question(tokenizer, question),
            "choices": [f"{name} {number}." for number in numbers],
            "answer": numbers.index(right),
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
