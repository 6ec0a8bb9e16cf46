"""The work that tests/bench.py measures, done in processes of their own; see there how to run it.

    python tests/bench_work.py '{"mode": "time", "build": "lora", "sides": ["ours"], "budget": 3, "options": {…}}'

Every row has a builder: build(side, options) → a callable that does the work once and returns a number on which the
sides must agree. Sides whose name begins with trl run under another interpreter, where this file imports TRL and
nothing of ours: TRL's own functions are called, and nothing of it is copied.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import re
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F


# ── Shapes and inputs ───────────────────────────────────────────────────────────────────────────────────

@dataclass(frozen=True)
class Shape:
    """A Llama: layers L, hidden H, inner I, query and key-value heads, vocabulary V, tied head or not."""
    L: int
    H: int
    I: int
    heads: int
    kv: int
    V: int
    tied: bool = False

    def config(self):
        """As transformers' LlamaConfig; no token of its own ends a text."""
        from transformers import LlamaConfig
        return LlamaConfig(
            num_hidden_layers=self.L, hidden_size=self.H, intermediate_size=self.I, num_attention_heads=self.heads,
            num_key_value_heads=self.kv, vocab_size=self.V, tie_word_embeddings=self.tied, eos_token_id=None,
            bos_token_id=None, pad_token_id=0, max_position_embeddings=4096)


# fit-*: the shapes whose training passes give the constants of SCALING.md; the others check them.
SHAPES = {"fit-a": Shape(8, 512, 512, 8, 4, 1024), "fit-b": Shape(8, 256, 1408, 8, 4, 1024),
          "fit-c": Shape(4, 1024, 2816, 8, 2, 1024), "fit-d": Shape(16, 256, 512, 8, 4, 1024),
          "toy": Shape(3, 128, 320, 4, 4, 719, True), "small-512": Shape(3, 128, 320, 4, 4, 512),
          "small": Shape(3, 128, 320, 4, 4, 32000), "middle": Shape(8, 512, 1408, 8, 4, 8192),
          "llama3-8b": Shape(32, 4096, 14336, 32, 8, 128256), "llama3-70b": Shape(80, 8192, 28672, 64, 8, 128256)}


def random_model(name: str, device="cpu"):
    """A Llama of a named shape, weights drawn from seed 0 on the device itself; float32 on a CPU, else bfloat16."""
    from transformers import LlamaForCausalLM
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if str(device) == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(SHAPES[name].config()).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(before)


def base_model(options: dict):
    """The model of a row: a directory, or a shape with random weights."""
    from model import load_model
    if "model" in options:
        return load_model(options["model"], device=options["device"])[0]
    return random_model(options["shape"], options["device"])


def word_tokenizer(vocabulary: int):
    """One word per id and no other rule: random weights need a tokenizer that can write every id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t3")


def sequences(rows: int, low: int, high: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids, lengths spread evenly over low..high; the special ids 0 to 3 are not drawn."""
    rng = random.Random(seed)
    lengths = [low + round(i * (high - low) / max(1, rows - 1)) for i in range(rows)]
    return [[rng.randrange(4, vocabulary) for _ in range(n)] for n in rng.sample(lengths, rows)]


def logprob_inputs(options: dict):
    """Hidden states [N, H] that want a gradient, head [V, H], targets [N]; float32 on a CPU, else bfloat16."""
    n, h, v, device = (options[key] for key in ("N", "H", "V", "device"))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    draw = torch.Generator(device).manual_seed(0)
    hidden, weight = (torch.randn(rows, h, generator=draw, device=device, dtype=dtype) for rows in (n, v))
    return hidden.requires_grad_(), weight / h**0.5, torch.randint(v, (n,), generator=draw, device=device)


# ── The sides: build(side, options) → a callable that does the work once and returns a number to compare ───

def build_logprobs(side: str, options: dict):
    """Log-probs of N targets and the gradient in the hidden states; the head is frozen, as under LoRA."""
    from sampling import token_logprobs
    hidden, weight, targets = logprob_inputs(options)

    def naive(hidden, weight, targets):
        return F.log_softmax(F.linear(hidden, weight).float(), dim=-1).gather(1, targets[:, None]).squeeze(1)

    def work() -> float:
        hidden.grad = None
        out = (token_logprobs if side == "ours" else naive)(hidden, weight, targets)
        out.sum().backward()
        return float(out.mean())

    return work


