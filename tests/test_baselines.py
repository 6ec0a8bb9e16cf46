"""Reward designs and baselines: critics and losses against closed forms, then small runs."""

import math
import random
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from statistics import mean
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
import data
import policy
import toy
from annotate import Span, read_reply, token_offsets, token_rewards
from data import InputError, get_task, load_object, read_rows, write_rows
from experiments import baselines, designs
from experiments.baselines import (bradley_terry_loss, dpo_loss, labelled_losses,
                                   labelled_steps, mend, pair_losses, preference_loss,
                                   preferences, recorded_pair)
from experiments.designs import (CHANGES, OTHERS, SCORED, mark_ends, marks, replace_delta,
                                 score_critic, step_spans, token_scores)
from helpers import toy_config, ROOT, error_message, noise, randomise
from model import (add_lora, encode_answer, encode_prompt, load_model, lora_parameters,
                   save_lora, use_lora)
from policy import Rollouts
from reward_model import Judgement
from reward_model import annotator_critic
from sampling import pad_batch

close = torch.testing.assert_close


def spans_of(response, reply, mode="cot"):
    return read_reply({"id": "", "prompt": "", "response": response}, reply, mode)[1].spans


def faulty(row, seed=0):
    """A summary with wrong facts, repeated clauses and the first person."""
    rng = random.Random(f"{row['id']} {seed}")
    return toy.write_summary(toy.confuse(row["facts"], rng), rng, 0.5)


def rollouts_of(tokenizer, rows, texts):
    ids = [encode_answer(tokenizer, text) for text in texts]
    prompts = [get_task("toy").policy_prompt(row) for row in rows]
    offsets = [token_offsets(tokenizer, y)[1] for y in ids]
    batch = pad_batch([encode_prompt(tokenizer, prompt) for prompt in prompts], ids, "cpu")
    return Rollouts(rows, prompts, texts, offsets, *batch)


def faulty_rollouts(tokenizer, start=0, end=6):
    """Rollouts start..end of five faulty summaries and an empty one."""
    rows = toy.rows("train", 6)
    return rollouts_of(tokenizer, rows[start:end], [*map(faulty, rows[:5]), ""][start:end])


def ids_of(rollouts, row):
    return rollouts.response_ids[row][rollouts.mask[row].bool()].tolist()


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


def test_bradley_terry_is_cross_entropy_between_two_classes():
    """P(w ≻ l) = e^{r_w} / (e^{r_w} + e^{r_l}): the softmax of two scores; finite far away."""
    scores = noise(1, 40, 2).mul(4).requires_grad_()
    loss = bradley_terry_loss(*scores.T)
    want = F.cross_entropy(scores, torch.zeros(40, dtype=torch.long), reduction="none")
    close(loss, want, rtol=1e-9, atol=1e-9)
    close(*(torch.autograd.grad(x.sum(), scores)[0] for x in (loss, want)))
    assert bradley_terry_loss(torch.tensor(-1e4), torch.tensor(1e4)).item() == 2e4


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
    rows = [([5, 6], [7, 8, 9], [0, 1, -1]), ([5], [6], [1])]
    with use_lora(model, "reward"), torch.no_grad():
        ends = []
        for side in SIDES:
            scores, mask = token_scores(model, tokenizer, side)
            assert mask.sum(1).tolist() == [len(y) for _, y in side]
            for (x, y), row in zip(side, scores):
                logits = logits_of(model, x, y)[1:]
                close(row[: len(y)], logits[:, plus] - logits[:, minus], rtol=1e-3, atol=1e-3)
                ends.append(row[len(y) - 1])
        want = bradley_terry_loss(*torch.stack(ends).chunk(2))
        close(pair_losses(model, tokenizer, PAIRS), want, rtol=1e-3, atol=1e-3)
        a, b = (token_scores(model, tokenizer, [row[:2]])[0][0] for row in rows)
        want = -F.logsigmoid(torch.stack([a[1], -a[2], b[0]]))
        close(labelled_losses(model, tokenizer, rows), want, rtol=1e-4, atol=1e-4)


