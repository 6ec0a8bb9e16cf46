"""Text2Grad (arXiv 2505.22338) on one page: Algorithms 2, 3 and 4, then 1, which is `main`.

    python tiny.py                     # no flags; about a minute on two cores

In the toy world (toy/README.md), a base model of 0.7 million parameters summarises a post x in
one sentence y. Of the three facts in y, about half are wrong. An annotator knows the facts. It
writes z = [c ; A(y)]: a critique c in English, then A(y), JSON that quotes the good and the
poor parts of y. R_φ learns to write z, and the policy π_θ learns from what R_φ writes.

The title of each part names the file that does the same for real models. "Left out" names what
only that file does. "l.15" is line 15 of the part's algorithm. Shapes: B rows, P tokens of a
prompt (padded left), T tokens of an answer (padded right), H hidden, V vocabulary, r rank.
"""

import copy
import json
import os
import random
import sys

import torch
import toy
from torch import nn
from torch.nn.utils import parametrize, rnn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed

SEED = 0
CRITIC = "reward_model"            # who judges the policy's answers; or "annotator"
ROWS = 1500                        # posts of all three phases
RANK = 16                          # r of LoRA
ALPHA = 32                         # α of LoRA
REWARD_BATCH = 8                   # rows in a step of R_φ
REWARD_RATE = 4e-3                 # learning rate of φ; all learning rates fall to 0
ITERATIONS = 10
BATCH = 64                         # rollouts in an iteration
PPO_EPOCHS = 4
POLICY_RATE = 5e-4                 # learning rate of θ
VALUE_RATE = 7e-3                  # learning rate of ψ
BETA = 0.2                         # weight of the KL penalty (the paper's β is the entropy's)
GAMMA = 1.0                        # γ, discount
LAMBDA = 0.95                      # λ of GAE
CLIP = 0.2                         # ε, clip range of ρ_t
RESPONSE_TOKENS = 32               # longest y
CRITIQUE_TOKENS = 96               # longest z
JUDGE = "{}\n\nResponse: {}\n\nJudge the response."               # x and y, as R_φ reads them
COLOURS = {1: "\033[32m", -1: "\033[31m", 0: "\033[0m"}           # green, red, none
if "NO_COLOR" in os.environ or not sys.stdout.isatty():
    COLOURS = dict.fromkeys(COLOURS, "")
TOKENIZER = AutoTokenizer.from_pretrained(toy.BASE)
EOS = TOKENIZER.eos_token_id       # the last token of y and of z


# ── §3.3, Algorithm 2, annotate.py: z → quotes → spans → tokens → δ

def generate_dual_feedback(row, response):
    """z = [c ; A(y)] of an annotator that knows the facts (l.5–13). Left out: to ask an LLM."""
    return toy.critique(row, response) if response.strip() else ""


def parse_quotes(z):
    """A(y): pairs (quote, ℓ_k), where ℓ_k is +1 for good and −1 for poor (l.13, 17)."""
    try:
        spans = json.loads(z[z.find("{") :])                 # A(y) begins at the first brace
        quotes = [(str(quote), +1) for quote in spans["good_spans"]]
        quotes += [(str(quote), -1) for quote in spans["poor_spans"]]
    except (ValueError, LookupError, TypeError):
        quotes = []                                          # invalid JSON gives no reward
    return quotes


def find_spans(response, quotes):
    """s_k: triples (start, end, ℓ_k) of the quotes that occur in y exactly once (l.16–17)."""
    # Left out: quotes that are repeated, and a quote "car" that also occurs in "scared".
    return [(response.index(quote), response.index(quote) + len(quote), label)
            for quote, label in quotes if response.count(quote) == 1]


def token_texts(ids):
    """The text of each token; "" for EOS. Left out: characters of more than one token."""
    return [TOKENIZER.decode(token, skip_special_tokens=True) for token in ids]


