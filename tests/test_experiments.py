"""Reward designs, baselines and advantages against closed forms, then small runs."""

import math
import random
import re
from collections import Counter
from dataclasses import replace
import shlex
from itertools import product
from statistics import mean

import pytest
import torch
import runtime
import toy
from annotate import Review, Span, read_reply, token_offsets, token_rewards
from data import read_rows, write_rows
from experiments import advantages, baselines, designs
from experiments.advantages import ADVANTAGES
from experiments.baselines import (bradley_terry_loss, dpo_loss, mend, pair_losses,
                                   preference_loss, preferences)
from experiments.designs import CHANGES, marks, replace_delta, response_scores
from helpers import ROOT, error_message, noise, randomise, refused, toy_config
from model import (add_lora, encode_answer, encode_prompt, load_model, lora_parameters,
                   save_lora, use_lora)
from policy import Rollouts, annotator_critic
from sampling import pad_batch
from text2grad import start_policy

close = torch.testing.assert_close


def read(mode, reply, response="The cat sat. A dog ran."):
    return read_reply({"id": "", "prompt": "", "response": response}, reply, mode)


def faulty(row):
    """A summary with wrong facts, repeated clauses and the first person."""
    rng = random.Random(f"{row['id']} 0")
    return toy.write_summary(toy.confuse(row["facts"], rng), rng, 0.5)


def faulty_rollouts(tokenizer):
    """Rollouts of five faulty summaries and an empty one."""
    rows = toy.rows("train", 6)
    texts = [*map(faulty, rows[:5]), ""]
    ids = [encode_answer(tokenizer, text) for text in texts]
    prompts = [*map(toy.prompt, rows)]
    offsets = [token_offsets(tokenizer, y)[1] for y in ids]
    batch = pad_batch([encode_prompt(tokenizer, prompt) for prompt in prompts], ids, "cpu")
    return Rollouts(rows, prompts, texts, offsets, *batch, task=toy.TASK)


def logits_of(model, x, y):
    """The plain model's logits of an unpadded row, after the prompt and after each token."""
    return model(torch.tensor([x + y])).logits[0, len(x) - 1 :]


def small(tmp_path, **more):
    return toy_config(**dict(output_dir=str(tmp_path), annotated_rows=24, batch_size=8,
                         minibatch_size=8, eval_rows=4, iterations=2, ppo_epochs=2,
                         learning_rate=3e-3, max_new_tokens=48) | more)


# ── Losses

def test_dpo_loss_and_its_gradient_are_the_closed_form():
    """−log σ(βu), u = Δ_w − Δ_l; ∂/∂log π(y_w) = −β σ(−βu) (Rafailov et al. 2023, §4)."""
    w, l, ref_w, ref_l = (noise(i, 50).mul(5).requires_grad_() for i in range(4))
    for beta in (0.05, 2.0):
        loss, u = dpo_loss(w, l, ref_w, ref_l, beta), (w - ref_w) - (l - ref_l)
        close(loss, torch.log1p(torch.exp(-beta * u)), rtol=1e-9, atol=1e-9)
        up_w, up_l = torch.autograd.grad(loss.sum(), (w, l))
        close(up_w, -beta / (1 + torch.exp(beta * u)), rtol=1e-9, atol=1e-12)
        close(up_l, -up_w)


PAIRS = [([5, 6, 7, 8], [9, 10, 1], [20, 1]), ([11], [12, 13, 14, 15, 1], [30, 31, 1]),
         ([16, 17], [1], [40, 41, 42, 1])]
SIDES = [[(pair[0], pair[k]) for pair in PAIRS] for k in (1, 2)]           # chosen, rejected


