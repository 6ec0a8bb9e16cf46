"""log π(y), its entropy and KL(π ‖ π_ref) without the [N, V] tensor of logits: the fused gather, in plain PyTorch.

    logprobs, entropy = token_logprobs(hidden, model.lm_head.weight, targets, temperature=0.6, with_entropy=True)
    kl = token_kl(hidden, ref_hidden, model.lm_head.weight)

With V = 128,256 the logits of 8,192 tokens are 4 GB in float32, and a naive log_softmax holds several such tensors. Here
the vocabulary goes by in tiles, and the gradient in the hidden state is made while a tile is at hand.
N tokens, H hidden size, V vocabulary.
Paper: log π and the entropy of §3.5 and Alg. 4 l.22, 25, r_t^KL of l.14; it says nothing of how they are computed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

ROWS = 1024        # rows that go through the head together: enough for its matrix products to run at full speed


def round_up(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def head_weight(model) -> Tensor:
    """The language-model head, [V, H], whole: of a sharded model it is gathered, and lives as long as it is held."""
    tied = getattr(model, "sharded_with_tied_head", False)           # then only the embeddings know when they are whole
    weight = (model.get_input_embeddings() if tied else model.get_output_embeddings()).weight
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _tiles(rows: int, weight: Tensor, buffers: int) -> list[slice]:
    """Parts of the vocabulary such that `buffers` float32 tensors [rows, part] fit in bounded memory.

    16 MiB on a CPU, whose cache they should stay in; 128 MiB on CUDA, or an eighth of what is free there. Never more
    than a quarter of the vocabulary, in steps of 128 that suit the matrix units.
    """
    budget = 1 << 24
    if weight.is_cuda:
        cached = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
        budget = min(1 << 27, (torch.cuda.mem_get_info(weight.device)[0] + cached) // 8)
    width = round_up(min(budget // (4 * max(rows, 1) * buffers), math.ceil(len(weight) / 4)) or 1, 128)
    return [slice(i, i + width) for i in range(0, len(weight), width)]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A new tensor a @ b in float32 (float64 stays), without a float32 copy of a or b. Only a CPU rounds it first."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    product = a @ b
    return product if product.dtype == torch.float64 else product.float()


def head_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """z = h Wᵀ / T, what is sampled from and what is scored: [N, H], [V, H] → [N, V], float32."""
    logits = _product(hidden, weight.T)
    return logits if temperature == 1 else logits.div_(temperature)


class _OverVocabulary(torch.autograd.Function):
    """log p(y), and H(p) or KL(p ‖ q), in one pass over the vocabulary, with their gradients in the hidden state.

    With z = h Wᵀ / T and p = softmax(z): ∂ log p(y) / ∂ h = (W[y] − pᵀ W) / T needs nothing from upstream, so it is
    made in the forward pass, where p is at hand, and backward is one scaling. Entropy and KL are means over p:
    H = log Σ e^z − E[z] and KL = E[z − z'] − log Σ e^z + log Σ e^z', and ∂ E[f] / ∂ h = (p ⊙ (f − E[f]))ᵀ W / T here.

    Exponentials are taken relative to the largest logit so far; what is summed already shrinks where a later tile
    holds a larger one (the online softmax of FlashAttention). So each tile of the head is used twice and left.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, ref_hidden, temperature, with_mean):
        """[rows, H], [V, H], [rows, 1] or None, [rows, H] or None → log p(y) [rows] or None, H or KL [rows] or None."""
        wants = ctx.needs_input_grad[0]
        start = hidden.new_zeros(len(hidden), 1, dtype=torch.promote_types(hidden.dtype, torch.float32))
        peak = peak_ref = shift = start - torch.inf
        total = total_ref = at_y = mean = start
        pull, pull_mean = (torch.zeros_like(hidden, dtype=start.dtype) if wants and asked else None    # Σ e W, Σ e f W
                           for asked in (True, with_mean))
        for tile in _tiles(len(hidden), weight, 1 + 2 * with_mean):
            w = weight[tile]
            z, f = head_logits(hidden, w, temperature), None                                               # [rows, tile]
            top = torch.maximum(peak, z.amax(1, keepdim=True))
            if targets is not None:
                here = (targets >= tile.start) & (targets < tile.stop)
                at_y = torch.where(here, z.gather(1, (targets - tile.start).clamp(0, len(w) - 1)), at_y)
            if ref_hidden is not None:
                f = head_logits(ref_hidden, w, temperature)
                top_ref = torch.maximum(peak_ref, f.amax(1, keepdim=True))
                total_ref = total_ref * (peak_ref - top_ref).exp() + (f - top_ref).exp_().sum(1, keepdim=True)
                peak_ref, f = top_ref, torch.sub(z, f, out=f)                                          # z − z'
            elif with_mean:
                shift = top if tile.start == 0 else shift
                f = z - shift                   # any constant will do; this one keeps the products small
            shrink, e = (peak - top).exp(), z.sub_(top).exp_()      # in place: memory traffic is half the work
            peak, total = top, total * shrink + e.sum(1, keepdim=True)
            if with_mean:
                mean = mean * shrink + f.mul_(e).sum(1, keepdim=True)
            for kept, factor in ((pull, e), (pull_mean, f)):
                if kept is not None:
                    kept.mul_(shrink).add_(_product(factor.to(w.dtype), w))
        lse, mean, grad, grad_mean = peak + total.log(), mean / total, None, None
        value = lse - shift - mean if ref_hidden is None else mean - (peak - peak_ref) - (total / total_ref).log()
        if wants and targets is not None:
            grad = ((weight[targets[:, 0]] - pull / total) / temperature).to(hidden.dtype)
        if pull_mean is not None:
            grad_mean = (pull_mean - mean * pull) / (total * temperature) * (-1 if ref_hidden is None else 1)
            grad_mean = grad_mean.to(hidden.dtype)
        again = (hidden, weight, targets, lse, value) if ctx.needs_input_grad[1] else ()     # a frozen head is let go
        ctx.save_for_backward(grad, grad_mean, *again)
        ctx.temperature = temperature
        return (None if targets is None else (at_y - lse).squeeze(1).float(),
                value.squeeze(1).float() if with_mean else None)

    @staticmethod
    def backward(ctx, *upstream):
        """The kept gradients, scaled; and the head's own, where a base is trained."""
        grads, inputs = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        terms = [grad * up[:, None].to(grad.dtype) for grad, up in zip(grads, upstream) if grad is not None]
        d_weight = _head_gradient(*inputs, ctx.temperature, *upstream) if inputs else None
        return sum(terms) if terms else None, d_weight, None, None, None, None