def pseudo_rewards(texts, spans):
    """δ_t of each token: +1 inside a good span, −1 inside a poor span, else 0 (l.15–27)."""
    delta = torch.zeros(len(texts))                                              # [T], l.15
    end = 0
    for t, text in enumerate(texts):
        start = end + len(text) - len(text.lstrip())         # " cousin" begins after its space
        end += len(text)
        labels = {label for first, last, label in spans if first <= start < end <= last}
        delta[t] = sum(labels)       # 0 if both good and poor (in l.18–25, the last span wins)
    assert set(delta.tolist()) <= {-1, 0, 1}, "§3.3: δ_t ∈ {−1, 0, +1}"
    return delta


# ── Appendix D, model.py and sampling.py: LoRA, log π(y_t | x, y_<t), and y ~ π(·|x)

class LoRA(nn.Module):
    """The new weight of a linear layer, W + (α/r) B A. W is frozen; A and B learn."""

    def __init__(self, layer):
        super().__init__()
        self.A = nn.Linear(layer.in_features, RANK, bias=False).weight           # [r, in]
        self.B = nn.Parameter(torch.zeros(layer.out_features, RANK))             # [out, r]

    def forward(self, W):
        """[out, in] → [out, in]. At first the new weight is W, because B is 0."""
        return W + ALPHA / RANK * self.B @ self.A


def with_lora(base):
    """A copy of the frozen base; the weight of each linear layer but the head is LoRA(W)."""
    model = copy.deepcopy(base)                          # left out: one base for all adapters
    for layer in [*model.model.modules()]:
        if isinstance(layer, nn.Linear):
            parametrize.register_parametrization(layer, "weight", LoRA(layer))
    return model


def encode(prompt):
    """The ids of a prompt, in the format of toy/base."""
    return TOKENIZER(f"{prompt}\n\nAnswer:\n").input_ids


def pad(rows, side):
    """Lists of ids → [B, longest list]. The padding is −1, which attention does not see."""
    return rnn.pad_sequence([torch.tensor(row) for row in rows], True, -1, side)


def score_tokens(model, prompts, answers):
    """log π(y_t | x, y_<t) [B, T], the h_t that predict y_t [B, T, H], the mask of y [B, T]."""
    x = pad(prompts, "left")                                                     # [B, P]
    y = pad(answers, "right")                                                    # [B, T]
    ids = torch.cat([x, y], 1)                                                   # [B, P + T]
    # Padding is read as token 0. RoPE sees only distances, so x needs no position ids.
    hidden = model.model(ids.clamp(min=0), ids >= 0, use_cache=False).last_hidden_state
    hidden = hidden[:, x.shape[1] - 1 : -1]              # h_t, one place before y_t: [B, T, H]
    logprobs = model.lm_head(hidden).log_softmax(2)                              # [B, T, V]
    logprobs = logprobs.gather(2, y.clamp(min=0)[..., None])[..., 0]             # [B, T]
    return logprobs, hidden, y >= 0


@torch.no_grad()
@parametrize.cached()                                    # computes LoRA(W) once for all tokens
def sample(model, prompts, longest, greedy=False):
    """y ~ π(·|x) for each prompt, until EOS or the longest length: its ids, its texts."""
    x = pad(prompts, "left")                                                     # [B, P]
    attention = x >= 0                                                           # [B, P + t]
    ids = x.clamp(min=0)                                 # new input: x, then the last token
    y = ids[:, :0]                                                               # [B, t]
    cache = DynamicCache()                               # keys and values of all earlier input
    while y.shape[1] < longest and not (y == EOS).any(1).all():
        hidden = model.model(ids, attention, None, cache).last_hidden_state[:, -1]    # [B, H]
        probs = model.lm_head(hidden).softmax(1)                                 # [B, V]
        ids = probs.argmax(1, keepdim=True) if greedy else probs.multinomial(1)  # [B, 1]
        y = torch.cat([y, ids], 1)                                               # [B, t]
        attention = torch.cat([attention, ids >= 0], 1)                          # [B, P + t]
    answers = [row[: row.index(EOS) + 1] if EOS in row else row for row in y.tolist()]
    return answers, TOKENIZER.batch_decode(answers, skip_special_tokens=True)


# ── §3.4, Algorithm 3, reward_model.py: R_φ learns to write z

