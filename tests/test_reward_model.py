"""Algorithm 3 in `fit_adapter`, and the inputs of `fit_reward_model` and `write_critiques`.

Each test compares a step's inputs (batches, learning rates, dropout masks, uniforms, the judged
adapter) with explicit values or a closed form.
"""

import math
from dataclasses import replace

import pytest
import torch
from data import InputError, critique_prompt, split_rows, write_rows
from helpers import ADAMW, randomise, read_jsonl, toy_config, toy_feedback
from model import add_lora, encode_prompt, load_lora, lora_parameters, use_lora
from report import count_tokens, reward_model_summary, token_figures
from reward_model import encode_rows, fit_adapter, fit_reward_model, write_critiques, z_loss

pytestmark = pytest.mark.inner
CONFIG = toy_config(reward_batch_size=4, reward_epochs=2, reward_lora_r=2,
                    reward_lora_alpha=4, reward_learning_rate=1e-2,
                    reward_lora_targets="q_proj")
PAIRS = [([5, 6, 7], [8, 9, 10 + n]) for n in range(20)]


def no_gradient(model, part):
    """A loss whose gradient is exactly 0, so that AdamW only decays the weights."""
    return sum(p.sum() for p in lora_parameters(model, "reward")) * 0.0


# ── Algorithm 3


def test_the_learning_rate_rises_for_a_twentieth_of_the_steps_and_falls_to_zero(
        toy_model, monkeypatch):
    """40 steps: two of warm-up, then a linear decay that would reach 0 after the last step. The
    weight decay is that of the flag."""
    rates = []

    def record(optimizer):
        group, = optimizer.param_groups
        assert (group["weight_decay"], group["betas"], group["eps"]) == (0.7, *ADAMW[1:])
        rates.append(group["lr"])
        return step(optimizer)

    step = torch.optim.AdamW.step
    monkeypatch.setattr("torch.optim.AdamW.step", record)
    config = replace(CONFIG, reward_batch_size=1, reward_learning_rate=0.4,
                     reward_weight_decay=0.7)
    fit_adapter(toy_model[0], PAIRS, "reward", config, no_gradient)
    assert rates[:4] == pytest.approx([0.2, 0.39, 0.38, 0.37])
    assert rates[2:] == pytest.approx([0.4 * (40 - step) / 40 for step in range(2, 40)])


def test_every_epoch_takes_every_row_once_in_an_order_of_its_own(toy_model, spy):
    """Each step clips the gradient."""
    clips = spy("torch.nn.utils.clip_grad_norm_", lambda parameters, most: most)
    batches = []

    def record(model, part):
        batches.append([z[-1] for _, z in part])
        return no_gradient(model, part)

    fit_adapter(toy_model[0], PAIRS, "reward", CONFIG, record)
    first, second = sum(batches[:5], []), sum(batches[5:], [])
    assert len(batches) == 10 and sorted(first) == sorted(second) == [*range(10, 30)]
    assert first != second and first != sorted(first) and clips == [1.0] * 10


def test_dropout_is_active_and_every_step_has_its_own_mask(toy_model, spy):
    """All steps see the same rows, so the masks differ only by their seeds.

    The mask of a step depends on the seed and the step alone: a second fit has the same masks.
    """
    model, _ = toy_model
    config = replace(CONFIG, reward_lora_dropout=0.5, reward_epochs=1)
    dropped = spy("torch.nn.functional.dropout")
    for _ in range(2):
        fit_adapter(model, PAIRS[:1] * 12, "reward", config)
    layers = len(lora_parameters(model, "reward")) // 2
    masks = [(x == 0).flatten().tolist() for x in dropped[::layers]]        # of the first layer
    assert len(masks) == 6 and all(0.3 < sum(mask) / len(mask) < 0.7 for mask in masks)
    assert masks[0] != masks[1] != masks[2] != masks[0] and masks[:3] == masks[3:]
    assert not model.training


def test_a_step_that_is_not_finite_ends_the_fit_in_one_line(toy_model):
    infinite = lambda model, part: z_loss(model, part) * math.inf
    with pytest.raises(InputError, match="step 0 is not finite.*lower --reward_learning_rate"):
        fit_adapter(toy_model[0], PAIRS, "reward", CONFIG, infinite)
    assert all(p.isfinite().all() for p in lora_parameters(toy_model[0], "reward"))


# ── Phase 2