# ── Content words and steps

def pieces(text):
    """Offsets of words with their leading space, and of punctuation marks."""
    return [m.span() for m in re.finditer(r"\s*(?:\w+|[^\w\s])", text)]


@pytest.mark.parametrize("text, content", [
    ("A nurse from York is sad, because the sister took it.", "nurse York sad sister took"),
    ("They've paid 300 dollars and don't care", "paid 300 dollars care"),
    ("IT WAS the BEST", "BEST")])
def test_importance_by_a_hand_made_list(text, content):  # Table 11
    """Appendix I.1: 1.0 on content words, 0.2 on others and on marks."""
    want = [1.0 if text[a:b].strip() in content.split() else OTHERS for a, b in pieces(text)]
    assert designs.word_weights(text, pieces(text)) == want


@pytest.mark.parametrize("text, ends, weights_of, want", [
    ("the wheelbarrow, without", [3, 9, 15, 16, 21, 24], designs.word_weights,
     [.2, 1, 1, .2, .2, .2]),
    ("John's boss couldn’t, it's", [4, 6, 11, 18, 20, 26], designs.word_weights,
     [1, 1, 1, .2, .2, .2]),
    ("the wheelbarrow,", [3, 9, 15, 16], designs.decay_weights, [1, .7, .4, .1]),
    ("the", [3], designs.decay_weights, [1])])
def test_parts_of_a_word_weigh_as_the_word_and_decay_is_a_line(text, ends, weights_of, want):
    assert weights_of(text, [*zip([0, *ends], ends)]) == pytest.approx(want)


@pytest.mark.parametrize("text, code, steps", [
    ("A cook is sad, who left.  It rained because of me; so what?\nYes", False,
     ["A cook is sad,", "who left.", "It rained", "because of me;", "so what?", "Yes"]),
    ("", False, []), ("one, 1,000", False, ["one,", "1,000"]),
    ("def f(x):\n    return 1\n\n  y = 2 \n", True, ["def f(x):", "return 1", "y = 2"])])
def test_steps_are_clauses_of_a_text_or_lines_of_code(text, code, steps):
    """Appendix N: sentence- or clause-level units; the last token of each has its label."""
    spans = step_spans(text, code)
    assert [text[step.start : step.end] for step in spans] == steps
    ends = [end for _, end in pieces(text)]
    assert mark_ends(text, pieces(text), spans) == [
        int(any(step.end == end for step in spans)) for end in ends]
    assert mark_ends("It is", [(0, 2), (2, 5)], [Span(3, 4, 1), Span(0, 2, -1)]) == [-1, 0]


def test_steps_of_a_toy_summary_are_labelled_at_their_ends(toy_model):  # Table 17
    """An annotation in mode STEPS gives labels; a clause without errors is correct."""
    _, tokenizer = toy_model
    seen = set()
    for row in toy.rows("train", 12):
        text = faulty(row)
        spans = spans_of(text, designs.critique_steps(row, text), "experiments.modes:STEPS")
        wrong = [mark.end for mark in marks(row, text) if mark.label < 0]
        want = [(step.end, -1 if any(step.start < end <= step.end for end in wrong) else 1)
                for step in step_spans(text)]
        annotation = {"prompt": "p", "response": text, "spans": [*map(vars, spans)]}
        x, y, labels = labelled_steps(annotation, tokenizer)
        assert x == encode_prompt(tokenizer, "p") and y == encode_answer(tokenizer, text)
        assert want == [(len(tokenizer.decode(y[: t + 1])), label)
                        for t, label in enumerate(labels) if label]
        seen |= {label for _, label in want}
    assert seen == {1, -1}


# ── Annotators of the toy world