def reward_loss(model, pairs):
    """−log p_φ(z_j | z_<j, x, y) of the pairs ([x ; y], z), per token; l.6 sums over j."""
    logprobs, _, mask = score_tokens(model, *zip(*pairs))                        # [B, T]
    assert mask.sum() == sum(len(z) for _, z in pairs), "l.5: one p_φ(z_j | ·) for each z_j"
    return -logprobs[mask].mean()                                                # scalar


def train_reward_model(base, dataset):
    """R_φ, by teacher forcing on each (x, y, z) of 𝒟_R, once. Left out: a test of R_φ."""
    model = with_lora(base)                                                      # l.4
    optimizer = torch.optim.AdamW(model.parameters(), REWARD_RATE, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, ROWS // REWARD_BATCH)
    for start in range(0, ROWS, REWARD_BATCH):
        pairs = [(encode(JUDGE.format(x, y)), TOKENIZER(z).input_ids + [EOS])
                 for x, y, z in dataset[start : start + REWARD_BATCH]]
        loss = reward_loss(model, pairs)
        loss.backward()
        optimizer.step()                                                         # l.7
        optimizer.zero_grad()
        schedule.step()
        if start % (50 * REWARD_BATCH) == 0:
            print(f"R_φ after {start} rows: loss {loss:.3f} nats per token of z")
    return model                                                                 # l.8


# ── §3.5, Algorithm 4, policy.py: π_θ learns from δ'

def add_penalty(delta, logprobs, logprobs_ref, mask):
    """r_t = δ'_t − β (log π(y_t) − log π_ref(y_t)): [B, T]; l.14 leaves the KL term open."""
    return (delta - BETA * (logprobs - logprobs_ref)) * mask


def estimate_advantages(rewards, values, mask):
    """A_t = Σ_l (γλ)^l δ^TD_{t+l}, where δ^TD_t = r_t + γ V_{t+1} − V_t (l.15–16): [B, T]."""
    advantages = torch.zeros_like(rewards)                                       # [B, T]
    next_value = next_advantage = torch.zeros(len(rewards))                      # of t+1, [B]
    for t in reversed(range(rewards.shape[1])):          # l.16's sum should end at T − t
        td_error = rewards[:, t] + GAMMA * next_value - values[:, t]             # δ^TD_t, [B]
        next_advantage = (td_error + GAMMA * LAMBDA * next_advantage) * mask[:, t]
        next_value = values[:, t] * mask[:, t]           # V is 0 after the last token
        advantages[:, t] = next_advantage
    last = mask.sum(1, keepdim=True) - 1                                         # T, [B, 1]
    td_error = (rewards - values).gather(1, last)                                # [B, 1]
    assert torch.equal(advantages.gather(1, last), td_error), "l.16: A_T = r_T − V_T"
    return advantages


def standardise(advantages, mask):
    """A_t, whitened to mean 0 and variance 1 over all y_t, as in the authors' code: [B, T]."""
    tokens = advantages[mask]                                                    # all A_t
    return (advantages - tokens.mean()) / tokens.std(correction=0) * mask


def clipped_loss(logprobs, logprobs_old, advantages, mask):
    """−E_t[min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t)] (l.22–23, 27): scalar.

    Where ρ_t = 1, its gradient is −E_t[A_t ∇ log π_θ(y_t)]: Definition 1 with A_t for δ_t.
    """
    ratio = (logprobs - logprobs_old).exp()                                      # ρ_t, [B, T]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain[mask].mean()


def value_error(values, returns, mask):
    """E_t[(V_t − R_t)²], where R_t are the returns (l.24, 28): scalar. Left out: clipping."""
    return ((values - returns) ** 2)[mask].mean()


def optimize_policy(base, reward_model, rows):
    """π_θ, trained with the critiques of R_φ. Left out: minibatches, and the entropy (l.25)."""
    policy = with_lora(base)                                                     # l.5
    value_head = nn.Linear(base.config.hidden_size, 1)                           # V_ψ, l.5
    optimizer = torch.optim.AdamW(policy.parameters(), POLICY_RATE, weight_decay=0)
    optimizer.add_param_group({"params": value_head.parameters(), "lr": VALUE_RATE})
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, ITERATIONS)
    for iteration in range(ITERATIONS):                                          # l.6
        batch = random.sample(rows, BATCH)                                       # l.10
        x = [encode(toy.prompt(row)) for row in batch]
        y, responses = sample(policy, x, RESPONSE_TOKENS)                        # l.11
        if CRITIC == "annotator":                                                # z', l.12
            z = [*map(generate_dual_feedback, batch, responses)]
        else:
            prompts = [JUDGE.format(toy.prompt(row), r) for row, r in zip(batch, responses)]
            _, z = sample(reward_model, [*map(encode, prompts)], CRITIQUE_TOKENS, greedy=True)
        texts = [*map(token_texts, y)]
        spans = map(find_spans, responses, map(parse_quotes, z))
        delta = rnn.pad_sequence([*map(pseudo_rewards, texts, spans)], True)     # [B, T], l.13
        with torch.no_grad():
            logprobs_ref, _, _ = score_tokens(base, x, y)        # π_ref is the base, [B, T]
            logprobs_old, hidden, mask = score_tokens(policy, x, y)              # [B, T], l.7
            values = value_head(hidden)[..., 0]                                  # [B, T]
        assert delta.shape == mask.shape, "l.13: one δ'_t for each y_t"
        rewards = add_penalty(delta, logprobs_old, logprobs_ref, mask)           # [B, T], l.14
        advantages = estimate_advantages(rewards, values, mask)                  # [B, T], l.16
        returns = advantages + values                    # R_t; it is l.24's sum if λ = 1
        advantages = standardise(advantages, mask)                               # [B, T]
        for epoch in range(PPO_EPOCHS):                                          # l.19
            logprobs, hidden, _ = score_tokens(policy, x, y)
            if epoch == 0:
                assert torch.allclose(logprobs, logprobs_old, atol=1e-3), "l.22: ρ_t = 1"
            values = value_head(hidden.detach())[..., 0]         # V_ψ does not change h_t
            loss = clipped_loss(logprobs, logprobs_old, advantages, mask)
            (loss + value_error(values, returns, mask)).backward()               # l.27–28
            optimizer.step()                                                     # l.29–30
            optimizer.zero_grad()
        schedule.step()
        if iteration % 3 == 0:
            facts = sum(map(toy.fact_accuracy, batch, responses)) / BATCH
            print(f"\niteration {iteration}: {facts:.3f} of the facts")
            coloured = [COLOURS[d] + text for d, text in zip(delta[0].tolist(), texts[0])]
            print(batch[0]["post"], "".join(coloured) + COLOURS[0], z[0], sep="\n")
    return policy                                                                # l.33


