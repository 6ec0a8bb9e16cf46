"""y ~ π(·|x): batched sampling with a static key-value cache and, on CUDA, a captured step (Alg. 4 l.11).

    with use_lora(model, "policy"):
        ids = generate(model, [encode_prompt(tokenizer, "Hello")], max_new_tokens=20)

π is sampled with no top-k, top-p or repetition penalty, so that the distribution which is scored is the one that was
sampled. B rows, P prompt tokens (padded on the left), T response tokens (padded on the right), V vocabulary, H hidden size.
Paper: Alg. 4 l.11 and l.12; it says nothing of how a token is drawn.

Departure from common practice: a uniform number per row and step decides the token (where the distribution function
passes it), so a text depends neither on its neighbours in the batch nor on the number of ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from checkpoints import ModelError
from logprobs import head_logits, head_weight, round_up

PREFILL_TOKENS = 1 << 16            # prompt tokens that run through the model together


# ── Prompts and responses as tensors ───────────────────────────────────────────────────────────────────

def context_length(model) -> int:
    """How many tokens the model can attend to: prompt and response together."""
    return getattr(model.config, "max_position_embeddings", None) or 1 << 30


def check_context(model, prompt_ids: list[list[int]], max_new_tokens: int):
    """Raises ModelError where a prompt and max_new_tokens more tokens would not fit the model's context."""
    longest, limit = max(map(len, prompt_ids)), context_length(model)
    if longest + max_new_tokens > limit:
        raise ModelError(f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of "
                         f"{limit}: shorten or drop that row (prompt {[len(p) for p in prompt_ids].index(longest)} "
                         f"of the batch), or lower --max_new_tokens or --max_critique_tokens")


def pad_batch(prompt_ids: list[list[int]], response_ids: list[list[int]], pad: int, device=None, multiple: int = 1):
    """Prompts padded on the left to a multiple, responses on the right: [B,P], [B,P], [B,T], [B,T] (ids, masks)."""
    P, T = round_up(max(map(len, prompt_ids)), multiple), max(map(len, response_ids), default=0)
    prompts = torch.tensor([[pad] * (P - len(p)) + p for p in prompt_ids], device=device)
    prompt_mask = torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in prompt_ids], device=device)
    responses = torch.tensor([r + [pad] * (T - len(r)) for r in response_ids], device=device)
    mask = torch.tensor([[1] * len(r) + [0] * (T - len(r)) for r in response_ids], device=device)
    return prompts, prompt_mask, responses, mask


def positions_of(attention: Tensor) -> Tensor:
    """[B, columns] of 0 and 1 → each token's position, counted from the first that is no padding."""
    return (attention.cumsum(dim=1) - 1).clamp(min=0)


# ── Sampling ───────────────────────────────────────────────────────────────────────────────────────────

@dataclass
class StaticCache:
    """Keys and values of every layer in tensors that are allocated once, [B, heads, columns, head size]."""
    columns: int
    at: Tensor | None = None            # the columns that the keys of this pass take
    width: int = 0                      # the number of columns that are read
    layers: dict[int, list[Tensor]] = field(default_factory=dict)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, ...]:
        """Attention calls this, as on transformers' own caches: new keys and values in → all that it reads, out."""
        if layer not in self.layers:
            self.layers[layer] = [x.new_zeros(*x.shape[:2], self.columns, x.shape[3]) for x in (keys, values)]
        for kept, new in zip(self.layers[layer], (keys, values)):
            kept.index_copy_(2, self.at, new)
        return tuple(kept[:, :, : self.width] for kept in self.layers[layer])

    def get_seq_length(self, *_) -> int:
        """Columns before those of this pass."""
        return self.width - len(self.at)


