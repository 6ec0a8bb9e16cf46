"""The worker processes of bench/bench.py, which describes the method.

    python bench/bench_work.py '{"mode": "iteration", "options": {…}}'     # once, from JSON
    python bench/bench_work.py                                   # tasks from stdin, a line each

A builder makes one side of a row: build(side, options) → a callable, warm already, that does
the work once and returns a number on which the sides must agree. Sides whose names begin with
trl run under another interpreter: TRL's own functions are called, nothing of TRL is copied.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


# ── Shapes and inputs

@dataclass(frozen=True)
class Shape:
    """A Llama: layers, hidden, inner, query and key-value heads, vocabulary, tied head."""
    L: int
    H: int
    I: int
    heads: int
    kv: int
    V: int
    tied: bool = False

    def config(self):
        """The shape as a LlamaConfig without an EOS token."""
        from transformers import LlamaConfig
        return LlamaConfig(
            num_hidden_layers=self.L, hidden_size=self.H, intermediate_size=self.I,
            num_attention_heads=self.heads, num_key_value_heads=self.kv, vocab_size=self.V,
            tie_word_embeddings=self.tied, eos_token_id=None, bos_token_id=None,
            pad_token_id=0, max_position_embeddings=4096)


SHAPES = {
    "toy": Shape(3, 128, 320, 4, 4, 719, True), "small": Shape(3, 128, 320, 4, 4, 32000),
    "middle": Shape(8, 512, 1408, 8, 4, 8192),
    "llama3-1b": Shape(16, 2048, 8192, 32, 8, 128256, True),
    "llama3-3b": Shape(28, 3072, 8192, 24, 8, 128256, True),
    "llama3-8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": Shape(80, 8192, 28672, 64, 8, 128256)}


def random_model(shape: Shape, device="cpu"):
    """A Llama with weights drawn from seed 0 on the device: float32 on a CPU, else bfloat16."""
    from transformers import LlamaForCausalLM
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if str(device) == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(shape.config()).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(before)


def base_model(options: dict):
    """The model of a case: a directory, or random weights of a shape with an optional V."""
    from model import load_model
    if "model" in options:
        return load_model(options["model"], device=options["device"])[0]
    shape = SHAPES[options["shape"]]
    return random_model(replace(shape, V=options.get("V", shape.V)), options["device"])


def word_tokenizer(vocabulary: int):
    """One word per id: random weights need a tokenizer that can write every id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    ids = {f"t{i}": i for i in range(vocabulary)}
    words = Tokenizer(models.WordLevel(ids, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1",
                                   unk_token="t3")


def sequences(rows: int, low: int, high: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random ids without the special ids 0 to 3; lengths are spread evenly over low..high."""
    rng = random.Random(seed)
    lengths = [low + round(i * (high - low) / max(1, rows - 1)) for i in range(rows)]
    return [[rng.randrange(4, vocabulary) for _ in range(n)] for n in rng.sample(lengths, rows)]


@lru_cache(1)
def random_head(v: int, h: int, device: str):
    """A random head [V, H], cached because drawing a large one takes as long as a case."""
    draw = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return torch.randn(v, h, generator=draw, device=device, dtype=dtype).div_(h**0.5)


def logprob_inputs(options: dict):
    """Hidden states [N, H] that require a gradient, head [V, H], targets [N]."""
    n, h, v, device = (options[key] for key in ("N", "H", "V", "device"))
    weight, draw = random_head(v, h, device), torch.Generator(device).manual_seed(1)
    hidden = torch.randn(n, h, generator=draw, device=device, dtype=weight.dtype)
    return hidden.requires_grad_(), weight, torch.randint(v, (n,), generator=draw,
                                                          device=device)


def warmed(work):
    """Call the function once, so that one-time loading is done, and return it."""
    work()
    return work


def count_calls(owner, name: str) -> list:
    """Patch owner.name to record its calls; returns the list that grows with each call."""
    calls, method = [], getattr(owner, name)

    def counted(*args, **options):
        calls.append(None)
        return method(*args, **options)

    setattr(owner, name, counted)
    return calls


# ── The sides

def build_logprobs(side: str, options: dict):
    """Log-probs of N targets and the gradient in the hidden states; the head is frozen.

    "products" is what no side can leave out: h Wᵀ, and the gradient's pᵀW.
    """
    inputs = logprob_inputs(options)

    def products(hidden, weight, _):
        from sampling import ROWS, _tiles
        for h in hidden.detach().split(ROWS):
            for tile in _tiles(len(h), weight):
                (h @ weight[tile].T) @ weight[tile]

    def naive(hidden, weight, targets):
        logits = F.linear(hidden, weight).float()
        return F.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)

    def chunked(hidden, weight, targets):
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, chunk, None,
                                            1.0, ())[0]

    if side == "products":
        return warmed(partial(products, *inputs))
    if side == "ours":
        from sampling import token_logprobs as function
    else:
        function = {"naive": naive, "trl1": chunked}[side]

    def work(hidden, weight, targets) -> float:
        hidden.grad = None
        out = function(hidden, weight, targets)
        out.sum().backward()
        return float(out.detach().mean())

    hidden, weight, targets = inputs             # few rows: a call may take half a minute
    work(hidden.detach()[:32].requires_grad_(), weight, targets[:32])
    return partial(work, *inputs)


def build_decode(side: str, options: dict):
    """Sample exactly `new` tokens per prompt at T = 1 under an adapter; returns how many."""
    import sampling
    from model import add_lora, lora_parameters, use_lora
    from sampling import generate, pad_batch
    model, new, device = base_model(options), options["new"], options["device"]
    prompts = sequences(options["batch"], *options["prompts"], model.config.vocab_size, seed=1)
    if side == "copy":    # copies half of the bytes that decoding reads, so equal traffic
        table = model.get_input_embeddings().weight
        tied = table is model.get_output_embeddings().weight
        read = sum(p.nbytes for p in model.parameters()) - (0 if tied else table.nbytes)
        source = torch.empty(read // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return warmed(lambda: len([target.copy_(source) for _ in range(new)]) * len(prompts))
    if side in ("ours", "eager"):
        add_lora(model, "policy", 16, 32)
        for p in lora_parameters(model, "policy"):
            torch.nn.init.normal_(p, std=0.02)

        captures = count_calls(sampling.Decoder, "captured_step")

        def ours() -> int:
            captures.clear()
            with use_lora(model, "policy", merge=True):
                made = generate(model, prompts, new, 1.0, cuda_graph=side == "ours")
            ours.note = f"{len(captures)} captures" if captures else ""
            return sum(map(len, made))

        return warmed(ours)
    from peft import LoraConfig, get_peft_model
    model.generation_config.eos_token_id = None
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, init_lora_weights=False,
                                             target_modules=["q_proj", "v_proj"]))
    model = model.merge_and_unload() if side == "merged" else model
    ids, mask, *_ = pad_batch(prompts, [[] for _ in prompts], device)
    rules = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new,
                 eos_token_id=None, pad_token_id=0)
    if side == "static":                              # on CUDA transformers compiles for it
        rules["cache_implementation"] = "static"

    @torch.no_grad()
    def peer() -> int:
        made = model.generate(input_ids=ids, attention_mask=mask, **rules)
        return made[:, ids.shape[1]:].numel()

    return warmed(peer)


def ppo_batch(options: dict, vocabulary: int):
    """Prompts, responses and scores, equal for both sides because of fixed seeds."""
    prompts, responses = (sequences(options["batch"], *options[key], vocabulary, seed)
                          for key, seed in (("prompts", 2), ("responses", 3)))
    rng = random.Random(4)
    return prompts, responses, [rng.gauss(0, 1) for _ in prompts]


def build_ppo(side: str, options: dict):
    """The work of PPOTrainer.step in policy.py: old log-probs of both policies, values,
    advantages, PPO epochs. Saves base and adapter in options["work"] for TRL."""
    import policy
    from model import ValueHead, add_lora, save_lora
    from sampling import pad_batch
    model = base_model(options)
    V, H = model.config.vocab_size, model.config.hidden_size
    work = Path(options["work"]) if "work" in options else None
    if work:
        model.save_pretrained(work / "base")
    torch.manual_seed(1)
    trained = add_lora(model, "policy", 16, 32)
    if work:
        save_lora(model, "policy", work / "adapter")
    value_head = ValueHead(H, model.device)
    optimizer = torch.optim.AdamW([*trained, *value_head.parameters()], lr=1e-5,
                                  weight_decay=0, fused=True)
    prompts, responses, scores = ppo_batch(options, V)
    rows = len(prompts)
    longest = max(len(x) + len(y) for x, y in zip(prompts, responses))
    config = policy.PolicyConfig(batch_size=rows, minibatch_size=rows,
                                 ppo_epochs=options["epochs"],
                                 micro_batch_tokens=options["micro"] * longest)
    padded = pad_batch(prompts, responses, model.device)
    delta = torch.zeros(padded[3].shape, device=model.device)
    ends = padded[3].sum(1) - 1
    delta[torch.arange(rows), ends] = torch.tensor(scores, device=model.device)

    def step() -> float:
        texts = [""] * rows
        rollouts = policy.Rollouts([{}] * rows, texts, texts, [[]] * rows, *padded, delta=delta)
        policy.add_scores(rollouts, model, value_head, config)
        policy.add_advantages(rollouts, 0.2, config)
        policy.ppo_update(rollouts, model, value_head, optimizer, config, random.Random(0))
        return float(rollouts.logprobs_old[rollouts.mask.bool()].mean())

    return warmed(step)


def build_trl_ppo(side: str, options: dict):
    """TRL 0.11.3's PPOTrainer.step on the base and adapter in options["work"]."""
    from peft import PeftModel
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

    warnings.filterwarnings("ignore")
    work, micro = Path(options["work"]), options["micro"]
    base = AutoModelForCausalLM.from_pretrained(work / "base", torch_dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(work / "adapter"), is_trainable=True)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(adapted)
    torch.nn.init.zeros_(model.v_head.summary.weight)
    torch.nn.init.zeros_(model.v_head.summary.bias)
    words = Tokenizer(WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    prompts, responses, scores = ppo_batch(options, base.config.vocab_size)
    rows = len(prompts)
    config = PPOConfig(batch_size=rows, mini_batch_size=micro, ppo_epochs=options["epochs"],
                       gradient_accumulation_steps=rows // micro, learning_rate=1e-5,
                       kl_penalty="full" if side == "trl-full" else "kl", max_grad_norm=1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0, fused=True)
    trainer = PPOTrainer(config, model, None, tokenizer, optimizer=optimizer)
    prompts, responses = ([torch.tensor(x) for x in part] for part in (prompts, responses))

    def step() -> float:
        given = [torch.tensor(score) for score in scores]
        stats = trainer.step(list(prompts), list(responses), given)
        logprobs = torch.as_tensor(stats["objective/logprobs"])
        spans = [(len(x) - 1, len(x) - 1 + len(y)) for x, y in zip(prompts, responses)]
        return float(torch.cat([row[a:b] for row, (a, b) in zip(logprobs, spans)]).mean())

    return warmed(step)


def build_lora(side: str, options: dict):
    """Forward and backward with adapters (r 16) on q and v; the mean square of the states."""
    from model import add_lora, use_lora
    model = base_model(options)
    ids = sequences(options["batch"], *options["prompts"], model.config.vocab_size, 1)
    ids = torch.tensor(ids, device=model.device)
    if side == "ours":
        parameters, inner = add_lora(model, "policy", 16, 32), model.base_model
        active = partial(use_lora, model, "policy")
    else:
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32,
                                                 target_modules=["q_proj", "v_proj"]))
        parameters = [p for p in model.parameters() if p.requires_grad]
        inner, active = model.base_model.model.model, nullcontext

    def work() -> float:
        with active():
            loss = inner(ids, use_cache=False).last_hidden_state.float().square().mean()
        loss.backward()
        for p in parameters:
            p.grad = None
        return loss.item()

    return warmed(work)


# ── Whole pieces of work: for each of their rows {kind: [ours, peer's], "note"}; a kind is
# seconds (a list of rounds each), bytes or numbers

def growth_worker(options: dict) -> list[dict]:
    """Run the work at several sizes; compare the last cost with linear growth of the first."""
    times, points = {}, options["points"]
    keep_memory()
    works = {n: BUILD[options["build"]]("ours", options | {options["key"]: x})
             for n, x in points}
    for _ in range(options["rounds"]):
        for n, work in works.items():
            times.setdefault(n, []).append(min(timed(work, 0.3, options["device"])))
    first, last = points[0][0], points[-1][0]
    linear = [t * last / first for t in times[first]]
    note = ", ".join(f"{n:,}: {min(t) * 1e3:.3g} ms" for n, t in times.items())
    return [{"seconds": [times[last], linear], "note": note}]


def iteration_worker(options: dict) -> list[dict]:
    """Algorithm 4 on random weights, one iteration to warm up: with feedback and without it,
    the peak beside the weights, or the card that options["card"] makes of this one; rollouts
    and critiques with the decode step captured and not."""
    import policy
    import reward_model
    from model import add_lora
    from settings import Config
    device, new, batch = (options[key] for key in ("device", "new", "batch"))
    if card := options.get("card"):
        whole = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, card / whole))
    model = base_model(options)
    tokenizer = word_tokenizer(V := model.config.vocab_size)
    for name in ("policy", "reward"):
        add_lora(model, name, 16, 32)
    config = Config(
        task="ultrafeedback", batch_size=batch, minibatch_size=batch, ppo_epochs=4,
        max_new_tokens=new, max_critique_tokens=new,
        iterations=1 + options["rounds"], learning_rate=1e-5)
    rows = [{"prompt": " ".join(f"t{i}" for i in ids)}
            for ids in sequences(batch, new, new, V, 1)]
    phases = "rollout", "critique", "score", "update"

    def run() -> list[list[float]]:
        steps = train(model, tokenizer, rows, config, policy.reward_model_critic)[1:]
        return [[step[f"seconds_{phase}"] for phase in phases] for step in steps]

    weights = sum(p.nbytes for p in model.parameters())
    first = partial(train, model, tokenizer, rows, replace(config, iterations=1),
                    policy.reward_model_critic)
    peak = peak_bytes(first, device)
    peak += weights if device == "cpu" else torch.cuda.memory_allocated()
    keep_memory()
    steps = run()
    total, bare = [sum(step) for step in steps], [sum(step) - step[1] for step in steps]
    best = min(steps, key=sum)
    note = ", ".join(f"{phase} {x:.3g} s" for phase, x in zip(phases, best))
    note += f"; feedback is {best[1] / sum(best):.0%} of it"
    for module in (policy, reward_model):
        module.generate = partial(module.generate, cuda_graph=False)
    eager = run() if options.get("eager") else steps
    drawing = [[sum(step[:2]) for step in both] for both in (steps, eager)]
    return [{"seconds": [total, bare], "note": note}, {"bytes": [peak, card or weights]},
            {"seconds": drawing}]


