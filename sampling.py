"""One distribution π(·|x): drawn from, with a key-value cache, and scored, by fused log-probs.

    with use_lora(model, "policy"):
        ids = generate(model, [encode_prompt(tokenizer, "Hello")], max_new_tokens=20)
    logprobs = token_logprobs(hidden, head_weight(model), targets, temperature=0.6)

What is drawn is what is scored: softmax(h Wᵀ / T), with no top-k, top-p or repetition penalty.
B rows, P prompt tokens (padded on the left), T response tokens (padded on the right), N tokens
of a flat batch, H hidden size, V vocabulary.

Paper: y ~ π (Alg. 4 l.11), z' ~ R_φ (l.12), log π and its entropy (l.22, 25); not how they are
made. Departure from common practice: one uniform number per row and step decides the token, so
on a CPU in float32 a text depends neither on its neighbours in the batch nor on the number of
ranks. A GPU chooses kernels by the shape of the batch, so there the last bits of the logits can
change with it, and now and then a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from data import ModelError

PREFILL_TOKENS = 1 << 16   # prompt tokens that run through the model together
ROWS = 1024                # rows scored together: enough for matrix products at full speed
LOGITS = 1 << 24           # logits at once where entropy is computed: 64 MiB


# ── Prompts and responses as tensors

def round_up(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def context_length(model) -> int:
    """How many tokens the model can attend to: prompt and response together."""
    return getattr(model.config, "max_position_embeddings", None) or 1 << 30


def pad_batch(prompt_ids: list[list[int]], response_ids: list[list[int]], device=None,
              multiple: int = 1):
    """Prompts padded left to a multiple, responses right: ids, mask [B, P], ids, mask [B, T]

    With id 0, which every model has: what is masked is never seen.
    """
    P, T = round_up(max(map(len, prompt_ids)), multiple), max(map(len, response_ids), default=0)
    prompts = [[0] * (P - len(x)) + x for x in prompt_ids]
    prompt_mask = [[0] * (P - len(x)) + [1] * len(x) for x in prompt_ids]
    responses = [y + [0] * (T - len(y)) for y in response_ids]
    mask = [[1] * len(y) + [0] * (T - len(y)) for y in response_ids]
    batch = prompts, prompt_mask, responses, mask
    return tuple(torch.tensor(x, device=device) for x in batch)


def positions_of(attention: Tensor) -> Tensor:
    """[B, columns] of 0 and 1 → each token's position, from the first that is no padding."""
    return (attention.cumsum(dim=1) - 1).clamp(min=0)


# ── The head: z = h Wᵀ / T

def head_weight(model) -> Tensor:
    """The language-model head, [V, H]; a sharded model's is gathered, and lives while held."""
    # Of a tied head that is sharded only the embeddings know when they are whole.
    tied = model.config.tie_word_embeddings
    weight = (model.get_input_embeddings() if tied else model.get_output_embeddings()).weight
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A new tensor a @ b in float32 (float64 stays), with no float32 copy of a or b."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    product = a @ b                                  # a CPU rounds it to half precision first
    return product if product.dtype == torch.float64 else product.float()


def head_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """What is drawn from and what is scored: [N, H], [V, H] → [N, V], float32."""
    logits = _product(hidden, weight.T)
    return logits if temperature == 1 else logits.div_(temperature)


# ── Scoring: log π(y) and entropy without the [N, V] tensor of logits

