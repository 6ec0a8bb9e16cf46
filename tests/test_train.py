"""The inputs of each step of Algorithms 1 and 4: seeds, adapters, learning rates, counts, rows;
and the annotator as the critic.

Comparing two runs of the same code cannot reveal a systematic error. So these tests compare
each step's inputs with explicit values.
"""

import json
import math
import random
import re
import typing
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
import runtime
import toy
from annotate import Review, annotation_questions, read_critique, token_offsets
from data import InputError, get_task, load_rows, write_rows
from helpers import ADAMW, error_message, randomise, read_jsonl, toy_config
from model import ValueHead, add_lora, encode_text
from runtime import CHANGEABLE, POLICY_SETTINGS
from policy import (add_advantages, add_scores, annotator_critic, batch_rows,
                    ppo_update, sample_rollouts, train)
from settings import Config, FitConfig, derive_settings, parse_flags
from text2grad import evaluate, train_and_evaluate, write_responses

pytestmark = pytest.mark.inner
CONFIG = toy_config(iterations=2, batch_size=8, minibatch_size=8, ppo_epochs=1,
                    learning_rate=0.0, max_new_tokens=12, kl_target=0.0, seed=3)


def length_critic(rollouts, model, tokenizer, config):
    """A critic without R_φ: δ_1 is the length of the response, all other δ_t are 0."""
    return [Review("", [float(len(offsets)), *[0.0] * (len(offsets) - 1)])
            for offsets in rollouts.offsets]


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
    calls = spy("policy.generate", lambda model, x, n, T, *options: options)
    batch = sample_rollouts(model, tokenizer, rows, replace(CONFIG, decode_batch_size=3),
                            "policy", torch.Generator().manual_seed(5))
    (ends, uniforms, size), = calls
    assert (ends, size) == (eos, 3)
    expected = torch.rand(8, 12, generator=torch.Generator().manual_seed(5))
    assert torch.equal(uniforms, expected)
    last = [y[m.bool()][-1].item() for y, m in zip(batch.response_ids, batch.mask)]
    assert batch.truncated == [token not in eos for token in last]
    assert {*eos[1:]} & {*last} and any(batch.truncated)


# ── Algorithm 4

def test_every_iteration_has_its_own_seed_and_learning_rates(model_and_tokenizer, rows,
                                                             tmp_path, spy, capsys):
    """With one row and weights that stay, each iteration draws other y and minibatches, as the
    documented seeds say, and logs another of its samples; every tenth prints it. The linear
    schedule takes both rates to 0. AdamW has torch's betas and ε, and no weight decay."""
    model, tokenizer = model_and_tokenizer

    def inputs(rollouts, model, value_head, optimizer, config, rng):
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            assert (group["weight_decay"], group["betas"], group["eps"]) == ADAMW
            group["lr"] = 0.0
        return rollouts.response_ids, rng.getstate(), rates

    updates = spy("policy.ppo_update", inputs)
    config = replace(CONFIG, iterations=11, batch_size=3, minibatch_size=3, learning_rate=0.2,
                     value_rate_factor=2.5)
    train(model, tokenizer, rows[:1], config, tmp_path, length_critic)
    samples = read_jsonl(tmp_path / "samples.jsonl")
    for iteration, (responses, state, rates) in enumerate(updates):
        seed = CONFIG.seed * 1_000_003 + iteration
        expected = sample_rollouts(model, tokenizer, rows[:1] * 3, CONFIG, "policy",
                                   torch.Generator().manual_seed(seed))
        assert samples[iteration]["response"] == expected.texts[iteration % 3]
        assert torch.equal(responses, expected.response_ids)
        assert state == random.Random(seed).getstate()
        assert rates == pytest.approx([0.2 * (1 - iteration / 11), 0.5 * (1 - iteration / 11)])
    assert len({str(responses.tolist()) for responses, _, _ in updates}) == 11
    assert re.findall(r"^ {2,3}(\d+)  ", capsys.readouterr().out, re.M) == ["1", "11"]


def test_the_kl_coefficient_follows_nats_per_response(rows, model_and_tokenizer, tmp_path):
    """β after an iteration, recomputed from the KL of the batch (Ziegler et al. 2019, §2.2).

    The target is near the KL, so that the error is not clipped, and nats per token would give
    another β. The horizon counts rollouts: 8 per iteration, though a minibatch has 4.
    """
    model, tokenizer = model_and_tokenizer
    config = replace(CONFIG, minibatch_size=4, iterations=15)
    batch = sample_rollouts(model, tokenizer, batch_rows(rows, config, 0), config, "policy",
                            torch.Generator().manual_seed(CONFIG.seed * 1_000_003))
    add_scores(batch, model, ValueHead(128), config)
    log_ratio = (batch.logprobs_old - batch.logprobs_ref) * batch.mask
    kl = log_ratio.sum(1).mean().item()
    config = replace(config, kl_target=kl / 1.1, kl_horizon=12)  # relative error .1
    critics = iter([length_critic, length_critic])
    betas = []

    def advantages(batch, beta, config):
        betas.append(beta)
        add_advantages(batch, beta, config)

    with pytest.raises(StopIteration):
        train(model, tokenizer, rows, config, tmp_path, lambda *batch: next(critics)(*batch),
              advantages)
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first["kl"] == pytest.approx(kl, rel=1e-4) and kl > 5
    assert second["kl_coef"] == pytest.approx(first["kl_coef"] * (1 + 0.1 * 8 / 12),
                                              rel=1e-5)
    assert betas == [first["kl_coef"], second["kl_coef"]]