STEPS = "experiments.designs:critique_steps", "experiments.modes:STEPS"
DENSE = "experiments.designs:critique_dense", "experiments.modes:DENSE"
ANNOTATORS = {"careful": ("toy:critique", "cot"),
              "no_cot": ("experiments.designs:critique_no_cot", "no_cot"),
              "spans": ("experiments.designs:critique_spans", "no_cot"),
              "steps": STEPS, "dense": DENSE}


@pytest.mark.parametrize("name", ANNOTATORS)
def test_every_toy_annotator_can_be_read_and_repeats_itself(name):
    """Annotators without errors give every unique quote its true label. Reasoning such as "The
    city Oslo was Berlin, wrong." is in z or not."""
    function, mode = ANNOTATORS[name]
    critic = load_object("--annotator_function", function)
    kinds, reasons = set(), 0
    for row in toy.rows("train", 40):
        text = faulty(row)
        example = {"id": "", "prompt": "", "response": text}
        feedback, grounding = read_reply(example, critic(row, text), mode)
        assert critic(row, text) == critic(row, text)
        assert feedback.critique and not grounding.unmatched
        reasons += " was " in feedback.critique
        truths = marks(row, text)
        for truth in truths if name in ("careful", "no_cot", "dense") else []:
            alone = sum(s.start < truth.end and truth.start < s.end for s in truths) == 1
            if alone and text.count(text[truth.start : truth.end]) == 1:
                kinds.add(truth.name)
                start = truth.start + 2 * (truth.name == "repetition")
                assert {s.label for s in grounding.spans
                        if s.start <= start and truth.end <= s.end} == {truth.label}, text
    assert kinds > {"repetition", "month"} or name in ("spans", "steps")
    assert (reasons > 0) == (name in ("careful", "dense", "steps"))


# ── Reward designs

@pytest.mark.parametrize("name", ["careful", "dense", "steps"])
def test_the_annotator_judges_rollouts_as_phase_1_does(toy_model, tmp_path, name):
    rollouts, (function, mode) = faulty_rollouts(toy_model[1]), ANNOTATORS[name]
    config = toy_config(annotator_function=function, mode=mode, output_dir=str(tmp_path))
    *judged, empty = annotator_critic(rollouts, *toy_model, config)
    critic = load_object("--annotator_function", function)
    for row, text, offsets, judgement in zip(rollouts.rows, rollouts.texts, rollouts.offsets,
                                             judged):
        spans = spans_of(text, critic(row, text), mode)
        assert judgement.delta == token_rewards(text, offsets, spans)
        assert any(judgement.delta) and not judgement.reason
    assert not any(empty.delta) and empty.reason


@pytest.mark.parametrize("task, first, second", [("toy", 0, 0),
                                                 ("notebooks.prose:TASK", 1, -1)])
def test_a_repeated_fact_is_rewarded_as_the_task_says(toy_model, tmp_path, monkeypatch, task,
                                                      first, second):
    """R_φ and the annotator as critic read a fact that is praised once alike."""
    (row,) = toy.rows("train", 1)
    reply = row["facts"]["reply"]
    text = f'She said "{reply}" and then said "{reply}"'
    rollouts = rollouts_of(toy_model[1], [row], [text])
    offsets = rollouts.offsets[0]
    places = {text.index(reply): first, text.rindex(reply): second}
    expected = [sum(label for place, label in places.items()
                    if place <= start < end <= place + len(reply)) for start, end in offsets]
    config = toy_config(task=task, annotator_function="toy:critique", output_dir=str(tmp_path))
    monkeypatch.setattr("policy.write_critiques", lambda *_, **__: [toy.critique(row, text)])
    for critic in (policy.reward_model_critic, annotator_critic):
        assert critic(rollouts, *toy_model, config)[0].delta == expected