def build_decode(side: str, options: dict):
    """Sample exactly `new` tokens for every prompt, at temperature 1 and with no other rule; returns how many."""
    from sampling import generate, pad_batch
    model, new, device = options["loaded"], options["new"], options["device"]
    prompts = sequences(options["batch"], *options["prompts"], model.config.vocab_size, seed=1)
    if side == "copy":              # read and written, so half as many bytes are copied as decoding must read
        source = torch.empty(decoded_bytes(model) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: [target.copy_(source) for _ in range(new)] and options["batch"] * new
    if side == "ours":
        return lambda: sum(map(len, generate(model, prompts, new, temperature=1.0)))
    ids, mask, _, _ = pad_batch(prompts, [[] for _ in prompts], 0, device)
    rules = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, eos_token_id=None,
                 pad_token_id=0, **({"cache_implementation": "static", "disable_compile": True} if side == "static" else {}))
    model.generation_config.eos_token_id = None

    def peer() -> int:
        with torch.no_grad():
            return model.generate(ids, attention_mask=mask, **rules)[:, ids.shape[1]:].numel()

    return peer


def decoded_bytes(model) -> int:
    """Bytes of weights that one decode step must read: all but the rows of an untied input embedding."""
    table = model.get_input_embeddings().weight
    skipped = 0 if table is model.get_output_embeddings().weight else table.nbytes
    return sum(p.nbytes for p in model.parameters()) - skipped


def prepare_ppo(options: dict):
    """Write base, adapter and sequences to options["work"], for both sides to read."""
    from model import add_lora, save_lora
    work = Path(options["work"])
    model = random_model(options["shape"])
    model.save_pretrained(work / "base")
    word_tokenizer(SHAPES[options["shape"]].V).save_pretrained(work / "base")
    torch.manual_seed(1)
    add_lora(model, "policy", 16, 32)
    save_lora(model, "policy", work / "adapter")
    draw = lambda key, seed: sequences(options["batch"], *options[key], SHAPES[options["shape"]].V, seed)
    scores = [random.Random(4).gauss(0, 1) for _ in range(options["batch"])]
    (work / "batch.json").write_text(json.dumps(
        {"prompts": draw("prompts", 2), "responses": draw("responses", 3), "scores": scores}))


def build_ppo(side: str, options: dict):
    """What PPOTrainer.step does, by text2grad.py: old log-probs of both policies and values, advantages, and the PPO epochs."""
    import text2grad as t2g
    from model import ValueHead, load_lora, lora_parameters
    from sampling import pad_batch
    work = Path(options["work"])
    batch = json.loads((work / "batch.json").read_text())
    model = base_model(options | {"model": work / "base"})
    load_lora(model, "policy", work / "adapter")
    value_head = ValueHead(model.config.hidden_size, model.device)
    trained = [*lora_parameters(model, "policy"), *value_head.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0)
    rows = len(batch["prompts"])
    config = t2g.Config(batch_size=rows, minibatch_size=rows, micro_batch_size=options["micro"],
                        ppo_epochs=options["epochs"])
    padded = pad_batch(batch["prompts"], batch["responses"], 0, model.device)
    delta = torch.zeros(padded[3].shape, device=model.device)
    delta[torch.arange(rows), padded[3].sum(1) - 1] = torch.tensor(batch["scores"], device=model.device)

    def step() -> float:
        rollouts = t2g.Rollouts([{}] * rows, [""] * rows, [""] * rows, [[]] * rows, *padded,
                                delta=delta)
        t2g.add_scores(rollouts, model, value_head, config)
        t2g.add_advantages(rollouts, 0.2, config)
        t2g.ppo_update(rollouts, model, value_head, optimizer, config, random.Random(0))
        return float(rollouts.logprobs_old[rollouts.mask.bool()].mean())

    return step