def test_a_harmful_step_is_skipped(policy, monkeypatch):
    """Five steps of gradient 1. A mean ratio of 11 skips one, an infinite loss another, and a
    gradient that is NaN a third. Without a good step, the run ends with a remedy."""
    model, head, rollouts = policy
    rollouts.advantages = rollouts.returns = rollouts.mask
    weight = head.linear.weight
    before = weight.detach().clone()
    harmful = [(11.0, 0.5, 1.0), (1.0, math.inf, 1.0), (1.0, 0.5, math.nan)]

    def update(*steps):
        """steps: ratio, loss and gradient of each."""
        def gradients(*arguments):
            *stats, gradient = next(left)
            weight.grad = torch.full_like(weight, gradient)
            return dict(zip(("ratio", "policy_loss"), stats))

        left = iter(steps)
        monkeypatch.setattr("policy.add_gradients", gradients)
        return ppo_update(rollouts, model, head, torch.optim.SGD([weight], lr=0.1),
                          toy_config(minibatch_size=6, ppo_epochs=len(steps)),
                          random.Random(0))

    monkeypatch.setattr("policy.MAX_GRAD_NORM", 99)
    stats = update((1.0, 0.5, 1.0), *harmful, (9.0, 0.5, 1.0))
    assert (stats["skipped_steps"], stats["ratio"]) == (3, 5.0)
    torch.testing.assert_close(weight.detach(), before - 0.2)
    assert not model.training, "a base with dropout would sample with it"
    with pytest.raises(InputError, match="finite.*lower --learning_rate"):
        update(*harmful)
    torch.testing.assert_close(weight.detach(), before - 0.2)


def test_rows_are_grouped_by_the_length_of_prompt_and_response(policy):
    lengths = [14, 5, 9, 9, 14, 10]
    groups = policy[2].groups(range(6), toy_config(micro_batch_tokens=28))
    assert [[lengths[row] for row in group] for group in groups] == [[5, 9, 9], [10, 14], [14]]


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
    assert samples != texts_of(model, tokenizer, held_out, "reference")
    prompts = [get_task("toy").policy_prompt(row) for row in rows[5:]]
    assert all(row["prompt"] in prompts for row in read_jsonl(tmp_path / "samples.jsonl"))


def test_no_held_out_prompt_is_trained_on(tmp_path):
    """Each of 20 prompts has three rows, which are on one side. No row is lost."""
    data = tmp_path / "rows.jsonl"
    write_rows(data, [{"prompt": f"Say {i % 20}.", "number": i} for i in range(60)])
    config = toy_config(task="ultrafeedback", data=str(data), eval_rows=2)
    training, held_out = load_rows(get_task(config.task), config)
    prompts = {row["prompt"] for row in held_out}
    assert len(prompts) == 2 and not prompts & {row["prompt"] for row in training}
    numbers = [row["number"] for row in training + held_out]
    assert sorted(numbers) == [*range(60)] and numbers[:54] != sorted(numbers[:54])
    assert (training, held_out) == load_rows(get_task(config.task), config)
    other = replace(config, seed=1)
    assert held_out != load_rows(get_task(config.task), other)[1], "the seed decides"


# ── Settings of a task

@pytest.mark.parametrize("settings, rows, millions, expected", [
    ({}, 20, 0.3, (16, 1.3e-3, 5e-3)),
    ({}, 10_000, 1000, (625, 1.3e-4, 5e-4)),
    ({}, 500_000, 1001, (6000, 1e-6, 1e-5)),
    ({"epochs": 4, "batch_size": 12}, 5000, 1, (1666, 1.3e-3, 5e-3)),
    ({"iterations": 7, "learning_rate": 0.0}, 20, 0.3, (7, 0.0, 5e-3))])
def test_derived_settings_follow_from_the_rows_and_the_model(settings, rows, millions,
                                                             expected):
    """questions.md: N / batch_size iterations, at least 16; a rate of 1.3 · 10⁻³ / ∛P, or of
    the release above a billion."""
    weight = torch.nn.Parameter(torch.empty(int(millions * 1e6), device="meta"), False)
    adapter = torch.nn.Parameter(torch.empty(10**9, device="meta"))
    model = SimpleNamespace(parameters=lambda: [weight, adapter])
    config = derive_settings(Config(**settings), rows, model)
    derived = config.iterations, config.learning_rate, config.reward_learning_rate
    assert derived == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("flags", [["--batch_size", 12, "--minibatch_size", 8],
                                   ["--batch_size", 16, "--minibatch_size", 12]])
