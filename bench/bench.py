"""Measure time and memory beside PyTorch, PEFT, a plain PPO loop and TRL; print the tables.

    python bench/bench.py                                       # on a CPU, four minutes
    python bench/bench.py --device cuda --shape llama3-8b       # on one GPU of 80 GB
    python bench/bench.py --trl_python trl/bin/python           # also TRL, see README.md

The sides of a table do the same work on the same random weights and inputs, and their results
must agree. The first side is ours. Texts are random tokens.
"""

import argparse
import ctypes
import gc
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import policy                                                                   # noqa: E402
from model import ValueHead, add_lora, lora_parameters, use_lora                # noqa: E402
from sampling import generate, head_weight, pad_batch, token_logprobs           # noqa: E402
from settings import Config                                                     # noqa: E402

TABLES = ["logprobs", "iteration", "ppo", "peft"]
# Layers, hidden size, inner size, query heads, key-value heads and vocabulary of a Llama.
SHAPES = {"toy": (3, 128, 320, 4, 4, 719), "small": (3, 128, 320, 4, 4, 32_000),
          "llama3-1b": (16, 2048, 8192, 32, 8, 128_256),
          "llama3-8b": (32, 4096, 14_336, 32, 8, 128_256)}
# logprobs: tokens, hidden size, vocabulary. batch, new: rows and tokens to decode. ppo: rows,
# tokens of a prompt, tokens of a response or critique. "toy" only tries out this script.
SIZES = {"toy": {"logprobs": (256, 128, 900), "batch": 4, "new": 8, "ppo": (4, 16, 16)},
         "cpu": {"logprobs": (1024, 512, 128_256), "batch": 32, "new": 100,
                 "ppo": (32, 64, 64)},
         "cuda": {"logprobs": (8192, 4096, 128_256), "batch": 64, "new": 100,
                  "ppo": (32, 128, 128)}}
PEAK = 989e12              # FLOP/s of an H100 or H200 in bfloat16, by the data sheet


# ── Models and inputs

def random_model(shape: str, device: str):
    """A frozen Llama with random weights: float32 on a CPU, bfloat16 on a GPU."""
    layers, hidden, inner, heads, kv_heads, vocabulary = SHAPES[shape]
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        eos_token_id=None, bos_token_id=None, pad_token_id=0)
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).requires_grad_(False).eval()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        if "norm" not in name:
            weight.normal_(std=0.02)         # the same weights with all versions of libraries
    return model


def add_peft(model):
    """The model with an adapter by PEFT, or None where PEFT is not installed."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return None
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM",
                                            target_modules=["q_proj", "v_proj"]))


def random_ids(rows: int, longest: int, vocabulary: int) -> list[list[int]]:
    """The same random ids in each call, without special ids. The shortest row has a quarter."""
    rng = random.Random(longest)
    return [[rng.randrange(4, vocabulary) for _ in range(rng.randint(longest // 4, longest))]
            for _ in range(rows)]


def word_tokenizer(vocabulary: int):
    """A tokenizer with one word for each id, because random weights write every id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, "t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t3")


# ── Measuring

def resident(name: str) -> int:
    """The memory that this process holds (VmRSS), or held at most (VmHWM), in bytes."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def measure(function) -> tuple[float, int, float | None]:
    """(seconds of the fastest call, most bytes that a call holds, result of the first call).

    The first call only warms up. The second one measures the memory above what was held before:
    that of tensors on a GPU, otherwise of the process. Calls are timed for a second, or twice.
    """
    result = function()
    gc.collect()
    is_cuda = torch.cuda.is_initialized()
    allocator = ctypes.CDLL("libc.so.6")
    allocator.mallopt(-3, 1 << 16)          # freed memory goes back at once: the peak is in use
    allocator.malloc_trim(0)
    held = torch.cuda.memory_allocated() if is_cuda else resident("VmRSS")
    start_peak()
    times = []
    while len(times) < 2 or sum(times) < 1:
        start = time.perf_counter()
        function()
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            peak = read_peak()
            allocator.mallopt(-3, 1 << 25)              # from here on as in a long run
    return min(times), peak - held, result


def start_peak():
    """Start to record the peak of the memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def read_peak() -> int:
    """The most bytes held since `start_peak`, of tensors on a GPU or of the process."""
    return torch.cuda.max_memory_allocated() or resident("VmHWM")


