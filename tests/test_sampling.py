"""sampling.py, tested against log_softmax, transformers and the CDF of the uncached model."""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import sampling
from helpers import IDS, logits_of, prompts_of, randomise, refused, save_tiny
from model import add_lora, load_model, response_hidden, use_lora
from sampling import (Decoder, StaticCache, _decode, can_capture, context_length, generate,
                      head_weight, pad_batch, token_entropy, token_logprobs)

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # float32 comes out


# ── Scoring: log-probs and entropy, in tiles of the vocabulary

def numbers_of(function, inputs, upstream):
    """Log-probs and entropy by a function, and the gradients of the hidden states."""
    values = function(*inputs)
    return [*values, *(torch.autograd.grad((x * up).sum(), inputs[0], retain_graph=True)[0]
                       for x, up in zip(values, upstream))]


def random_inputs(n, v, h, dtype, device="cpu"):
    """Random hidden states, a frozen head and targets; and two upstream gradients."""
    hidden = torch.randn(n, h, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, device=device) / 4).to(dtype)
    return (hidden, weight, torch.randint(v, (n,), device=device)), torch.randn(2, n).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n, temperature", [(1, 0.6), (64, 0.6), (1100, 1.0)])
@pytest.mark.parametrize("v, tiles", [(203, 1), (2600, 3), (5000, 5)])
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
def test_log_probs_and_entropy_are_those_of_log_softmax(dtype, v, tiles, n, temperature, device,
                                                        monkeypatch):
    """Values, and gradients of the hidden states, over several tiles and parts of the rows."""
    def ours(*inputs):
        return token_logprobs(*inputs, temperature), token_entropy(*inputs[:2], temperature)

    def naive(hidden, weight, targets):
        wide = torch.promote_types(dtype, torch.float32)
        logp = torch.log_softmax(hidden.to(wide) @ weight.to(wide).T / temperature, dim=-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    monkeypatch.setattr(sampling, "LOGITS", 1 << 20)
    inputs, upstream = random_inputs(n, v, 24, dtype, device)
    if device == "cpu" and n > sampling.ROWS:
        assert len(sampling._tiles(sampling.ROWS, inputs[1])) == tiles
    for x, y in zip(numbers_of(ours, inputs, upstream), numbers_of(naive, inputs, upstream)):
        x, y = x.detach().double(), y.detach().double()
        assert float((x - y).norm() / y.norm()) < RELATIVE[dtype]


class Sizes(TorchDispatchMode):
    """Records the size of every tensor but one that an operator returns."""
    sizes = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.sizes += (*(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)
                         and x.untyped_storage().data_ptr() != self.head),)
        return out


def test_the_logits_never_exist_at_once(monkeypatch):
    """No operator of forward or backward returns N·V numbers, nor a gradient of the head."""
    monkeypatch.setattr(sampling, "LOGITS", 512 * 512)
    inputs, upstream = random_inputs(512, 4096, 32, torch.bfloat16)
    with Sizes() as recorder:
        recorder.head = inputs[1].untyped_storage().data_ptr()
        numbers_of(lambda *x: (token_logprobs(*x), token_entropy(*x[:2])), inputs, upstream)
    assert max(recorder.sizes) <= 512 * 1024 and 4096 * 32 not in recorder.sizes


# ── Sampling, and scoring what was sampled

def test_scores_are_those_of_the_unpadded_sequence(base):
    """Each row of a padded batch gets the log-probs of its unpadded prompt and response."""
    model, tokenizer = base
    rows = prompts_of(tokenizer)
    prompts = [row[:k] for k, row in zip((3, 1, 1, 2, 4, 9), rows)]
    batch = pad_batch(prompts, rows[::-1])
    with torch.no_grad():
        hidden = response_hidden(model, *batch)
    for prompt, response, h in zip(prompts, rows[::-1], hidden):
        logp = logits_of(model, prompt + response).log_softmax(-1)[len(prompt) - 1 : -1]
        ours = token_logprobs(h[: len(response)], head_weight(model), torch.tensor(response))
        torch.testing.assert_close(ours, logp[range(len(response)), response], atol=1e-4,
                                   rtol=1e-5)


def test_no_token_without_probability_is_drawn():
    """u is the smallest or the largest value of torch.rand. The sum of random probabilities may
    be less than the largest u."""
    u = torch.tensor([0, 1 - 2**-24])[:, None]
    logits = torch.full((2, 128_256), -torch.inf)
    logits[:, [40_000, 90_000]] = 0
    assert sampling._draw(logits, u, 1.0)[:, 0].tolist() == [40_000, 90_000]
    logits = torch.randn(16, 128_256)
    logits[:, 90_000:] = -torch.inf
    drawn = sampling._draw(logits, u[1:].expand(16, 1), 1.0)
    assert logits.gather(1, drawn).isfinite().all()


