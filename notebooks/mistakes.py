"""The project's functions with the signatures of notebook 6, and typical mistakes in them.

MISTAKES maps the name of a function to wrong versions of it: hint → function. `checks.check`
gives the hint if a student's function gives what the wrong version gives.
"""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import annotate
from annotate import Span, token_labels, token_rewards
from model import LoRALinear
from policy import MAX_GRAD_NORM, add_gradients, gae, ppo_loss
from reward_model import z_loss
from runtime import optimizer_parameters
from sampling import generate


project_forward = LoRALinear.forward         # the notebook replaces the method


def our_lora_forward(x, W, A, B, alpha):
    """`LoRALinear.forward`, with the signature of the notebook."""
    layer = LoRALinear(nn.Linear(1, 1, bias=False, device="meta"))     # draws no random numbers
    layer.base_layer.weight = nn.Parameter(W, requires_grad=False)
    layer.lora_A["student"], layer.lora_B["student"], layer.active = A, B, "student"
    layer.scaling, layer.dropout = {"student": alpha / len(A)}, {"student": 0.0}
    return project_forward(layer, x)


def our_update(rollouts, index, model, value_head, optimizer, config, policy_loss,
               max_norm=MAX_GRAD_NORM, sign=1, **settings):
    """One step of `ppo_update`. The other arguments make mistakes."""
    parameters = optimizer_parameters(optimizer)
    with patch("policy.ppo_loss", lambda *terms: policy_loss(*terms[:5])):
        add_gradients(rollouts, index, model, value_head, parameters,
                      replace(config, **settings))
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    for p in parameters:
        p.grad *= sign
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def patched(function, owner, name, replacement):
    """The function, which runs while `owner.name` is replaced."""
    def wrong(*inputs):
        with patch.object(owner, name, replacement):
            return function(*inputs)
    return wrong


def touched(text, offsets, spans):
    """The labels of the spans that touch each token: it is neither left nor right of them."""
    def inside(*place):
        return {t for t, labels in enumerate(token_labels(text, offsets, [Span(*place, 1)]))
                if labels}

    labels = [set() for _ in offsets]
    for span in spans:
        for t in inside(0, len(text)) - inside(0, span.start) - inside(span.end, len(text)):
            labels[t].add(span.label)
    return labels


def our_generate(model, prompts, uniforms, temperature, eos):
    """`sampling.generate`, with the signature of the notebook."""
    return generate(model, prompts, uniforms.shape[1], temperature, [eos], uniforms)


OURS = {"token_rewards": token_rewards, "z_loss": z_loss, "lora_forward": our_lora_forward,
        "generate": our_generate, "gae": gae, "ppo_loss": ppo_loss, "update": our_update}
