"""Sample from π(·|x) with a key-value cache, and score tokens without storing all logits.

    with use_lora(model, "policy"):
        ids = generate(model, [encode_prompt(tokenizer, "Hello")], max_new_tokens=20)
    logprobs = token_logprobs(hidden, head_weight(model), targets, temperature=0.6)

Sampling and scoring use the same distribution: softmax(h Wᵀ / T) with the temperature T, and no
top-k, top-p or repetition penalty. Temperature 0 is greedy decoding.
In shapes: B rows, P prompt tokens (padded on the left), T response tokens (padded on the
right), N tokens of a flat batch, H hidden size, V vocabulary.

Paper: y ~ π (Alg. 4 l.11), z' ~ R_φ (l.12), log π and its entropy (l.22, 25). The paper does
not describe how to compute them. Departure from common practice: each token is drawn with one
uniform random number, which the caller can fix in advance. In float32 on a CPU, a sampled
text therefore depends neither on the other rows nor on the number of processes. A GPU
chooses its kernels by the shape of the batch. The last bits of the logits can therefore differ,
and in rare cases so does a token.
"""

import inspect
import math
import os
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from data import InputError, chunks

PREFILL_TOKENS = 1 << 14   # maximum number of prompt tokens per forward pass
ROWS = 1024                # number of tokens scored at a time; enough for fast matrix products
LOGITS = 1 << 24           # maximum number of logits per step of the entropy; 64 MiB in float32


# ── Batches of prompts and responses

def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not less than n."""
    return -(-n // multiple) * multiple


def _rope_limit(model):
    """The longest sequence in which RoPE keeps its frequencies; None if they never change."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    for options in rope, *rope.values():            # rope may contain one dict per layer type
        match options:
            case {"rope_type": "dynamic" | "longrope"}:
                return options.get("original_max_position_embeddings", 1 << 30)


def context_length(model) -> int:
    """The largest number of tokens in a prompt and its response together.

    For RoPE of the type longrope (Phi-3-128k, Phi-4-mini) or dynamic, it is at most the
    original context. In a longer sequence, all positions get other frequencies. Sampling would
    still read keys with the old frequencies from its cache, and scoring would not.
    """
    limit = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    return min(limit, _rope_limit(model) or limit)


def pad_batch(prompt_ids: list[list[int]], response_ids: list[list[int]], device=None,
              multiple: int = 1):
    """Pad prompts on the left and responses on the right.

    Returns the prompt ids and their mask, [B, P], and the response ids and their mask, [B, T].
    P is rounded up to a multiple of `multiple`. The padding id is 0, because every
    model has a token 0. The masks are 1 at tokens and 0 at padding.
    """
    P = round_up(max(map(len, prompt_ids)), multiple)
    T = max(map(len, response_ids), default=0)
    prompts = [[0] * (P - len(x)) + x for x in prompt_ids]
    prompt_mask = [[0] * (P - len(x)) + [1] * len(x) for x in prompt_ids]
    responses = [y + [0] * (T - len(y)) for y in response_ids]
    mask = [[1] * len(y) + [0] * (T - len(y)) for y in response_ids]
    return tuple(torch.tensor(x, device=device)
                 for x in (prompts, prompt_mask, responses, mask))


# ── The language-model head: z = h Wᵀ / T

def head_weight(model) -> Tensor:
    """The weight of the language-model head, [V, H]. `shard` leaves it whole."""
    return model.get_output_embeddings().weight


def _product(a, b):
    """Compute a @ b without float32 copies of a and b. The result is float32, or float64."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    product = a @ b                     # on a CPU, bfloat16 inputs give a product in bfloat16
    return product if product.dtype == torch.float64 else product.float()


def head_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Compute the logits for sampling and scoring: [N, H], [V, H] → [N, V] in float32."""
    logits = _product(hidden, weight.T)
    return logits if temperature == 1 else logits.div_(temperature)


# ── Scoring: log π(y) and entropy, without a large [N, V] tensor of logits