def test_greedy_is_transformers_greedy(base, monkeypatch):  # Table 5
    """Equal tokens, including EOS, for prompts of unequal length that end at different times.

    The prefill takes two columns at a time, and the cache is allocated once.
    """
    model, tokenizer = base
    prompts, caches, update = prompts_of(tokenizer), set(), StaticCache.update

    def watched_update(self, *arguments, **options):   # transformers ≥ 5.24 passes keywords
        out = update(self, *arguments, **options)
        caches.update((x.data_ptr(), x.shape[2]) for x in self.layers[0])
        return out

    monkeypatch.setattr(sampling, "PREFILL_TOKENS", 2 * len(prompts))
    with monkeypatch.context() as patched:
        patched.setattr(StaticCache, "update", watched_update)
        long = generate(model, prompts, 24, temperature=0)
    assert len(caches) == 2 and {n for _, n in caches} == {max(map(len, prompts)) + 24}
    eos = [long[0][3], long[1][9]]
    ids, mask, *_ = pad_batch(prompts, [])
    out = model.generate(ids, attention_mask=mask, do_sample=False, eos_token_id=eos,
                         max_new_tokens=24, pad_token_id=0)[:, ids.shape[1]:].tolist()
    theirs = [next((row[: t + 1] for t, token in enumerate(row) if token in eos), row)
              for row in out]
    assert generate(model, prompts, 24, 0, eos) == theirs and len({*map(len, theirs)}) > 1
    assert generate(model, prompts, 24, 0, eos, batch_size=4) == theirs, "in two parts"


def test_every_token_is_the_one_its_uniform_says(base):  # Alg. 4 l.11
    """y_t is the token at which the CDF of the uncached model exceeds u (T = 0.8, with an
    adapter, for any order of the batch, in parts, and with rows that end early). Without
    `uniforms`, u is torch.rand."""
    model, tokenizer = base
    randomise(add_lora(model, "policy"))
    prompts = prompts_of(tokenizer)
    uniforms = torch.rand(6, 14, generator=torch.Generator().manual_seed(11))
    eos = list(range(0, model.config.vocab_size, 8))
    with use_lora(model, "policy"):
        rows = generate(model, prompts, 14, 0.8, eos, uniforms=uniforms)
        turned = generate(model, prompts[::-1], 14, 0.8, eos, uniforms=uniforms.flip(0))
        torch.manual_seed(11)
        assert rows == turned[::-1] == generate(model, prompts, 14, 0.8, eos, batch_size=4)
        assert len({len(row) for row in rows}) > 2
        for prompt, row, us in zip(prompts, rows, uniforms):
            logits = logits_of(model, prompt + row)[len(prompt) - 1 : -1]
            cdf = (logits.double() / 0.8).softmax(-1).cumsum(-1)
            assert row == [int((c <= u).sum()) for u, c in zip(us, cdf)]


@pytest.mark.parametrize("kind, options", [
    ("GPT2", {}), ("GPTNeoX", {}), ("OPT", dict(ffn_dim=48, word_embed_proj_dim=32)),
    ("OPT", dict(ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False))])
def test_families_that_order_their_arguments_otherwise_are_sampled(tmp_path, kind, options):
    """Greedy tokens are those of the uncached model, for prompts of unequal length."""
    model, _ = load_model(save_tiny(tmp_path, kind, **options), device="cpu")
    for prompt, row in zip([IDS, IDS[:3]], generate(model, [IDS, IDS[:3]], 9, temperature=0)):
        greedy = logits_of(model, prompt + row).argmax(-1).tolist()
        assert row == greedy[len(prompt) - 1 : -1]


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 40,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 4.4, 4.8, 5.2]}


@pytest.mark.parametrize("limit, options", [
    (40, dict(kind="Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=40)),
    (48, {"max_position_embeddings": 48, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    (128, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})])
def test_what_was_sampled_with_a_cache_is_scored_alike(tmp_path, limit, options):
    """RoPE whose frequencies depend on the length: the context is filled to its last token, and
    one token more is refused."""
    model, _ = load_model(save_tiny(tmp_path, **options), device="cpu")
    assert context_length(model) == limit
    prompts = [IDS, IDS[:3]]
    uniforms = torch.rand(2, limit - len(IDS))
    answers = generate(model, prompts, limit - len(IDS), uniforms=uniforms)
    batch = pad_batch(prompts, answers)
    with torch.no_grad():
        logits = response_hidden(model, *batch) @ head_weight(model).T
    cdf = logits.double().softmax(-1).cumsum(-1)
    assert torch.equal((cdf <= uniforms[..., None]).sum(-1), batch[2])
    refused(f"model's context of {limit} tokens", generate, model, prompts,
            limit - len(IDS) + 1)


# ── What a CUDA graph may capture

@pytest.mark.parametrize("rope, is_captured", [
    ({"rope_type": "linear", "factor": 2.0}, True), ({"rope_type": "dynamic"}, False),
    ({"rope_type": "longrope", "long_factor": [2.0]}, False),
    ({"full_attention": {"rope_type": "default"},
      "sliding_attention": {"rope_type": "dynamic"}}, False)])
def test_rope_that_asks_the_host_is_not_captured(toy_model, rope, is_captured):
    model, _ = toy_model
    model.config.rope_parameters = rope
    assert can_capture(model) is is_captured


@torch.no_grad()
def test_a_graph_is_freed_before_the_next_is_captured(toy_model, monkeypatch):
    """Each width gets a graph, after a step that is not captured."""
    prompts = torch.tensor([[5, 6, 7], [8, 9, 10]])
    uniforms = torch.rand(2, 9)
    decoder = Decoder(toy_model[0], 0.8, prompts, torch.ones_like(prompts), uniforms, 12)
    decoder.prefill(prompts, torch.ones_like(prompts))
    graphs = []

    def capture(decoder):
        assert all(graph() is None for graph in graphs)
        graph = partial(Decoder.step, decoder)
        graphs.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(Decoder, "captured_step", capture)
    tokens = _decode(decoder, uniforms, [], capture=True)
    assert tokens.shape == (2, 9) and len(graphs) == 8