def test_preference_loss_is_that_of_the_models_own_logits(toy_model):
    """The loss equals that of each unpadded row's logits, and log 2 per pair at first."""
    model, _ = toy_model
    add_lora(model, "policy", 4, 8)
    with use_lora(model, "policy"):
        first = preference_loss(model, PAIRS, None, 0.1)
        randomise(lora_parameters(model, "policy"))
        loss = preference_loss(model, PAIRS, None, 0.1)
    assert first.item() == pytest.approx(3 * math.log(2), abs=1e-5) and loss.requires_grad
    sums = []
    for name, side in product(("policy", None), SIDES):
        with use_lora(model, name), torch.no_grad():
            sums.append(torch.stack([
                logits_of(model, x, y).log_softmax(-1)[range(len(y)), y].sum()
                for x, y in side]))
    close(loss, dpo_loss(*sums, 0.1).sum(), rtol=1e-4, atol=1e-4)


def test_scores_are_logit_differences_after_each_token(toy_model):
    """ℓ_t = logit(+) − logit(−) of the plain model after y_≤t; r is the last ℓ_t."""
    model, tokenizer = toy_model
    randomise(add_lora(model, "reward", 4, 8))
    plus, minus = (tokenizer(mark).input_ids[-1] for mark in "+-")
    with use_lora(model, "reward"), torch.no_grad():
        ends = []
        for side in SIDES:
            for (x, y), score in zip(side, response_scores(model, tokenizer, side)):
                logits = logits_of(model, x, y)[-1]
                close(score, logits[plus] - logits[minus], rtol=1e-3, atol=1e-3)
                ends.append(score)
        want = bradley_terry_loss(*torch.stack(ends).chunk(2))
        close(pair_losses(model, tokenizer, PAIRS), want, rtol=1e-3, atol=1e-3)


# ── Content words

def pieces(text):
    """Offsets of words with their leading space, and of punctuation marks."""
    return [m.span() for m in re.finditer(r"\s*(?:\w+|[^\w\s])", text)]


# ── Annotators of the toy world

@pytest.mark.parametrize("critic, mode, has_reasons", [
    (toy.critique, "cot", True), (designs.critique_no_cot, "no_cot", False),
    (designs.critique_spans, "no_cot", False)])
def test_every_toy_annotator_can_be_read(critic, mode, has_reasons):
    """It gives every unique quote its true label. Reasoning with the facts of the post, such as
    "The writer lives in Oslo, not in Berlin.", is in z or not."""
    kinds, reasons = set(), 0
    for row in toy.rows("train", 40):
        text = faulty(row)
        feedback, grounding = read(mode, critic(row, text), text)
        assert feedback.critique and not grounding.unmatched
        facts = map(toy.plain, row["facts"].values())
        reasons += any(fact in feedback.critique for fact in facts)
        truths = marks(row, text)
        for truth in truths:
            alone = sum(s.start < truth.end and truth.start < s.end for s in truths) == 1
            if alone and text.count(text[truth.start : truth.end]) == 1:
                kinds.add(truth.name)
                start = truth.start + 2 * (truth.name == "repetition")
                assert {s.label for s in grounding.spans
                        if s.start <= start and truth.end <= s.end} == {truth.label}, text
    assert kinds > {"repetition", "month"}
    assert bool(reasons) == has_reasons


def test_a_fifth_of_the_quotes_is_in_the_wrong_list():
    """The same ones each time; the critique and the set of all quotes stay as they are."""
    moved, total = 0, 0
    for row in toy.rows("train", 200):
        text = faulty(row)
        want, got = (read("cot", critic(row, text), text)[0]
                     for critic in (toy.critique, designs.critique_noise))
        assert designs.critique_noise(row, text) == designs.critique_noise(row, text)
        assert got.critique == want.critique
        assert (sorted(got.good_spans + got.poor_spans)
                == sorted(want.good_spans + want.poor_spans))
        moved += sum((Counter(got.good_spans) - Counter(want.good_spans)).values())
        moved += sum((Counter(got.poor_spans) - Counter(want.poor_spans)).values())
        total += len(want.good_spans + want.poor_spans)
    assert total > 500 and moved / total == pytest.approx(0.2, abs=0.05)


def test_references_can_be_as_wrong_as_the_base():
    rows = designs.DRAFTS.rows("train", 300, 0)
    truths = toy.rows("train", 300, 0)
    assert [row["facts"] for row in rows] == [row["facts"] for row in truths]
    right = [[toy.fact_accuracy(row, row["reference"]) for row in part]
             for part in (rows, truths)]
    assert mean(right[0]) == pytest.approx(0.55, abs=0.05) and mean(right[1]) == 1


