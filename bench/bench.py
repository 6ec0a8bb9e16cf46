"""Measure time and memory beside PyTorch and PEFT; print the tables.

    python bench/bench.py                                       # on a CPU, four minutes
    python bench/bench.py --device cuda --shape llama3-8b       # on one GPU of 80 GB
"""

import argparse
import ctypes
import gc
import io
import json
import random
import re
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import policy                                                                   # noqa: E402
from model import add_lora, use_lora                                            # noqa: E402
from sampling import generate, head_weight, pad_batch, token_logprobs           # noqa: E402
from settings import Config                                                     # noqa: E402

SIZES_OF_A_LLAMA = ("num_hidden_layers", "hidden_size", "intermediate_size",
                    "num_attention_heads", "num_key_value_heads", "vocab_size")
SHAPES = {"toy": (3, 128, 320, 4, 4, 719), "small": (3, 128, 320, 4, 4, 32_000),
          "llama3-8b": (32, 4096, 14_336, 32, 8, 128_256)}
# First tuple: tokens, hidden size and vocabulary in the table of log-probs. Second: rows,
# tokens of a prompt and of a response in the other tables. "toy" only tests this script.
SIZES = {"toy": ((256, 128, 900), (4, 16, 16)), "cpu": ((1024, 512, 128_256), (32, 64, 64)),
         "cuda": ((8192, 4096, 128_256), (32, 128, 128))}
PEAK = 989e12              # FLOP/s of an H100 or H200 in bfloat16, by the data sheet


def random_model(shape: str, device: str):
    """A frozen Llama with the same random weights in each call, bfloat16 on a GPU."""
    config = transformers.LlamaConfig(**dict(zip(SIZES_OF_A_LLAMA, SHAPES[shape])),
                                      eos_token_id=None, bos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).requires_grad_(False).eval()
    torch.set_default_dtype(torch.float32)
    return model


def random_ids(rows: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Lists of longest / 4 to longest random ids, none of them special. Equal in each call."""
    rng = random.Random(longest)
    return [[rng.randrange(4, vocabulary) for _ in range(rng.randint(longest // 4, longest))]
            for _ in range(rows)]


def word_tokenizer(vocabulary: int):
    """A tokenizer with one word for each id, because random weights can sample any id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, "t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t3")


def resident(name: str) -> int:
    """The memory that this process holds (VmRSS), or held at most (VmHWM), in bytes."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def measure(function, calls: int = 2) -> tuple[float, int]:
    """(seconds of the fastest call, most bytes that a call holds).

    The first call only warms up. The second one measures the memory above what was held before:
    that of tensors on a GPU, otherwise of the process. At least `calls` calls are timed, until
    they take a second in all.
    """
    function()
    gc.collect()
    is_cuda = torch.cuda.is_initialized()
    allocator = ctypes.CDLL("libc.so.6")
    allocator.mallopt(-3, 1 << 16)          # freed memory is given back and not counted
    allocator.malloc_trim(0)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")              # VmHWM starts again
    held = torch.cuda.memory_allocated() if is_cuda else resident("VmRSS")
    times = []
    while len(times) < calls or sum(times) < 1:
        start = time.perf_counter()
        function()
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            peak = torch.cuda.max_memory_allocated() if is_cuda else resident("VmHWM")
            allocator.mallopt(-3, 1 << 25)              # freed memory may be kept again
    return min(times), peak - held


def print_table(title: str, header: list[str], lines: list[list[str]]):
    """Print a table in Markdown."""
    print(f"\n**{title}**\n")
    for line in header, ["---"] * len(header), *lines:
        print("| " + " | ".join(line) + " |", flush=True)


def compare(title: str, sides: dict):
    """Measure the functions in `sides`, ours first, and print a table."""
    figures = {name: measure(side) for name, side in sides.items()}
    own_seconds, own_memory = figures["ours"]
    lines = [[name, f"{seconds:.3g}", f"{own_seconds / seconds:.2f}", f"{memory / 1e6:,.0f}",
              f"{own_memory / max(memory, 1):.2f}"]
             for name, (seconds, memory) in figures.items()]
    print_table(title, ["side", "seconds", "ours / side", "MB", "ours / side"], lines)


def plain_logprobs(hidden, weight, targets):
    """log π of targets [N] from hidden states [N, H] and head [V, H], as `token_logprobs`."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def compare_logprobs(N: int, H: int, V: int, device: str):
    """log π(y) of N tokens and its gradient: ours, and by log_softmax."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weight = torch.randn(V, H, device=device, dtype=dtype) / H**0.5
    hidden = torch.randn(N, H, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(V, (N,), device=device)

    def gradient(logprobs_of):
        torch.autograd.grad(logprobs_of(hidden, weight, targets).sum(), hidden)

    compare(f"Log-probs of {N:,} tokens with their gradient, H {H:,}, V {V:,}",
            {"ours": partial(gradient, token_logprobs),
             "log_softmax, gather": partial(gradient, plain_logprobs)})


def compare_peft(model, shape: str, rows: int, prompt: int, response: int):
    """Decoding: ours and PEFT's."""
    import peft
    prompts = random_ids(rows, prompt, model.config.vocab_size)
    inputs, mask, *_ = pad_batch(prompts, [[]] * rows, model.device)
    peft_model = peft.get_peft_model(
        random_model(shape, model.device.type),
        peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))

    def decode():
        with use_lora(model, "policy", merge=True):
            generate(model, prompts, response)

    @torch.no_grad()
    def decode_by_peft():
        peft_model.generate(
            input_ids=inputs, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=response, eos_token_id=None, pad_token_id=0)

    compare(f"Decoding {response} tokens for each of {rows} rows",
            {"ours": decode, "PEFT, `generate`": decode_by_peft})