def _tiles(rows: int, weight: Tensor):
    """Split the vocabulary into slices. The logits of one slice are a tile, [rows, width].

    A float32 tile takes about 4 MiB or less on a CPU, so that it fits into the cache, and about
    64 MiB or less on CUDA. For a large V, the width is at most about V / 4. It is rounded up to
    a multiple of 128, which suits the matrix units of a GPU.
    """
    budget = 1 << (26 if weight.is_cuda else 22)
    width = min(budget // (4 * max(rows, 1)), max(1024, math.ceil(len(weight) / 4)))
    width = round_up(width, 128)
    return [slice(i, i + width) for i in range(0, len(weight), width)]


class _FusedLogProbs(torch.autograd.Function):
    """log p(y) and its gradient with respect to `hidden`, in one pass over the vocabulary.

    With V = 128,256 the float32 logits of 8,192 tokens take 4 GB, and log_softmax needs several
    tensors of this size. This function therefore processes the vocabulary in tiles. With
    z = h Wᵀ / T and p = softmax(z):

        log p(y) = z_y − log Σ e^z        ∂ log p(y) / ∂h = (W[y] − pᵀW) / T

    The forward pass computes this gradient, because it already has p. The backward pass only
    multiplies it by the upstream gradient. Each tile makes Σ e^z larger and thus the earlier p
    smaller. So pᵀW of the earlier tiles is scaled down, as in FlashAttention.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        """[rows, H], [V, H], [rows, 1] → log p(y) [rows]."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        needs_gradient = ctx.needs_input_grad[0]
        z_y = torch.zeros_like(targets, dtype=dtype)             # [rows, 1]
        log_sum = z_y - torch.inf                                # log Σ e^z so far, [rows, 1]
        if needs_gradient:
            mean_weight = torch.zeros_like(hidden, dtype=dtype)  # pᵀW so far, [rows, H]
        for tile in _tiles(len(hidden), weight):
            w = weight[tile]
            z = head_logits(hidden, w, temperature)              # [rows, width]
            column = targets - tile.start        # index of y in this tile, if y is in it
            clamped = column.clamp(0, len(w) - 1)
            z_y = torch.where(column == clamped, z.gather(1, clamped), z_y)
            previous = log_sum
            log_sum = torch.logaddexp(previous, z.logsumexp(1, keepdim=True))
            if needs_gradient:
                p = z.sub_(log_sum).exp_()               # e^z / Σ e^z of the tiles so far
                mean_weight.mul_((previous - log_sum).exp())
                mean_weight += _product(p.to(w.dtype), w)
        logprobs = z_y - log_sum
        assert not (logprobs > 1e-3 * (1 + log_sum.abs())).any(), "Alg. 4 l.22: log π(y) ≤ 0"
        if needs_gradient:
            gradient = (weight[targets[:, 0]] - mean_weight) / temperature
            ctx.save_for_backward(gradient.to(hidden.dtype))
        return logprobs.squeeze(1).float()

    @staticmethod
    def backward(ctx, upstream):
        """Scale the stored gradient: [rows] → [rows, H]."""
        gradient, = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), None, None, None


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0):
    """Compute log π(y_i | x, y_<i) of N sampled tokens (§3.5, Alg. 4 l.22).

    hidden [N, H], weight [V, H] (the frozen head), targets [N] → [N] in nats, float32. The
    logits are computed in tiles, so no large [N, V] tensor is stored. Only `hidden` gets a
    gradient.
    """
    assert hidden.ndim == weight.ndim == 2 and targets.shape == hidden.shape[:1], \
        "§3.5: log π(y_i) takes one h_i and one y_i for each token: [N, H], [V, H], [N]"
    assert not (weight.requires_grad and torch.is_grad_enabled()), "the head is frozen here"
    return torch.cat([_FusedLogProbs.apply(h, weight, y[:, None], temperature)
                      for h, y in zip(hidden.split(ROWS), targets.split(ROWS))])