def test_setting_b_pays_the_same_sum_at_the_last_token(toy_model, tmp_path):
    """Appendix A: r_T = Σ δ_t and 0 before. A second design changes the δ of the first one."""
    arguments = faulty_rollouts(toy_model[1]), *toy_model, toy_config(output_dir=str(tmp_path))
    by_token = annotator_critic(*arguments)
    at_end = replace_delta(annotator_critic, designs.end)
    for critic, sign in ((at_end, 1), (replace_delta(at_end, lambda *_: [
            -d for d in _[2].delta]), -1)):
        assert critic(*arguments) == [
            replace(a, delta=[0.0 * sign] * (len(a.delta) - 1) + [sign * sum(a.delta)])
            for a in by_token]
    assert any(sum(judgement.delta) for judgement in by_token)


def test_late_credit_by_hand():
    """Three labelled words. Each label is paid at the next one, the last at the last token."""
    text = "a b c ."
    spans = [Span(4, 5, 1), Span(0, 1, 1), Span(2, 3, -1)]
    judgement = Judgement("", [1.0, -1.0, 1.0, 0.0], spans=spans)
    assert designs.late(text, pieces(text), judgement) == [0.0, 1.0, -1.0, 1.0]
    assert designs.late("a", pieces("a"), Judgement("", [0.0])) == [0.0]


@pytest.mark.parametrize("weighting, good, poor", [
    ("linear_decay", [1, .775, .55], [1 - .9 * i / 7 for i in range(8)]),
    ("importance", [1, .2, 1], [.2, 1, .2, .2, .2, .2, .2, .2])])
def test_weighted_critics_pay_each_token_of_a_span_its_weight(weighting, good, poor):
    """Appendix I.1: δ = label · weight; a token in conflict stays 0 but counts in the decay."""
    text = "A nurse of York, sad, is not sad at all because of him."
    spans = [Span(2, 20, 1), Span(15, 20, -1), Span(25, 55, -1)]
    offsets = pieces(text)
    judgement = Judgement("z", token_rewards(text, offsets, spans), spans=spans)
    want = [0, *good, 0, 0, 0, 0, *(-weight for weight in poor)]
    assert CHANGES[weighting](text, offsets, judgement) == pytest.approx(want)


def test_scalar_and_step_rewards_stand_where_they_belong(toy_model, monkeypatch):
    """r is at the last token, tanh(ℓ/2) at the end of each clause, for this rank's rows."""
    model, tokenizer = toy_model
    randomise(add_lora(model, "reward", 4, 8))
    rollouts, config = faulty_rollouts(tokenizer), toy_config(rollout_batch_size=4)
    scalar, steps = (critic(rollouts, model, tokenizer, config) for critic in SCORED.values())
    for i, text in enumerate(rollouts.texts):
        pair = encode_prompt(tokenizer, rollouts.prompts[i]), ids_of(rollouts, i)
        with use_lora(model, "reward"), torch.no_grad():
            scores = token_scores(model, tokenizer, [pair])[0][0]
        last = torch.arange(len(scores)) == len(scores) - 1
        ends = torch.tensor(mark_ends(text, rollouts.offsets[i], step_spans(text)))
        for judged, want in ((scalar, scores * last), (steps, torch.tanh(scores / 2) * ends)):
            close(torch.tensor(judged[i].delta), want, atol=1e-3, rtol=0)
            assert [d == 0 for d in judged[i].delta] == (want == 0).tolist()
    assert sum(map(bool, steps[0].delta)) >= 2 and not any(steps[-1].delta)
    monkeypatch.setattr(designs, "RANK", 1)
    monkeypatch.setattr(designs, "WORLD_SIZE", 2)
    for critic in (SCORED["prm_ppo"], replace_delta(SCORED["ppo"], designs.end)):
        judged = critic(rollouts, model, tokenizer, config)
        lengths = [len(rollouts.offsets[i]) for i in (1, 3, 5)]
        assert [len(judgement.delta) for judgement in judged] == lengths