def measure_iteration(model, rows: int, prompt: int, response: int):
    """Table 13: seconds and memory of an iteration, with passes of 4,096 tokens and of one row.

    MFU, the model FLOP utilisation, counts 2 FLOP for each weight and token in a forward pass,
    and 2 in a backward pass, because frozen weights have no gradient. The products of queries,
    keys and values in attention are left out.
    """
    head = head_weight(model)
    weights = sum(p.numel() for p in model.base_model.layers.parameters())
    forward = 2 * rows * (weights * (prompt + response) + head.numel() * response)
    flop = {"rollout": forward, "critique": forward + 2 * rows * weights * response,
            "score": 2 * forward, "update": 4 * 2 * forward}
    matrix = torch.randn(2048, 2048)
    peak = PEAK if head.is_cuda else 2 * 2048**3 / measure(lambda: (matrix @ matrix).sum())[0]
    ids = torch.randint(4, len(head), (rows, prompt - 1)).tolist()    # the template adds one
    data = [{"prompt": " ".join(f"t{i}" for i in row)} for row in ids]
    config = Config(task="ultrafeedback", batch_size=rows, minibatch_size=rows, ppo_epochs=4,
                    max_new_tokens=response, max_critique_tokens=response, iterations=1,
                    learning_rate=1e-5)
    add_lora(model, "reward", 16, 32)
    seconds = {}
    lines = []

    def iterate():
        with redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as out:
            policy.train(model, word_tokenizer(len(head)), data, config, Path(out))
            metrics = json.loads(Path(out, "metrics.jsonl").read_text())
        seconds.update({name: metrics[f"seconds_{name}"] for name in flop})

    for config.micro_batch_tokens in 4096, prompt + response:
        memory = measure(iterate, calls=1)[1] + sum(p.nbytes for p in model.parameters())
        share = seconds["critique"] / (sum(seconds.values()) - seconds["critique"])
        lines.append([f"{config.micro_batch_tokens:,}",
                      *(f"{seconds[name]:.3g} ({work / seconds[name] / peak:.1%})"
                        for name, work in flop.items()),
                      f"+{share:.0%}", f"{memory / 1e9:.2f}"])
    print_table(f"One iteration, {rows} rows of {prompt} + {response} tokens, critiques of "
                f"{response}; MFU of {peak / 1e12:.3g} TFLOP/s",
                ["tokens of a pass", *(f"{name} s (MFU)" for name in flop), "feedback adds",
                 "GB with weights"], lines)


def main():
    """Measure the tables and print them."""
    if sys.platform != "linux":
        sys.exit("bench.py measures memory through /proc and libc, so it needs Linux")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="small", choices=SHAPES)
    arguments = parser.parse_args()
    sizes = SIZES["toy" if arguments.shape == "toy" else arguments.device]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    compare_logprobs(*sizes[0], arguments.device)
    model = random_model(arguments.shape, arguments.device)
    add_lora(model, "policy", 16, 32)
    measure_iteration(model, *sizes[1])
    if find_spec("peft"):                               # otherwise this table is left out
        compare_peft(model, arguments.shape, *sizes[1])


if __name__ == "__main__":
    main()