def token_entropy(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute H(π(·|x, y_<i)) at N positions (Alg. 4 l.25): [N, H], [V, H] → [N] in nats.

    To save memory, logits are computed for some rows at a time, and not stored. The backward
    pass computes them again.
    """
    def chunk_entropy(h):
        dtype = torch.promote_types(h.dtype, torch.float32)
        logp = ((h @ weight.T).to(dtype) / temperature).log_softmax(-1)
        return -(logp.exp() * logp).sum(-1).float()

    rows = max(1, LOGITS // len(weight))
    entropy = torch.cat([checkpoint(chunk_entropy, h, use_reentrant=False)
                         for h in hidden.split(rows)])
    assert not ((entropy < -1e-3) | (entropy > math.log(len(weight)) + 1e-3)).any(), \
        "Alg. 4 l.25: 0 ≤ H(π) ≤ log V"
    return entropy


# ── The key-value cache

@dataclass
class StaticCache:
    """Keys and values of all layers: tensors of fixed size, [B, heads, columns, head size]."""
    columns: int                                # number of allocated columns
    cache_position: Tensor | None = None        # indices of the columns to write in this pass
    width: int = 0                              # number of columns that attention reads
    layers: dict = field(default_factory=dict)  # index of the layer → [keys, values]

    def update(self, keys, values, layer: int, *_, **__) -> tuple[Tensor, ...]:
        """Store new keys and values; return all keys and values that attention reads.

        The attention layers of transformers call this method of their cache.
        """
        if layer not in self.layers:
            self.layers[layer] = [x.new_zeros(*x.shape[:2], self.columns, x.shape[3])
                                  for x in (keys, values)]
        for stored, new in zip(self.layers[layer], (keys, values)):
            stored.index_copy_(2, self.cache_position, new)
        return tuple(stored[:, :, : self.width] for stored in self.layers[layer])

    def get_seq_length(self, *_) -> int:
        """The number of columns that this pass reads without writing them."""
        return self.width - len(self.cache_position)


def _masks(config, mask, cache_position):
    """Make the attention masks of all layer types from `mask`, [B, 1, queries, columns].

    Returns a dict from layer type to mask, or the mask itself if the model has only one type.
    In a layer with a sliding window, a token does not attend to columns before its window.
    `load_model` refuses models with layers of other types.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None)
                      or ["sliding_attention" if window else "full_attention"])
    masks = {"full_attention": mask}
    if "sliding_attention" in layer_types:
        columns = torch.arange(mask.shape[-1], device=mask.device)
        is_outside = columns <= cache_position[:, None] - window
        masks["sliding_attention"] = mask.masked_fill(is_outside, -torch.inf)
    return masks if len(layer_types) > 1 else masks[layer_types.pop()]


# ── Sampling: y_t ~ π(·|x, y_<t)