# ── Reward designs

def test_sums_and_late_labels_by_hand(toy_model, tmp_path):
    """Three labelled words; setting B of App. A pays their sum at the end. `late` pays each
    label at the next word, and the last one at the last token."""
    text = "a b c ."
    spans = [Span(4, 5, 1), Span(0, 1, 1), Span(2, 3, -1)]
    review = Review("", [1.0, -1.0, 1.0, 0.0], spans=spans)
    assert designs.end(text, pieces(text), review) == [0, 0, 0, 1]
    assert designs.late(text, pieces(text), review) == [0, 1, -1, 1]
    assert designs.minus_faults(text, pieces(text), review) == [0, 0, 0, -1]
    assert designs.late("a", pieces("a"), Review("", [0.0])) == [0]
    # A second design changes the δ of the first one.
    arguments = faulty_rollouts(toy_model[1]), *toy_model, toy_config(output_dir=str(tmp_path))
    twice = replace_delta(replace_delta(annotator_critic, designs.end),
                          lambda text, offsets, review: [-d for d in review.delta])
    for once, changed in zip(annotator_critic(*arguments), twice(*arguments)):
        assert changed.delta[-1] == -sum(once.delta) and not any(changed.delta[:-1])


def test_linear_decay_pays_each_token_of_a_span_its_weight():
    """Appendix I.1: δ = label · weight; a token in conflict stays 0 but counts in the decay. A
    span of one token has the weight 1."""
    one = Review("z", [1.0], spans=[Span(0, 1, 1)])
    assert CHANGES["linear_decay"]("a", [(0, 1)], one) == [1]
    good, poor = [1, .775, .55], [1 - .9 * i / 7 for i in range(8)]
    text = "A nurse of York, sad, is not sad at all because of him."
    spans = [Span(2, 20, 1), Span(15, 20, -1), Span(25, 55, -1)]
    offsets = pieces(text)
    review = Review("z", token_rewards(text, offsets, spans), spans=spans)
    want = [0, *good, 0, 0, 0, 0, *(-weight for weight in poor)]
    assert CHANGES["linear_decay"](text, offsets, review) == pytest.approx(want)


def test_scalar_rewards_stand_at_the_last_token(toy_model, monkeypatch):
    """r = ℓ_T stands there, for the rows of this rank."""
    model, tokenizer = toy_model
    randomise(add_lora(model, "reward", 4, 8))
    rollouts, config = faulty_rollouts(tokenizer), toy_config(decode_batch_size=4)
    reviews = designs.pay_scores(rollouts, model, tokenizer, config)
    for i, review in enumerate(reviews):
        y = rollouts.response_ids[i][rollouts.mask[i].bool()].tolist()
        pair = encode_prompt(tokenizer, rollouts.prompts[i]), y
        with use_lora(model, "reward"), torch.no_grad():
            score, = response_scores(model, tokenizer, [pair])
        assert not any(review.delta[:-1]) and len(review.delta) == len(y)
        close(torch.tensor(review.delta[-1]), score, atol=1e-3, rtol=0)
    monkeypatch.setattr(runtime, "RANK", 1)
    monkeypatch.setattr(runtime, "WORLD_SIZE", 2)
    for critic in (designs.pay_scores, replace_delta(designs.pay_scores, designs.end)):
        judged = critic(rollouts, model, tokenizer, config)
        lengths = [len(rollouts.offsets[i]) for i in (1, 3, 5)]
        assert [len(review.delta) for review in judged] == lengths


@pytest.mark.parametrize("flags, message", [
    ("late --critic annotator --annotator_function none", "--annotator_function"),
    ("late best --seed 1", "unknown name 'best': .* names out of text2grad, .* grpo"),
    ("", "no name was given: choose from"), ("ppo dpo", "ppo dpo: these names exclude"),
    ("grpo definition_1", "exclude each other"),
    ("late dpo", "exclude each other; .* stand alone"),
    ("reflection", "reflection needs --reward_model"),
    ("dpo --annotator_function none:x", "import"),
    ("ppo grpo", "compares responses to a prompt: set --responses_per_prompt"),
    ("grpo --responses_per_prompt 3", "^--batch_size must be a multiple of 3$")])
