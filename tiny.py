"""Text2Grad (arXiv 2505.22338) on one page: Algorithms 2, 3 and 4, then 1, which is `main`.

    python tiny.py                     # no flags; about a minute on two cores

In the toy world (toy/README.md), a base model of 0.7 million parameters summarises a post x in
one sentence y. Of the three facts in y, about half are wrong. An annotator knows the facts. It
writes z = [c ; A(y)]: a critique c in English, then A(y), JSON that quotes the good and the
poor parts of y. R_φ learns to write z, and the policy π_θ learns from R_φ.

The title of each part names the file that does the same for real models. After "Left out" comes
what only that file does; for details see PAPER.md. "l.15" is line 15 of the part's algorithm.
B rows, P prompt and T answer tokens, H hidden size, V vocabulary; LoRA's A, B and rank r.
"""

import copy
import json
import os
import random
import sys

import torch
import toy
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed

SEED = 0
CRITIC = "reward_model"            # who judges the policy's answers; or "annotator"
ROWS = 1500                        # training posts, the same in all three phases
RANK = 16                          # r of LoRA
ALPHA = 32                         # α of LoRA
REWARD_STEPS = 400                 # gradient steps of R_φ
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
CRITIQUE_TOKENS = 104              # longest z
JUDGE = "{}\n\nResponse: {}\n\nJudge the response."               # x and y, as R_φ reads them
PLAIN = "NO_COLOR" in os.environ or not sys.stdout.isatty()        # no green, no red
COLOURS = {1: "", -1: "", 0: ""} if PLAIN else {1: "\033[32m", -1: "\033[31m", 0: "\033[0m"}
TOKENIZER = AutoTokenizer.from_pretrained(toy.BASE)
EOS = TOKENIZER.eos_token_id       # the last token of y and of z


# ── §3.3, Algorithm 2, annotate.py: z → quotes → spans → tokens → δ

def generate_dual_feedback(row, response):
    """z = [c ; A(y)] of an annotator that knows the facts (l.5–13). Left out: asking an LLM."""
    return toy.critique(row, response) if response.strip() else ""


def find_spans(response, z):
    """s_k: triples (start, end, ℓ_k) of the quotes in A(y); ℓ_k: +1 good, −1 poor (l.13–17).

    Only a quote that y has exactly once gives a reward. Left out: refusing parts of words.
    """
    try:
        lists = json.loads(z[z.index("{") :])                # without a brace: a ValueError
        quotes = [(str(quote), +1) for quote in lists["good_spans"]]
        quotes += [(str(quote), -1) for quote in lists["poor_spans"]]
    except (ValueError, LookupError, TypeError):
        quotes = []                                          # invalid JSON gives no reward
    return [(response.index(quote), response.index(quote) + len(quote), label)
            for quote, label in quotes if response.count(quote) == 1]


def token_texts(ids):
    """The text of each token; "" for EOS. Left out: characters split over several tokens."""
    return [TOKENIZER.decode(token, skip_special_tokens=True) for token in ids]


def pseudo_rewards(ids, response, z):
    """δ_t of each token: +1 inside a good span, −1 inside a poor span, else 0 (l.15–27)."""
    spans = find_spans(response, z)
    delta = torch.zeros(len(ids))                                                # [T], l.15
    end = 0
    for t, text in enumerate(token_texts(ids)):
        start = end + len(text) - len(text.lstrip())         # " cousin" begins after its space
        end += len(text)
        labels = {label for first, last, label in spans if first <= start < end <= last}
        delta[t] = sum(labels)       # 0 if both good and poor (in l.18–25, the last one stays)
    assert set(delta.tolist()) <= {-1, 0, 1}, "§3.3: δ_t ∈ {−1, 0, +1}"
    return delta


# ── Appendix D, model.py and sampling.py: LoRA, log π(y_t | x, y_<t), and y ~ π(·|x)

class LoRA(nn.Module):
    """The new weight of a linear layer, W + (α/r) B A. `main` freezes W; A and B learn."""

    def __init__(self, layer):
        super().__init__()
        self.A = nn.Linear(layer.in_features, RANK, bias=False).weight           # [r, in]
        self.B = nn.Parameter(torch.zeros(layer.out_features, RANK))             # [out, r]

    def forward(self, W):
        """[out, in] → [out, in]. At first the new weight is W, because B is 0."""
        return W + ALPHA / RANK * self.B @ self.A


def with_lora(base):
    """A copy of the base. In each linear layer but the head, LoRA(W) takes the place of W."""
    model = copy.deepcopy(base)                          # left out: one base for all adapters
    for layer in [*model.model.modules()]:
        if isinstance(layer, nn.Linear):
            parametrize.register_parametrization(layer, "weight", LoRA(layer))
    return model


