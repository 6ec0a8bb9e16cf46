"""What would fail first on a GPU. tests/gpu.sh runs this file; a CPU runs smaller tests.

Independent side: SDPA in float32, the step that is not captured, what a killed run must hold.
"""

import os
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention
import model as model_file
import sampling
from data import ModelError
from helpers import ROOT, randomise, read_jsonl, run_main
from model import add_lora, load_model
from reward_model import z_loss
from sampling import Decoder, _decode, can_capture, generate

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
whole_run = pytest.mark.skipif(not CUDA and "TINY" not in os.environ,
                               reason="tests/gpu.sh runs it; other tests cover it on a CPU")
RUN = ["--annotated_rows", 300 if CUDA else 40, "--batch_size", 8, "--minibatch_size", 8,
       "--eval_rows", 8]


# ── Attention

def test_importing_model_turns_off_cudnn_attention():
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize("length", [64, 128, 192, 704])
def test_attention_gradients_of_padded_rows_in_bfloat16(length):
    """Finite, and those of float32; a third of one row is padding, which sees nothing."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, 4, length, 32, device=DEVICE) for _ in range(3))
    columns = torch.arange(length, device=DEVICE)
    padding = torch.tensor([0, length // 3], device=DEVICE)
    seen = (columns >= padding[:, None])[:, None, None] & (columns <= columns[:, None])
    upstream = torch.randn_like(q) * (columns >= padding[:, None])[:, None, :, None]

    def gradients(dtype):
        # Large negative scores: with cuDNN, e^(−lse) overflows.
        inputs = [x.to(dtype).requires_grad_() for x in (4 * q, -4 * q + 0.1 * k, v)]
        F.scaled_dot_product_attention(*inputs, attn_mask=seen).backward(upstream.to(dtype))
        return [x.grad.float() for x in inputs]

    for half, single in zip(gradients(torch.bfloat16), gradients(torch.float32)):
        assert half.isfinite().all() and (half - single).norm() < 0.05 * single.norm()


def test_z_loss_gradients_of_192_tokens_in_bfloat16():
    """R_φ's first step on the toy base, with a prompt that is padded by 80 tokens."""
    pairs = [([*range(5, 125)], [*range(20, 92)]), ([*range(5, 45)], [*range(30, 90)])]

    def gradients(dtype):
        model, _ = load_model(ROOT / "toy" / "base", dtype, DEVICE)
        torch.manual_seed(1)
        parameters = add_lora(model, "reward", 8, 16)
        randomise(parameters, 0.02)
        with model_file.use_lora(model, "reward"):
            z_loss(model, pairs).backward()
        return torch.cat([p.grad.flatten() for p in parameters])

    half, single = gradients("bfloat16"), gradients("float32")
    assert half.isfinite().all() and (half - single).norm() < 0.1 * single.norm()


# ── The captured decode step

@pytest.fixture()
def grouped():
    """A random grouped-query model, bfloat16 on a GPU."""
    torch.manual_seed(2)
    config = LlamaConfig(vocab_size=1000, hidden_size=256, intermediate_size=512,
                         num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
                         max_position_embeddings=1024)
    model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16 if CUDA else torch.float32)
    return model.requires_grad_(False).eval()


@pytest.mark.parametrize("gigabytes", [None, 2], ids=["whole", "2GB"])
def test_captured_steps_draw_what_eager_steps_draw(grouped, gigabytes, monkeypatch):
    """600 tokens: the cache is read further twice, half of the rows leave, no memory leaks."""
    captures, capture = [], Decoder.captured_step
    monkeypatch.setattr(Decoder, "captured_step",
                        lambda self: captures.append(len(self.rows)) or capture(self))
    prompts = [[*range(5, 8 + 3 * n)] for n in range(8)]
    tokens = 600 if CUDA else 40
    uniforms = torch.rand(8, tokens, generator=torch.Generator().manual_seed(5))
    free = generate(grouped, prompts, tokens, 0.8, uniforms=uniforms)
    ends = [row[tokens // 4] for row in free[:5]]              # five rows end by then
    if CUDA and gigabytes:
        whole = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / whole)
    try:
        for eos in ([], ends):
            captures.clear()
            graph, eager = (generate(grouped, prompts, tokens, 0.8, eos, uniforms=uniforms,
                                     cuda_graph=on) for on in (True, False))
            assert graph == eager and (not eos or sum(len(y) < tokens for y in eager) >= 5)
            assert len(captures) == 0 if not CUDA else len(captures) >= 3
            assert not CUDA or bool(eos) == (min(captures) < 8)
        if CUDA:
            held = []
            for _ in range(6):
                generate(grouped, prompts, tokens, 0.8, ends, uniforms=uniforms)
                held.append(torch.cuda.memory_reserved())
            assert held[-1] == held[1]
    finally:
        if CUDA:
            torch.cuda.set_per_process_memory_fraction(1.0)


def test_decoding_does_not_copy_the_keys_of_a_group(grouped, monkeypatch):
    """transformers repeats them for the prompt alone, once in each layer, and the values."""
    widths, repeat = [], sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv",
                        lambda x, n: widths.append(x.shape[2]) or repeat(x, n))
    generate(grouped, [[5, 6, 7]], 20, cuda_graph=False)
    assert len(widths) == 2 * 4 and len(set(widths)) == 1