def test_names_or_flags_that_cannot_be_are_refused(flags, message, tmp_path):
    flags = [*flags.split(), "--output_dir", tmp_path] if flags else []
    assert re.search(message, error_message("experiments.baselines", *flags))


def test_help_has_one_line_for_each_name(capsys):
    with pytest.raises(SystemExit):
        baselines.main(["--help"])
    words = [line.split()[:1] for line in capsys.readouterr().out.splitlines()]
    assert {words.count([name]) for name in baselines.NAMES} == {1}


# ── Rows

def test_pairs_are_responses_in_the_order_of_their_labels(toy_model, tmp_path):
    """Two samples of the base per row, the better one first; ties are omitted."""
    rows, config = toy.rows("train", 24), small(tmp_path, annotated_rows=48)
    pairs = preferences(*toy_model, rows, config, tmp_path)
    row_of = {toy.prompt(row): row for row in rows}
    assert len(pairs) > 12                              # eight seeds: 17.4 ± 1.6
    for x, *texts in pairs:
        better, worse = (sum(span.label for span in read(
            "cot", toy.critique(row_of[x], text), text)[1].spans) for text in texts)
        assert better > worse


def test_sft_takes_the_first_reference_of_a_row(monkeypatch, tmp_path):
    monkeypatch.setattr(baselines, "fit_policy", lambda *args: fitted.extend(args[2]))
    fitted, row = [], {"prompt": "x", "solution": "y", "4o_solution": "z"}
    config = small(tmp_path, task="ultrafeedback")
    baselines.sft(None, None, [row], config, tmp_path)
    assert fitted == [("x", "y")]
    refused("none of the fields", baselines.sft, None, None, [{"prompt": "x"}], config, None)