def _tiles(rows: int, weight: Tensor) -> list[slice]:
    """Parts of the vocabulary, a quarter of a large one at most, for float32 [rows, part].

    4 MiB on a CPU, whose cache they should stay in; 64 MiB on CUDA. In steps of 128 that suit
    the matrix units.
    """
    budget = 1 << (26 if weight.is_cuda else 22)
    width = min(budget // (4 * max(rows, 1)), max(1024, math.ceil(len(weight) / 4)))
    width = round_up(max(width, 1), 128)
    return [slice(i, i + width) for i in range(0, len(weight), width)]


class _FusedLogProbs(torch.autograd.Function):
    """log p(y) in one pass over the vocabulary, with its gradient in `hidden`.

    With V = 128,256 the logits of 8,192 tokens are 4 GB in float32, and log_softmax holds
    several such tensors; here the vocabulary goes by in tiles. z = h Wᵀ / T, p = softmax(z):

        log p(y) = z_y − log Σ e^z        ∂ log p(y) / ∂h = (W[y] − pᵀW) / T

    The gradient needs nothing from upstream, so it is made in the forward pass, where p is at
    hand, and backward only scales it: it needs no head, which FSDP has freed by then.
    Each tile has a softmax and a log Σ e^z of its own, which are joined as FlashAttention does:
    a tile's share of p is its part of Σ e^z, and shrinks as others are added.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        """[rows, H], [V, H], [rows, 1] → log p(y) [rows]."""
        wide, wanted = torch.promote_types(hidden.dtype, torch.float32), ctx.needs_input_grad[0]
        z_y = hidden.new_zeros(len(hidden), 1, dtype=wide)               # z of y
        total = z_y - torch.inf                                          # log Σ e^z so far
        pull = torch.zeros_like(hidden, dtype=wide) if wanted else None  # pᵀW so far
        for tile in _tiles(len(hidden), weight):
            w = weight[tile]
            z = head_logits(hidden, w, temperature)                          # [rows, tile]
            here = (targets >= tile.start) & (targets < tile.stop)
            column = (targets - tile.start).clamp(0, len(w) - 1)
            z_y = torch.where(here, z.gather(1, column), z_y)
            p = z.softmax(1)            # a row at a time, while it is in the cache
            # p = e^z / Σ e^z, so that log Σ e^z = z − log p, safest where both are largest.
            part = z.amax(1, keepdim=True) - p.amax(1, keepdim=True).log()
            former, total = total, torch.logaddexp(total, part)
            if wanted:
                pull.mul_((former - total).exp())
                pull.addcmul_(_product(p.to(w.dtype), w), (part - total).exp())
        logprobs = z_y - total
        assert not (logprobs > 1e-3 * (1 + total.abs())).any(), "Alg. 4 l.22: log π(y) ≤ 0"
        if wanted:
            gradient = (weight[targets[:, 0]] - pull) / temperature
            ctx.save_for_backward(gradient.to(hidden.dtype))
        return logprobs.squeeze(1).float()

    @staticmethod
    def backward(ctx, upstream):
        """The kept gradient, scaled: [rows] → [rows, H]."""
        gradient, = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), None, None, None


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0):
    """log π(y_i | x, y_<i) of N sampled tokens (§3.5, Alg. 4 l.22), with no [N, V] tensor.

    hidden [N, H], weight [V, H] (the frozen head), targets [N] → [N] in nats, float32, with its
    gradient in `hidden` alone.
    """
    assert hidden.ndim == weight.ndim == 2 and targets.shape == hidden.shape[:1], \
        "§3.5: log π(y_i) takes one h_i and one y_i for each token: [N, H], [V, H], [N]"
    assert not (weight.requires_grad and torch.is_grad_enabled()), "the head is frozen here"
    parts = zip(hidden.split(ROWS), targets.split(ROWS))
    return torch.cat([_FusedLogProbs.apply(h, weight, y[:, None], temperature)
                      for h, y in parts])


def token_entropy(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """H(π(·|x, y_<i)) at N positions (Alg. 4 l.25): [N, H], [V, H] → [N] in nats.

    Some rows of logits at a time, made again in the backward pass.
    """
    def entropy(h):
        wide = torch.promote_types(h.dtype, torch.float32)
        logp = ((h @ weight.T).to(wide) / temperature).log_softmax(-1)
        return -(logp.exp() * logp).sum(-1).float()

    rows = max(1, LOGITS // len(weight))
    whole = torch.cat([checkpoint(entropy, h, use_reentrant=False) for h in hidden.split(rows)])
    assert not ((whole < -1e-3) | (whole > math.log(len(weight)) + 1e-3)).any(), \
        "Alg. 4 l.25: 0 ≤ H(π) ≤ log V"
    return whole


# ── The key-value cache

@dataclass
class StaticCache:
    """Keys and values of all layers, allocated once: [B, heads, columns, head size] each."""
    columns: int
    at: Tensor | None = None            # the columns that the keys of this pass take
    width: int = 0                      # the number of columns that are read
    layers: dict[int, list[Tensor]] = field(default_factory=dict)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, ...]:
        """Attention calls this, as on transformers' own caches: new ones in → all it reads."""
        if layer not in self.layers:
            self.layers[layer] = [x.new_zeros(*x.shape[:2], self.columns, x.shape[3])
                                  for x in (keys, values)]
        for kept, new in zip(self.layers[layer], (keys, values)):
            kept.index_copy_(2, self.at, new)
        return tuple(kept[:, :, : self.width] for kept in self.layers[layer])

    def get_seq_length(self, *_) -> int:
        """Columns before those of this pass."""
        return self.width - len(self.at)


def _masks(config, mask: Tensor, at: Tensor):
    """[B, 1, queries, columns] → what each kind of layer needs; a window hides the far past."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None)
                or ["sliding_attention" if window else "full_attention"])
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{config._name_or_path}: {', '.join(sorted(strange))} cannot be "
                         f"sampled from here, only full attention and sliding windows")
    masks = {"full_attention": mask}
    if "sliding_attention" in kinds:
        far = torch.arange(mask.shape[-1], device=mask.device) <= at[:, None] - window
        masks["sliding_attention"] = mask.masked_fill(far, -torch.inf)
    return masks if len(kinds) > 1 else masks[kinds.pop()]


# ── Drawing: y_t ~ π(·|x, y_<t)

def _draw(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Where the distribution function passes u; at T = 0 the likeliest. [B, V] → [B, 1]"""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    cdf = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    at = torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)
    return at.clamp(max=logits.shape[1] - 1)