@pytest.mark.parametrize("value, delta", [
    (True, [0, 0, 1]), (2, [0, 0, 2]), (0.25, [0, 0, 0.25]), (torch.tensor(0.5), [0, 0, 0.5]),
    ([1, -1.5, 0], [1, -1.5, 0]), (numpy.array([1, 0, 2]), [1, 0, 2]), (None, "returned None;"),
    ("1.0", "returned '1.0';"), ([1, 2], "returned .1, 2.; .* list of 3 numbers"),
    (float("nan"), "returned nan; .* such as 1.0 if all tests pass"), ([[1, 2, 3]], "returned"),
    ([None] * 3, "returned .None")])
def test_scores_are_paid_at_the_end_or_per_token(toy_model, monkeypatch, value, delta):
    """The function sees the row, the response and the texts of its tokens, EOS last."""
    def score(row, response):
        calls.append((row["facts"], response, row["response_tokens"]))
        return value

    calls, (row,) = [], toy.rows("train", 1)
    monkeypatch.setitem(sys.modules, "my_score", SimpleNamespace(score=score))
    rollouts = rollouts_of(toy_model[1], [row], ["It was"])
    arguments = rollouts, *toy_model, toy_config(annotator_function="my_score:score")
    if isinstance(delta, str):
        with pytest.raises(InputError, match=f"my_score:score, row {row['id']}: {delta}"):
            score_critic(*arguments)
    else:
        (judgement,) = score_critic(*arguments)
        assert judgement.delta == delta and not judgement.reason
    assert calls == [(row["facts"], "It was", ["It", " was", ""])]


@pytest.mark.parametrize("flags, message", [
    ("score --annotator_function none", "score needs --annotator_function"),
    ("late --critic annotator --annotator_function none", "--annotator_function"),
    ("best", "unknown name 'best': .* names out of text2grad, .* rloo"),
    ("late best --seed 1", "unknown name 'best'"), ("", "no name was given: choose from"),
    ("ppo dpo", "ppo dpo: these names exclude each other"),
    ("grpo rloo", "exclude each other"), ("late dpo", "exclude each other; .* stand alone"),
    ("reflection", "reflection needs --reward_model"),
    ("dpo --annotator_function none:x", "import"),
    ("ppo grpo", "compare responses to one prompt: set --responses_per_prompt"),
    ("rloo --responses_per_prompt 3", "--batch_size must be a multiple of 3"),
    ("reward_to_go --responses_per_prompt 0", "--responses_per_prompt: expected")])
def test_names_or_flags_that_cannot_be_are_refused(flags, message, tmp_path):
    flags = [*flags.split(), "--output_dir", tmp_path] if flags else []
    assert re.search(message, error_message("experiments.baselines", *flags))


def test_help_has_one_line_for_each_name(capsys):
    with pytest.raises(SystemExit):
        baselines.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in baselines.NAMES:
        assert sum(line.split()[:1] == [name] for line in lines) == 1


# ── Rows

def test_pairs_are_responses_in_the_order_of_their_labels(toy_model, tmp_path):
    """Two samples of the base per row, the better one first; ties are omitted."""
    rows, config = toy.rows("train", 24), small(tmp_path, annotated_rows=48)
    pairs = preferences(*toy_model, rows, config, tmp_path)
    row_of = {toy.prompt(row): row for row in rows}
    assert len(pairs) > 12                              # eight seeds: 17.4 ± 1.6
    for x, *texts in pairs:
        better, worse = (sum(span.label for span in spans_of(
            text, toy.critique(row_of[x], text))) for text in texts)
        assert better > worse


def messages(text):
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]


def trials(*results):
    return {str(i): {"solution_code": f"{result} {i}", "test_result": result}
            for i, result in enumerate(results)}


SUMMARIES = {"generated_summary_for_comparison_A": "a",
             "generated_summary_for_comparison_B": "b"}