def _masks(config, mask: Tensor, at: Tensor):
    """[B, 1, queries, columns] as each kind of layer needs it: a sliding window also hides what lies too far back."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{config._name_or_path}: {', '.join(sorted(kinds))} cannot be sampled from here, only full "
                         f"attention and sliding windows")
    if kinds == {"full_attention"}:
        return mask
    near = mask.masked_fill(torch.arange(mask.shape[-1], device=mask.device) <= at[:, None] - window, -torch.inf)
    return near if len(kinds) == 1 else {"full_attention": mask, "sliding_attention": near}


def _last_hidden(model, cache: StaticCache, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """One pass over the columns `cache.at`; the hidden state of the last of them, [B, H]."""
    return model.base_model(ids, attention_mask=_masks(model.config, mask, cache.at), position_ids=positions,
                            past_key_values=cache, use_cache=True).last_hidden_state[:, -1]


def _prefill(model, cache: StaticCache, ids: Tensor, attention: Tensor, seen: Tensor) -> Tensor:
    """Fill the cache with the prompts, some columns at a time; returns the last hidden states, [B, H]."""
    P, part, positions = ids.shape[1], max(1, PREFILL_TOKENS // len(ids)), positions_of(attention)
    for start in range(0, P, part):
        cache.width = min(start + part, P)
        cache.at = torch.arange(start, cache.width, device=ids.device)
        columns = torch.arange(cache.width, device=ids.device)
        mask = seen[..., : cache.width].masked_fill(columns > cache.at[:, None], -torch.inf)
        mask = mask.masked_fill(columns == cache.at[:, None], 0)        # padding sees itself: a row of −∞ would be NaN
        now = slice(start, cache.width)
        hidden = _last_hidden(model, cache, ids[:, now], mask, positions[:, now])
    cache.at = cache.at[-1:].clone()
    return hidden


def _draw(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """The token at which the distribution function passes u, the likeliest at T = 0: [B, V], [B, 1] → [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    cdf = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True).clamp(max=logits.shape[1] - 1)


def _capture(step, changed: list[Tensor]):
    """`step` as a CUDA graph, whose thousand kernels are launched as one.

    It runs once beforehand, beside the main stream as CUDA asks, to set up libraries; what it `changed` is put back.
    """
    before, side = [x.clone() for x in changed], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    for x, old in zip(changed, before):
        x.copy_(old)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def generate(model, prompt_ids: list[list[int]], max_new_tokens: int, temperature: float = 1.0,
             eos_token_id=None, pad_token_id=None, generator=None, return_logprobs: bool = False,
             uniforms: Tensor | None = None, cuda_graph: bool = True, stats: dict | None = None):
    """Sample one answer of at most max_new_tokens tokens per prompt; rows end at an EOS, which is kept (Alg. 4 l.11).

    temperature 0 is greedy; otherwise the samples are from softmax(logits / temperature), the very distribution
    that `token_logprobs` scores: no top-k, top-p, beams or penalties. eos_token_id: an id, a list of ids or None.
    uniforms [B, max_new_tokens] in [0, 1) decide the samples, each row's its own, whatever batch it is in; without
    them they are drawn from `generator`. Returns B lists of ids; with return_logprobs also B lists of their log-probs.
    Rows that have ended leave once a quarter of the batch is idle, on CUDA once half of it is. `stats`, a dict, is
    filled by `_speed`. cuda_graph=False is for a model whose forward pass looks at the host, and for finding faults;
    a sharded model is never captured. Raises ModelError where a prompt is empty or does not fit the context.
    """
    if not prompt_ids or max_new_tokens < 1:
        return ([], []) if return_logprobs else []
    if min(map(len, prompt_ids)) == 0:
        raise ModelError("a prompt has no tokens; there is nothing to condition on")
    check_context(model, prompt_ids, max_new_tokens)
    if uniforms is None:
        uniforms = torch.rand(len(prompt_ids), max_new_tokens, generator=generator,
                              device=generator.device if generator else model.device)
    eos = eos_token_id if isinstance(eos_token_id, list) else [] if eos_token_id is None else [eos_token_id]
    ids, scores, lengths = _generate(model, prompt_ids, max_new_tokens, temperature, eos, pad_token_id or 0,
                                     uniforms.to(model.device), return_logprobs, cuda_graph, stats)
    tokens, logprobs = ([row[:n] for row, n in zip(x.tolist(), lengths.tolist())] for x in (ids, scores))
    return (tokens, logprobs) if return_logprobs else tokens