@cache
def _side_stream():
    """One CUDA stream for all captures of the process; cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream()


def can_capture(model) -> bool:
    """Whether a decode step asks the host for nothing, so that a CUDA graph can hold it.

    FSDP's gathers do ask, and RoPE whose frequencies depend on the length reached so far.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    layer_types = rope, *rope.values()
    rope_types = {x.get("rope_type") for x in layer_types if isinstance(x, dict)}
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return not sharded and not rope_types & {"dynamic", "longrope"}


class Decoder:
    """The rows that still decode, and all that their next token depends on.

    `step` changes tensors in place and asks the host for nothing, so a CUDA graph can hold it,
    until `keep` makes other tensors of them.
    """

    def __init__(self, model, temperature: float, prompts, attention, uniforms, columns: int):
        self.model, self.temperature, self.cache = model, temperature, StaticCache(columns)
        self.weight = head_weight(model)                             # [V, H]
        self.rows = torch.arange(len(prompts), device=prompts.device)    # in the batch, [B]
        self.done = torch.zeros_like(self.rows, dtype=torch.bool)    # an EOS was drawn, [B]
        self.ids = prompts[:, -1:].clone()                           # the last token, [B, 1]
        self.positions = attention.sum(1, keepdim=True) - 1          # its position, [B, 1]
        self.uniforms = uniforms[:, :1].clone()                      # decides the next, [B, 1]
        # Added to attention's scores, [B, 1, 1, columns]: 0 is seen, −∞ is not.
        seen = F.pad(attention, (0, columns - attention.shape[1]))[:, None, None]
        self.seen = torch.zeros_like(seen, dtype=model.dtype).masked_fill(seen == 0, -torch.inf)

    def last_hidden(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """One pass over the columns `cache.at`: the hidden state of the last one, [B, H]."""
        masks = _masks(self.model.config, mask, self.cache.at)
        out = self.model.base_model(ids, attention_mask=masks, position_ids=positions,
                                    past_key_values=self.cache, use_cache=True)
        return out.last_hidden_state[:, -1]

    def prefill(self, prompts: Tensor, attention: Tensor):
        """Fill the cache with the prompts, [B, P], and draw the first token."""
        cache, positions, (B, P) = self.cache, positions_of(attention), prompts.shape
        part = max(1, PREFILL_TOKENS // B)
        if part > 64:                    # GPU kernels pad masks of other widths by a copy
            part -= part % 64
        columns = torch.arange(P, device=prompts.device)
        for start in range(0, P, part):
            cache.width = min(start + part, P)
            now, before = slice(start, cache.width), columns[: cache.width]
            cache.at = columns[now]
            mask = self.seen[..., : cache.width]
            mask = mask.masked_fill(before > cache.at[:, None], -torch.inf)
            # Padding sees itself: a row of −∞ alone would be NaN.
            mask = mask.masked_fill(before == cache.at[:, None], 0)
            hidden = self.last_hidden(prompts[:, now], mask, positions[:, now])
        cache.at = cache.at[-1:].clone()
        self.draw(hidden)

    def draw(self, hidden: Tensor):
        """The next token of each row, after the hidden states [B, H]."""
        logits = head_logits(hidden, self.weight, self.temperature or 1.0)           # [B, V]
        self.ids.copy_(_draw(logits, self.uniforms, self.temperature))

    def step(self):
        """Run the last token through the model, one column on, and draw the next."""
        self.cache.at.add_(1)
        self.positions.add_(1)
        self.seen.index_fill_(3, self.cache.at, 0)
        seen = self.seen[..., : self.cache.width]
        self.draw(self.last_hidden(self.ids, seen, self.positions))

    def captured_step(self):
        """`step` as a CUDA graph: its thousand kernels are launched as one.

        Raises torch.OutOfMemoryError where the graph does not fit.
        """
        # Once beforehand, on a stream of its own, to set up libraries; changes are undone.
        changed = self.cache.at, self.positions, self.ids
        before, side = [x.clone() for x in changed], _side_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        for x, old in zip(changed, before):
            x.copy_(old)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                self.step()
        except RuntimeError as error:
            # Whatever broke the capture, its end raises an error of its own on top.
            cause = error
            while cause and not isinstance(cause, torch.OutOfMemoryError):
                cause = cause.__context__
            raise cause or error
        return graph.replay

    def keep(self, alive: Tensor):
        """Only these of the rows, [B], go on."""
        for name in ("rows", "done", "seen", "positions", "ids", "uniforms"):
            setattr(self, name, getattr(self, name)[alive])
        for kept in self.cache.layers.values():
            kept[:] = [x[alive] for x in kept]


@torch.no_grad()
def generate(model, prompt_ids: list[list[int]], max_new_tokens: int, temperature: float = 1.0,
             eos_token_id=None, generator=None, uniforms: Tensor | None = None,
             cuda_graph: bool = True) -> list[list[int]]:
    """Draw one answer per prompt, of at most max_new_tokens tokens, its EOS kept (Alg. 4 l.11).

    temperature 0 is greedy; else the draws are from softmax(logits / temperature), as scored
    by `token_logprobs`. eos_token_id: an id, a list of ids or None. uniforms, [B, T] in [0, 1),
    decide the draws; without them `generator` does. cuda_graph=False is for finding faults.
    Raises ModelError for a bad prompt.
    """
    if not prompt_ids or max_new_tokens < 1:
        return []
    lengths, limit = [len(prompt) for prompt in prompt_ids], context_length(model)
    longest = max(lengths)
    if min(lengths) == 0:
        raise ModelError("a prompt has no tokens; there is nothing to condition on")
    if longest + max_new_tokens > limit:
        raise ModelError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's "
            f"context of {limit}: shorten or drop that row (prompt {lengths.index(longest)} of "
            f"the batch), or lower --max_new_tokens or --max_critique_tokens")
    shape, device = (len(prompt_ids), max_new_tokens), model.device
    if uniforms is None:
        uniforms = torch.rand(shape, generator=generator, device=(generator or model).device)
    assert uniforms.shape == shape, "Alg. 4 l.11: each token y_t has one u of its own"
    eos = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    eos = [token for token in eos if token is not None]
    bucket = 64 if device.type == "cuda" else 1          # graphs ask for few different shapes
    prompts, attention, *_ = pad_batch(prompt_ids, [], device, bucket)
    columns, uniforms = round_up(prompts.shape[1] + max_new_tokens, bucket), uniforms.to(device)
    decoder = Decoder(model, temperature, prompts, attention, uniforms, columns)
    decoder.prefill(prompts, attention)
    capture = cuda_graph and device.type == "cuda" and can_capture(model)
    tokens, lengths = _decode(decoder, uniforms, eos, capture)
    answers = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist())]
    assert all(y and not set(eos) & set(y[:-1]) for y in answers), \
        "Alg. 4 l.11: y has a token, and an EOS at its end alone"
    return answers


