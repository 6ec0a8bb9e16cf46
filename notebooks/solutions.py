"""The solutions of notebook 6, and typical mistakes in them.

Each function is the solution of the exercise with its name, in the order of the notebook, which
prints it on request. MISTAKES has the hints of notebooks/checks.py: an edit of a
solution makes the mistake, and its hint says what is wrong.
"""

from inspect import signature

import torch
from transformers import DynamicCache

from model import response_hidden, use_lora
from policy import value_loss


# ── What the notebook gives to the student

def token_states(model, rollouts, index):
    """The hidden states before the N tokens of some rows, [N, H], and their ids, [N].

    index: a list of row numbers.
    """
    mask = rollouts.mask[index]
    with use_lora(model, "policy"):
        hidden = response_hidden(model, rollouts.prompt_ids[index], rollouts.prompt_mask[index],
                                 rollouts.response_ids[index], mask)
    return hidden[mask.bool()], rollouts.response_ids[index][mask.bool()]


def next_logits(model, ids, attention, positions, cache):
    """Read new columns of tokens; return the logits after the last column, and the cache.

    ids: [B, n], the tokens in the new columns. attention: [B, columns], 1 on tokens and 0 on
    padding, for all columns, old and new. positions: [B, n], the place of each new token in its
    text, from 0. cache: None at first, then what the last call returned.
    Returns the logits, [B, M], and the cache.
    """
    cache = DynamicCache() if cache is None else cache
    # transformers 5.24 renamed this argument.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        output = model(ids, attention_mask=attention, position_ids=positions, use_cache=True,
                       **{name: cache})
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


# ── Mistakes: solution → [(hint, (text of the solution, wrong text), …)]