def print_table(title: str, header: list[str], lines: list[list[str]]):
    """Print a table in Markdown."""
    print(f"\n**{title}**\n")
    for line in header, ["---"] * len(header), *lines:
        print("| " + " | ".join(line) + " |", flush=True)


def compare(title: str, sides: dict):
    """Measure all sides and print one table. Raises RuntimeError where results differ.

    sides: name → a function, what `measure` returned, or a text that says why it is missing.
    A result of None is not compared.
    """
    lines = []
    ours = None
    for name, side in sides.items():
        if isinstance(side, str):
            lines.append([name, side, "", "", ""])
            continue
        seconds, memory, result = measure(side) if callable(side) else side
        ours = ours or (seconds, memory, result)
        if result is not None and abs(result - ours[2]) > 0.02 * abs(ours[2]):
            raise RuntimeError(f"{title}: {name} computes {result}, and ours {ours[2]}")
        lines.append([name, f"{seconds:.3g}", f"{ours[0] / seconds:.2f}",
                      f"{memory / 1e6:,.0f}", f"{ours[1] / max(memory, 1):.2f}"])
    print_table(title, ["side", "seconds", "ours / side", "MB", "ours / side"], lines)


# ── Tables beside other implementations

def compare_logprobs(N: int, H: int, V: int, device: str):
    """log π(y) of N tokens and its gradient: ours, log_softmax, the two products alone."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weight = torch.randn(V, H, device=device, dtype=dtype) / H**0.5
    hidden = torch.randn(N, H, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(V, (N,), device=device)

    def log_softmax(hidden, weight, targets):
        return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])

    def gradient(logprobs_of) -> float:
        hidden.grad = None
        logprobs = logprobs_of(hidden, weight, targets)
        logprobs.sum().backward()
        return logprobs.mean().item()

    @torch.no_grad()
    def products():
        for rows in hidden.split(1024):
            for part in weight.split(8192):
                (rows @ part.T) @ part

    compare(f"Log-probs of {N:,} tokens with their gradient, H {H:,}, V {V:,}",
            {"ours": partial(gradient, token_logprobs),
             "log_softmax, gather": partial(gradient, log_softmax),
             "the products h Wᵀ and pᵀW alone": products})


def compare_peft(model, peft_model, batch: int, new: int):
    """Decoding, and a forward and backward pass of the blocks: ours and PEFT."""
    prompts = random_ids(batch, 60, model.config.vocab_size)
    ids = torch.randint(4, model.config.vocab_size, (4, 256), device=model.device)

    def decode(cuda_graph: bool) -> int:
        with use_lora(model, "policy", merge=True):
            return sum(map(len, generate(model, prompts, new, cuda_graph=cuda_graph)))

    @torch.no_grad()
    def decode_by_peft() -> int:
        inputs, mask, *_ = pad_batch(prompts, [[]] * batch, model.device)
        answers = peft_model.generate(
            input_ids=inputs, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
        return answers[:, inputs.shape[1] :].numel()

    def gradient(blocks, adapter) -> float:
        with adapter:
            loss = blocks(ids, use_cache=False).last_hidden_state.float().square().mean()
        loss.backward()
        blocks.zero_grad()
        return loss.item()

    decoding = {"ours": partial(decode, True)}
    if model.device.type == "cuda":
        decoding["ours without CUDA graph"] = partial(decode, False)
    decoding["PEFT, `generate`"] = peft_gradient = "PEFT is not installed"
    if peft_model:
        decoding["PEFT, `generate`"] = decode_by_peft
        blocks = peft_model.base_model.model.model
        peft_gradient = partial(gradient, blocks, nullcontext())
    compare(f"Decoding {new} tokens for each of {batch} rows", decoding)
    compare("LoRA, forward and backward, 4 rows of 256 tokens",
            {"ours": lambda: gradient(model.base_model, use_lora(model, "policy")),
             "PEFT": peft_gradient})


def compare_ppo(model, rows: int, prompt: int, response: int, trl: str | tuple):
    """Old log-probs, values, reference, GAE and 4 epochs: ours, plain PyTorch, TRL.

    The learning rate is 0, so that all calls do the same work. trl: TRL's side of the table.
    """
    vocabulary = model.config.vocab_size
    padded = pad_batch(random_ids(rows, prompt, vocabulary),
                       random_ids(rows, response + 1, vocabulary), model.device)
    prompt_ids, prompt_mask, response_ids, mask = padded
    value_head = ValueHead(model.config.hidden_size, model.device)
    parameters = [*lora_parameters(model, "policy"), *value_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
    delta = torch.zeros(mask.shape, device=model.device)
    delta[range(rows), mask.sum(1) - 1] = torch.ones(rows, device=model.device)
    config = Config(batch_size=rows, minibatch_size=rows, ppo_epochs=4, temperature=1.0,
                    micro_batch_tokens=rows // 2 * (prompt + response + 1))

    def step() -> float:
        rollouts = policy.Rollouts([{}] * rows, [""] * rows, [""] * rows, [[]] * rows, *padded,
                                   delta=delta)
        policy.add_scores(rollouts, model, value_head, config)
        policy.add_advantages(rollouts, 0.2, config)
        policy.ppo_update(rollouts, model, value_head, optimizer, config, random.Random(0))
        return rollouts.logprobs_old[mask.bool()].mean().item()

    def score(index, adapter):
        ids = torch.cat([prompt_ids, response_ids], 1)[index]
        attention = torch.cat([prompt_mask, mask], 1)[index]
        with use_lora(model, adapter):
            hidden = model.base_model(ids, attention, (attention.cumsum(1) - 1).clamp(min=0),
                                      use_cache=False).last_hidden_state
        hidden = hidden[:, prompt_ids.shape[1] - 1 : -1]
        logprobs = model.get_output_embeddings()(hidden).float().log_softmax(-1)
        logprobs = logprobs.gather(2, response_ids[index][..., None]).squeeze(2)
        return logprobs, value_head(hidden.detach())

    def plain_step() -> float:
        parts = torch.arange(rows).chunk(2)
        with torch.no_grad():
            scores = [score(index, "policy") for index in parts]
            reference = torch.cat([score(index, None)[0] for index in parts])
        old, values = (torch.cat(tensors) for tensors in zip(*scores))
        rewards = (delta - 0.2 * (old - reference)) * mask
        advantages, returns = policy.gae(rewards, values, mask, 1.0, 0.95)
        advantages = policy.whiten(advantages, mask)
        for _ in range(4):
            for i in parts:
                logprobs, new_values = score(i, "policy")
                loss = policy.ppo_loss(logprobs, old[i], advantages[i], mask[i], 0.2)
                loss += policy.value_loss(new_values, values[i], returns[i], mask[i], 5.0)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return old[mask.bool()].mean().item()

    compare(f"A PPO step of {rows} rows, 4 epochs, prompts of {prompt // 4} to {prompt} "
            f"tokens, responses of {response // 4} to {response + 1}",
            {"ours": step, "plain PyTorch": plain_step, "TRL, `PPOTrainer.step`": trl})


def measure_trl(python: str | None, *arguments) -> str | tuple:
    """TRL's side of `compare_ppo`, measured in a process of TRL's environment."""
    if python is None:
        return "TRL is not installed: --trl_python"
    command = [python, __file__, "--trl_worker", *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        return f"failed: {process.stderr.strip().splitlines()[-1]}"
    return tuple(json.loads(process.stdout.splitlines()[-1]))


def trl_worker(shape: str, rows: int, prompt: int, response: int):
    """Print what `measure` returns for TRL 0.11.3's PPOTrainer.step on a CPU."""
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        add_peft(random_model(shape, "cpu")))
    vocabulary = SHAPES[shape][-1]
    prompts = random_ids(rows, prompt, vocabulary)
    responses = random_ids(rows, response + 1, vocabulary)
    config = PPOConfig(batch_size=rows, mini_batch_size=rows // 2, ppo_epochs=4,
                       gradient_accumulation_steps=2, learning_rate=0.0, kl_penalty="full")
    trainer = PPOTrainer(config, model, None, word_tokenizer(vocabulary))

    def step() -> float:
        stats = trainer.step([*map(torch.tensor, prompts)], [*map(torch.tensor, responses)],
                             [torch.tensor(1.0)] * rows)
        logprobs = torch.as_tensor(stats["objective/logprobs"])
        return torch.cat([row[len(x) - 1 :][: len(y)] for row, x, y in
                          zip(logprobs, prompts, responses)]).mean().item()

    print(json.dumps(measure(step)))