def build_lora(side: str, options: dict):
    """Forward and backward through a model with adapters (r 16) on q and v; the loss is the mean of the last states."""
    from model import add_lora, use_lora
    model = random_model(options["shape"], options["device"])
    if side == "ours":
        parameters, inner = add_lora(model, "policy", 16, 32), model.base_model
        active = partial(use_lora, model, "policy")
    else:
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
        parameters, inner = [p for p in model.parameters() if p.requires_grad], model.base_model.model.model
        active = nullcontext
    ids = torch.tensor(sequences(options["batch"], *options["prompts"], SHAPES[options["shape"]].V, 1)).to(model.device)

    def work() -> float:
        with active():
            loss = inner(ids, use_cache=False).last_hidden_state.float().square().mean()
        loss.backward()
        for p in parameters:
            p.grad = None
        return loss.item()

    return work


def build_trl_ppo(side: str, options: dict):
    """TRL 0.11.3's PPOTrainer.step on the model, adapter and sequences in options["work"]. side: trl-full or trl-k1.

    Returns a callable that makes one step and returns the mean old log-prob of the response tokens.
    """
    from peft import PeftModel
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

    warnings.filterwarnings("ignore")
    work = Path(options["work"])
    batch = json.loads((work / "batch.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(work / "base", torch_dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(work / "adapter"), is_trainable=True)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(adapted)
    torch.nn.init.zeros_(model.v_head.summary.weight)
    torch.nn.init.zeros_(model.v_head.summary.bias)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0}, unk_token="[PAD]")),
                                        pad_token="[PAD]")
    rows = len(batch["prompts"])
    config = PPOConfig(batch_size=rows, mini_batch_size=options["micro"],
                       gradient_accumulation_steps=rows // options["micro"], ppo_epochs=options["epochs"],
                       kl_penalty="full" if side == "trl-full" else "kl", learning_rate=1e-5, max_grad_norm=1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    trainer = PPOTrainer(config, model, None, tokenizer, optimizer=torch.optim.AdamW(trained, lr=1e-5, weight_decay=0))
    prompts, responses = ([torch.tensor(ids) for ids in batch[key]] for key in ("prompts", "responses"))
    scores = [torch.tensor(s) for s in batch["scores"]]

    def step() -> float:
        stats = trainer.step(list(prompts), list(responses), list(scores))
        logprobs = torch.as_tensor(stats["objective/logprobs"])
        spans = [(len(x) - 1, len(x) - 1 + len(y)) for x, y in zip(prompts, responses)]
        return float(torch.cat([row[a:b] for row, (a, b) in zip(logprobs, spans)]).mean())

    return step


def build_trl_logprobs(side: str, options: dict):
    """TRL 1.x's chunked log-probs, forward and backward in the hidden states, at the chunk size of its trainers."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk

    hidden, weight, targets = logprob_inputs(options)

    def work() -> float:
        hidden.grad = None
        out = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, chunk, None, 1.0, ())
        out[0].sum().backward()
        return float(out[0].mean())

    return work


# ── Whole pieces of work that report for themselves ────────────────────────────────────────────────────

def iteration_worker(options: dict) -> dict:
    """One iteration of Algorithm 4 on random weights, after one that warms up: seconds per phase and peak bytes."""
    import text2grad as t2g
    from model import add_lora, checkpoint_activations
    shape, device = SHAPES[options["shape"]], options["device"]
    if device != "cpu":                                  # a 40 GB card, whatever this one holds
        torch.cuda.set_per_process_memory_fraction(min(1.0, 40e9 / torch.cuda.mem_get_info()[1]))
    model, tokenizer = random_model(options["shape"], device), word_tokenizer(shape.V)
    model.generation_config.eos_token_id = None
    for name in ("policy", "reward"):
        add_lora(model, name, 16, 32)
    if options.get("checkpointed"):
        checkpoint_activations(model)
    config = t2g.Config(task="ultrafeedback", batch_size=options["batch"], minibatch_size=options["batch"],
                        max_new_tokens=options["new"], max_critique_tokens=options["new"], ppo_epochs=4,
                        micro_batch_size=options["micro"], iterations=1, learning_rate=1e-5)
    rows = [{"prompt": " ".join(f"t{i}" for i in ids)}
            for ids in sequences(options["batch"], options["new"], options["new"], shape.V, 1)]
    found = one_iteration(model, tokenizer, rows, config, t2g.critique)
    peak = peak_bytes(lambda: found.update(one_iteration(model, tokenizer, rows, config, t2g.critique)), device)
    held = torch.cuda.memory_allocated() if device != "cpu" else sum(p.nbytes for p in model.parameters())
    return {"weights": sum(p.nbytes for p in model.parameters()),
            "seconds": {k.removeprefix("seconds_"): v for k, v in found.items() if k.startswith("seconds_")},
            "peak": torch.cuda.max_memory_reserved() if device != "cpu" else peak + held, "tokens": 2 * options["new"]}


def one_iteration(model, tokenizer, rows, config, critic) -> dict:
    """Algorithm 4 from l.5 to l.33 with one iteration; its metrics."""
    import text2grad as t2g
    with tempfile.TemporaryDirectory() as out:
        t2g.train(model, tokenizer, rows, config, Path(out), critic)
        return json.loads((Path(out) / "metrics.jsonl").read_text())


def asserts_worker(options: dict) -> dict:
    """Two iterations of the toy world with every assert of the scripts timed: seconds in asserts, and in all."""
    import ast
    import importlib.machinery
    spent = []

    class Timed(ast.NodeTransformer):
        def visit_Assert(self, node):                    # an assert that fails ends the run, so no finally is needed
            before, after = ast.parse("_clock.append(-_now())\n_clock.append(_now())").body
            return [ast.copy_location(before, node), node, ast.copy_location(after, node)]

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, name):
            tree = Timed().visit(ast.parse(self.get_data(self.path)))
            return compile(ast.fix_missing_locations(tree), self.path, "exec")

        def exec_module(self, module):
            module._clock, module._now = spent, time.perf_counter
            super().exec_module(module)

    root = Path(__file__).resolve().parent.parent
    hook = importlib.machinery.FileFinder.path_hook((Loader, [".py"]))
    sys.path_hooks.insert(0, lambda path: hook(path) if Path(path) == root else (_ for _ in ()).throw(ImportError))
    sys.path_importer_cache.clear()
    import text2grad as t2g
    import toy
    from experiments.designs import true_critic
    from model import add_lora, load_model
    model, tokenizer = load_model(toy.BASE, device=options["device"])
    add_lora(model, "policy", 16, 32)
    rows, config = toy.rows("train", 64), t2g.Config(iterations=1)
    one_iteration(model, tokenizer, rows, config, true_critic)
    spent.clear()
    whole = seconds(lambda: one_iteration(model, tokenizer, rows, config, true_critic), options["device"])
    return {"asserts": sum(spent), "whole": whole, "number": len(spent) // 2}


def fsdp_worker(options: dict) -> dict:
    """On every rank of torchrun: parameter bytes before and after sharding, and all-gathers in two rollouts."""
    import torch.distributed as dist
    from model import add_lora, gathered, shard
    from sampling import generate
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Gathers(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += "allgather" in str(function)
            return function(*args, **(kwargs or {}))

    dist.init_process_group("gloo" if options["device"] == "cpu" else "nccl")
    if options["device"] != "cpu":
        torch.cuda.set_device(dist.get_rank())
    model = random_model(options["shape"], options["device"])
    add_lora(model, "policy", 16, 32)
    whole = sum(p.nbytes for p in model.parameters())
    shard(model)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    prompts, gathers = sequences(4, 8, 12, SHAPES[options["shape"]].V, dist.get_rank()), []
    for new in (10, 100):
        with Gathers() as seen, gathered(model):
            made = generate(model, prompts, new)
        assert sum(map(len, made)) == len(prompts) * new, "every row must reach its full length"
        gathers.append(seen.count)
    dist.destroy_process_group()
    return {"whole": whole, "held": held, "gathers": gathers}


def footprint_worker(options: dict) -> dict:
    """Bytes of a shape's parameters and, off the meta device, of its cache and of a training pass (SCALING.md)."""
    from model import add_lora, checkpoint_activations, use_lora
    model = random_model(options["shape"], options["device"])
    out = {"parameters": sum(p.nbytes for p in model.parameters())}
    if options["device"] == "meta":
        return out
    add_lora(model, "policy", 16, 32)
    ids = sequences(options["rows"], options["length"], options["length"], SHAPES[options["shape"]].V, 1)
    ids = torch.tensor(ids, device=options["device"])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0                                    # as in training: attention goes the way of padded batches

    def work():
        with use_lora(model, "policy"):
            model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state.square().mean().backward()

    with torch.no_grad():
        cache = model.base_model(ids, use_cache=True).past_key_values
        out["cache"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    del cache
    for key in ("training", "checkpointed"):
        if key == "checkpointed":
            checkpoint_activations(model)
        work()
        out[key] = peak_bytes(work, options["device"])
    return out


def speed_worker(options: dict) -> dict:
    """Seconds of a decode step and of a training pass (body and head, forward and backward) of shapes (SCALING.md).

    runs: [[shape, rows that decode], …]. The shapes take turns, so that a busy machine slows all of them; the least of
    five turns counts. Returns {"step": […], "train": […]} in the order of the runs.
    """
    from model import add_lora, use_lora
    from sampling import generate, head_weight, token_logprobs
    device, works = options["device"], []

    def train(model, ids):
        with use_lora(model, "policy"):
            hidden = model.base_model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        token_logprobs(hidden, head_weight(model), ids.flatten()).sum().backward()

    for shape, batch in options["runs"]:
        model, vocabulary = random_model(shape, device), SHAPES[shape].V
        add_lora(model, "policy", 16, 32)
        prompts = sequences(batch, 16, 16, vocabulary, 1)
        ids = sequences(options["rows"], options["length"], options["length"], vocabulary, 1)
        ids = torch.tensor(ids, device=device)
        works.append((partial(generate, model, prompts, 33), partial(generate, model, prompts, 1),
                      partial(train, model, ids)))
    turns = [[[seconds(work, device) for work in three] for three in works] for _ in range(6)][1:]
    long, short, training = ([min(turn[run][k] for turn in turns) for run in range(len(works))] for k in range(3))
    return {"step": [(a - b) / 32 for a, b in zip(long, short)], "train": training}


# ── Measuring ───────────────────────────────────────────────────────────────────────────────────────────

def peak_bytes(work, device: str) -> int:
    """The most memory that one call holds at once, above what was held before it."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)              # what earlier calls freed must not count as held before
    Path("/proc/self/clear_refs").write_text("5")        # the high-water mark starts again from here
    status = lambda key: int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def seconds(work, device: str) -> float:
    """Wall-clock time of one call, to the end of its work on the device."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def worker(task: dict) -> dict:
    """In a process of its own: measure some sides of a row. Returns {side: {"time", "check"} or {"memory"}}."""
    options, device = task["options"], task["options"]["device"]
    if task["mode"] in WHOLE:
        return WHOLE[task["mode"]](options)
    if task["build"] == "decode":
        options["loaded"] = base_model(options)
    works, out = {}, {}
    for side in task["sides"]:
        works[side] = BUILD[task["build"], side in TRL](side, options)
    for side, work in works.items():
        out[side] = {"check": work(), "time": []}        # the first call also warms up
    if task["mode"] == "memory":
        return {side: {"memory": peak_bytes(work, device)} for side, work in works.items()}
    while sum(sum(result["time"]) for result in out.values()) < task["budget"] * len(works):
        for side, work in works.items():
            out[side]["time"].append(seconds(work, device))
    return out


TRL = ("trl-full", "trl-k1", "trl1")
BUILD = {("logprobs", False): build_logprobs, ("logprobs", True): build_trl_logprobs, ("ppo", False): build_ppo,
         ("ppo", True): build_trl_ppo, ("decode", False): build_decode, ("lora", False): build_lora}
WHOLE = {"prepare": prepare_ppo, "iteration": iteration_worker, "fsdp": fsdp_worker,
         "asserts": asserts_worker, "footprint": footprint_worker,
         "speed": speed_worker}

if __name__ == "__main__":
    result = worker(json.loads(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps(result))