def _draw(logits, uniforms, temperature: float) -> Tensor:
    """Draw tokens by the inverse CDF; temperature 0 means argmax. [B, V], u [B, 1] → [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    cdf = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)
    return ids.clamp(max=logits.shape[1] - 1)


def can_capture(model) -> bool:
    """Whether a CUDA graph can capture a decoding step: nothing in it may need the CPU.

    It cannot if FSDP shards the model, or if the RoPE frequencies depend on the current length.
    """
    return not isinstance(model.base_model, FSDPModule) and _rope_limit(model) is None


class Decoder:
    """The state of decoding: the rows of the batch, their cache and their last tokens.

    `step` changes tensors in place and needs nothing from the CPU, so that a CUDA graph can
    capture it. `keep` drops rows by making new tensors, so `step` must then be captured again.
    """

    def __init__(self, model, temperature: float, prompts, attention, uniforms, columns: int):
        self.model = model
        self.temperature = temperature
        self.cache = StaticCache(columns)
        # transformers 5.24 renamed the argument past_key_values to cache.
        self.cache_name = ("cache" if "cache" in inspect.signature(model.base_model.forward)
                           .parameters else "past_key_values")
        self.weight = head_weight(model)                             # [V, H]
        self.rows = torch.arange(len(prompts), device=prompts.device)    # batch indices, [B]
        self.has_ended = torch.zeros_like(self.rows, dtype=torch.bool)   # True after EOS, [B]
        self.ids = prompts[:, -1:].clone()                           # the last tokens, [B, 1]
        self.positions = attention.sum(1, keepdim=True) - 1          # their positions, [B, 1]
        self.uniforms = uniforms[:, :1].clone()                      # u of the next, [B, 1]
        # Added to attention scores, [B, 1, 1, columns]: 0 where visible, −∞ elsewhere.
        mask = F.pad(attention, (0, columns - attention.shape[1]))[:, None, None]
        self.mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(mask == 0, -torch.inf)

    def last_hidden(self, ids, mask, positions) -> Tensor:
        """Run a forward pass over `ids`; return the hidden state of the last column, [B, H]."""
        masks = _masks(self.model.config, mask, self.cache.cache_position)
        output = self.model.base_model(ids, attention_mask=masks, position_ids=positions,
                                       use_cache=True, **{self.cache_name: self.cache})
        return output.last_hidden_state[:, -1]

    def prefill(self, prompts, attention):
        """Fill the cache with the prompts, [B, P], and draw the first token."""
        cache = self.cache
        positions = (attention.cumsum(dim=1) - 1).clamp(min=0)       # from 0, [B, P]
        B, P = prompts.shape
        size = max(1, PREFILL_TOKENS // B)
        if size > 64:
            size -= size % 64            # for other widths, GPU kernels copy the mask
        columns = torch.arange(P, device=prompts.device)
        for start in range(0, P, size):
            cache.width = min(start + size, P)
            chunk = slice(start, cache.width)
            cache.cache_position = columns[chunk]
            queries = columns[chunk, None]
            keys = columns[: cache.width]
            mask = self.mask[..., : cache.width].masked_fill(keys > queries, -torch.inf)
            # Each token attends to itself: a padding token with only −∞ scores would give NaN.
            mask = mask.masked_fill(keys == queries, 0)
            hidden = self.last_hidden(prompts[:, chunk], mask, positions[:, chunk])
        cache.cache_position = cache.cache_position[-1:].clone()
        self.draw(hidden)

    def draw(self, hidden: Tensor):
        """Draw the next token of each row from its hidden state, [B, H]."""
        logits = head_logits(hidden, self.weight, self.temperature or 1.0)           # [B, V]
        self.ids.copy_(_draw(logits, self.uniforms, self.temperature))

    def step(self):
        """Run the last token of each row through the model and draw the next token."""
        self.cache.cache_position.add_(1)
        self.positions.add_(1)
        self.mask.index_fill_(3, self.cache.cache_position, 0)
        mask = self.mask[..., : self.cache.width]
        self.draw(self.last_hidden(self.ids, mask, self.positions))

    def captured_step(self):
        """Capture `step` in a CUDA graph and return a function that runs the graph.

        `step` must have run with these tensors before, because its first run prepares CUDA
        libraries, and this cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def keep(self, alive: Tensor):
        """Keep K rows, those with the indices in `alive`, [K], and drop the others."""
        self.rows = self.rows[alive]
        self.has_ended = self.has_ended[alive]
        self.mask = self.mask[alive]
        self.positions = self.positions[alive]
        self.ids = self.ids[alive]
        self.uniforms = self.uniforms[alive]
        for layer in self.cache.layers.values():
            layer[:] = [x[alive] for x in layer]