def _head_gradient(hidden, weight, targets, lse, entropy, temperature, upstream, upstream_entropy) -> Tensor:
    """∂ loss / ∂ W, [V, H], for the rare case that a base is trained: the logits are simply made again."""
    d_weight, up = torch.empty_like(weight), upstream[:, None].to(lse.dtype)
    for tile in _tiles(len(hidden), weight, 3):
        logp = head_logits(hidden, weight[tile], temperature) - lse
        p, row = logp.exp(), torch.arange(tile.start, tile.start + logp.shape[1], device=logp.device)
        d_logits = ((targets == row).to(p.dtype) - p) * up
        if upstream_entropy is not None:
            d_logits -= p * (logp + entropy) * upstream_entropy[:, None]
        d_weight[tile] = (d_logits.T @ hidden.to(d_logits.dtype)) / temperature
    return d_weight


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0,
                   with_entropy: bool = False):
    """log π(y_i | x, y_<i) of N sampled tokens, and the entropy of each distribution (§3.5, Alg. 4 l.22, 25).

    hidden [N, H], weight [V, H] (the head), targets [N] → [N] in nats, float32; with_entropy → ([N], [N]).
    Both have their gradient in `hidden`, and in `weight` where it requires one. No [N, V] tensor ever exists, and
    backward does not need a frozen head, which FSDP has freed by then.
    """
    assert hidden.ndim == 2 and weight.ndim == 2 and targets.shape == hidden.shape[:1], "expected [N,H], [V,H], [N]"
    parts = [_OverVocabulary.apply(h, weight, y[:, None], None, temperature, with_entropy)
             for h, y in zip(hidden.split(ROWS), targets.split(ROWS))]
    return tuple(map(torch.cat, zip(*parts))) if with_entropy else torch.cat([logprobs for logprobs, _ in parts])


def token_kl(hidden: Tensor, ref_hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """Exact KL(π ‖ π_ref) over the vocabulary at every position: [N, H], [N, H], [V, H] → [N] in nats.

    It enters the reward as r_t^KL = −β KL_t (§3.5, Alg. 4 l.14), a constant of the update; where it is a term of a loss
    instead, it has its gradient in `hidden`. The reference and the head are constants.
    """
    return torch.cat([_OverVocabulary.apply(h, weight.detach(), None, ref, temperature, True)[1]
                      for h, ref in zip(hidden.split(ROWS), ref_hidden.detach().split(ROWS))])