# ── One iteration of Algorithm 4 (Table 13)

def measure_iteration(model, rows: int, prompt: int, response: int):
    """Print seconds, memory and model FLOP utilisation (MFU), by the tokens of a pass.

    A forward pass has 2 FLOP for each weight and token, and a backward pass as many, because
    the weights are frozen. Products of attention are left out.
    """
    weights = sum(p.numel() for p in model.base_model.layers.parameters()
                  if not p.requires_grad)
    head = head_weight(model)
    forward = 2 * rows * (weights * (prompt + response) + head.numel() * response)
    flop = {"rollout": forward, "score": 2 * forward, "update": 4 * 2 * forward}
    matrix = torch.randn(2048, 2048)
    peak = PEAK if head.is_cuda else 2 * 2048**3 / measure(lambda: (matrix @ matrix).sum())[0]
    vocabulary = model.config.vocab_size
    ids = torch.randint(4, vocabulary, (rows, prompt - 1)).tolist()   # and one of the template
    data = [{"prompt": " ".join(f"t{i}" for i in row)} for row in ids]
    config = Config(task="ultrafeedback", batch_size=rows, minibatch_size=rows, ppo_epochs=4,
                    max_new_tokens=response, max_critique_tokens=response, iterations=2,
                    learning_rate=1e-5)
    add_lora(model, "reward", 16, 32)
    lines = []
    for tokens in 4096, prompt + response:
        config = replace(config, micro_batch_tokens=tokens)
        start_peak()
        with redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as out:
            policy.train(model, word_tokenizer(vocabulary), data, config, Path(out))
            metrics = json.loads(Path(out, "metrics.jsonl").read_text().splitlines()[-1])
        seconds = {name: metrics[f"seconds_{name}"]
                   for name in ("rollout", "critique", "score", "update")}
        share = seconds["critique"] / (sum(seconds.values()) - seconds["critique"])
        usage = [f"{work / seconds[name] / peak:.1%}" for name, work in flop.items()]
        lines.append([f"{tokens:,}", *(f"{x:.3g}" for x in seconds.values()), f"+{share:.0%}",
                      f"{read_peak() / 1e9:.1f}", *usage])
    print_table(f"One iteration: {rows} rollouts, prompts of {prompt} tokens, responses and "
                f"critiques of {response}, 4 epochs; MFU of {peak / 1e12:.3g} TFLOP/s",
                ["tokens of a pass", "rollout s", "critique s", "score s", "update s",
                 "feedback adds", "peak GB", *(f"MFU {name}" for name in flop)], lines)