def _generate(model, prompt_ids, T, temperature, eos, pad, uniforms, scored, cuda_graph, stats):
    """`generate` on tensors: ids [B, T], log-probs [B, T], lengths [B].

    On CUDA shapes come in buckets and the host looks only every 16 tokens who has ended: until then it runs ahead of
    the device. The step is captured again when the batch has halved or the cache is read 256 columns further.
    """
    cuda, device = model.device.type == "cuda", model.device
    bucket, further, every, idle = (64, 256, 16, 0.5) if cuda else (1, 1, 1, 0.25)
    graph = cuda_graph and cuda and not any(isinstance(m, FSDPModule) for m in model.modules())
    prompts, attention, _, _ = pad_batch(prompt_ids, [[] for _ in prompt_ids], pad, device, bucket)
    (B, P), ends = prompts.shape, torch.tensor(eos, dtype=torch.long, device=device)
    cache, weight = StaticCache(round_up(P + T, bucket)), head_weight(model)
    tokens, logprobs = prompts.new_zeros(B, T), uniforms.new_zeros(B, T, dtype=torch.float32)
    rows, lengths = torch.arange(B, device=device), prompts.new_zeros(B)
    done, u, positions = lengths.bool(), uniforms[:, :1].clone(), attention.sum(1, keepdim=True) - 1
    ids, scores = prompts[:, -1:].clone(), logprobs[:, :1].clone()
    seen = torch.full((B, 1, 1, cache.columns), -torch.inf, dtype=model.dtype, device=device)   # 0: attention looks
    seen[:, 0, 0, :P].masked_fill_(attention.bool(), 0)

    def sample(hidden):
        logits = head_logits(hidden, weight, temperature or 1.0)                                 # [B, V]
        ids.copy_(_draw(logits, u, temperature))
        if scored:
            scores.copy_(logits.gather(1, ids) - logits.logsumexp(1, keepdim=True))

    def decode():                   # is captured: it changes tensors in place and asks the host for nothing
        cache.at.add_(1), positions.add_(1), seen.index_fill_(3, cache.at, 0)
        sample(_last_hidden(model, cache, ids, seen[..., : cache.width], positions))

    sample(_prefill(model, cache, prompts, attention, seen))
    start, step = _clock(device) if stats is not None else 0, None
    for t in range(T):
        if t:
            width = min(cache.columns, round_up(P + t, further))
            if step is None or width != cache.width:
                cache.width = width
                step = _capture(decode, [cache.at, positions, ids]) if graph else decode
                start = _clock(device) if stats is not None and t == 1 else start      # the first capture is no decoding
            u.copy_(uniforms[rows, t : t + 1])
            step()
        tokens[rows, t], logprobs[rows, t] = ids[:, 0], scores[:, 0]
        lengths[rows] += ~done
        done |= torch.isin(ids[:, 0], ends)
        if eos and (t + 1) % every == 0 and t + 1 < T:
            alive = (~done).nonzero().squeeze(1)                        # the one place where the host waits
            if len(alive) == 0:
                break
            if len(alive) <= (1 - idle) * len(rows):
                rows, done, u, positions, ids, scores, seen = (x[alive] for x in
                                                               (rows, done, u, positions, ids, scores, seen))
                for kept in cache.layers.values():
                    kept[:] = [x[alive] for x in kept]
                step = None
    if stats is not None:
        stats.update(_speed(model, int(lengths.sum()) - B, t, _clock(device) - start))
    return tokens, logprobs, lengths


def _clock(device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)                      # what was launched must also have happened
    return time.perf_counter()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes that memory reads and writes in a second, measured by copying 256 MiB."""
    source, times, n = torch.zeros(1 << 28, dtype=torch.uint8, device=device), [], 20 if device.type == "cuda" else 1
    target = torch.empty_like(source)
    for _ in range(3):
        start = _clock(device)
        for _ in range(n):                           # so that launching them counts for nothing
            target.copy_(source)
        times.append((_clock(device) - start) / n)
    return 2 * source.nbytes / min(times)


def _speed(model, tokens: int, steps: int, seconds: float) -> dict[str, float]:
    """Speed after each row's first token, and the share of the memory bandwidth that reading the weights takes."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = sum(p.nbytes for p in model.parameters()) - (0 if embeddings is head else embeddings.nbytes)
    bandwidth = copy_bandwidth(model.device)
    return {"tokens": tokens, "steps": steps, "seconds": seconds, "tokens_per_second": tokens / seconds,
            "bytes_per_step": read, "copy_bandwidth": bandwidth, "bandwidth_share": read * steps / seconds / bandwidth}
