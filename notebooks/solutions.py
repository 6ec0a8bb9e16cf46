"""The solutions of notebook 6.

Each function is the solution of the exercise with its name, in the order of the notebook, which
prints it on request.
"""

import torch
from transformers import DynamicCache

from policy import forward, value_loss


# ── What the notebook gives to the student

def token_states(model, rollouts, index):
    """The hidden states before the N tokens of some rows, [N, H], and their ids, [N].

    index: a list of row numbers.
    """
    return forward(model, rollouts, index, "policy")


def next_logits(model, ids, attention, positions, cache):
    """Read new columns of tokens; return the logits after the last column, and the cache.

    ids: [B, n], the tokens in the new columns. attention: [B, columns], 1 on tokens and 0 on
    padding, for all columns, old and new. positions: [B, n], the place of each new token in its
    text, from 0. cache: None at first, then what the last call returned.
    Returns the logits, [B, M], and the cache.
    """
    cache = DynamicCache() if cache is None else cache
    with torch.no_grad():
        # The cache goes by position, because transformers 5.24 renamed its argument.
        output = model(ids, attention, positions, cache, use_cache=True)
    return output.logits[:, -1], cache


# ── The solutions

def find_spans(response, quotes):
    spans = []
    for quote in set(quotes):
        places = []
        for start in range(len(response) - len(quote) + 1):
            end = start + len(quote)
            cuts_left = response[max(start - 1, 0) : start].isalnum() and quote[0].isalnum()
            cuts_right = response[end : end + 1].isalnum() and quote[-1].isalnum()
            if response[start:end] == quote and not cuts_left and not cuts_right:
                places.append((start, end))
        if len(places) <= quotes.count(quote):
            spans += places
    return spans


def token_rewards(text, offsets, spans):
    delta = []
    for start, end in offsets:
        piece = text[start:end]
        word = piece.strip() or piece
        start += piece.index(word)
        end = start + len(word)
        # A set: two good spans give {1}, and praise with blame gives {1, −1}, whose sum is 0.
        labels = {span.label for span in spans if span.start <= start < end <= span.end}
        delta.append(sum(labels))
    return delta


def z_loss(model, pairs):
    loss = torch.zeros(())
    for prompt, z in pairs:
        logits = model(torch.tensor([prompt + z])).logits[0]           # [L, M]
        # The last token of the prompt predicts z_1, and the last token of z predicts nothing.
        log_p = logits[len(prompt) - 1 : -1].log_softmax(-1)           # predict z, [J, M]
        loss = loss - log_p[range(len(z)), z].sum()
    return loss


def nl_gradient(logprobs, delta, parameters):
    objective = (delta * logprobs).sum()
    return list(torch.autograd.grad(objective, parameters))


def add_penalty(delta, logprobs_old, logprobs_ref, mask, beta):
    log_ratio = logprobs_old - logprobs_ref
    return (delta - beta * log_ratio) * mask


def gae(rewards, values, mask, gamma, lam):
    # After these two lines, the padding has only rewards and values of 0, so A_t is 0 there.
    rewards = rewards * mask
    values = values * mask
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0])
    next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        td_error = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = td_error + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def whiten(advantages, mask):
    count = mask.sum()
    mean = (advantages * mask).sum() / count
    variance = ((advantages - mean) ** 2 * mask).sum() / count
    # The small number avoids a division by 0.
    return (advantages - mean) / (variance + 1e-8).sqrt() * mask


def ppo_loss(logprobs, logprobs_old, advantages, mask, clip):
    # This mask keeps exp finite on padding, which the check does not test: ∞ · 0 is NaN.
    ratio = torch.exp((logprobs - logprobs_old) * mask)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return -(gain * mask).sum() / mask.sum()


def update(rollouts, index, model, value_head, optimizer, config, policy_loss):
    hidden, ids = token_states(model, rollouts, index)
    picked = rollouts.mask[index].bool()
    logprobs_old = rollouts.logprobs_old[index][picked]
    advantages = rollouts.advantages[index][picked]
    values_old = rollouts.values[index][picked]
    returns = rollouts.returns[index][picked]
    mask = torch.ones_like(advantages)

    logits = hidden @ model.get_output_embeddings().weight.T
    log_p = (logits / config.temperature).log_softmax(-1)                      # [N, M]
    logprobs = log_p[range(len(ids)), ids]
    entropy = -(log_p.exp() * log_p).sum(-1)
    values = value_head(hidden.detach())
    loss = policy_loss(logprobs, logprobs_old, advantages, mask, config.clip)
    loss = loss - config.entropy_coef * entropy.mean()
    loss = loss + config.value_coef * value_loss(values, values_old, returns, mask,
                                                 config.value_clip)
    optimizer.zero_grad()
    loss.backward()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    return norm.item()


def lora_forward(x, W, down, up, alpha):
    # `up @ down` is never computed: it is as large as W.
    return x @ W.T + (alpha / len(down)) * (x @ down.T @ up.T)


def generate(model, prompts, uniforms, temperature, eos):
    longest = max(map(len, prompts))
    padding = [longest - len(x) for x in prompts]
    ids = torch.tensor([[0] * n + x for n, x in zip(padding, prompts)])              # [B, P]
    attention = torch.tensor([[0] * n + [1] * len(x) for n, x in zip(padding, prompts)])
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    cache = None
    answers = [[] for _ in prompts]
    for u in uniforms.T:                                                             # [B]
        logits, cache = next_logits(model, ids, attention, positions, cache)
        sums = (logits / temperature).softmax(-1).cumsum(-1)                         # [B, M]
        # The number of sums that are at most u is the id of the first sum above it.
        ids = (sums <= u[:, None]).sum(-1, keepdim=True)                             # [B, 1]
        ids = ids.clamp(max=logits.shape[1] - 1)
        for answer, token in zip(answers, ids[:, 0].tolist()):
            if eos not in answer:
                answer.append(token)
        if all(eos in answer for answer in answers):
            break
        attention = torch.cat([attention, torch.ones_like(ids)], 1)
        positions = positions[:, -1:] + 1
    return answers
