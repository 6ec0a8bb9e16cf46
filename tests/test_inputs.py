"""Mutated inputs: each is refused in one line that names its place, or is read correctly.

`SLOW=1` tries 1,000 rows, 120 rows of feedback, 60 adapters and 60 model directories.
"""

import json
import random
import re
import shutil
from contextlib import suppress

import pytest
import torch
import toy
from annotate import annotation_questions
from data import InputError, is_prompt, read_rows
from helpers import ROOT, SLOW, randomise
from model import (add_lora, encode_prompt, load_lora, load_model, lora_parameters,
                   save_lora)
from reward_model import FEEDBACK as FEEDBACK_TASK
from reward_model import encode_rows
from safetensors.torch import load_file, save_file
from sampling import generate
from settings import AnnotateConfig

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


def accepted(read, path, *words: str):
    """read(), or None if it is refused in one line with the path and the words."""
    try:
        return read()
    except InputError as error:
        is_unnamed = re.search(": the response is empty;|surrogates not allowed", str(error))
        words = () if is_unnamed else words
        assert all(word in str(error) for word in (str(path), *words))
        assert "\n" not in str(error)
        return None


@pytest.mark.parametrize("task", ROWS)
def test_a_mutated_row_is_named_or_read_correctly(task, tmp_path):
    row, fields_read = ROWS[task]
    path = tmp_path / "rows.jsonl"
    config = AnnotateConfig(task=task, annotator_function="toy:critique")
    for line, name in mutated_lines(row, 300 if SLOW else 60, task):
        path.write_bytes(json.dumps(row).encode() + b"\n" + line + b"\n")
        questions = accepted(lambda: annotation_questions(config, path), path,
                             ", line 2: ",
                             name) or []
        for question in questions:
            assert question.context["response"].strip()
            assert is_prompt(question.context["prompt"])
        value = json.loads(line).get(name) if questions and name else None
        if name in fields_read and value not in (None, "", [], {}):
            assert type(value) is type(row[name]) or is_prompt(value), (name, value)


def test_a_mutated_row_of_feedback_is_named_or_read_correctly(tmp_path, toy_model):
    path = tmp_path / "feedback.jsonl"
    for line, name in mutated_lines(FEEDBACK, 180 if SLOW else 60, "feedback"):
        path.write_bytes(json.dumps(FEEDBACK).encode() + b"\n" + line + b"\n")
        rows = accepted(lambda: read_rows(path, task=FEEDBACK_TASK), path, ", line 2: ", name)
        for row in rows or []:
            assert is_prompt(row["prompt"])
            texts = [row["response"], row["critique"], *row["good_spans"], *row["poor_spans"]]
            assert all(isinstance(text, str) for text in texts)
        encode_rows(rows or [], toy_model[1], 512)


# ── Adapters and models

def mutate_file(rng, path):
    """Change some bytes of a file, or a value, name or shape in it; or empty or remove it."""
    kind = rng.choice(["bytes", "cut", "content", "content", "empty", "absent"])
    if kind == "absent":
        path.unlink()
    elif kind == "content" and path.suffix == ".safetensors":
        tensors = load_file(path)
        name = rng.choice(sorted(tensors))
        tensor = tensors.pop(name)
        tensors |= rng.choice([{}, {f"{name}x": tensor}, {name: tensor[1:].clone()}])
        save_file(tensors, path, {"format": "pt"})
    elif kind == "content" and path.suffix == ".json":
        value = json.loads(path.read_text())
        name = rng.choice(sorted(value))
        del value[name]
        path.write_text(json.dumps(value | rng.choice([{}, {name: rng.choice(JUNK)}])))
    else:
        data = path.read_bytes()
        cut = {"cut": rng.randrange(len(data)), "empty": 0}.get(kind)
        path.write_bytes(mutate_bytes(rng, data) if cut is None else data[:cut])


def results(load, source, folder, count: int) -> list:
    """load() of mutated copies of a directory; None for those refused in one line."""
    rng = random.Random(0)
    loaded = []
    for number in range(count):
        out = shutil.copytree(source, folder / str(number))
        mutate_file(rng, rng.choice(sorted(out.iterdir())))
        loaded.append(accepted(lambda out=out: load(out), out))
    return loaded


def test_a_mutated_adapter_is_refused_or_is_the_saved_one(tmp_path):
    """Settings that only PEFT reads may change."""
    model, _ = load_model(ROOT / "toy" / "base", device="cpu")
    randomise(add_lora(model, "saved", 4, 8, 0.0, ["q_proj", "v_proj"]))
    save_lora(model, "saved", tmp_path / "adapter")
    saved = lora_parameters(model, "saved")
    scaling = model.get_submodule("model.layers.0.self_attn.q_proj").scaling
    adapters = results(lambda path: load_lora(model, path.name, path), tmp_path / "adapter",
                       tmp_path, 120 if SLOW else 40)
    for number, adapter in enumerate(adapters):
        if adapter:
            assert all(torch.equal(x, y) for x, y in zip(adapter, saved, strict=True))
            assert scaling[str(number)] == scaling["saved"]
    assert adapters.count(None) > len(adapters) / 2


def test_a_mutated_model_directory_is_refused_or_works(tmp_path):
    """What loads has finite weights, all of them from the file, and generates."""
    source = ROOT / "toy" / "base"
    weights = load_file(source / "model.safetensors")
    models = results(lambda path: load_model(path, device="cpu"), source, tmp_path,
                     60 if SLOW else 15)
    for model, tokenizer in filter(None, models):
        state = model.state_dict()
        assert all(state[name].isfinite().all() for name in weights)
        with suppress(InputError):
            prompt = encode_prompt(tokenizer, "A post.")
            assert len(generate(model, [prompt], 3)[0]) <= 3
    assert models.count(None) > len(models) / 4