def _decode(decoder: Decoder, uniforms: Tensor, eos: list[int], capture: bool):
    """All tokens after the first draw: ids [B, T], lengths [B].

    Rows that have ended leave once a quarter of them is idle. On CUDA once half is, and the
    host looks every 16 tokens, for it runs ahead of the device; there a step is captured again
    when rows have left, or the cache is read 256 columns further.
    """
    model, cache, (B, T) = decoder.model, decoder.cache, uniforms.shape
    cuda, P = model.device.type == "cuda", cache.width
    further, every, most_busy = (256, 16, 0.5) if cuda else (1, 1, 0.75)
    ends = torch.tensor(eos, dtype=torch.long, device=model.device)
    tokens, lengths = ends.new_zeros(B, T), ends.new_zeros(B)
    step = None
    for t in range(T):
        if t > 0:
            width = min(cache.columns, round_up(P + t, further))
            if step is None or width != cache.width:
                cache.width = width
                step = None       # frees the memory of the old graph before the new one's
                step = decoder.captured_step() if capture else decoder.step
            decoder.uniforms.copy_(uniforms[decoder.rows, t : t + 1])
            step()
        tokens[decoder.rows, t] = decoder.ids[:, 0]
        lengths[decoder.rows] += ~decoder.done
        decoder.done |= torch.isin(decoder.ids[:, 0], ends)
        if eos and (t + 1) % every == 0 and t + 1 < T:
            alive = (~decoder.done).nonzero().squeeze(1)      # here alone the host waits
            if len(alive) == 0:
                break
            if len(alive) <= most_busy * len(decoder.rows):
                decoder.keep(alive)
                step = None
    return tokens, lengths