def test_rope_that_asks_the_host_is_not_captured(grouped):
    """Of the flat form and of that by layer type; linear, yarn and llama3 do not ask."""
    assert can_capture(grouped)
    for rope, captured in [({"rope_type": "linear", "factor": 2.0}, True),
                           ({"rope_type": "dynamic", "factor": 2.0}, False),
                           ({"rope_type": "longrope", "long_factor": [2.0]}, False),
                           ({"full_attention": {"rope_type": "default"},
                             "sliding_attention": {"rope_type": "dynamic"}}, False)]:
        grouped.config.rope_parameters = rope
        assert can_capture(grouped) is captured


class Stream:
    """A CUDA stream on a CPU."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_stream(self, other):
        pass


@pytest.fixture()
def fake_cuda(monkeypatch):
    """What a capture uses of torch.cuda, on a CPU: the captured step runs at once."""
    class Capture(Stream):
        streams = []

        def __init__(self, graph, stream):
            self.streams.append(stream)

    sampling._side_stream.cache_clear()
    for name, value in {"Stream": Stream, "current_stream": Stream, "stream": lambda s: s,
                        "CUDAGraph": type("Graph", (), {"replay": print}),
                        "graph": Capture}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield Capture
    sampling._side_stream.cache_clear()


def decoder_of(model):
    """A decoder that has drawn its first tokens."""
    prompts = torch.tensor([[5, 6, 7], [8, 9, 10]])
    decoder = Decoder(model, 0.8, prompts, torch.ones_like(prompts), torch.rand(2, 9), 12)
    with torch.no_grad():
        decoder.prefill(prompts, torch.ones_like(prompts))
    return decoder


@torch.no_grad()
def test_all_captures_use_one_stream(toy_model, fake_cuda):
    decoder = decoder_of(toy_model[0])
    decoder.cache.width = 12
    for _ in range(3):
        decoder.captured_step()
    assert len(fake_cuda.streams) == 3 and len(set(map(id, fake_cuda.streams))) == 1


@torch.no_grad()
def test_out_of_memory_in_a_capture_stays_out_of_memory(toy_model, fake_cuda, monkeypatch):
    """PyTorch reports the broken capture; the scripts have a remedy for its cause alone."""
    decoder = decoder_of(toy_model[0])
    decoder.cache.width = 12
    step, steps = Decoder.step, []

    def exhausted(self):
        steps.append(None)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        step(self)

    def fail(*_):
        raise RuntimeError("capture was invalidated")

    monkeypatch.setattr(Decoder, "step", exhausted)
    monkeypatch.setattr(fake_cuda, "__exit__", fail)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        decoder.captured_step()
    with pytest.raises(RuntimeError, match="invalidated"):
        decoder.captured_step()


@torch.no_grad()
def test_a_graph_is_freed_before_the_next_is_captured(toy_model, monkeypatch):
    """On a CPU the cache is read one column further each step, so each step is captured."""
    class Graph:
        def __init__(self, decoder):
            self.decoder = decoder

        def __call__(self):
            self.decoder.step()

    graphs = []

    def capture(decoder):
        assert all(graph() is None for graph in graphs)
        graph = Graph(decoder)
        graphs.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(Decoder, "captured_step", capture)
    tokens, _ = _decode(decoder_of(toy_model[0]), torch.rand(2, 9), [], capture=True)
    assert tokens.shape == (2, 9) and len(graphs) == 8


# ── Bad machines

def test_a_gpu_without_bfloat16_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ModelError, match="^Tesla T4 has no bfloat16; use --dtype float32"):
        load_model(ROOT / "toy" / "base", device="cuda")


# ── Whole runs

@whole_run
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_iterations_are_finite(dtype, tmp_path):
    """All three phases: no step is skipped, and the ratio starts at 1 up to rounding."""
    run_main(*RUN, "--iterations", 2, "--dtype", dtype, "--output_dir", tmp_path)
    reward, = read_jsonl(tmp_path / "reward" / "metrics.json")
    assert reward["skipped_steps"] == 0 and reward["held_out_loss"] < 10
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        numbers = torch.tensor([x for x in row.values() if isinstance(x, (int, float))])
        assert numbers.isfinite().all() and row["skipped_steps"] == 0
        assert abs(row["ratio"] - 1) < 0.1


@whole_run
def test_a_killed_run_goes_on(tmp_path):
    """Killed after its first checkpoint, the same command ends it with every row once."""
    flags = [*RUN, "--iterations", 4, "--save_every", 1, "--output_dir", tmp_path]
    command = [sys.executable, "text2grad.py", *map(str, flags)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    while not list(tmp_path.glob("checkpoint-*")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed after iteration" in done.stdout
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
