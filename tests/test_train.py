"""The inputs of each step of Algorithms 1 and 4: seeds, adapters, learning rates, counts, rows.

Comparing two runs of the same code cannot reveal a systematic error. So these tests compare
each step's inputs with explicit values.
"""

import json
import math
import random
import typing
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
import text2grad
import toy
from annotate import annotation_questions, annotation_settings
from data import InputError, check_values, get_task, parse_flags, write_rows
from helpers import error_message, length_critic, randomise, read_jsonl, run_main, scored
from model import ValueHead, add_lora, encode_prompt, eos_ids, lora_parameters, save_lora
from reward_model import Judgement, RewardConfig, derive_reward_settings
from policy import (add_gradients, add_scores, batch_rows, derive_settings, sample_rollouts,
                    train)
from runtime import forecast_minutes
from text2grad import Config, evaluate, load_rows, train_and_evaluate, write_responses

CONFIG = Config(iterations=2, batch_size=8, minibatch_size=8, ppo_epochs=1, learning_rate=0.0,
                value_learning_rate=0.0, max_new_tokens=12, probe_rows=0, kl_target=0.0, seed=3)


def documented_seed(config, iteration):
    """The seed of one iteration: every draw depends on (seed, iteration, row)."""
    return config.seed * 1_000_003 + iteration


@pytest.fixture()
def model_and_tokenizer(toy_model):
    """The toy base with random adapters "policy" and "reference"."""
    model, tokenizer = toy_model
    randomise(add_lora(model, "policy", 4, 8), 0.3)
    randomise(add_lora(model, "reference", 4, 8), 0.3)
    return model, tokenizer


@pytest.fixture()
def rows():
    return get_task("toy").rows("train", 8, 0)


# ── Sampling (Alg. 4 l.11)

def test_every_row_has_its_own_uniforms_and_ends_at_every_eos(model_and_tokenizer, rows, spy):
    """The uniforms of row i are row i of one torch.rand(B, T), whatever the chunk size. The
    EOS ids of the generation config count too, and a response that ends there is whole."""
    model, tokenizer = model_and_tokenizer
    eos = [tokenizer.eos_token_id, *range(100, 300)]
    model.generation_config.eos_token_id = eos
    calls = spy("policy.generate", lambda model, x, n, T, ends, uniforms: (ends, uniforms))
    batch = sample_rollouts(model, tokenizer, rows, replace(CONFIG, rollout_batch_size=3),
                            "policy", torch.Generator().manual_seed(5))
    assert [(ends, len(uniforms)) for ends, uniforms in calls] == [(eos, 3), (eos, 3), (eos, 2)]
    expected = torch.rand(8, 12, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat([uniforms for _, uniforms in calls]), expected)
    last = [y[m.bool()][-1].item() for y, m in zip(batch.response_ids, batch.mask)]
    assert batch.truncated == [token not in eos for token in last]
    assert {*eos[1:]} & {*last} and any(batch.truncated)


# ── Algorithm 4

def test_every_iteration_has_its_own_seed_and_learning_rates(model_and_tokenizer, rows,
                                                             tmp_path, spy):
    """With one row and weights that stay, each iteration draws other y and minibatches, as the
    documented seeds say. The linear schedule takes both rates to 0."""
    model, tokenizer = model_and_tokenizer

    def inputs(rollouts, model, value_head, optimizer, config, rng):
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return rollouts.response_ids, rng.getstate(), rates

    updates = spy("policy.ppo_update", inputs)
    config = replace(CONFIG, iterations=4, learning_rate=0.2, value_learning_rate=0.5)
    train(model, tokenizer, rows[:1], config, tmp_path, length_critic)
    for iteration, (responses, state, rates) in enumerate(updates):
        seed = documented_seed(CONFIG, iteration)
        expected = sample_rollouts(model, tokenizer, rows[:1] * 8, CONFIG, "policy",
                                   torch.Generator().manual_seed(seed))
        assert torch.equal(responses, expected.response_ids)
        assert state == random.Random(seed).getstate()
        assert rates == pytest.approx([0.2 * (1 - iteration / 4), 0.5 * (1 - iteration / 4)])
    assert len({str(responses.tolist()) for responses, _, _ in updates}) == 4