MISTAKES = {
    "token_rewards": {
        "a token that is only partly in a span gets 0":
            patched(token_rewards, annotate, "token_labels", touched),
        "the character at `end` is not in the span, so a token may end there":
            lambda text, offsets, spans: token_rewards(
                text, offsets, [replace(span, end=span.end - 1) for span in spans]),
        "whitespace around a token's characters need not be in the span":
            lambda text, *places: token_rewards("x" * len(text), *places),
        "a token of only whitespace is in a span that covers it whole":
            lambda text, offsets, spans: token_rewards(
                text, [(a, b if text[a:b].strip() else a) for a, b in offsets], spans),
        "praise and blame of one token give 0, whichever comes last":
            lambda text, offsets, spans: [next(filter(None, labels), 0) for labels in zip(*(
                token_rewards(text, offsets, part) for part in ([], *zip(spans[::-1]))))],
    },
    "z_loss": {
        "the logits at position i predict the token at i + 1, not at i":
            lambda model, pairs: sum(cross_entropy(
                model(torch.tensor([x + z])).logits[0, len(x) :], torch.tensor(z),
                reduction="sum") for x, z in pairs),
        "only the tokens of z have a loss, not those of x and y":
            lambda model, pairs: z_loss(model, [(x[:1], x[1:] + z) for x, z in pairs]),
        "the first token of z has a loss too": lambda model, pairs:
            z_loss(model, [(x + z[:1], z[1:]) for x, z in pairs if len(z) > 1]),
        "the last token of z has a loss too": lambda model, pairs:
            z_loss(model, [(x, z[:-1]) for x, z in pairs if len(z) > 1]),
        "the loss is a sum over the pairs, not their mean":
            lambda model, pairs: z_loss(model, pairs) / len(pairs),
        "the loss is a sum over the tokens, not their mean":
            lambda model, pairs: z_loss(model, pairs) / sum(len(z) for _, z in pairs),
        "the loss of a pair is a sum over its tokens, not their mean":
            lambda model, pairs: sum(z_loss(model, [pair]) / len(pair[1]) for pair in pairs),
        "the loss is minus the log-probability": lambda *pairs: -z_loss(*pairs),
    },
    "lora_forward": {
        "the update is scaled by α / r": lambda x, W, A, B, _: x @ W.T + x @ A.T @ B.T,
        "the scale is α / r, not α": lambda x, W, A, B, a: x @ W.T + a * (x @ A.T @ B.T),
        "the update is added to the frozen layer's output":
            lambda x, W, A, B, alpha: x @ A.T @ B.T * alpha / len(A),
    },
    "generate": {
        "an answer includes its EOS": lambda model, prompts, u, temperature, eos:
            [y[: y.index(eos)] if eos in y else y
             for y in our_generate(model, prompts, u, temperature, eos)],
        "an answer ends with its first EOS": lambda model, prompts, u, temperature, _:
            our_generate(model, prompts, u, temperature, -1),
        "logits are divided by the temperature": lambda model, prompts, u, temperature, eos:
            our_generate(model, prompts, u, 1.0, eos),
        "the attention mask is 0 on padding": lambda model, prompts, u, temperature, eos:
            our_generate(model, [[0] * (8 - len(x)) + x for x in prompts], u, temperature, eos),
        "if no sum is above u_t, take the id V − 1":
            patched(our_generate, Tensor, "clamp", lambda x, **_: x),
        "if u_t is above all sums, the id is V − 1, not 0":
            patched(our_generate, Tensor, "clamp", lambda x, **_: x % 960),           # V = 960
    },
    "gae": {
        "V after the last token of a response is 0, whatever stands in the padding":
            lambda r, V, mask, gamma, lam:
            [x * mask for x in gae(r * mask, V, torch.ones_like(mask), gamma, lam)],
        "rewards of the padding do not count": lambda r, V, mask, gamma, lam:
            [x * mask for x in gae(r, V, torch.ones_like(mask), gamma, lam)],
        "A_{t+1} is discounted by γλ, not by γ":
            lambda r, V, mask, gamma, lam: gae(r, V, mask, gamma, 1.0),
        "A_{t+1} is discounted by γλ, not by λ":
            lambda r, V, mask, gamma, lam: gae(r, V, mask, gamma, lam / gamma),
        "the TD error of token T counts": lambda r, V, *others:
            gae(torch.cat([r[:, :-1], V[:, -1:]], 1), V, *others),            # δ_T = r − V = 0
        "the loop begins with token T": lambda r, V, mask, *factors:
            [A := pad(gae(r[:, :-1], V[:, :-1], mask[:, :-1], *factors)[0], [0, 1]),
             A + V * mask],
        "V_{t+1} is discounted by γ in the TD error":
            lambda r, V, mask, gamma, lam: gae(r, V, mask, 1.0, gamma * lam),
        "the TD error of t begins with r_t, not r_{t+1}": lambda r, V, mask, *factors:
            gae(torch.cat([r[:, 1:], 0 * r[:, :1]], 1) * mask, V, mask, *factors),
    },
    "ppo_loss": {
        "the loss is minus the objective": lambda *terms: -ppo_loss(*terms),
        "take the minimum of both terms, not the maximum": lambda logp, old, A, mask, clip:
            ppo_loss(logp, old, -A, mask, clip) * -1,
        "average over tokens, without padding": lambda logp, old, A, mask, clip:
            ppo_loss(logp, old, A, mask, clip, mask.numel()),
        "padding does not count: use the mask": lambda logp, old, A, mask, clip:
            ppo_loss(logp, old, A, torch.ones_like(mask), clip),
        "take one mean over all tokens, not one per row": lambda *terms:
            torch.stack([ppo_loss(*row, terms[-1]) for row in zip(*terms[:-1])]).mean(),
        "the ratio is exp of a difference of logarithms":
            patched(ppo_loss, torch, "exp", lambda x: x),
        "the minimum of both terms is missing": lambda *terms: ppo_loss(*terms[:-1], 1e9),
        "take the minimum with the term that is not clipped": lambda logp, old, A, mask, clip:
            -(torch.exp(logp - old).clamp(1 - clip, 1 + clip) * A * mask).sum() / mask.sum(),
        "the ratio is π_θ over π_θold": lambda logp, old, A, mask, clip:
            ppo_loss(2 * old - logp, old, A, mask, clip),
    },
    "update": {
        "call optimizer.zero_grad(), or the next step adds this gradient":
            patched(our_update, torch.optim.Optimizer, "zero_grad", lambda optimizer: None),
        "the value loss must not move θ: give value_head the detached hidden states":
            patched(our_update, Tensor, "detach", lambda x: x),
        "call the argument policy_loss, not the function ppo_loss":
            lambda *inputs: our_update(*inputs[:-1], ppo_loss),
        "call optimizer.step()": partial(our_update, sign=0),
        "clip the gradient after loss.backward(), not before":
            lambda *inputs: 0 * our_update(*inputs, max_norm=1e9),
        "the value loss has the weight c": partial(our_update, value_coef=1.0),
        "the entropy is subtracted from the loss": partial(our_update, entropy_coef=-0.3),
        "the entropy is missing in the loss": partial(our_update, entropy_coef=0.0),
        "the gradient is clipped to the norm 1": partial(our_update, max_norm=1e9),
        "the step goes up the loss": partial(our_update, sign=-1),
        "log π is taken at the temperature": partial(our_update, temperature=1.0),
    },
}
