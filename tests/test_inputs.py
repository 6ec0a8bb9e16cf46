"""Mutated inputs: each is refused in one line that names its place, or is read correctly.

`SLOW=1` tries 1,000 rows, 120 rows of feedback, 60 adapters and 60 model directories.
"""

import json
import random
import shutil
from contextlib import suppress

import pytest
import torch
import toy
from annotate import AnnotateConfig, annotation_questions
from data import InputError, ModelError, is_prompt, read_rows
from helpers import ROOT, SLOW, randomise
from model import (add_lora, encode_prompt, load_lora, load_model, lora_parameters,
                   save_lora)
from reward_model import FEEDBACK as FEEDBACK_TASK
from reward_model import encode_rows
from safetensors.torch import load_file, save_file
from sampling import generate

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
            questions = annotation_questions(config)
        except InputError as error:
            message = str(error)
            place = "row " if "the response is empty" in message else "line 2: "
            assert message.startswith(f"{path}, {place}") and "\n" not in message
            assert name in message
            continue
        for question in questions:
            assert question.context["response"].strip()
            assert is_prompt(question.context["prompt"])
        value = (json.loads(line).get(name) if name else None)
        if name in fields_read and value not in (None, "", [], {}):
            assert type(value) is type(row[name]) or is_prompt(value), (name, value)


def test_a_mutated_row_of_feedback_is_named_or_read_correctly(tmp_path, toy_model):
    path = tmp_path / "feedback.jsonl"
    for line, name in mutated_lines(FEEDBACK, 180 if SLOW else 60, "feedback"):
        path.write_bytes(json.dumps(FEEDBACK).encode() + b"\n" + line + b"\n")
        try:
            rows = read_rows(path, task=FEEDBACK_TASK)
        except InputError as error:
            assert str(error).startswith(f"{path}, line 2: ") and "\n" not in str(error)
            assert name in str(error)
            continue
        for row in rows:
            assert is_prompt(row["prompt"])
            texts = [row["response"], row["critique"], *row["good_spans"], *row["poor_spans"]]
            assert all(isinstance(text, str) for text in texts)
        encode_rows(rows, toy_model[1], 512)


# ── Adapters and models

def mutate_tensors(rng, path):
    """Change a safetensors file: its values, names, shapes, or some of its bytes."""
    change = rng.choice(["bytes", "cut", "nan", "drop", "rename", "shape", "bits"])
    if change == "bytes":
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    elif change == "cut":
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    elif change == "bits":
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    else:
        tensors = load_file(path)
        name = rng.choice(sorted(tensors))
        tensor = tensors.pop(name)
        if change == "nan":
            tensors[name] = torch.full_like(tensor, rng.choice([float("nan"), float("inf")]))
        elif change == "rename":
            tensors[f"{name}x"] = tensor
        elif change == "shape":
            tensors[name] = tensor[1:].clone()
        save_file(tensors, path, {"format": "pt"})


def mutate_json(rng, path):
    """Change or remove a value of a JSON file, or some of its bytes."""
    if rng.random() < 0.3:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
        return
    value = json.loads(path.read_text())
    name = rng.choice(sorted(value))
    if rng.random() < 0.4:
        del value[name]
    else:
        value[name] = rng.choice(JUNK)
    path.write_text(json.dumps(value))


def mutate_directory(rng, source, out):
    """A copy of a directory with one file changed, emptied or removed."""
    shutil.copytree(source, out)
    path = rng.choice(sorted(out.iterdir()))
    action = rng.random()
    if action < 0.15:
        path.unlink()
    elif action < 0.25:
        path.write_bytes(b"")
    elif path.suffix == ".safetensors":
        mutate_tensors(rng, path)
    elif path.suffix == ".json":
        mutate_json(rng, path)
    else:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))


def test_a_mutated_adapter_is_refused_or_is_the_saved_one(tmp_path):
    """Settings that only PEFT reads may change."""
    model, _ = load_model(ROOT / "toy" / "base", device="cpu")
    randomise(add_lora(model, "saved", 4, 8, 0.0, ["q_proj", "v_proj"]))
    save_lora(model, "saved", tmp_path / "adapter")
    saved = lora_parameters(model, "saved")
    rng = random.Random(0)
    refused = 0
    for number in range(120 if SLOW else 40):
        out = tmp_path / str(number)
        mutate_directory(rng, tmp_path / "adapter", out)
        try:
            loaded = load_lora(model, str(number), out)
        except ModelError as error:
            assert str(out) in str(error) and "\n" not in str(error)
            refused += 1
            continue
        assert all(torch.equal(x, y) for x, y in zip(loaded, saved, strict=True))
        layer = model.get_submodule("model.layers.0.self_attn.q_proj")
        assert layer.scaling[str(number)] == layer.scaling["saved"]
    assert refused > number / 2


def test_a_mutated_model_directory_is_refused_or_works(tmp_path):
    """What loads has finite weights, all of them from the file, and generates."""
    rng = random.Random(0)
    source = ROOT / "toy" / "base"
    weights = load_file(source / "model.safetensors")
    refused = 0
    for number in range(60 if SLOW else 15):
        out = tmp_path / str(number)
        mutate_directory(rng, source, out)
        try:
            model, tokenizer = load_model(out, device="cpu")
        except ModelError as error:
            assert str(out) in str(error) and "\n" not in str(error)
            refused += 1
            continue
        state = model.state_dict()
        assert all(state[name].isfinite().all() for name in weights)
        with suppress(ModelError):
            prompt = encode_prompt(tokenizer, "A post.")
            assert len(generate(model, [prompt], 3)[0]) <= 3
    assert refused > number / 4
