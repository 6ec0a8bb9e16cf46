"""Mutated inputs: each is refused in one line that names its place, or is read correctly.

`SLOW=1` tries 1,000 rows, 120 rows of feedback, 60 adapters and 60 model directories.
"""

import json
import random
import shutil

import pytest
import torch
import toy
from annotate import AnnotateConfig, annotation_questions
from data import InputError, get_task, is_prompt, is_text, is_texts, read_rows
from helpers import ROOT, SLOW
from model import add_lora, load_lora, load_model, save_lora
from reward_model import FEEDBACK_FIELDS, encode_rows
from safetensors.torch import load_file, save_file

JUNK = [None, 7, -1.5, True, [], {}, "", " ", ["a"], [7], {"a": 1}, "\ud83d half", [["a"]],
        {"role": "user"}, [{"role": "user"}], [{"role": 1, "content": "x"}], ["\ud800"]]
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
# Task → a row that fits it, and the fields that a request reads.
ROWS = {
    "slf5k": ({"id": "a", "title": "A loss", "post": "We lost a dog.", "upvotes": 3,
               "generated_summary_for_feedback": "A dog is lost."},
              ["title", "post", "generated_summary_for_feedback"]),
    "ultrafeedback": ({"prompt_id": "p", "prompt": "Why?", "chosen": CHAT, "score": 4.0,
                       "rejected": CHAT}, ["prompt", "chosen", "rejected"]),
    "kodcode": ({"question_id": "q", "question": "Add.", "test": "assert add(1, 1) == 2",
                 "trials": {"t": {"solution_code": "def add(a, b):\n    return a + b",
                                  "test_result": "passed"}}}, ["question", "trials"]),
    "toy": ({**toy.rows("train", 1)[0], "response": "A summary."}, ["post", "response"]),
}
FEEDBACK = {"id": "a", "prompt": "Why?", "response": "Because it is.", "critique": "Good.",
            "good_spans": ["it is"], "poor_spans": [], "usage": {}, "usd": None}


def mutate_bytes(rng, line: bytes) -> bytes:
    """A line with a few bytes changed, removed or repeated."""
    data = bytearray(line)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data))
        data[place:place + rng.randrange(0, 3)] = rng.randbytes(rng.randrange(0, 3))
    return bytes(data)


def mutated_lines(row: dict, count: int, seed) -> list[tuple[bytes, str]]:
    """(line, changed field or "") of `count` mutations of a row."""
    rng = random.Random(seed)
    lines = []
    for name in row:
        lines.append((json.dumps({k: v for k, v in row.items() if k != name}).encode(), name))
        lines += [(json.dumps(row | {name: value}).encode(), name) for value in JUNK]
    rng.shuffle(lines)
    while len(lines) < count:
        lines.append((mutate_bytes(rng, json.dumps(row).encode()), ""))
    return lines[:count]


@pytest.mark.parametrize("task", ROWS)
def test_a_mutated_row_is_named_or_read_correctly(task, tmp_path):
    row, fields_read = ROWS[task]
    path = tmp_path / "rows.jsonl"
    config = AnnotateConfig(task=task, data=str(path), output="x", dry_run=True)
    for line, name in mutated_lines(row, 300 if SLOW else 60, task):
        path.write_bytes(json.dumps(row).encode() + b"\n" + line + b"\n")
        try:
            questions = list(annotation_questions(config))
        except InputError as error:
            assert str(error).startswith(f"{path}, line 2: ") and "\n" not in str(error)
            assert name in str(error)
            continue
        for question in questions:
            assert is_text(question.context["response"]) and question.context["response"].strip()
            assert is_prompt(question.context["prompt"])
        value = (json.loads(line).get(name) if name else None)
        if name in fields_read and value not in (None, "", [], {}):
            assert type(value) is type(row[name]) or is_prompt(value), (name, value)


def test_a_mutated_row_of_feedback_is_named_or_read_correctly(tmp_path, toy_model):
    path = tmp_path / "feedback.jsonl"
    for line, name in mutated_lines(FEEDBACK, 180 if SLOW else 60, "feedback"):
        path.write_bytes(json.dumps(FEEDBACK).encode() + b"\n" + line + b"\n")
        try:
            rows = read_rows(path, FEEDBACK_FIELDS)
        except InputError as error:
            assert str(error).startswith(f"{path}, line 2: ") and "\n" not in str(error)
            assert name in str(error)
            continue
        for row in rows:
            assert is_prompt(row["prompt"]) and is_text(row["response"] + row["critique"])
            assert is_texts(row["good_spans"]) and is_texts(row["poor_spans"])
        encode_rows(rows, toy_model[1], 512)