def test_a_reward_model_without_pairs_is_one_line(tmp_path):
    """There are two rows with equal labels."""
    rows = [{"prompt": "p", "response": "r", "spans": []}] * 2
    for name in ("responses", "feedback"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    refused("ppo needs two preference pairs, and there are 0", baselines.fit_scores, None, None,
            [{}] * 2, small(tmp_path), tmp_path)


def test_what_the_critique_names_is_mended():
    """Facts of several words, repeated clauses and the first person are mended; a correct text
    stays as it is."""
    for row in toy.rows("train", 60):
        response = faulty(row)
        mended = mend(response, toy.critique(row, response))
        assert toy.fact_accuracy(row, mended) == 1 and not toy.faults(mended), response
        assert mend(mended, toy.critique(row, mended)) == mended


# ── Whole runs

def reviewed(*labels, reason=""):
    """A review with a span for each label."""
    return Review("", [0.0], reason, spans=[Span(0, 1, label) for label in labels])


@pytest.mark.parametrize("share, kept", [(None, [2, 5]), (.1, [2]), (.5, [2, 5, 0]),
                                         (.7, [2, 5, 0, 4]), (1, [2, 5, 0, 4, 1])])
def test_the_responses_that_rejection_keeps(share, kept):
    """The merits are 1, 0, 2, none (not readable), 1 and 2. Equal ones stay in their order."""
    reviews = [reviewed(1), reviewed(1, -1), reviewed(1, 1), reviewed(*[1] * 5, reason="cut"),
               reviewed(1, 1, -1), reviewed(1, 1)]
    assert baselines.keep_best(reviews, share) == kept
    assert baselines.keep_best([reviewed(), reviewed(-1)], None) == []
    assert baselines.keep_best([reviewed(reason="cut")] * 3, .5) == []


def test_rejection_trains_on_its_own_responses_in_rounds(tmp_path, toy_model, spy):
    """Three rounds share 50 annotations and 12 steps; the second one samples from the policy
    that the first has trained, and each trains on the best tenth of its own responses."""
    model, _ = toy_model
    config = small(tmp_path, iterations=6, annotated_rows=50, rounds=3, learning_rate=.02)
    start_policy(model, config)
    batches = spy("experiments.baselines.sample_rollouts")
    weights = spy("experiments.baselines.sample_rollouts", lambda *arguments: (
        arguments[4], lora_parameters(model, "policy")[1].abs().sum().item()))
    reviews, losses = map(spy, ("experiments.baselines.annotator_critic",
                                "experiments.baselines.fit_adapter"))
    fitted = spy("experiments.baselines.fit_policy", lambda *arguments: arguments[2])
    rows = toy.rows("train", 60)
    baselines.FITTED["best_tenth"](*toy_model, rows, config, tmp_path)
    assert [batch.rows for batch in batches] == [rows[:16], rows[16:32], rows[32:48]]
    assert [name for name, _ in weights] == ["policy"] * 3
    assert weights[0][1] == 0 < weights[1][1] < weights[2][1]
    for batch, judged, texts in zip(batches, reviews, fitted):
        merits = [sum(span.label for span in review.spans) for review in judged]
        first, second = sorted(range(16), key=lambda i: (-merits[i], i))[:2]
        assert texts == [(batch.prompts[i], batch.texts[i]) for i in (first, second)]
    assert [len(part) for part in losses] == [4] * 3


def test_rejection_without_a_good_response_is_one_line(tmp_path, toy_model, monkeypatch, spy):
    monkeypatch.setattr(baselines, "annotator_critic",
                        lambda batch, *_: [reviewed(1, -1) for _ in batch.rows])
    fitted = spy("experiments.baselines.fit_adapter")
    config = small(tmp_path, annotated_rows=2)
    start_policy(toy_model[0], config)
    refused("no response is without blame, so nothing is trained", baselines.rejection,
            *toy_model, toy.rows("train", 2), config, tmp_path)
    assert not fitted


@pytest.mark.parametrize("name", ["ilf", "dpo"])
def test_a_fitted_baseline_takes_as_many_steps_as_text2grad(tmp_path, toy_model, spy, name):
    """Equal steps, rounded to full passes over the rows; the training loss falls."""
    config = small(tmp_path, iterations=6)
    results = spy("experiments.baselines.fit_adapter")
    calls = spy("experiments.baselines.fit_adapter",
                lambda model, pairs, name, settings, **_: (len(pairs), settings))
    start_policy(toy_model[0], config)
    baselines.FITTED[name](*toy_model, toy.rows("train", 48), config, tmp_path)
    (n, settings), = calls
    losses, = results
    assert abs(settings.reward_epochs * math.ceil(n / 8) - 6 * 2) <= math.ceil(n / 8) / 2
    assert settings.reward_batch_size == 8
    assert len(losses) == settings.reward_epochs * math.ceil(n / 8)
    # The ratio over eight seeds: .65 ± .10 (ILF), .58 ± .12 (DPO).
    assert mean(losses[-3:]) < 0.97 * mean(losses[:3])


def chat(row):
    return [{"role": "system", "content": "Be brief."},
            {"role": "user", "content": toy.prompt(row)}]


CHAT = replace(toy.TASK, policy_prompt=chat)


@pytest.mark.parametrize("name", ["ilf", "dpo"])
def test_a_fitted_baseline_trains_chat_messages_as_the_policy_reads_them(
        tmp_path, toy_model, spy, name):
    config = small(tmp_path, task="test_experiments:CHAT", max_new_tokens=24)
    texts = spy("experiments.baselines.fit_policy", lambda *arguments, **_: arguments[2])
    start_policy(toy_model[0], config)
    rows = toy.rows("train", 24)
    baselines.FITTED[name](*toy_model, rows, config, tmp_path)
    assert texts[0] and all(x in map(chat, rows) for x, *_ in texts[0])


def test_baselines_and_designs_run_by_their_names(tmp_path, monkeypatch, capsys):
    """All write result.json, and print the command that evaluates them. With the annotator as
    critic, no R_φ is trained. reflection evaluates its second answers."""
    def run(names, *more):
        out = tmp_path / names.replace(" ", "_")
        flags = ["--annotated_rows", 16, "--batch_size", 8, "--minibatch_size", 8,
                 "--eval_rows", 3, "--iterations", 1, "--ppo_epochs", 1, *more]
        baselines.main([*names.split(), *map(str, flags), "--output_dir", str(out)])
        (result,) = read_rows(out / "result.json")
        assert 0 <= min(part["fact accuracy"] for part in (result["before"], result["after"]))
        output = capsys.readouterr().out
        assert shlex.join(["eval.py", "--adapter", f"{out}/policy"]) in output
        assert (out / "policy" / "adapter_model.safetensors").exists()
        return output

    def read_row(name, file):
        return read_rows(tmp_path / name / file)[0]

    monkeypatch.chdir(ROOT)
    run("sft")
    assert "reused" in run("sft")                              # a second start trains nothing
    run("late end definition_1", "--critic", "annotator")
    sample = read_row("late_end_definition_1", "samples.jsonl")
    assert len(sample["delta"]) == len(sample["tokens"]) and not any(sample["delta"][:-1])
    assert not (tmp_path / "late_end_definition_1" / "reward").exists()
    assert "held-out comparisons" in run("ppo")
    sample = read_row("ppo", "samples.jsonl")
    assert any(delta % 1 for delta in sample["delta"])         # not those of a critique
    model, _ = load_model(toy.BASE, device="cpu")
    add_lora(model, "reward", 4, 8)
    save_lora(model, "reward", tmp_path / "reward")
    monkeypatch.setattr(baselines, "mend", lambda response, critique: f"mended {response}")
    run("reflection", "--max_critique_tokens", 16, "--reward_model", tmp_path / "reward")
    assert read_row("reflection", "after_samples.jsonl")["response"].startswith("mended ")


def test_another_base_is_prompted_to_rewrite(toy_model, spy):
    """Outside the toy world, π_ref answers a prompt with the critique, without its JSON."""
    triples = [("Ask.", "It was.", 'It lacks facts.\n{"good_spans": []}')]
    calls = spy("experiments.baselines.sample_rollouts", lambda *arguments: arguments)
    text, = baselines.rewrite(*toy_model, triples, toy_config(task="slf5k"))
    (_, _, (prompt,), _, adapter, _), = calls
    assert isinstance(text, str) and adapter is None
    assert "Critique: It lacks facts.\n\n" in prompt and "good_spans" not in prompt


# ── Advantages without V, and groups

DELTA = [[1, 0, -1], [1, 1, 0], [0, -1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("name, expected", [
    ("definition_1", DELTA),
    # whiten doubles its argument here
    ("reward_to_go", [[0, -2, -2], [4, 2, 0], [-2, -2, 0], [2, 2, 2], [2, 0, 0], [2, 2, 0]]),
    # R = 0, 2, −1, 1, 1, 1 in groups of two; A = ∓1 in two groups, and 0 in the last; the mean
    # length is 17 / 6
    ("grpo", [[-17 / 18] * 3, [17 / 12, 17 / 12, 0], [-17 / 18] * 3, [17 / 18] * 3, [0] * 3,
              [0] * 3])])
def test_advantages_by_hand(name, expected, monkeypatch):
    """The KL penalty β (log π − log π_ref) takes away what is added to δ here."""
    monkeypatch.setattr(advantages, "whiten", lambda x, mask: 2 * x)
    mask = torch.ones(6, 3).long()
    mask[1, 2] = 0
    rollouts = Rollouts([{}] * 6, [], [], [], mask, mask, mask, mask)
    rollouts.delta = torch.tensor(DELTA) + 0.4 * 0.5
    rollouts.delta[1, 2] = 9                               # padding
    rollouts.values = rollouts.logprobs_ref = torch.zeros(6, 3)
    rollouts.logprobs_old = rollouts.logprobs_ref + 0.5
    ADVANTAGES[name](rollouts, 0.4, toy_config(lam=0.5, responses_per_prompt=2))
    close(rollouts.advantages, torch.tensor(expected).float(), rtol=1e-3, atol=1e-6)
    assert torch.equal(rollouts.returns, rollouts.values)