def train(model, tokenizer, rows, config, critic) -> list[dict]:
    """Algorithm 4 from l.5 to l.33; the metrics of its iterations."""
    import policy
    with tempfile.TemporaryDirectory() as out:
        policy.train(model, tokenizer, rows, config, Path(out), critic)
        return [json.loads(line) for line in open(Path(out, "metrics.jsonl"))]


def asserts_worker(options: dict) -> list[dict]:
    """The time of all asserts in an iteration of the toy world, and of the whole iteration."""
    import ast
    import builtins
    from importlib.machinery import SourceFileLoader
    builtins._clock, builtins._now = spent, _ = [], time.perf_counter
    plain = SourceFileLoader.get_code

    class Timed(ast.NodeTransformer):
        def visit_Assert(self, node):                    # a failing assert would end the run
            before, after = ast.parse("_clock.append(-_now())\n_clock.append(_now())").body
            return [ast.copy_location(before, node), node, ast.copy_location(after, node)]

    def get_code(loader, name):
        if Path(loader.path).parent != ROOT:
            return plain(loader, name)
        tree = Timed().visit(ast.parse(loader.get_data(loader.path)))
        return compile(ast.fix_missing_locations(tree), loader.path, "exec")

    SourceFileLoader.get_code = get_code
    import toy
    from experiments.designs import true_critic
    from model import add_lora, load_model
    from settings import Config, parse_flags
    model, tokenizer = load_model(toy.BASE, device=options["device"])
    add_lora(model, "policy", 16, 32)
    config = parse_flags(Config, argv=["--iterations", "1"])
    work = partial(train, model, tokenizer, toy.rows("train", 64), config, true_critic)
    keep_memory()
    work()
    spent.clear()
    whole = seconds(work, options["device"])
    return [{"seconds": [[sum(spent)], [whole]], "note": f"{len(spent) // 2} asserts"}]


