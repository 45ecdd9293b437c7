"""Generated documents of the offline tasks, and how an answer is judged. The harness calls these by name.

Lengths are counted in words, so that the same documents serve every tokenizer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from turbomill.reports.probes import FILLER, NOUNS, QUESTION, TASK, VERBS

COPIES = 40  # documents of each kind of copying
SUMS = 100  # of arithmetic
KEYS = 8  # of passkey retrieval, at each length and depth
DEPTHS = (10, 50, 90)  # percent of the text that lies before the key
LETTERS = "abcdefghkmnpqrstuvwxyzABCDEFGHKLMN23456789"
CITIES = ("Oslo", "Lima", "Cairo", "Quito", "Turin", "Perth", "Dakar", "Hanoi")
COLOURS = ("blue", "grey", "amber", "green", "violet", "white")


def _dataset(documents: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(documents)}


def _name(rng: random.Random) -> str:
    return f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}_{''.join(rng.choices(LETTERS, k=5))}"


def _shown_once(make: Callable[[random.Random], tuple[str, str]], seed: int) -> list[dict[str, Any]]:
    """COPIES documents, each with one example before it: a base model sees what is wanted."""
    documents = []
    for number in range(COPIES):
        rng = random.Random(1000 * seed + number)
        (example, done), (asked, answer) = make(rng), make(rng)
        documents.append({"context": f"{example}{done}\n\n{asked}", "answer": answer})
    return documents


def _identifiers(rng: random.Random) -> tuple[str, str]:
    names = "\n".join(_name(rng) for _ in range(4))
    return f"Names:\n{names}\nThe same names again, exactly:\n", names


def _edit(rng: random.Random) -> tuple[str, str]:
    old, new = f"total_{rng.randrange(100)}", f"sum_{rng.randrange(100)}"
    function, helper, label = _name(rng), rng.choice(VERBS), "".join(rng.choices(LETTERS, k=4))

    def code(variable: str) -> str:
        return (
            f"def {function}(order):\n    {variable} = order.page + {rng_number}\n"
            f"    return {helper}({variable}, '{label}')"
        )

    rng_number = rng.randrange(1000)
    return f"Code:\n{code(old)}\nThe same code, with {old} renamed to {new}:\n", code(new)


def _quote(rng: random.Random) -> tuple[str, str]:
    sentences = [
        f"On {rng.randrange(1, 29)} May the {rng.choice(COLOURS)} {rng.choice(NOUNS)} carried "
        f"{rng.randrange(100, 1000)} letters from {rng.choice(CITIES)} to {rng.choice(CITIES)}."
        for _ in range(4)
    ]
    wanted = rng.randrange(4)
    text = "\n".join(f"({i + 1}) {sentence}" for i, sentence in enumerate(sentences))
    return f"Text:\n{text}\nSentence ({wanted + 1}), word for word:\n", sentences[wanted]


def copy_identifiers(**_: Any) -> dict[str, Any]:
    """Made-up names, to be repeated."""
    return _dataset(_shown_once(_identifiers, 1))


def copy_edits(**_: Any) -> dict[str, Any]:
    """A function, to be repeated with one variable renamed."""
    return _dataset(_shown_once(_edit, 2))


def copy_quotes(**_: Any) -> dict[str, Any]:
    """One of four sentences, to be quoted."""
    return _dataset(_shown_once(_quote, 3))


def passkey(length: int, **_: Any) -> dict[str, Any]:
    """A five-digit number at each of DEPTHS of about `length` words of filler (arXiv 2305.16300)."""
    filler = FILLER.split()
    documents = []
    for number in range(KEYS):
        for depth in DEPTHS:
            rng = random.Random(f"{length} {depth} {number}")
            key = str(rng.randrange(10_000, 100_000))
            before = length * depth // 100
            words = [filler[i % len(filler)] for i in range(length)]
            hidden = f"The pass key is {key}. Remember it. {key} is the pass key."
            text = " ".join([*words[:before], hidden, *words[before:]])
            documents.append({"context": f"{TASK}{text}{QUESTION}", "answer": key, "depth": depth})
    return _dataset(documents)


def arithmetic(operation: str, **_: Any) -> dict[str, Any]:
    """`operation` (+, - or *) of small numbers, behind three examples."""
    documents = []
    for number in range(SUMS):
        rng = random.Random(f"{operation} {number}")
        lines = [_sum(rng, operation) for _ in range(4)]
        context = "\n".join(f"{asked}{answer}" for asked, answer in lines[:3])
        documents.append({"context": f"{context}\n{lines[3][0]}", "answer": lines[3][1]})
    return _dataset(documents)


def _sum(rng: random.Random, operation: str) -> tuple[str, str]:
    a, b = (rng.randrange(2, 10), rng.randrange(2, 10)) if operation == "*" else rng.sample(range(10, 100), 2)
    if operation == "-" and a < b:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return f"{a} {operation} {b} =", f" {result}"


def judge_copy(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the text is the answer, but for space around it."""
    return {"exact_match": float(results[0].strip() == document["answer"])}


def judge_passkey(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the first number of the text is the key: for all documents, and for those of its depth."""
    found = re.search(r"\d+", results[0])
    right = float(found is not None and found[0] == document["answer"])
    return {"exact_match": right, f"depth_{document['depth']}": right}
