"""What several test files use: paths, small runs, random rollouts, page readers, processes.

Fixtures are in conftest.py, the fake server is loopback.py. No test file imports another one.
"""

import importlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import traceback
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file

import text2grad
from data import InputError
from reward_model import Judgement
from sampling import pad_batch
from text2grad import Rollouts, add_advantages, add_scores

# SLOW=1 python -m pytest -q tests: more kills, and 100,000 generated replies.
SLOW = bool(os.environ.get("SLOW"))
ROOT = Path(__file__).resolve().parent.parent
often = settings(max_examples=100, deadline=None, derandomize=True)

# Flags of small toy runs: all three phases; phase 3 alone, with the fixture `reward` as R_φ.
SMALL = ["--annotated_rows", 240, "--iterations", 4, "--batch_size", 8, "--minibatch_size", 8,
         "--eval_rows", 8, "--save_every", 2, "--ppo_epochs", 2]
PHASE_3 = ["--iterations", 6, "--batch_size", 8, "--minibatch_size", 4, "--ppo_epochs", 2,
           "--max_new_tokens", 24, "--max_critique_tokens", 100, "--eval_rows", 3,
           "--save_every", 2]


# ── Running the scripts

def run_main(*flags, module=text2grad):
    """Call a script's main in this process, from the repository's root."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [module.__name__, *map(str, flags)])
        module.main()


def error_message(script: str, *flags) -> str:
    """The one-line error of a script's main, called in this process."""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    with pytest.raises((InputError, SystemExit)) as caught:
        run_main(*flags, module=module)
    traceback.clear_frames(caught.tb)             # they hold the lock of the output directory
    message = str(caught.value)
    assert len(message) > 3 and "\n" not in message      # an exit status alone is no message
    return message


def start(ranks, out, *flags, stderr=subprocess.PIPE, script="text2grad.py", settings=()):
    """Start a script under torchrun; returns the process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node", ranks, script, *settings, *flags, "--output_dir", out]
    return subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=stderr, text=True, start_new_session=True)


def finish(process) -> str:
    """Wait for a process that must succeed; returns its standard output."""
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-3000:]
    return output


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# ── Reading what a run writes

def read_jsonl(path):
    """The rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(path):
    """The rows of metrics.jsonl without the fields that measure time."""
    return [{k: v for k, v in row.items() if not k.startswith("seconds")}
            for row in read_jsonl(path)]


def assert_equal_tensors(a, b):
    """Two files hold the same tensors, bit for bit."""
    ours, theirs = load_file(a), load_file(b)
    assert ours.keys() == theirs.keys(), a
    assert all(torch.equal(ours[k], theirs[k]) for k in ours), a


def assert_equal_runs(a, b):
    """Two runs left the same tensors, metrics, samples and result, bit for bit."""
    files = ("policy/adapter_model.safetensors", "value_head.safetensors",
             f"checkpoint-{len(read_jsonl(b / 'metrics.jsonl'))}/tensors.safetensors")
    for file in files:
        assert_equal_tensors(a / file, b / file)
    assert read_metrics(a / "metrics.jsonl") == read_metrics(b / "metrics.jsonl")
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert (a / "result.json").read_bytes() == (b / "result.json").read_bytes()


# ── Random weights and rollouts

def randomise(parameters, scale=0.1):
    """Fill parameters with normal numbers, so that an adapter or a value head has an effect."""
    for p in parameters:
        p.data.normal_(std=scale)


def random_rollouts(copies=1):
    """copies × six prompts and responses of random tokens, with δ on the responses.

    Some of the responses have length 1.
    """
    rng = random.Random(0)
    draw = lambda n: [rng.randrange(2, 640) for _ in range(n)]
    prompts, responses = ([draw(n) for n in lengths * copies]
                          for lengths in ((9, 4, 1, 6, 12, 3), (5, 1, 8, 3, 2, 7)))
    n = len(prompts)
    rollouts = Rollouts([{}] * n, [""] * n, [""] * n, [[]] * n,
                        *pad_batch(prompts, responses))
    rollouts.delta = torch.randint(-1, 2, rollouts.mask.shape) * rollouts.mask.float()
    rollouts.feedback = [Judgement("", []) for _ in range(n)]
    return rollouts


def scored(policy, config, beta=0.1):
    """The fixture `policy` with log-probs, values and advantages: the input of an update."""
    model, head, rollouts = policy
    add_scores(rollouts, model, head, config)
    add_advantages(rollouts, beta, config)
    return model, head, rollouts


def length_critic(rollouts, model, tokenizer, config):
    """A critic that needs no R_φ: δ_1 is the length of the response."""
    return [Judgement("", [float(len(offsets)), *[0.0] * (len(offsets) - 1)])
            for offsets in rollouts.offsets]


# ── Reading HTML pages

HOSTILE = ["</script><img src=x onerror=\"document.title='owned'\">", "<!-- <script>",
           "a\"b'c&amp;<b>", "nul \0 here", "line\u2028para\u2029graph",
           "half \ud83d of a pair", "نص عربي", "👨‍👩‍👧 🏠 é\u0301", "</style></title><b>"]


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

    def all(self, name, **wanted):
        return [(attributes, text) for tag, attributes, text in self.tags
                if tag == name and wanted.items() <= attributes.items()]


def assert_closed(text):
    """The page has no script and loads nothing, and its policy forbids both."""
    page = Page(text)
    names = {tag for tag, *_ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "form", "base"}
    for _, attributes, _ in page.tags:
        assert not {"src", "action", "srcset", "data"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
    (meta, _), = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert meta["content"].startswith("\ndefault-src 'none'; style-src 'unsafe-inline'")
    assert "script-src" not in meta["content"]
    style = "".join(text for _, text in page.all("style"))
    assert "color-scheme: light dark" in style and "@media print" in style
    assert not re.search(r"@import|url\(", text)


# ── Processes of the sandbox

def command_line(path: Path) -> str:
    """The text of /proc/PID/cmdline; empty if the process has ended."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def alive(mark: str, seconds: float = 5.0) -> list[str]:
    """The processes with `mark` in their command that are still alive after `seconds`."""
    end = time.monotonic() + seconds
    while (pids := [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline")
                    if mark in command_line(path)]):
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return pids


def copy_sandbox(folder: Path) -> str:
    """Copy the sandbox's files to a folder whose name identifies its processes."""
    folder.mkdir(parents=True)
    for path in (ROOT / "data.py", *(ROOT / "measures").glob("*.py")):
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(path, place)
    return str(folder / "measures" / "sandbox.py")
