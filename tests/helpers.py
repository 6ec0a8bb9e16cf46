"""Helpers of several test files: paths, small runs, random rollouts, HTML pages.

Fixtures are in conftest.py and the fake server is in loopback.py. No test file imports another.
"""

import importlib
import json
import os
import random
import shutil
import socket
import sys
import traceback
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import transformers
import text2grad
import toy
from hypothesis import settings
from safetensors.torch import load_file

from annotate import Review, parse_feedback
from data import InputError
from sampling import pad_batch
from policy import Rollouts, add_advantages, add_scores
from settings import Config, parse_flags

# `SLOW=1 python -m pytest -q tests` generates 100,000 replies and tries more published rows.
SLOW = bool(os.environ.get("SLOW"))
ROOT = Path(__file__).resolve().parent.parent
needs_posix = pytest.mark.skipif(os.name == "nt", reason="uses signals or forks of POSIX")
often = settings(max_examples=100, deadline=None, derandomize=True)
ADAMW = 0.0, (0.9, 0.999), 1e-8                          # weight decay, betas, ε

# Flags of two small toy runs: all three phases, and phase 3 with the fixture `reward` as R_φ.
SMALL = ["--annotated_rows", 120, "--iterations", 4, "--batch_size", 8, "--minibatch_size", 8,
         "--eval_rows", 8, "--ppo_epochs", 2]
# A pass takes one row or two. The learning rate is low, as AdamW turns rounding errors of small
# gradients into steps of its size.
PHASE_3 = ["--iterations", 4, "--batch_size", 8, "--minibatch_size", 4, "--ppo_epochs", 2,
           "--max_new_tokens", 24, "--max_critique_tokens", 100, "--eval_rows", 3,
           "--micro_batch_tokens", 150, "--learning_rate", 2e-4]


# ── Running the scripts

def toy_config(**changes) -> Config:
    """The settings of the toy task with some changes."""
    return replace(parse_flags(Config, argv=[]), **changes)


def run_main(*flags, module=text2grad):
    """Call a script's main in this process, from the repository's root."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [module.__name__, *map(str, flags)])
        if module.__name__ == "text2grad":           # perhaps another import of it
            module.main(module.parse_flags(module.Config, module.__doc__))
        else:
            module.main()


def noise(seed, *shape):
    """Normal numbers in float64, so that rounding errors are negligible."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed),
                       dtype=torch.float64)


def error_message(script: str, *flags) -> str:
    """The one-line error of a script's main, called in this process."""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    with pytest.raises((InputError, SystemExit)) as error:
        run_main(*flags, module=module)
    traceback.clear_frames(error.tb)             # frames hold the output directory's lock
    message = str(error.value)
    assert len(message) > 3 and "\n" not in message      # a bare exit status is too short
    return message


def refused(match, call, *arguments, **options) -> str:
    """The InputError of one line that the call raises; `match` is a part of it."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert match in message and "\n" not in message
    return message


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# ── Reading the files of a run

def read_jsonl(path):
    """The rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_metrics(path):
    """The rows of metrics.jsonl without the timing fields."""
    return [{k: v for k, v in row.items() if not k.startswith("seconds")}
            for row in read_jsonl(path)]


def assert_equal_tensors(a, b):
    """Check that two files hold the same tensors, bit for bit."""
    tensors_a, tensors_b = load_file(a), load_file(b)
    assert tensors_a.keys() == tensors_b.keys(), a
    assert all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a), a


def assert_equal_runs(a, b):
    """Check that two runs wrote the same tensors, metrics, samples and result, bit for bit."""
    files = ("policy/adapter_model.safetensors", "value_head.safetensors",
             f"checkpoint-{len(read_jsonl(b / 'metrics.jsonl')):06d}.safetensors")
    for file in files:
        assert_equal_tensors(a / file, b / file)
    assert read_metrics(a / "metrics.jsonl") == read_metrics(b / "metrics.jsonl")
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert (a / "result.json").read_bytes() == (b / "result.json").read_bytes()


def flip_bit(path, bit: int):
    """Change one bit of a file in place; a negative bit counts from the end."""
    with open(path, "r+b") as file:
        place = file.seek(bit // 8, os.SEEK_END if bit < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit % 8]))


# ── Small models and their prompts

TEXTS = ["Once upon a time", "The dog", "He", "One day, a little cat saw", "Tom was sad. He",
         "Lily and her mom went to the park to play with a big red ball"]
IDS = [5, 9, 77, 300, 12, 8, 99, 440]


def save_tiny(folder, kind="Llama", **options):
    """Save a tiny random model with the toy tokenizer; return its directory."""
    sizes = dict(vocab_size=960, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                 initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "toy" / "base" / name, folder)
    return folder


def prompts_of(tokenizer):
    """Six prompts of unequal length."""
    return [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]


@torch.no_grad()
def logits_of(model, ids=IDS):
    return model(torch.tensor([ids])).logits[0]


# ── Random weights and rollouts

def randomise(parameters, scale=0.1):
    """Fill parameters with normal noise, so that an adapter or value head is not zero."""
    for p in parameters:
        p.data.normal_(std=scale)


def random_rollouts():
    """Six rollouts of random tokens with random δ; some responses have one token."""
    rng = random.Random(0)
    draw = lambda n: [rng.randrange(2, 640) for _ in range(n)]
    prompts = [draw(n) for n in (9, 4, 1, 6, 12, 3)]
    responses = [draw(n) for n in (5, 1, 8, 3, 2, 7)]
    rollouts = Rollouts([{}] * 6, [""] * 6, [""] * 6, [[]] * 6, *pad_batch(prompts, responses),
                        task=toy.TASK)
    rollouts.delta = torch.randint(-1, 2, rollouts.mask.shape) * rollouts.mask.float()
    rollouts.reviews = [Review("", []) for _ in range(6)]
    return rollouts


def scored(policy, config, beta=0.1):
    """The fixture `policy` with log-probs, values and advantages, as a PPO update needs it."""
    model, head, rollouts = policy
    add_scores(rollouts, model, head, config)
    add_advantages(rollouts, beta, config)
    return model, head, rollouts


def toy_feedback(count: int) -> list[dict]:
    """Rows of feedback.jsonl: drafts of toy summaries with their critiques."""
    rng = random.Random(0)
    rows = []
    for row in toy.rows("train", count):
        draft = toy.write_draft(row["facts"], rng)
        feedback = parse_feedback(toy.critique(row, draft))
        rows.append({"id": row["id"], "task": "toy", "prompt": toy.prompt(row),
                     "response": draft, **asdict(feedback)})
    return rows


# ── Reading HTML pages

class Page(HTMLParser):
    """The tags of a page with their attributes and text, in reading order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append([tag, dict(attributes), ""])
        self.open.append(self.tags[-1])

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for tag in self.open[-1:]:
            tag[2] += data

    def all(self, name, **expected):
        return [(attributes, text) for tag, attributes, text in self.tags
                if tag == name and expected.items() <= attributes.items()]