MISTAKES = {
    "find_spans": [
        ("an occurrence inside a word is none: look at the characters beside it",
         (" and not cuts_left and not cuts_right", "")),
        ("the quote must also end at the end of a word",
         (" and not cuts_right", "")),
        ("the quote must also begin at the beginning of a word",
         (" and not cuts_left", "")),
        ("a quote that occurs more often than it was quoted gives no span",
         ("if len(places) <= quotes.count(quote):", "if places:")),
        ("a quote that was repeated gives a span for each occurrence, not only for the first",
         ("spans += places", "spans += places[:1]")),
        ("a repeated quote must not give the same span again",
         ("set(quotes)", "quotes")),
        ("a quote that was repeated more often than it occurs keeps its occurrences",
         ("len(places) <=", "len(places) ==")),
        ("if it is unclear which occurrence was quoted, there is no span, not even the first",
         ("        if len(places) <= quotes.count(quote):\n            spans += places",
          "        spans += places[: quotes.count(quote)]")),
        ("a span ends after its last character",
         ("(start, end))", "(start, end - 1))")),
        ("a span is (start, end), not (start, length)",
         ("(start, end))", "(start, len(quote)))")),
        ("\\b is no boundary where two characters meet that are not letters: a space and a "
         "quotation mark",
         ("cuts_left = response[max(start - 1, 0) : start].isalnum() and quote[0].isalnum()",
          "cuts_left = response[max(start - 1, 0) : start].isalnum() == quote[0].isalnum()"),
         ("cuts_right = response[end : end + 1].isalnum() and quote[-1].isalnum()",
          "cuts_right = response[end : end + 1].isalnum() == quote[-1].isalnum()")),
        ("a quote that begins or ends with punctuation may touch a word there",
         (" and quote[0].isalnum()", ""),
         (" and quote[-1].isalnum()", "")),
    ],
    "token_rewards": [
        ("a token that is only partly in a span gets 0",
         ("span.start <= start < end <= span.end",
          "max(start, span.start) < min(end, span.end)")),
        ("the character at span.end is not in the span, so a token may end there",
         ("end <= span.end", "end < span.end")),
        ("whitespace around a token's characters need not be in the span",
         ("piece.strip() or piece", "piece")),
        ("whitespace after a token's characters need not be in the span either",
         ("piece.strip() or piece", "piece.lstrip() or piece")),
        ("a token of only whitespace is in a span that covers it whole",
         ("word = piece.strip() or piece", "word = piece.strip()")),
        ("a token without characters, such as EOS, is in no span",
         ("start < end <= span.end", "start <= end <= span.end")),
        ("a token in two good spans gets +1, not +2",
         ("labels = {span.label for span in spans if span.start <= start < end <= span.end}",
          "labels = [span.label for span in spans if span.start <= start < end <= span.end]")),
        ("a token in a good span and a poor span gets 0, whichever comes last",
         ("sum(labels)",
          "([0] + [span.label for span in spans if span.start <= start < end <= "
          "span.end])[-1]")),
        ("a token in a good span and a poor span gets 0, whichever comes first",
         ("sum(labels)",
          "next((span.label for span in spans if span.start <= start < end <= span.end), 0)")),
        ("a token in a good span and a poor span gets 0, not −1",
         ("sum(labels)", "min(labels, default=0)")),
        ("a token in a good span and a poor span gets 0, not +1",
         ("sum(labels)", "max(labels, default=0)")),
    ],
    "z_loss": [
        ("the logits in column i predict the token in column i + 1, not that in column i",
         ("[len(prompt) - 1 : -1]", "[len(prompt) :]")),
        ("only the tokens of z have a loss, not those of x and y",
         ("log_p[range(len(z)), z].sum()",
          "log_p[range(len(z)), z].sum() - logits[: len(prompt) - "
          "1].log_softmax(-1)[range(len(prompt) - 1), prompt[1:]].sum()")),
        ("the first token of z has a loss too",
         ("log_p[range(len(z)), z]", "log_p[range(1, len(z)), z[1:]]")),
        ("the last token of z has a loss too",
         ("log_p[range(len(z)), z]", "log_p[range(len(z) - 1), z[:-1]]")),
        ("the loss is a sum over the pairs, not their mean",
         ("return loss", "return loss / len(pairs)")),
        ("the loss is a sum over the tokens, not their mean",
         ("return loss", "return loss / sum(len(z) for _, z in pairs)")),
        ("the loss of a pair is a sum over its tokens, not their mean",
         ("log_p[range(len(z)), z].sum()", "log_p[range(len(z)), z].mean()")),
        ("the loss is minus the log-probability",
         ("loss - log_p", "loss + log_p")),
        ("the loss takes the logarithm of the probability",
         ("log_softmax(-1)", "softmax(-1)")),
        ("add the losses of all pairs",
         ("loss = loss - log_p", "loss = 0 * loss - log_p")),
    ],
    "nl_gradient": [
        ("g_NL is the gradient of Σ δ log π, not of the loss −Σ δ log π",
         ("(delta * logprobs)", "-(delta * logprobs)")),
        ("Definition 1 is a sum over the tokens, not their mean",
         (".sum()", ".mean()")),
        ("the gradient is that of log π, not of π",
         ("(delta * logprobs)", "(delta * logprobs.exp())")),
        ("the vectors of poor tokens are subtracted",
         ("(delta * logprobs)", "(delta.abs() * logprobs)")),
        ("poor tokens count too, with −1",
         ("(delta * logprobs)", "(delta.clamp(min=0) * logprobs)")),
        ("each token's vector has the factor δ_t",
         ("(delta * logprobs)", "logprobs")),
        ("p.grad keeps what earlier calls added; torch.autograd.grad does not",
         ("return list(torch.autograd.grad(objective, parameters))",
          "objective.backward()\n    return [p.grad for p in parameters]")),
    ],
    "add_penalty": [
        ("the KL term is a penalty: it is subtracted",
         ("delta - beta", "delta + beta")),
        ("the penalty has the weight β",
         ("beta * log_ratio", "log_ratio")),
        ("r_t is 0 on padding",
         (" * mask", "")),
        ("the penalty has the logarithm of the ratio: a difference of logarithms, without "
         "exp",
         ("logprobs_old - logprobs_ref", "(logprobs_old - logprobs_ref).exp()")),
        ("the log-ratio keeps its sign, also where the policy is below the reference",
         ("logprobs_old - logprobs_ref", "(logprobs_old - logprobs_ref).abs()")),
        ("the log-ratio keeps its sign, also where it is below 0",
         ("logprobs_old - logprobs_ref", "(logprobs_old - logprobs_ref).clamp(min=0)")),
        ("each token has its own log-ratio, not the sum of its response",
         ("logprobs_old - logprobs_ref",
          "((logprobs_old - logprobs_ref) * mask).sum(-1, keepdim=True)")),
        ("the logarithm of a ratio is a difference of logarithms, not their quotient",
         ("logprobs_old - logprobs_ref", "logprobs_old / logprobs_ref")),
        ("the log-ratio is of the sampled token alone, so it has no factor π",
         ("beta * log_ratio", "beta * logprobs_old.exp() * log_ratio")),
    ],
    "gae": [
        ("V after the last token of a response is 0, whatever the padding holds",
         ("values = values * mask", "pass")),
        ("mask r_t and V_t before the loop: a mask at the end lets the padding leak into A_t",
         ("rewards = rewards * mask", "pass"),
         ("values = values * mask", "pass"),
         ("return advantages, advantages + values",
          "return advantages * mask, (advantages + values) * mask")),
        ("rewards of the padding do not count",
         ("rewards = rewards * mask", "pass")),
        ("A_{t+1} is discounted by γλ, not by γ",
         ("gamma * lam * next", "gamma * next")),
        ("A_{t+1} is discounted by γλ, not by λ",
         ("gamma * lam * next", "lam * next")),
        ("A_t adds γλ A_{t+1}",
         ("gamma * lam * next_advantage", "0")),
        ("V_{t+1} is discounted by γ in the TD error",
         ("+ gamma * next_value", "+ next_value")),
        ("the TD error has γ V_{t+1}",
         (" + gamma * next_value", "")),
        ("the TD error subtracts V_t",
         (" - values[:, t]", "")),
        ("the TD error adds γ V_{t+1} and subtracts V_t",
         ("gamma * next_value - values[:, t]", "values[:, t] - gamma * next_value")),
        ("the sum includes token T: §3.5 and Alg. 4 end it too early",
         ("reversed(range(rewards.shape[1]))", "reversed(range(rewards.shape[1] - 1))")),
        ("the targets of the value head are A_t + V_t",
         ("advantages, advantages + values", "advantages, advantages")),
        ("R_t is A_t + V_t here, not the sum of rewards of Alg. 4 l.24",
         ("    return advantages, advantages + values",
          "    returns = rewards.clone()\n    for t in reversed(range(rewards.shape[1] - "
          "1)):\n        returns[:, t] += gamma * returns[:, t + 1]\n    return advantages, "
          "returns")),
        ("A_t is whitened later, not here",
         ("    return advantages, advantages + values",
          "    white = whiten(advantages, mask)\n    return white, advantages + values")),
        ("A_t is whitened later, and R_t has A_t before whitening",
         ("    return advantages, advantages + values",
          "    white = whiten(advantages, mask)\n    return white, white + values")),
        ("A_t needs A_{t+1}, so the loop runs from the last token to the first",
         ("reversed(range(rewards.shape[1]))", "range(rewards.shape[1])")),
    ],
    "whiten": [
        ("padding does not count in the mean",
         ("(advantages * mask).sum() / count", "advantages.mean()")),
        ("padding does not count in the variance",
         ("((advantages - mean) ** 2 * mask).sum() / count",
          "((advantages - mean) ** 2).mean()")),
        ("divide the variance by the number of tokens, not by one less (torch's default)",
         ("((advantages - mean) ** 2 * mask).sum() / count",
          "((advantages - mean) ** 2 * mask).sum() / (count - 1)")),
        ("the result is 0 on padding",
         (".sqrt() * mask", ".sqrt()")),
        ("divide by the standard deviation, not by the variance",
         (".sqrt()", "")),
        ("subtract the mean",
         ("(advantages - mean) /", "advantages /")),
        ("divide by the standard deviation",
         (" / (variance + 1e-8).sqrt()", "")),
        ("the number of tokens is mask.sum(), without padding",
         ("mask.sum()", "mask.numel()")),
        ("take one mean and one deviation for all tokens of the batch, not one per row",
         ("mean = (advantages * mask).sum() / count",
          "count = mask.sum(1, keepdim=True)\n    mean = (advantages * mask).sum(1, "
          "keepdim=True) / count\n    variance = ((advantages - mean) ** 2 * mask).sum(1, "
          "keepdim=True) / count\n    return (advantages - mean) / (variance + 1e-8).sqrt() "
          "* mask")),
    ],
    "ppo_loss": [
        ("the loss is minus the objective",
         ("return -(", "return (")),
        ("take the minimum of both terms, not the maximum",
         ("minimum", "maximum")),
        ("divide by the number of tokens, without padding",
         ("/ mask.sum()", "/ mask.numel()")),
        ("the loss is the mean over the tokens, not their sum",
         (" / mask.sum()", "")),
        ("padding does not count in the mean: a mask on ρ alone leaves its A_t",
         ("-(gain * mask).sum() / mask.sum()", "-gain.mean()")),
        ("take one mean over all tokens, not one per row",
         ("-(gain * mask).sum() / mask.sum()",
          "-((gain * mask).sum(1) / mask.sum(1)).mean()")),
        ("the ratio is exp of a difference of logarithms",
         ("torch.exp((logprobs - logprobs_old) * mask)",
          "1 + (logprobs - logprobs_old) * mask")),
        ("the ratio is exp of the difference of logarithms",
         ("torch.exp((logprobs - logprobs_old) * mask)", "(logprobs - logprobs_old) * mask")),
        ("the ratio is π_θ over π_θold, not the inverse",
         ("(logprobs - logprobs_old)", "(logprobs_old - logprobs)")),
        ("the clip also has a lower bound, 1 − ε",
         ("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(max=1 + clip)")),
        ("the clip also has an upper bound, 1 + ε",
         ("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(min=1 - clip)")),
        ("take the minimum with the term that is not clipped",
         ("torch.minimum(ratio * advantages, clipped * advantages)", "clipped * advantages")),
        ("the minimum with the clipped term is missing",
         ("torch.minimum(ratio * advantages, clipped * advantages)", "ratio * advantages")),
        ("take the minimum after multiplying by A_t, which may be negative",
         ("torch.minimum(ratio * advantages, clipped * advantages)",
          "torch.minimum(ratio, clipped) * advantages")),
        ("the clip is around 1: from 1 − ε to 1 + ε",
         ("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(-clip, clip)")),
        ("padding does not count: use the mask",
         ("(logprobs - logprobs_old) * mask", "logprobs - logprobs_old"),
         ("-(gain * mask).sum() / mask.sum()", "-gain.mean()")),
    ],
    "update": [
        ("call optimizer.zero_grad(), or the next step adds this gradient",
         ("    optimizer.zero_grad()\n", "")),
        ("no gradient reaches the step: the order is zero_grad, backward, clip, step",
         ("loss.backward()\n    weights",
          "loss.backward()\n    optimizer.zero_grad()\n    weights")),
        ("the value loss must not move θ: give value_head the detached hidden states",
         ("value_head(hidden.detach())", "value_head(hidden)")),
        ("call the argument policy_loss, not the function ppo_loss",
         ("= policy_loss(", "= ppo_loss(")),
        ("call optimizer.step()",
         ("    optimizer.step()\n", "")),
        ("clip the gradient to the norm 1, before optimizer.step()",
         ("(weights, 1.0)", "(weights, 1e9)")),
        ("the value loss has the weight c_V",
         ("config.value_coef * ", "")),
        ("the entropy is subtracted from the loss",
         ("loss - config.entropy_coef", "loss + config.entropy_coef")),
        ("the entropy is missing in the loss",
         ("    loss = loss - config.entropy_coef * entropy.mean()\n", "")),
        ("take the mean of the entropy, not its sum",
         ("entropy.mean()", "entropy.sum()")),
        ("log π and H are taken at the temperature",
         ("(logits / config.temperature)", "logits")),
        ("the entropy is taken at the temperature too",
         ("entropy = -", "log_p = logits.log_softmax(-1)\n    entropy = -")),
        ("log π is taken at the temperature too",
         ("logprobs = log_p[", "logprobs = logits.log_softmax(-1)[")),
        ("the value loss has its own clip, value_clip",
         ("config.value_clip", "config.clip")),
        ("the entropy has the weight β_H",
         ("config.entropy_coef * ", "")),
        ("rollouts.advantages is already whitened",
         ("rollouts.advantages[index][picked]",
          "whiten(rollouts.advantages[index][picked][None], torch.ones(1, len(ids)))[0]")),
        ("the step goes up the loss",
         ("optimizer.step()",
          "for p in weights:\n        p.grad *= -1\n    optimizer.step()")),
        ("return the norm before the gradient was scaled: clip_grad_norm_ returns it",
         ("return norm.item()",
          "return sum(p.grad.norm() ** 2 for p in weights).item() ** 0.5")),
    ],
    "lora_forward": [
        ("the update is scaled by α / r",
         ("(alpha / len(down)) * ", "")),
        ("the scale is α / r, not α",
         ("alpha / len(down)", "alpha")),
        ("the scale is α / r, not 1 / r",
         ("alpha / len(down)", "1 / len(down)")),
        ("α / r is not rounded",
         ("alpha / len(down)", "alpha // len(down)")),
        ("r is the number of rows of `down`",
         ("alpha / len(down)", "alpha / down.shape[1]")),
        ("the update is added to the output of the frozen layer",
         ("x @ W.T + ", "")),
    ],
    "generate": [
        ("an answer includes its EOS, and ends there",
         ("if eos not in answer:", "if token != eos and eos not in answer:")),
        ("an answer includes its EOS",
         ("return answers", "return [[v for v in y if v != eos] for y in answers]")),
        ("an answer ends with its first EOS",
         ("            if eos not in answer:\n                answer.append(token)\n        "
          "if all(eos in answer for answer in answers):\n            break",
          "            answer.append(token)")),
        ("an answer does not contain the prompt",
         ("[[] for _ in prompts]", "[list(x) for x in prompts]")),
        ("logits are divided by the temperature",
         ("logits / temperature", "logits")),
        ("logits are divided by the temperature, not multiplied",
         ("logits / temperature", "logits * temperature")),
        ("the attention mask is 0 on padding, and positions count only the tokens",
         ("[0] * n + [1] * len(x)", "[1] * longest")),
        ("the first token of each prompt has position 0; padding has none",
         ("positions = (attention.cumsum(1) - 1).clamp(min=0)",
          "positions = torch.arange(longest).expand(len(prompts), -1)")),
        ("positions begin at 0, not at 1",
         ("positions = (attention.cumsum(1) - 1).clamp(min=0)",
          "positions = attention.cumsum(1)")),
        ("each new token has the next position",
         ("positions = positions[:, -1:] + 1", "positions = positions[:, -1:]")),
        ("the position of a new token does not count the padding",
         ("positions = positions[:, -1:] + 1",
          "positions = torch.full_like(ids, attention.shape[1] - 1)")),
        ("the attention mask is 0 on padding",
         ("positions = (attention.cumsum(1) - 1).clamp(min=0)",
          "positions = (attention.cumsum(1) - 1).clamp(min=0)\n    attention = "
          "torch.ones_like(attention)")),
        ("each new column has a 1 in the attention mask",
         ("torch.ones_like(ids)], 1)", "torch.zeros_like(ids)], 1)")),
        ("pad the prompts on the left: the next column follows the last one",
         ("[[0] * n + x for n, x in zip(padding, prompts)])              # [B, P]\n    "
          "attention = torch.tensor([[0] * n + [1] * len(x)",
          "[x + [0] * n for n, x in zip(padding, prompts)])\n    attention = "
          "torch.tensor([[1] * len(x) + [0] * n")),
        ("draw y_t with u_t; argmax takes the most probable token instead",
         ("ids = (sums <= u[:, None]).sum(-1, keepdim=True)",
          "ids = logits.argmax(-1, keepdim=True)")),
        ("y_t is the first token whose sum is above u_t; a sum equal to u_t is not above it",
         ("(sums <= u[:, None])", "(sums < u[:, None])")),
        ("if no sum is above u_t, take the last id",
         ("        ids = ids.clamp(max=logits.shape[1] - 1)\n", "")),
        ("if no sum is above u_t, take the last id, not id 0",
         ("(sums <= u[:, None]).sum(-1, keepdim=True)",
          "(sums > u[:, None]).int().argmax(-1, keepdim=True)")),
    ],
}
