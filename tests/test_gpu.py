"""What would fail first on a GPU. tests/gpu.sh runs this file; a CPU runs smaller tests.

Independent side: SDPA in float32, the step that is not captured, what a killed run must hold.
"""

import gc
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import model as model_file
from helpers import ROOT, randomise, read_jsonl, run_main
from model import add_lora, load_model
from reward_model import z_loss
from sampling import generate

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
whole_run = pytest.mark.skipif(not CUDA and "TINY" not in os.environ,
                               reason="tests/gpu.sh runs it; other tests cover it on a CPU")
RUN = ["--annotated_rows", 300 if CUDA else 120, "--batch_size", 8, "--minibatch_size", 8,
       "--eval_rows", 8]


# ── Attention

def test_importing_model_turns_off_cudnn_attention():
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ and not CUDA, reason="it hides "
                    "instructions that PyTorch's attention in bfloat16 then asks for")
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


@pytest.mark.parametrize("gigabytes", [None, 2] if CUDA else [None])
def test_captured_steps_draw_what_eager_steps_draw(grouped, gigabytes, spy):
    """600 tokens: the cache is read further twice, half of the rows leave, no memory leaks."""
    captures = spy("sampling.Decoder.captured_step", lambda decoder: len(decoder.rows))
    prompts = [[*range(5, 8 + 3 * n)] for n in range(8)]
    tokens = 600 if CUDA else 20
    uniforms = torch.rand(8, tokens, generator=torch.Generator().manual_seed(5))

    def draw(temperature, eos, **options):
        return generate(grouped, prompts, tokens, temperature, eos, uniforms, **options)

    ends = [row[tokens // 4] for row in draw(0.8, [])[:5]]            # five rows end by then
    if gigabytes:
        whole = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / whole)
    try:
        for temperature, eos in ((0.8, []), (0.8, ends), (0, [])):
            captures.clear()
            graph = draw(temperature, eos)
            assert len(captures) >= 3 if CUDA else not captures
            assert not CUDA or bool(eos) == (min(captures) < 8)
            assert graph == draw(temperature, eos, cuda_graph=False)
            assert not eos or sum(len(y) < tokens for y in graph) >= 5
        if CUDA:
            held = []
            for _ in range(6):
                draw(0.8, ends)
                held.append(torch.cuda.memory_reserved())
            assert held[-1] == held[1]
    finally:
        if CUDA:
            torch.cuda.set_per_process_memory_fraction(1.0)


def test_decoding_does_not_copy_the_keys_of_a_group(grouped, spy):
    """transformers repeats them for the prompt alone, once in each layer, and the values."""
    widths = spy("transformers.integrations.sdpa_attention.repeat_kv", lambda x, n: x.shape[2])
    generate(grouped, [[5, 6, 7]], 20, cuda_graph=False)
    assert len(widths) == 2 * 4 and len(set(widths)) == 1


# ── Whole runs

@whole_run
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_iterations_are_finite(dtype, tmp_path):
    """All three phases: no step is skipped, and the ratio starts at 1 up to rounding."""
    run_main(*RUN, "--iterations", 2, "--dtype", dtype, "--output_dir", tmp_path)
    reward, = read_jsonl(tmp_path / "reward" / "metrics.json")
    assert reward["final_loss"] < 10
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        numbers = torch.tensor([x for x in row.values() if isinstance(x, (int, float))])
        assert numbers.isfinite().all() and row["skipped_steps"] == 0
        assert abs(row["ratio"] - 1) < 0.1


@whole_run
def test_a_stopped_run_continues(tmp_path, capsys, spy):
    """Stopped after its first checkpoint, the same command ends it with every row once."""
    flags = [*RUN, "--iterations", 4, "--output_dir", tmp_path]
    stops = [1]

    def stop(rows, config, iteration):
        if iteration in stops:
            stops.clear()
            raise KeyboardInterrupt

    spy("policy.batch_rows", stop)
    with pytest.raises(KeyboardInterrupt):
        run_main(*flags)
    gc.collect()                                         # release the lock of the stopped run
    run_main(*flags)
    assert "resumed after step 1" in capsys.readouterr().out
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