@pytest.mark.parametrize("kl_horizon, horizon", [(10**4, 10**4), (None, 12)])
def test_the_kl_coefficient_follows_nats_per_response(kl_horizon, horizon, rows,
                                                      model_and_tokenizer, tmp_path):
    """β after an iteration, recomputed from the KL of the batch (Ziegler et al. 2019, §2.2).

    The target is near the KL, so that the error is not clipped, and nats per token would give
    another β. The horizon counts rollouts: 8 per iteration, though a minibatch has 4. If no
    setting names it, it is a tenth of the 120 rollouts of the run, which the critic stops.
    """
    model, tokenizer = model_and_tokenizer
    config = replace(CONFIG, minibatch_size=4, iterations=15)
    batch = sample_rollouts(model, tokenizer, batch_rows(rows, config, 0), config, "policy",
                            torch.Generator().manual_seed(documented_seed(config, 0)))
    add_scores(batch, model, ValueHead(128), config)
    log_ratio = (batch.logprobs_old - batch.logprobs_ref) * batch.mask
    kl = log_ratio.sum(1).mean().item()
    config = replace(config, kl_target=kl / 1.1, kl_horizon=kl_horizon)  # relative error .1
    critics = iter([length_critic, length_critic])
    with pytest.raises(StopIteration):
        train(model, tokenizer, rows, config, tmp_path, lambda *batch: next(critics)(*batch))
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first["kl"] == pytest.approx(kl, rel=1e-4) and kl > 5
    assert second["kl_coef"] == pytest.approx(first["kl_coef"] * (1 + 0.1 * 8 / horizon),
                                              rel=1e-5)


def test_ranks_divide_by_the_tokens_of_the_whole_minibatch(policy, monkeypatch):
    """The gradients of two ranks add up to the gradient of one process."""
    config = Config(minibatch_size=6, micro_batch_size=2, ppo_epochs=1)
    model, head, rollouts = scored(policy, config)
    parameters = [*lora_parameters(model, "policy"), *head.parameters()]

    def gradient(rank, ranks):
        """The gradient of one rank's share."""
        monkeypatch.setattr("policy.RANK", rank)
        monkeypatch.setattr("policy.WORLD_SIZE", ranks)
        model.zero_grad()
        head.zero_grad()
        add_gradients(rollouts, list(range(6)), model, head, parameters, config)
        return torch.cat([p.grad.flatten() for p in parameters])

    whole = gradient(0, 1)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(gradient(0, 2) + gradient(1, 2), whole, rtol=1e-4, atol=1e-6)