def test_eight_ranks_name_the_batch_sizes_that_they_can_share(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(runtime, "WORLD_SIZE", 8)
    message = error_message("text2grad.py", "--task", "slf5k", "--data", "rows.jsonl",
                            "--output_dir", tmp_path, *flags)
    assert message.endswith("a multiple of 8, and --minibatch_size of 8")


def test_phase_1_samples_a_response_for_each_row_that_has_none(toy_model, tmp_path):
    """A prompt that stands in two rows gets two responses."""
    posts = toy.rows("train", 2)
    rows = [posts[0] | {"response": "stored"}, posts[1], posts[1]]
    text = write_responses(*toy_model, rows, replace(CONFIG, temperature=1.5), tmp_path)
    assert text == "2 responses sampled"
    written = read_jsonl(tmp_path / "responses.jsonl")
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert written[0]["response"] == "stored"
    assert len({row["response"] for row in written}) == 3


def test_a_stored_response_that_is_empty_is_left_out_and_not_sampled_again(tmp_path):
    rows = [{"id": "a", "prompt": "p", "chosen": [{"content": "y"}],
             "rejected": [{"content": " "}]}, {"id": "b", "prompt": "q", "response": ""}]
    config = toy_config(task="ultrafeedback", annotator_function="toy:critique")
    assert write_responses(None, None, rows, config, tmp_path) == "0 responses sampled"
    questions = annotation_questions(config, tmp_path / "responses.jsonl",
                                     get_task(config.task))
    assert [question.id for question in questions] == ["a/0"]


def test_a_wrong_setting_of_a_task_is_one_line():
    """Each flag × five values: refused in one line, or a value that the flag accepts."""
    types = typing.get_type_hints(Config)
    refused = 0
    for setting in fields(Config):
        kind, *_ = typing.get_args(types[setting.name]) or (types[setting.name],)
        least, most = setting.metadata["limits"]
        for value in ("many", "", -5, 1e30, float("nan")):
            try:
                config = parse_flags(Config, "", [], lambda task: {setting.name: value})
            except InputError as error:
                assert str(error).startswith("the settings of --task ")
                assert setting.name in str(error) and "\n" not in str(error)
                refused += 1
                continue
            parsed = getattr(config, setting.name)
            assert type(parsed) is kind and (kind in (str, bool) or least <= parsed <= most)
            assert not setting.metadata["choices"] or parsed in setting.metadata["choices"]
    assert refused > 3 * len(fields(Config))


def test_flags_replace_settings_of_the_task_which_are_flags_of_some_script():
    """None can be typed, too. A setting of another script is left out."""
    config = parse_flags(Config, argv=["--annotator_function", "none", "--batch_size", "4"])
    assert (config.annotator_function, config.batch_size, config.model) == (None, 4, "toy/base")
    with pytest.raises(InputError, match="settings of --task toy: unrecognized .*--kl_coeff"):
        parse_flags(FitConfig, "", [], lambda task: {"kl_coeff": 1})
    assert parse_flags(FitConfig, "", [], lambda task: {"kl_coef": 1}).reward_epochs == 5
    flags = {setting.name for setting in fields(Config)}
    assert POLICY_SETTINGS | CHANGEABLE - {"torch", "transformers", "commit"} <= flags


# ── The annotator as the critic

@pytest.mark.parametrize("task", ["toy", "notebooks.prose:TASK"])    # prose: repeats are poor
def test_the_annotator_judges_as_a_direct_call_does(toy_model, tmp_path, task, monkeypatch):
    """Independent side: direct calls. Of two ranks, each gets the reviews of its rows."""
    model, tokenizer = toy_model
    add_lora(model, "policy", 4, 8)
    config = toy_config(task=task, output_dir=str(tmp_path), max_new_tokens=24, mode="cot")
    rows = toy.rows("train", 6) * 2                    # each post twice: equal texts, too
    batch = sample_rollouts(model, tokenizer, rows, config, "policy", torch.Generator())
    for i, text in enumerate(batch.texts):                     # every fact is repeated
        ids = encode_text(tokenizer, f"{text} {text}")
        batch.texts[i], batch.offsets[i] = token_offsets(tokenizer, ids)
    batch.texts[3] = ""
    replies = [toy.critique(row, text) if text else ""
               for row, text in zip(rows, batch.texts)]
    expected = [read_critique(reply, text, offsets, get_task(task).repeats_are_poor)
                for reply, text, offsets in zip(replies, batch.texts, batch.offsets)]
    for _ in range(2):                                 # the second time from the journal
        reviews = annotator_critic(batch, model, tokenizer, config)
        assert [x.delta for x in reviews] == [x.delta for x in expected]
        assert [x.critique for x in reviews] == [x.critique for x in expected]
        assert [bool(x.reason) for x in reviews] == [i == 3 for i in range(12)]
    monkeypatch.setattr("policy.from_rank0", lambda value: reviews)
    for name, value in (("policy.RANK", 1), ("runtime.RANK", 1), ("runtime.WORLD_SIZE", 2)):
        monkeypatch.setattr(name, value)
    assert annotator_critic(batch, None, None, config) == reviews[1::2]