def fsdp_worker(options: dict) -> list[dict]:
    """On each rank of torchrun: parameter bytes with and without sharding, and all-gathers."""
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
    model = base_model(options)
    add_lora(model, "policy", 16, 32)
    whole = sum(p.nbytes for p in model.parameters())
    shard(model, options["device"])
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    prompts, counts = sequences(4, 8, 12, model.config.vocab_size, dist.get_rank()), []
    for new in (100, 10):
        with Gathers() as seen, gathered(model):
            made = generate(model, prompts, new)
        assert sum(map(len, made)) == len(prompts) * new, "every row reaches its full length"
        counts.append(seen.count)
    dist.destroy_process_group()
    return [{"bytes": [sum(p.nbytes for p in local), whole]}, {"numbers": counts}]


def annotation_worker(options: dict) -> list[dict]:
    """2,000 rows from a server that answers in 200 ms (64 at once), and from a faulty one."""
    import toy
    from data import write_rows
    from loopback import MIX, loopback
    rng, rows = random.Random(0), []
    for row in toy.rows("train", 2000):
        draft = toy.write_draft(row["facts"], rng)
        rows.append({"id": row["id"], "post": row["post"], "response": draft})
    with tempfile.TemporaryDirectory() as work:
        files = {n: str(Path(work, f"{n}.jsonl")) for n in (500, 2000)}
        for n, file in files.items():
            write_rows(file, rows[:n])

        def side(name: str, url: str, n: int = 2000) -> dict:
            with tempfile.TemporaryDirectory() as out:
                asked = {"side": name, "url": url, "data": files[n], "output": f"{out}/f.jsonl"}
                return once({"mode": "annotate", "options": asked}, {"OPENAI_API_KEY": "x"})

        with loopback(process=True, delay=0.2) as server:
            turns = [(side("ours", server.url), side("bare", server.url)) for _ in range(3)]
            few = side("ours", server.url, 500)["peak"]
        with loopback(process=True, delay=0.2, faults=MIX, hang=10) as server:
            faulty = side("ours", server.url, 500)
            calls = server.stats()["calls"]
    said = faulty["said"].split(". ")[0].split(": ", 1)[-1]
    return [{"seconds": [[turn[k]["seconds"] for turn in turns] for k in (0, 1)]},
            {"bytes": [max(ours["peak"] for ours, _ in turns), few]},
            {"numbers": [calls, 500], "note": f"{faulty['seconds']:.0f} s; {said}"}]