def test_the_kl_penalty_takes_a_policy_back_to_the_reference(toy_model, tmp_path):
    """δ = 0, β = 1 fixed: eight iterations shrink the KL to a small part of its first value.

    The ratio last / first is .08 ± .12 (10 seeds, at most .41). The bound is 4 standard
    deviations above; without a penalty the ratio stays at 1.
    """
    model, tokenizer = toy_model
    randomise(add_lora(model, "policy", 16, 32)[1::2], 0.15)                # B of every layer
    config = Config(iterations=8, batch_size=32, minibatch_size=16, ppo_epochs=2, kl_coef=1.0,
                    kl_target=0.0, seed=1, learning_rate=2e-3, max_new_tokens=12)
    rows = get_task("toy").rows("train", 200, 0)
    zero_critic = lambda batch, *_: [Judgement("", [0.0] * len(y)) for y in batch.offsets]
    train(model, tokenizer, rows, config, tmp_path, zero_critic)
    kl = [row["kl"] for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert kl[0] > 5 and kl[-1] < 0.55 * kl[0], kl


# ── Algorithm 1: which adapter answers, which rows are held out

def texts_of(model, tokenizer, rows, adapter):
    """The responses of one adapter with the seed of CONFIG."""
    generator = torch.Generator().manual_seed(CONFIG.seed)
    return sample_rollouts(model, tokenizer, rows, CONFIG, adapter, generator).texts


def test_phase_1_and_before_sample_from_the_sft_adapter(model_and_tokenizer, rows, tmp_path):
    """With --adapter, π_ref is the SFT adapter: it answers in phase 1 and in "before".

    Both evaluations take the held-out rows and have one seed.
    """
    model, tokenizer = model_and_tokenizer
    (tmp_path / "SFT").write_text("")
    config = replace(CONFIG, adapter=str(tmp_path / "SFT"))
    reference = texts_of(model, tokenizer, rows, "reference")
    assert reference != texts_of(model, tokenizer, rows, None)
    assert reference != texts_of(model, tokenizer, rows, "policy")
    write_responses(model, tokenizer, rows, config, tmp_path)
    responses = [row["response"] for row in read_jsonl(tmp_path / "responses.jsonl")]
    assert responses == reference
    held_out = rows[:5]
    train_and_evaluate(model, tokenizer, rows[5:], held_out, config, tmp_path, length_critic)
    result = json.loads((tmp_path / "result.json").read_text())
    for name, adapter in (("before", "reference"), ("after", "policy")):
        samples = [row["response"] for row in read_jsonl(tmp_path / f"{name}_samples.jsonl")]
        assert samples == texts_of(model, tokenizer, held_out, adapter)
        means, _ = evaluate(model, tokenizer, held_out, config, adapter, length_critic)
        assert result[name] == means
    assert result["before"] != result["after"]
    prompts = [get_task("toy").policy_prompt(row) for row in rows[5:]]
    assert all(row["prompt"] in prompts for row in read_jsonl(tmp_path / "samples.jsonl"))


@pytest.mark.parametrize("adapter", [None, "policy"])
def test_perplexity_is_that_of_the_base_in_transformers(model_and_tokenizer, rows, adapter):
    """exp(nats / tokens) over all responses, without EOS, at temperature 1."""
    model, tokenizer = model_and_tokenizer
    config = replace(CONFIG, batch_size=len(rows), micro_batch_size=3, temperature=0.7,
                     max_new_tokens=48)
    generator = torch.Generator().manual_seed(config.seed)
    batch = sample_rollouts(model, tokenizer, rows, config, adapter, generator)
    base = AutoModelForCausalLM.from_pretrained(toy.BASE)
    eos = eos_ids(tokenizer, model)
    logprobs = []
    for i, row in enumerate(rows):
        x = encode_prompt(tokenizer, toy.prompt(row))
        y = [token for token in batch.response_ids[i][batch.mask[i].bool()].tolist()
             if token not in eos]
        rows_of_logits = base(torch.tensor([x + y])).logits[0, len(x) - 1 : -1]
        logprobs += rows_of_logits.log_softmax(-1)[range(len(y)), y].tolist()
    means, _ = evaluate(model, tokenizer, rows, config, adapter, length_critic)
    perplexity = math.exp(-sum(logprobs) / len(logprobs))
    assert means["perplexity under the base"] == pytest.approx(perplexity, rel=1e-4)


def write_repeated_prompts(path):
    """60 rows: each of 20 prompts three times, in an order that mixes them."""
    write_rows(path, [{"prompt": f"Say {i % 20}.", "number": i} for i in range(60)])
    return path


def test_no_held_out_prompt_is_trained_on(tmp_path):
    """Rows are split by prompt; every prompt is on one side, and all rows of training stay."""
    data = write_repeated_prompts(tmp_path / "rows.jsonl")
    splits = set()
    for seed in range(5):
        config = Config(task="ultrafeedback", data=str(data), eval_rows=2, seed=seed)
        training, held_out = load_rows(config)
        prompts = [row["prompt"] for row in held_out]
        assert len(prompts) == len(set(prompts)) == 2
        assert not {row["prompt"] for row in training} & set(prompts)
        assert len({row["number"] for row in training}) == len(training) == 54
        assert [row["number"] for row in training] != sorted(row["number"] for row in training)
        assert (training, held_out) == load_rows(config)
        splits.add(tuple(prompts))
    assert len(splits) > 1, "the seed decides which prompts are held out"


def test_the_run_passes_on_the_split(toy_model, tmp_path, monkeypatch):
    """`main` trains on the training rows and evaluates the held-out ones."""
    def stop(model, tokenizer, rows, held_out, *_):
        prompts.extend({row["prompt"] for row in part} for part in (rows, held_out))
        raise KeyboardInterrupt

    prompts = []
    data = write_repeated_prompts(tmp_path / "rows.jsonl")
    add_lora(toy_model[0], "reward")
    save_lora(toy_model[0], "reward", tmp_path / "reward")
    monkeypatch.setattr(text2grad, "train_and_evaluate", stop)
    with pytest.raises(KeyboardInterrupt):
        run_main("--task", "ultrafeedback", "--model", "toy/base", "--data", data,
                 "--eval_rows", 2, "--max_new_tokens", 12, "--max_critique_tokens", 64,
                 "--reward_model", tmp_path / "reward", "--output_dir", tmp_path / "run")
    assert [*map(len, prompts)] == [18, 2] and not prompts[0] & prompts[1]


# ── Settings of a task

def model_of(millions):
    """A frozen model with this many parameters, without memory for them."""
    weight = torch.nn.Parameter(torch.empty(int(millions * 1e6), device="meta"), False)
    return SimpleNamespace(parameters=lambda: [weight])


DERIVED = "batch_size", "iterations", "minibatch_size", "learning_rate", "value_learning_rate"


@pytest.mark.parametrize("settings, rows, millions, ranks, expected", [
    ({}, 160, 134.5, 1, (16, 16, 8, 2.54e-4, 2.54e-3)),
    ({}, 20, 0.3, 1, (16, 16, 8, 1.3e-3, 1.3e-2)),
    ({}, 10_000, 8030, 1, (64, 156, 32, 6.49e-5, 6.49e-4)),
    ({}, 500_000, 8000, 1, (64, 6000, 32, 6.5e-5, 6.5e-4)),
    ({"task": "slf5k", "batch_size": 12}, 5000, 1, 1, (12, 1666, 6, 1.3e-3, 1.3e-2)), # 4 epochs
    (dict(zip(DERIVED, (3, 7, 3, 0.0, 0.25))), 20, 0.3, 1, (3, 7, 3, 0.0, 0.25)),
    # The value head has the same rate, unless the policy's is derived.
    ({"learning_rate": 0.5}, 100, 1, 1, (16, 16, 8, 0.5, 0.5)),
    ({"learning_rate": 0.0}, 100, 1, 1, (16, 16, 8, 0.0, 0.0)),
    ({"value_learning_rate": 0.0}, 100, 1, 1, (16, 16, 8, 1.3e-3, 0.0)),
    # Each rank gets the same number of rollouts, and no group is cut.
    ({"responses_per_prompt": 3}, 100, 1, 1, (18, 16, 9, 1.3e-3, 1.3e-2)),
    ({}, 100, 1, 3, (18, 16, 9, 1.3e-3, 1.3e-2)),
    ({"responses_per_prompt": 12}, 100, 1, 8, (24, 16, 8, 1.3e-3, 1.3e-2)),
    ({}, 100, 1, 24, (24, 16, 24, 1.3e-3, 1.3e-2))])
def test_derived_settings_follow_from_the_rows_and_the_model(settings, rows, millions, ranks,
                                                             expected, monkeypatch):
    """questions.md: N / batch_size iterations, at least 16, and a rate of 1.3 · 10⁻³ / ∛P."""
    monkeypatch.setattr("policy.WORLD_SIZE", ranks)
    empty = {"task": "my_task:HEADLINES", **dict.fromkeys(DERIVED)}
    config = derive_settings(Config(**empty | settings), rows, model_of(millions))
    assert [getattr(config, name) for name in DERIVED] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("settings, rows, millions, epochs, rate", [
    ({}, 130, 134.5, 6, 9.76e-4), ({}, 20, 0.3, 10, 5e-3), ({}, 10_000, 8000, 3, 2.5e-4),
    ({"epochs": 2, "learning_rate": 0.0}, 20, 0.3, 2, 0.0)])
def test_derived_settings_of_r_phi(settings, rows, millions, epochs, rate):
    """questions.md: 200 steps of 4 rows, in 3 to 10 epochs, and a rate of 5 · 10⁻³ / ∛P."""
    empty = {"epochs": None, "learning_rate": None, "batch_size": 4}
    config = derive_reward_settings(RewardConfig(**empty | settings), rows, model_of(millions))
    assert (config.epochs, config.learning_rate) == (epochs, pytest.approx(rate, rel=0.01))


def test_eight_ranks_name_the_batch_sizes_that_they_can_share(tmp_path, monkeypatch):
    monkeypatch.setattr(text2grad, "WORLD_SIZE", 8)
    message = error_message("text2grad.py", "--task", "slf5k", "--data", "rows.jsonl",
                            "--output_dir", tmp_path)
    assert message.endswith("set --batch_size and --minibatch_size to multiples of 8")


def test_phase_1_samples_several_responses_to_each_prompt(toy_model, tmp_path):
    """A row that has a response keeps it, and no two draws of a prompt are the same."""
    posts = toy.rows("train", 3)
    rows = [posts[0] | {"response": "stored"}, *posts[1:]]
    config = replace(CONFIG, temperature=1.5, annotated_responses_per_prompt=3)
    text = write_responses(*toy_model, rows, config, tmp_path)
    assert text == "7 responses, 6 of them sampled"
    written = read_jsonl(tmp_path / "responses.jsonl")
    assert [row["id"] for row in written] == [post["id"] for post in (
        posts[0], *[posts[1]] * 3, *[posts[2]] * 3)]
    assert written[0]["response"] == "stored"
    assert len({row["response"] for row in written}) == 7


def test_a_phase_says_after_a_tenth_when_it_ends(monkeypatch, capsys):
    """20 steps of 10 s: after two, 18 are left. A phase of 30 s says nothing."""
    clock = [0.0]
    monkeypatch.setattr("runtime.time", SimpleNamespace(time=lambda: clock[0]))
    for steps, line in ((20, "work: ends in about 3.0 min\n"), (3, "")):
        for step in forecast_minutes(range(steps), "work"):
            assert capsys.readouterr() == ("", line if step == 2 else "")
            clock[0] += 10


def test_empty_responses_are_left_out_by_phase_1_and_counted(tmp_path, capsys):
    """Phase 1 keeps the other response of a row that has two."""
    def side(text):
        return [{"role": "assistant", "content": text}]

    rows = [{"id": "a", "prompt": "p", "chosen": side("good"), "rejected": side(" ")},
            {"id": "b", "prompt": "q", "response": ""},
            {"id": "c", "prompt": "q", "response": "text"}]
    config = Config(task="ultrafeedback", annotator_function="toy:critique")
    assert text2grad.write_responses(None, None, rows, config, tmp_path) == (
        "3 responses, 0 of them sampled")
    settings = annotation_settings(config, tmp_path)
    questions = annotation_questions(settings)
    assert [question.id for question in questions] == ["a/0", "c"]
    assert "left out 2 empty responses (the first: row a/1)" in capsys.readouterr().err
    write_rows(tmp_path / "responses.jsonl", rows[1:2])
    with pytest.raises(InputError, match="every response is empty; if text2grad.py sampled "
                                         "them, choose another --model$"):
        annotation_questions(settings)


WRONG = ["many", "", -5, 1e30, [1], {"a": 1}, float("nan"), True]


@pytest.mark.parametrize("config_class", [Config, RewardConfig])
def test_a_wrong_setting_of_a_task_is_one_line(config_class):
    """Each flag × eight values: refused in one line, or a value that the flag accepts."""
    types = typing.get_type_hints(config_class)
    refused = 0
    for setting in fields(config_class):
        allowed = typing.get_args(types[setting.name]) or (types[setting.name],)
        least, most = setting.metadata["range"]
        for value in WRONG:
            try:
                check_values(config_class, {setting.name: value}, "")
            except InputError as error:
                assert setting.name in str(error) and "\n" not in str(error)
                refused += 1
                continue
            assert type(value) in allowed or type(value) is int and float in allowed
            assert type(value) in (str, bool) or least <= value <= most
            assert not setting.metadata["choices"] or value in setting.metadata["choices"]
    assert refused > 4 * len(fields(config_class))
    with pytest.raises(InputError, match="--task .*: its setting --seed: -5 must be"):
        parse_flags(config_class, "", lambda task: {"seed": -5}, [])
