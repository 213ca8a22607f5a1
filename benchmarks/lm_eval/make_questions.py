"""Write questions.jsonl: sums the demo model never saw, each with four answers, for lm-evaluation-harness.

    python benchmarks/lm_eval/make_questions.py > benchmarks/lm_eval/questions.jsonl

Prompts are the chat template's text up to the answer, without thinking, so that `local-completions` needs no template.
"""

from __future__ import annotations

import json
import random
import re

from glm5_ascend.demo_model.held_out import held_out_questions, render_question
from glm5_ascend.demo_model.loading import load_tokenizer
from glm5_ascend.demo_model.resources import data_folder

COUNT = 40


def main() -> None:
    tokenizer, rng = load_tokenizer(data_folder()), random.Random(0)
    questions = [q for q in held_out_questions(n=2000) if q.category == "arithmetic" and not q.enable_thinking]
    for question in questions[:COUNT]:
        asked = re.search(r"(\d+) ([+-]) (\d+)", question.messages[0]["content"])
        assert asked is not None
        a, b = int(asked[1]), int(asked[3])
        right = a + b if asked[2] == "+" else a - b
        sums = [right, *rng.sample([right + off for off in (-11, -10, -2, -1, 1, 2, 10, 11)], 3)]
        rng.shuffle(sums)
        record = {
            "prompt": render_question(tokenizer, question),
            "choices": [f"{asked[0]} = {value}." for value in sums],
            "answer": sums.index(right),
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