def pad(rows, side):
    """Lists of ids → [B, longest list]. The padding is −1, and attention will mask it."""
    rows = [torch.tensor(row) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side)


def encode(prompts):
    """The ids of prompts in the format of toy/base: [B, P]."""
    return pad(TOKENIZER([f"{x}\n\nAnswer:\n" for x in prompts]).input_ids, "left")


def score_tokens(model, prompts, answers):
    """log π(y_t | x, y_<t) [B, T], the h_t that predict y_t [B, T, H], the mask of y [B, T]."""
    x = encode(prompts)                                                          # [B, P]
    y = pad(answers, "right")                                                    # [B, T]
    ids = torch.cat([x, y], 1)                                                   # [B, P + T]
    # Padding becomes token 0, masked. RoPE uses only distances: position ids are not needed.
    hidden = model.model(ids.clamp(min=0), ids >= 0, use_cache=False).last_hidden_state
    hidden = hidden[:, x.shape[1] - 1 : -1]              # h_t, one place before y_t: [B, T, H]
    logprobs = model.lm_head(hidden).log_softmax(2)                              # [B, T, V]
    logprobs = logprobs.gather(2, y.clamp(min=0)[..., None])[..., 0]             # [B, T]
    return logprobs, hidden, y >= 0


@torch.no_grad()
@parametrize.cached()                                    # computes W + (α/r) B A only once
def sample(model, prompts, longest, greedy=False):
    """y ~ π(·|x) for each prompt, until EOS or the longest length: its ids, its texts."""
    x = encode(prompts)                                                          # [B, P]
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

def train_reward_model(base, dataset):
    """Train R_φ by teacher forcing on the z of 𝒟_R. Left out: epochs, warm-up, clipping."""
    model = with_lora(base)                                                      # l.4
    optimizer = torch.optim.AdamW(model.parameters(), lr=REWARD_RATE, weight_decay=0)
    schedule = LinearLR(optimizer, start_factor=1, end_factor=0, total_iters=REWARD_STEPS)
    for step in range(REWARD_STEPS):
        pairs = [(JUDGE.format(x, y), TOKENIZER(z).input_ids + [EOS])
                 for x, y, z in random.sample(dataset, REWARD_BATCH)]
        logprobs, _, mask = score_tokens(model, *zip(*pairs))                    # [B, T]
        assert mask.sum() == sum(len(z) for _, z in pairs), "l.5: a p_φ(z_j | ·) for each z_j"
        loss = -logprobs[mask].mean()              # −log p_φ(z_j | z_<j, x, y); l.6 sums over j
        loss.backward()
        optimizer.step()                                                         # l.7
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"R_φ, step {step}: loss {loss:.3f} nats per token of z")
    return model                                                                 # l.8


def write_critiques(reward_model, rows, responses):
    """z' that R_φ writes greedily (Alg. 4 l.12); without an R_φ, the annotator's z."""
    if not reward_model:
        return [generate_dual_feedback(row, y) for row, y in zip(rows, responses)]
    prompts = [JUDGE.format(toy.prompt(row), y) for row, y in zip(rows, responses)]
    return sample(reward_model, prompts, CRITIQUE_TOKENS, greedy=True)[1]


def print_agreement(base, reward_model, rows):
    """Print how well R_φ finds the annotator's −1. Left out: the +1."""
    y, responses = sample(base, [*map(toy.prompt, rows)], RESPONSE_TOKENS)
    critiques = [write_critiques(critic, rows, responses) for critic in (None, reward_model)]
    delta = [torch.cat([*map(pseudo_rewards, y, responses, z)]) for z in critiques]
    poor, called_poor = delta[0] < 0, delta[1] < 0                               # of all y_t
    found = (poor & called_poor).sum()
    print(f"R_φ: precision {found / called_poor.sum():.3f}, recall {found / poor.sum():.3f}")


# ── §3.5, Algorithm 4, policy.py: π_θ learns from δ'

def estimate_advantages(rewards, values, mask):
    """A_t = Σ_l (γλ)^l δ^TD_{t+l}, where δ^TD_t = r_t + γ V_{t+1} − V_t (l.15–16): [B, T]."""
    advantages = torch.zeros_like(rewards)                                       # [B, T]
    next_value = next_advantage = torch.zeros(len(rewards))                      # of t+1, [B]
    for t in reversed(range(rewards.shape[1])):          # l.16's T − t − 1 would leave out r_T
        td_error = rewards[:, t] + GAMMA * next_value - values[:, t]             # δ^TD_t, [B]
        next_advantage = (td_error + GAMMA * LAMBDA * next_advantage) * mask[:, t]
        next_value = values[:, t] * mask[:, t]           # V is 0 after the last token
        advantages[:, t] = next_advantage
    return advantages


