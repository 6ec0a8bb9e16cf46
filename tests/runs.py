"""Small runs of text2grad.py that several test files share."""

import json
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

import text2grad

# All three phases; and phase 3 alone, on the adapter of the fixture `reward`.
SMALL = ["--annotated_rows", 240, "--iterations", 4, "--batch_size", 8, "--minibatch_size", 8,
         "--eval_rows", 8, "--save_every", 2, "--ppo_epochs", 2]
PHASE_3 = ["--iterations", 6, "--batch_size", 8, "--minibatch_size", 4, "--ppo_epochs", 2,
           "--max_new_tokens", 24, "--max_critique_tokens", 100, "--eval_rows", 3,
           "--save_every", 2]


def run_main(*flags, module=text2grad):
    """A script's main in this process, from the repository's root."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [module.__name__, *map(str, flags)])
        module.main()


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(path):
    """The metrics without the fields that measure time."""
    return [{k: v for k, v in row.items() if not k.startswith("seconds")}
            for row in rows_of(path)]


def assert_equal_tensors(a, b):
    """Two files hold the same tensors, bit for bit."""
    ours, theirs = load_file(a), load_file(b)
    assert ours.keys() == theirs.keys(), a
    assert all(torch.equal(ours[k], theirs[k]) for k in ours), a


def assert_equal_runs(a, b):
    """All that two runs leave is the same, bit for bit: tensors, metrics, samples, result."""
    files = ("policy/adapter_model.safetensors", "value_head.safetensors",
             f"checkpoint-{len(rows_of(b / 'metrics.jsonl'))}/tensors.safetensors")
    for file in files:
        assert_equal_tensors(a / file, b / file)
    assert timeless(a / "metrics.jsonl") == timeless(b / "metrics.jsonl")
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert (a / "result.json").read_bytes() == (b / "result.json").read_bytes()