def mean_facts(model, rows):
    """The share of the facts that the model's responses state correctly."""
    _, responses = sample(model, [encode(toy.prompt(row)) for row in rows], RESPONSE_TOKENS)
    return sum(map(toy.fact_accuracy, rows, responses)) / len(rows)


# ── §3.2, Algorithm 1, text2grad.py: the three phases

def main():
    """Train π_θ, and count its facts on held-out posts before and after."""
    set_seed(SEED)
    base = AutoModelForCausalLM.from_pretrained(toy.BASE).requires_grad_(False)
    rows = toy.rows("train", ROWS, SEED)
    held_out = toy.rows("eval", 200)
    print(f"base: {mean_facts(base, held_out):.3f} of the facts of 200 held-out posts")
    reward_model = None
    if CRITIC == "reward_model":
        prompts = [*map(toy.prompt, rows)]
        _, responses = sample(base, [*map(encode, prompts)], RESPONSE_TOKENS)    # l.6
        z = map(generate_dual_feedback, rows, responses)                         # l.7–8
        reward_model = train_reward_model(base, [*zip(prompts, responses, z)])   # l.9–14
    policy = optimize_policy(base, reward_model, rows)                           # l.17–18
    print(f"policy: {mean_facts(policy, held_out):.3f} of the facts of 200 held-out posts")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")             # old locales have no φ
    main()