@pytest.mark.parametrize("row, pair", [
    ({"chosen": messages("good"), "rejected": messages("poor")}, ("good", "poor")),
    ({"chosen": messages("good"), "rejected": messages("poor"), "score_chosen": 4.0,
      "score_rejected": 4.0}, None),
    (SUMMARIES | {"comparison_preference": "Summary A"}, ("a", "b")),
    (SUMMARIES | {"comparison_preference": "Summary B"}, ("b", "a")),
    (SUMMARIES | {"comparison_preference": None}, None),
    ({"comparison_preference": "Summary A"}, None),
    ({"trials": trials("Fail", "Pass")}, ("Pass 1", "Fail 0")),
    ({"trials": trials("Pass", "Pass")}, None)])
def test_recorded_preferences_of_the_three_data_sets(row, pair):
    assert recorded_pair(row) == pair


@pytest.mark.parametrize("task, file", [
    ("kodcode", "kodcode_leetcode.jsonl"),
    ("ultrafeedback", "ultrafeedback_binarized_example.jsonl")])
def test_recorded_pairs_of_real_rows_need_no_annotation(task, file, tmp_path, shared):
    rows = read_rows(shared / "data" / file, task=get_task(task))
    pairs = preferences(None, None, rows, small(tmp_path, task=task), tmp_path)
    prompts = {get_task(task).policy_prompt(row) for row in rows}
    assert 0 < len(pairs) <= len(rows)
    assert all(x in prompts and better != worse for x, better, worse in pairs)


@pytest.mark.parametrize("field", [*data.REFERENCES, "post"])
def test_sft_takes_the_references_of_every_data_set(field, monkeypatch, tmp_path):
    monkeypatch.setattr(baselines, "fit_policy", lambda *args: fitted.extend(args[2]))
    fitted, rows = [], [{"summary_prompt": "x", field: "y"}]
    is_none = field == "post"
    with pytest.raises(InputError, match="none of the fields") if is_none else nullcontext():
        baselines.sft(None, None, rows, small(tmp_path, task="slf5k"), tmp_path)
    assert fitted == [("x", "y")] * (not is_none)


