"""Names of people and places, made of syllables, and the rule that keeps some of everything out of training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from glm5_ascend.fidelity.evaluation.python_docs import stable_hash

ONSETS = [
    "b", "br", "d", "dr", "f", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p", "pl", "r", "s", "sk", "st",
    "t", "tr", "v", "w", "z",
]  # fmt: skip
VOWELS = ["a", "e", "i", "o", "u", "ai", "ei", "ou"]
CODAS = ["", "", "n", "r", "s", "l", "m", "k"]
WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
REAL_CITIES, REAL_PEOPLE = WORDS["cities"], WORDS["people"]
LETTERS = "aaabccdeeeeefghhiiijklllmnnnnoooprrrsssttttuuvwxyz"
PATTERNS = ("cvcvc", "cvccv", "cvcvcv", "cvccvc", "cvccvcc", "vccvc", "ccvcv", "cccvcccc")  # v: a vowel, c: any letter
HELD_OUT_SHARE = 8


def name_is_held_out(name: str) -> bool:
    """Reserve one name in eight for evaluation."""
    return stable_hash("name:" + name) % HELD_OUT_SHARE == 0


def sum_is_held_out(left: int, sign: str, right: int) -> bool:
    """Reserve one problem in eight for evaluation; a + b and b + a are on the same side."""
    if sign == "+" and left > right:
        left, right = right, left
    return stable_hash(f"sum:{left}{sign}{right}") % HELD_OUT_SHARE == 0


def made_up_name(rng: random.Random) -> str:
    """A capitalised name: two or three syllables, or (one in three) letters in a pattern like "Paris" or "Lombert".

    The patterns bring every token that begins a capitalised word into names: what was never copied cannot be copied.
    """
    if rng.random() < 0.33:
        pattern = rng.choice(PATTERNS)
        return "".join(rng.choice(LETTERS if letter == "c" else "aeiou") for letter in pattern).capitalize()
    count = 2 if rng.random() < 0.7 else 3
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(count)]
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def pick_name(rng: random.Random, held_out: bool, real: list[str]) -> str:
    """One name from one side of the split: a real one in 3 of 10 draws, otherwise made up."""
    while True:
        name = rng.choice(real) if rng.random() < 0.3 else made_up_name(rng)
        if name_is_held_out(name) == held_out:
            return name


def pick_sum(rng: random.Random, held_out: bool) -> tuple[int, str, int]:
    """A sum or a difference >= 0 of two-digit numbers from one side of the split."""
    while True:
        left, right, sign = rng.randint(10, 99), rng.randint(10, 99), rng.choice("+-")
        if sign == "-" and left < right:
            left, right = right, left
        if sum_is_held_out(left, sign, right) == held_out:
            return left, sign, right