def annotate_worker(options: dict) -> dict:
    """Annotation by annotate.py, or a plain loop of requests with the same client."""
    import asyncio
    import openai
    from annotate import annotate, annotation_messages
    from settings import AnnotatorConfig
    from data import InputError, examples, get_task, read_rows

    async def bare():
        task = get_task("slf5k")
        waiting = examples(task, read_rows(options["data"]))

        async def loop():
            for example in waiting:
                await client.chat.completions.create(
                    model="gpt-4o", messages=annotation_messages(task, example),
                    temperature=0.3, top_p=0.95, max_tokens=1200)

        async with openai.AsyncOpenAI(base_url=options["url"], max_retries=0) as client:
            await asyncio.gather(*(loop() for _ in range(64)))

    keep_memory()
    before = resident("VmRSS")                        # torch's, which annotation does not use
    Path("/proc/self/clear_refs").write_text("5")
    start, said = time.perf_counter(), ""
    if options["side"] == "bare":
        asyncio.run(bare())
    else:
        config = AnnotatorConfig(concurrency=64, base_url=options["url"], price_in=2.5,
                                 price_out=10.0, timeout=2.0)
        config.task = "slf5k"
        try:
            said = annotate(config, options["data"], options["output"])
        except InputError as error:                   # the server failed on some rows
            said = str(error)
    return {"seconds": time.perf_counter() - start, "said": said,
            "peak": resident("VmHWM") - before}