def main():
    """Measure the tables and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--trl_python", help="Python of an environment with TRL 0.11.3")
    parser.add_argument("--trl_worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl_worker:
        shape, *numbers = arguments.trl_worker
        return trl_worker(shape, *map(int, numbers))
    sizes = SIZES["toy" if arguments.shape == "toy" else arguments.device]
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else \
        f"{torch.get_num_threads()} threads"
    print(f"`python bench/bench.py {' '.join(sys.argv[1:])}`, {date.today()}: {machine}, torch "
          f"{torch.__version__}, transformers {transformers.__version__}, load average "
          f"{os.getloadavg()[0]:.1f}", flush=True)
    if "logprobs" in arguments.only:
        compare_logprobs(*sizes["logprobs"], arguments.device)
    model = random_model(arguments.shape, arguments.device)
    add_lora(model, "policy", 16, 32)
    if "iteration" in arguments.only:
        measure_iteration(model, *sizes["ppo"])
    if "ppo" in arguments.only:
        trl = measure_trl(arguments.trl_python, arguments.shape, *sizes["ppo"])
        compare_ppo(model, *sizes["ppo"], trl)
    if "peft" in arguments.only:
        peft_model = add_peft(random_model(arguments.shape, arguments.device))
        compare_peft(model, peft_model, sizes["batch"], sizes["new"])


if __name__ == "__main__":
    main()