def whiten(advantages, mask):
    """A_t with mean 0 and variance 1 over all y_t (not in the paper): [B, T]."""
    return (advantages - advantages[mask].mean()) / advantages[mask].std(correction=0) * mask


def clipped_loss(logprobs, logprobs_old, advantages, mask):
    """−E_t[min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t)] (l.22–23, 27): scalar."""
    ratio = (logprobs - logprobs_old).exp()                                      # ρ_t, [B, T]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain[mask].mean()


def optimize_policy(base, reward_model, rows):
    """Train π_θ. Left out: minibatches (l.20), entropy (l.25), two more clips, adaptive β."""
    policy = with_lora(base)                                                     # l.5
    value_head = nn.Linear(base.config.hidden_size, 1)                           # V_ψ, l.5
    optimizer = torch.optim.AdamW(policy.parameters(), POLICY_RATE, weight_decay=0)
    optimizer.add_param_group({"params": value_head.parameters(), "lr": VALUE_RATE})
    schedule = LinearLR(optimizer, start_factor=1, end_factor=0, total_iters=ITERATIONS)
    for iteration in range(ITERATIONS):                                          # l.6
        batch = random.sample(rows, BATCH)                                       # l.10
        x = [*map(toy.prompt, batch)]
        y, responses = sample(policy, x, RESPONSE_TOKENS)                        # l.11
        z = write_critiques(reward_model, batch, responses)                      # z', l.12
        delta = pad_sequence([*map(pseudo_rewards, y, responses, z)], batch_first=True)
        with torch.no_grad():
            logprobs_ref, _, _ = score_tokens(base, x, y)        # π_ref is the base, [B, T]
            logprobs_old, hidden, mask = score_tokens(policy, x, y)              # [B, T], l.7
            values = value_head(hidden)[..., 0]                                  # [B, T]
        assert delta.shape == mask.shape, "l.13: one δ'_t for each y_t"
        rewards = (delta - BETA * (logprobs_old - logprobs_ref)) * mask          # r_t, l.14
        advantages = estimate_advantages(rewards, values, mask)                  # [B, T], l.16
        returns = advantages + values                    # R_t; it is l.24's sum if λ = 1
        advantages = whiten(advantages, mask)                               # [B, T]
        for epoch in range(PPO_EPOCHS):                                          # l.19
            logprobs, hidden, _ = score_tokens(policy, x, y)
            values = value_head(hidden.detach())[..., 0]         # the value loss trains only ψ
            loss = clipped_loss(logprobs, logprobs_old, advantages, mask)
            if epoch == 0:         # ρ_t = 1: the gradient is Definition 1's, with A_t for δ_t
                slope, = torch.autograd.grad(loss, logprobs, retain_graph=True)  # [B, T]
                assert torch.allclose(slope * mask.sum(), -advantages, atol=1e-3), "−A_t"
            value_loss = ((values - returns) ** 2)[mask].mean()                  # l.24
            (loss + value_loss).backward()                                       # l.27–28
            optimizer.step()                                                     # l.29–30
            optimizer.zero_grad()
        schedule.step()
        if iteration % 3 == 0:
            facts = sum(map(toy.fact_accuracy, batch, responses)) / BATCH
            print(f"\niteration {iteration}: {facts:.3f} of the facts")
            words = zip(delta[0].tolist(), token_texts(y[0]))
            coloured = [COLOURS[sign] + word for sign, word in words]
            print(batch[0]["post"], "".join(coloured) + COLOURS[0], z[0], sep="\n")
    return policy                                                                # l.33


def mean_facts(model, rows):
    """The share of the facts that the model's responses state correctly, and only once."""
    _, responses = sample(model, [*map(toy.prompt, rows)], RESPONSE_TOKENS)
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
        x = [*map(toy.prompt, rows)]
        _, responses = sample(base, x, RESPONSE_TOKENS)                          # l.6
        z = write_critiques(None, rows, responses)                               # l.7–8
        reward_model = train_reward_model(base, [*zip(x, responses, z)])   # l.9–14
        print_agreement(base, reward_model, held_out)
    policy = optimize_policy(base, reward_model, rows)                           # l.17–18
    print(f"policy: {mean_facts(policy, held_out):.3f} of the facts of 200 held-out posts")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")             # some terminals cannot print φ
    main()