@torch.no_grad()
def generate(model, prompt_ids: list[list[int]], max_new_tokens: int, temperature: float = 1.0,
             eos_token_id=(), uniforms: Tensor | None = None, batch_size: int = 256,
             cuda_graph: bool = True) -> list[list[int]]:
    """Sample one answer per prompt, as token ids (Alg. 4 l.11).

    An answer ends with an EOS token, or is cut off after max_new_tokens tokens.
    temperature: 0 means greedy decoding; otherwise tokens are drawn from
    softmax(logits / temperature), which `token_logprobs` scores. eos_token_id: the ids that end
    an answer. uniforms: random numbers in [0, 1), [B, T], one for each token; None: drawn here.
    batch_size: number of prompts that are decoded together. cuda_graph: False disables CUDA
    graphs, for debugging.
    Raises InputError if the longest prompt and max_new_tokens exceed the context.
    """
    longest = max(map(len, prompt_ids), default=0)
    limit = context_length(model)
    if longest + max_new_tokens > limit:
        raise InputError(
            f"the longest prompt has {longest} tokens; with {max_new_tokens} new tokens it "
            f"exceeds the model's context of {limit} tokens; shorten or drop that row, or "
            f"lower --max_new_tokens or --max_critique_tokens")
    shape = len(prompt_ids), max_new_tokens
    uniforms = torch.rand(shape) if uniforms is None else uniforms
    assert uniforms.shape == shape, "Alg. 4 l.11: each token y_t has one u of its own"
    is_cuda = model.device.type == "cuda"
    bucket = 64 if is_cuda else 1                        # keeps the number of shapes small
    answers = []
    parts = [*zip(chunks(prompt_ids, batch_size), uniforms.split(batch_size))]
    for part_prompts, part_uniforms in tqdm(parts, "generate", delay=2, leave=False,
                                            disable=os.environ.get("RANK", "0") != "0"):
        prompts, attention, *_ = pad_batch(part_prompts, [], model.device, bucket)
        columns = round_up(prompts.shape[1] + max_new_tokens, bucket)
        part_uniforms = part_uniforms.to(model.device)
        decoder = Decoder(model, temperature, prompts, attention, part_uniforms, columns)
        decoder.prefill(prompts, attention)
        can_graph = cuda_graph and is_cuda and can_capture(model)
        for row in _decode(decoder, part_uniforms, eos_token_id, can_graph).tolist():
            end = next((t for t, token in enumerate(row, 1) if token in eos_token_id), None)
            answers.append(row[:end])
    return answers


def _decode(decoder: Decoder, uniforms, eos, capture: bool):
    """Decode after `prefill`; return the ids of all new tokens, [B, T].

    The ids after the EOS of a row have no meaning, and `generate` cuts them off.
    """
    cache = decoder.cache
    # On CUDA, a check for ended rows makes the CPU wait for the GPU, and a new width or batch
    # size needs a new graph. Both take time, so they are rarer than on a CPU.
    is_cuda = uniforms.is_cuda
    width_step = 256 if is_cuda else 1      # attention reads a multiple of this many columns
    check_every = 16 if is_cuda else 1      # tokens between two checks for ended rows
    max_active = 0.5 if is_cuda else 0.75   # drop ended rows if at most this share is active
    B, T = uniforms.shape
    P = cache.width
    ends = torch.tensor(eos, dtype=torch.long, device=uniforms.device)
    tokens = ends.new_zeros(B, T)
    step = None
    for t in range(T):
        if t > 0:
            width = min(cache.columns, round_up(P + t, width_step))
            if width != cache.width:
                cache.width = width
                step = None       # frees the old graph before the next capture
            decoder.uniforms.copy_(uniforms[decoder.rows, t : t + 1])
            if step:
                step()
            else:
                decoder.step()
                step = decoder.captured_step() if capture else decoder.step
        tokens[decoder.rows, t] = decoder.ids[:, 0]
        decoder.has_ended |= torch.isin(decoder.ids[:, 0], ends)
        if eos and (t + 1) % check_every == 0:
            alive = (~decoder.has_ended).nonzero().squeeze(1)   # the CPU waits only here
            if len(alive) == 0:
                break
            if len(alive) <= max_active * len(decoder.rows):
                decoder.keep(alive)
                step = None
    return tokens