@pytest.mark.parametrize("reward_type", ["ppo", "prm_ppo"])
def test_a_reward_model_without_labels_is_one_line(reward_type, tmp_path):
    """There are two rows with equal labels, or a row whose steps have no label."""
    rows = [{"prompt": "p", "response": "r", "spans": []}] * 2
    for name in ("responses", "feedback"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    with pytest.raises(InputError, match=f"{reward_type} needs two labelled examples"):
        baselines.fit_scores(None, None, [{}] * 2, small(tmp_path), tmp_path, reward_type)


def test_what_the_critique_names_is_mended():
    """Facts of several words, repeated clauses and the first person are mended; a correct text
    stays as it is."""
    for row in toy.rows("train", 60):
        response = faulty(row)
        mended = mend(response, toy.critique(row, response))
        assert toy.fact_accuracy(row, mended) == 1 and not toy.faults(mended), response
        assert mend(mended, toy.critique(row, mended)) == mended


# ── Whole runs

@pytest.mark.parametrize("name", ["sft", "ilf", "dpo"])
def test_a_fitted_baseline_takes_as_many_steps_as_text2grad(tmp_path, toy_model, monkeypatch,
                                                            name):
    """Equal steps, rounded to full passes over the rows; the training loss falls."""
    def watch(model, pairs, name, settings, *more, **loss):
        losses = fit(model, pairs, name, settings, *more, **loss)
        fits.append((len(pairs), losses, settings))
        return losses

    config, fits, fit = small(tmp_path, iterations=6), [], baselines.fit_adapter
    monkeypatch.setattr(baselines, "fit_adapter", watch)
    baselines.start_policy(toy_model[0], config)
    baselines.FITTED[name](*toy_model, toy.rows("train", 48), config, tmp_path)
    ((n, losses, settings),) = fits
    assert abs(settings.reward_epochs * n - 6 * 8 * 2) <= n / 2
    assert settings.reward_batch_size == 8
    assert len(losses) == settings.reward_epochs * math.ceil(n / 8)
    # The ratio over eight seeds: .59 ± .01 (SFT), .65 ± .10 (ILF), .58 ± .12 (DPO).
    assert mean(losses[-3:]) < 0.97 * mean(losses[:3])


def test_baselines_and_designs_run_by_their_names(tmp_path, monkeypatch, capsys):
    """All write result.json, and print the command that evaluates them. With the annotator
    as critic, no R_φ is trained. prm_ppo rewards the ends of steps. reflection evaluates its second answers
    and writes them to the held-out rows."""
    def run(names, *more):
        out = tmp_path / names.replace(" ", "_")
        flags = ["--annotated_rows", 16, "--batch_size", 8, "--minibatch_size", 8,
                 "--eval_rows", 3, "--iterations", 1, "--ppo_epochs", 1, *more]
        baselines.main([*names.split(), *map(str, flags), "--output_dir", str(out)])
        (result,) = read_rows(out / "result.json")
        assert 0 <= min(part["fact accuracy"] for part in (result["before"], result["after"]))
        output = capsys.readouterr().out
        assert f"eval.py --adapter {out}/policy" in output
        assert (out / "policy" / "adapter_model.safetensors").exists()
        return output

    def read(name, file):
        return read_rows(tmp_path / name / file)[0]

    monkeypatch.chdir(ROOT)
    run("sft")
    assert "reused" in run("sft")                              # a second start trains nothing
    run("late end definition_1", "--critic", "annotator")
    sample = read("late_end_definition_1", "samples.jsonl")
    assert len(sample["delta"]) == len(sample["tokens"]) and not any(sample["delta"][:-1])
    assert not (tmp_path / "late_end_definition_1" / "reward").exists()
    assert read("late_end_definition_1", "config.json")["critic"] == "annotator"
    function = "--annotator_function", "toy:fact_accuracy"
    run("score", *function)
    assert "held-out comparisons or steps" in run("prm_ppo")
    sample = read("prm_ppo", "samples.jsonl")
    ends = numpy.cumsum([len(token) for token in sample["tokens"]]).tolist()
    text = sample["response"]
    steps = mark_ends(text, [*zip([0, *ends], ends)], step_spans(text))
    assert [int(delta != 0) for delta in sample["delta"]] == steps and any(steps)
    model, _ = load_model(toy.BASE, device="cpu")
    add_lora(model, "reward", 4, 8)
    save_lora(model, "reward", tmp_path / "reward")
    monkeypatch.setattr(baselines, "mend", lambda response, critique: f"mended {response}")
    output = run("reflection", "--max_critique_tokens", 16,
                 "--reward_model", tmp_path / "reward")
    answers = read_rows(tmp_path / "reflection" / "answers.jsonl")
    samples = read_rows(tmp_path / "reflection" / "after_samples.jsonl")
    assert [row["post"] for row in answers] == [row["post"] for row in toy.rows("eval", 3, 0)]
    assert all(row["response"].startswith("mended ") and row["id"] for row in answers)
    assert [row["response"] for row in samples] == [row["response"] for row in answers]
    assert f"--adapter {tmp_path}/reflection/answers.jsonl" in output


def test_another_base_is_prompted_to_rewrite(toy_model, monkeypatch):
    """Outside the toy world, π_ref answers a prompt with the critique, without its JSON."""
    triples = [("Ask.", "It was.", 'It lacks facts.\n{"good_spans": []}')]
    model, tokenizer = toy_model
    seen = []
    sample = baselines.sample_rollouts
    monkeypatch.setattr(baselines, "sample_rollouts",
                        lambda *arguments: seen.append(arguments) or sample(*arguments))
    (text,) = baselines.rewrite(model, tokenizer, triples, toy_config(task="slf5k"))
    ((_, _, prompts, _, adapter, _),) = seen
    assert isinstance(text, str) and adapter is None
    assert "Critique: It lacks facts.\n\n" in prompts[0] and "good_spans" not in prompts[0]