@pytest.mark.slow
def test_the_loss_of_held_out_rows_falls(toy_model, tmp_path, spy):
    """`z_loss` per token of the saved adapter against that of the base.

    No held-out row is among those that R_φ is fitted to. After two passes over 40 rows the
    ratio of the two losses is .288 ± .046 (8 seeds and sets of rows); the bound is 4 standard
    deviations above.
    """
    model, tokenizer = toy_model
    rows = toy_feedback(40)
    write_rows(tmp_path / "rows.jsonl", rows)
    config = toy_config(reward_epochs=2, reward_held_out=4, max_critique_tokens=8)
    fitted = spy("reward_model.fit_adapter", lambda model, pairs, *_, **__: pairs)
    fit_reward_model(model, tokenizer, config, tmp_path / "rows.jsonl", tmp_path / "r")
    load_lora(model, "saved", tmp_path / "r" / "adapter")
    _, held_out = split_rows(rows, 4, config.seed, lambda row: row["prompt"])
    _, pairs = encode_rows(held_out, tokenizer, 512)
    assert len(fitted[0]) == 36 and not any(pair in pairs for pair in fitted[0])
    tokens = sum(len(z) for _, z in pairs)
    loss = {}
    for name in (None, "saved"):
        with use_lora(model, name), torch.no_grad():
            loss[name] = z_loss(model, pairs).item() / tokens
    assert loss["saved"] < 0.47 * loss[None]


def test_rows_that_are_too_long_are_counted_on_the_terminal(toy_model, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    rows = toy_feedback(4)
    for row in rows[1::2]:
        row["critique"] = "word " * 600
    write_rows(data, rows)
    config = toy_config(reward_epochs=1, reward_held_out=0)
    summary = fit_reward_model(*toy_model, config, data, tmp_path / "r")
    assert summary.startswith("trained, but not evalu")
    metrics, = read_jsonl(tmp_path / "r" / "metrics.json")
    assert (metrics["training_rows"], metrics["too_long"]) == (2, 2)
    losses = read_jsonl(tmp_path / "r" / "losses.jsonl")
    assert losses == [{"iteration": 1, "loss in nats per token of z": metrics["final_loss"]}]
    assert f"left out: {data}: 2 of 4 rows have more than 512" in capsys.readouterr().out


def test_tokens_of_graded_delta_count_by_their_sign():
    """Graded critics give ±.25 to ±1: good 2 marked, 3 predicted, 2 hit; poor 3, 2 and 1. What
    cannot be divided is None and no 0."""
    counts = count_tokens([1, 0.5, -1, -0.25, 0, -0.75], [0.75, 1, 0.25, 0, -0.5, -1])
    assert counts == {"tokens": 6, "good marked": 2, "good predicted": 3, "good hit": 2,
                      "poor marked": 3, "poor predicted": 2, "poor hit": 1}
    assert token_figures(counts) == {"good_precision": 2 / 3, "good_recall": 1,
                                     "poor_precision": 1 / 2, "poor_recall": 1 / 3}
    counts = count_tokens([1, 1, 1, 1], [1, 1, 1, 0]) + count_tokens([0], [0])
    assert token_figures(counts) == {"good_precision": 1, "good_recall": 3 / 4,
                                     "poor_precision": None, "poor_recall": None}


# ── Critiques in phase 3 (Alg. 4 l.12)

@pytest.fixture()
def critic_model(toy_model):
    """The toy base with a random adapter "reward"."""
    model, tokenizer = toy_model
    randomise(add_lora(model, "reward", 4, 8), 0.2)
    return model, tokenizer


def test_an_empty_or_too_long_response_has_no_critique_and_moves_none(critic_model, spy):
    """Of ["", y, more than y] the critique belongs to y, which fills the context together with
    its prompt and 16 tokens. It ends at every EOS of the generation config, and is greedy."""
    model, tokenizer = critic_model
    eos = [tokenizer.eos_token_id, 7]
    model.generation_config.eos_token_id = eos
    calls = spy("reward_model.generate", lambda *_, **options: options)
    texts = ["", "It was a cat.", "It was a cat. Yes."]
    prompt = critique_prompt("Where is the xylophone?", texts[1])
    assert "Where is the xylophone?" in prompt and texts[1] in prompt
    model.config.max_position_embeddings = len(encode_prompt(tokenizer, prompt)) + 16
    empty, critique, too_long = write_critiques(
        model, tokenizer, ["Where is the xylophone?"] * 3, texts, 16)
    assert empty == too_long == "" != critique and calls[0]["eos_token_id"] == eos
    assert calls[0]["temperature"] == 0


# ── What R_φ is worth, before phase 3

@pytest.mark.parametrize("figures, warning", [
    ({}, None), ({"poor_recall": .19}, "R_φ is weak"), ({"poor_precision": .1}, "R_φ is weak"),
    ({"poor_recall": 0.0, "poor_precision": None}, "R_φ is weak")])
def test_a_weak_reward_model_is_one_warning(figures, warning):
    """It finds less than a fifth of the poor tokens, or random marks are as precise."""
    metrics = {"held_out_rows": 9, "tokens": 1000, "poor_tokens": 100,
               "poor_recall": .7, "poor_precision": .8, "good_recall": 1.0,
               "good_precision": 1.0, "unparseable": 0.0, **figures}
    _, _, line = reward_model_summary(metrics).partition("\n")
    assert line.startswith(f"warning: {warning}") if warning else line == ""