def save_worker(options: dict) -> str:
    """A directory with a random model and its tokenizer, for text2grad.py --model."""
    model = base_model(options)
    model.save_pretrained(options["path"])
    word_tokenizer(model.config.vocab_size).save_pretrained(options["path"])
    return options["path"]


# ── Measuring

def resident(key: str) -> int:
    """VmRSS, or its high-water mark VmHWM, in bytes."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def peak_bytes(work, device: str) -> int:
    """The most memory that one call holds at once, above what was held before it.

    On a CPU freed tensors must leave the resident set at once, so that its peak is what lives:
    see ENVIRONMENT, without which 40 % too much was measured.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)      # freed memory must not count as held before
    Path("/proc/self/clear_refs").write_text("5")        # the high-water mark starts again
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def keep_memory():
    """Let the allocator keep freed memory from now on, for realistic times."""
    for option, size in ((-3, 1 << 25), (-1, 1 << 26)):       # M_MMAP_, M_TRIM_THRESHOLD
        ctypes.CDLL("libc.so.6").mallopt(option, size)


def seconds(work, device: str) -> float:
    """Wall-clock seconds of one call, including its work on the device."""
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def timed(work, least: float, device: str) -> list[float]:
    """The seconds of repeated calls, until their sum reaches `least`."""
    found = [seconds(work, device)]
    while sum(found) < least:
        found.append(seconds(work, device))
    return found


def once(task: dict, extra=(), python: str = sys.executable, ranks: int = 0):
    """Run a task in a new process, or in `ranks` processes, and return its result."""
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks else []
    command = [python, *launch, str(HERE / "bench_work.py"), json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True,
                          env=ENVIRONMENT | dict(extra))
    found = re.findall(r"^RESULT (.*)$", done.stdout, re.M)
    if done.returncode or not found:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return json.loads(found[-1])


ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}", "TOKENIZERS_PARALLELISM": "false",
                            "MALLOC_MMAP_THRESHOLD_": "65536"}
BUILD = {"logprobs": build_logprobs, "ppo": build_ppo, "decode": build_decode,
         "lora": build_lora, "trl-ppo": build_trl_ppo}
WHOLE = {"iteration": iteration_worker, "fsdp": fsdp_worker, "asserts": asserts_worker,
         "annotation": annotation_worker, "annotate": annotate_worker, "save": save_worker,
         "growth": growth_worker}


def serve():
    """Serve tasks from stdin, one JSON line each: build a side, measure memory, or time it."""
    work, device = None, "cpu"
    for line in sys.stdin:
        task = json.loads(line)
        if task["mode"] == "build":
            work = None                               # free it before the next side is built
            gc.collect()
            device = task["options"]["device"]
            work, out = BUILD[task["build"]](task["side"], task["options"]), None
        elif task["mode"] == "first":
            checks, start = [], time.perf_counter()
            peak = peak_bytes(lambda: checks.append(work()), device)
            out = {"check": checks[0], "bytes": peak, "seconds": time.perf_counter() - start,
                   "note": getattr(work, "note", "")}
            keep_memory()
        else:
            out = timed(work, task["least"], device)
        print("RESULT", json.dumps(out), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    else:
        asked = json.loads(sys.argv[1])
        result = WHOLE[asked["mode"]](asked["options"])
        if os.environ.get("RANK", "0") == "0":
            print("RESULT", json.dumps(result))
