"""Reward designs and baselines: critics and losses against brute force and closed forms, then
small runs."""

import json
import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from safetensors.torch import load_file

import toy
from annotate import Span, read_reply, token_offsets, token_rewards
from data import InputError, get_task, read_rows
from experiments import baselines, designs
from experiments.baselines import (BaselineConfig, bradley_terry_loss, dpo_loss, labelled_loss,
                                   labelled_steps, merit, own_pairs, preference_loss,
                                   ranking_loss, reference, refinements, reflect, step_loss)
from experiments.designs import (OTHERS, WEIGHTINGS, at_end, is_content, scalar,
                                 sequence_scores, span_weights, step_ends, step_spans, steps,
                                 token_scores, true_critic, weighted)
from model import add_lora, encode_answer, encode_prompt, lora_parameters, use_lora
from sampling import pad_batch
from text2grad import Config, Rollouts

close = torch.testing.assert_close


def numbers(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def feedback_of(response, reply, mode="cot"):
    return read_reply({"id": "", "prompt": "", "response": response}, reply, mode)


# ── DPO, Bradley–Terry and step losses

def test_dpo_loss_and_its_gradient_are_the_closed_form():
    """−log σ(βu), u = Δ_w − Δ_l; ∂/∂log π(y_w) = −β σ(−βu) (Rafailov et al. 2023, §4)."""
    w, l, ref_w, ref_l = (numbers(i, 50) * 5 for i in range(4))
    w.requires_grad_(), l.requires_grad_()
    for beta in (0.05, 0.1, 2.0):
        loss, u = dpo_loss(w, l, ref_w, ref_l, beta), (w - ref_w) - (l - ref_l)
        close(loss, torch.log1p(torch.exp(-beta * u)), rtol=1e-9, atol=1e-9)
        up_w, up_l = torch.autograd.grad(loss.sum(), (w, l))
        close(up_w, -beta / (1 + torch.exp(beta * u)), rtol=1e-9, atol=1e-12)
        close(up_l, -up_w)
    same = numbers(0, 4)
    log_2 = torch.full((4,), math.log(2), dtype=torch.float64)
    close(dpo_loss(same, same + 3, same, same + 3, 0.7), log_2)


def test_bradley_terry_is_cross_entropy_between_two_classes():
    """P(w ≻ l) = e^{r_w} / (e^{r_w} + e^{r_l}): the softmax of two scores; finite far away."""
    scores = numbers(1, 40, 2) * 4
    chosen = scores[:, 0].clone().requires_grad_()
    loss = bradley_terry_loss(chosen, scores[:, 1])
    classes = torch.zeros(40, dtype=torch.long)
    close(loss, F.cross_entropy(scores, classes, reduction="none"), rtol=1e-9, atol=1e-9)
    gradient = torch.autograd.grad(loss.sum(), chosen)[0]
    close(gradient, -torch.sigmoid(scores[:, 1] - scores[:, 0]), rtol=1e-9, atol=1e-9)
    far = bradley_terry_loss(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert far.item() == pytest.approx(2e4)


def test_step_loss_is_binary_cross_entropy_over_the_labelled_tokens():
    generator = torch.Generator().manual_seed(0)
    scores, labels = numbers(2, 3, 9), torch.randint(-1, 2, (3, 9), generator=generator)
    at = labels != 0
    expected = F.binary_cross_entropy_with_logits(scores[at], (labels[at] > 0).double(),
                                                  reduction="sum")
    close(step_loss(scores, labels), expected)


PAIRS = [([5, 6, 7, 8], [9, 10, 1], [20, 1]), ([11], [12, 13, 14, 15, 1], [30, 31, 1]),
         ([16, 17], [1], [40, 41, 42, 1])]


def side(pairs, k):
    return [(pair[0], pair[k]) for pair in pairs]


def randomise(model, name, seed=3):
    torch.manual_seed(seed)
    for p in add_lora(model, name, 4, 8):
        p.data.normal_(std=0.1)


def test_preference_loss_is_that_of_the_models_own_logits(toy_model):
    """Row by row through the plain logits, so that padding changes nothing; log 2 at first."""
    model, _ = toy_model
    add_lora(model, "policy", 4, 8)
    loss_of = preference_loss(BaselineConfig())
    with use_lora(model, "policy"):
        assert loss_of(model, PAIRS, 0).item() == pytest.approx(3 * math.log(2), abs=1e-5)
    for p in lora_parameters(model, "policy"):
        p.data.normal_(std=0.1)
    with use_lora(model, "policy"):
        loss = loss_of(model, PAIRS, 0)
    sums = []
    for name in ("policy", None):
        for k in (1, 2):
            with use_lora(model, name), torch.no_grad():
                logits = [model(torch.tensor([x + y])).logits[0] for x, y in side(PAIRS, k)]
            logprobs = [z.log_softmax(-1)[len(x) - 1 : -1][range(len(y)), y].sum()
                        for z, (x, y) in zip(logits, side(PAIRS, k))]
            sums.append(torch.stack(logprobs))
    close(loss, dpo_loss(*sums, 0.1).sum(), rtol=1e-4, atol=1e-4)
    assert loss.requires_grad


# ── Scores that are read from the head

def test_scores_are_logit_differences_after_each_token(toy_model):
    """ℓ_t = logit(+) − logit(−) of the plain model after y_≤t; r is that after the last."""
    model, tokenizer = toy_model
    randomise(model, "reward")
    plus, minus = (tokenizer(mark).input_ids[-1] for mark in "+-")
    with use_lora(model, "reward"), torch.no_grad():
        scores, mask = token_scores(model, tokenizer, side(PAIRS, 1))
        last = sequence_scores(model, tokenizer, side(PAIRS, 1))
        for (x, y), row, n, end in zip(side(PAIRS, 1), scores, mask.sum(1), last):
            logits = model(torch.tensor([x + y])).logits[0, len(x):]
            close(row[: len(y)], logits[:, plus] - logits[:, minus], rtol=1e-3, atol=1e-3)
            assert n == len(y) and end == row[len(y) - 1]


def test_ranking_and_step_losses_of_rows_are_those_of_their_scores(toy_model):
    model, tokenizer = toy_model
    randomise(model, "reward")
    with use_lora(model, "reward"):
        r_w, r_l = (sequence_scores(model, tokenizer, side(PAIRS, k)) for k in (1, 2))
        close(ranking_loss(tokenizer)(model, PAIRS, 0), bradley_terry_loss(r_w, r_l).sum(),
              rtol=1e-4, atol=1e-4)
        rows = [([5, 6], [7, 8, 9], [0, 1, -1]), ([5], [6], [1])]
        loss = labelled_loss(tokenizer)(model, rows, 0)
        a, b = (token_scores(model, tokenizer, [row[:2]])[0][0] for row in rows)
        want = -F.logsigmoid(a[1]) - F.logsigmoid(-a[2]) - F.logsigmoid(b[0])
        close(loss, want, rtol=1e-4, atol=1e-4)


# ── Content words and steps

def pieces(text):
    """Tokens that carry their leading space, as most tokenizers cut them, and marks alone."""
    return [m.span() for m in re.finditer(r"\s*(?:\w+|[^\w\s])", text)]


@pytest.mark.parametrize("text, content", [
    ("A nurse from York is sad, because the sister took it.", "nurse York sad sister took"),
    ("They've paid 300 dollars and don't care", "paid 300 dollars care"),
    ("IT WAS the BEST", "BEST")])
def test_importance_by_a_hand_made_list(text, content):  # Table 11
    """Appendix I.1: 1.0 on content words, 0.2 on others and on marks."""
    want = [1.0 if text[a:b].strip() in content.split() else OTHERS for a, b in pieces(text)]
    assert span_weights(text, pieces(text), "importance") == want


def test_parts_of_a_word_weigh_as_the_word_and_decay_is_a_line():
    text = "the wheelbarrow, without it"
    places = [(0, 3), (3, 9), (9, 15), (15, 16), (16, 21), (21, 24), (24, 27)]
    assert span_weights(text, places, "importance") == [.2, 1, 1, .2, .2, .2, .2]
    assert not is_content("couldn’t") and not is_content("it's") and is_content("John's")
    assert span_weights(text, places[:4], "linear_decay") == pytest.approx([1, .7, .4, .1])
    assert span_weights(text, places[:1], "linear_decay") == [1]
    with pytest.raises(ValueError, match="'tfidf'"):
        span_weights("a", [(0, 1)], "tfidf")


def test_importance_of_code():
    """Names, numbers and words of strings; no keyword and no mark."""
    text = 'def total(n):\n    return sum(range(n)) + 12 if n else "none of it"'
    weights = span_weights(text, pieces(text), "importance_code")
    content = [text[a:b].strip() for (a, b), w in zip(pieces(text), weights) if w == 1]
    assert content == ["total", "n", "sum", "range", "n", "12", "n", "none", "of", "it"]


def shown(text, code=False):
    return [text[a:b] for a, b in step_spans(text, code)]


def test_steps_of_a_text_are_its_clauses():
    """Appendix N: sentence- or clause-level units; together they are the text."""
    text = "A cook from York is sad, who left.  It rained because of me; so what?\nYes"
    assert shown(text) == ["A cook from York is sad,", "who left.", "It rained",
                           "because of me;", "so what?", "Yes"]
    assert shown("") == [] and shown("one, 1,000") == ["one,", "1,000"]


PROGRAM = '''import os

@cache
def größe(n):
    """Doc."""
    for i in range(n):
        if i > 2: return "é"
    else:
        x = (1 +
             2)
    return x

print("ü", größe(3)); y = 1
'''


@pytest.mark.parametrize("before, after", [
    ("", ""), ("Here it is:\n```python\n", "```\nDone, I hope.")])
def test_steps_of_code_are_its_statements(before, after):
    """Heads of compound statements, statements within, two on a line, several lines."""
    assert shown(before + PROGRAM + after, code=True) == [
        "import os", "@cache\ndef größe(n):", '"""Doc."""', "for i in range(n):", "if i > 2:",
        'return "é"', "x = (1 +\n             2)", "return x", 'print("ü", größe(3))', "y = 1"]


def test_steps_of_code_that_does_not_parse_are_its_lines_and_have_their_last_tokens():
    assert shown("def f(:\n\n  return 1\nend", code=True) == ["def f(:", "return 1", "end"]
    parts = "First\n```py\nx = 1\n```\nthen\n```py\nif x:\n```\nprints\n```\n1\n```"
    assert shown(parts, code=True) == ["x = 1", "if x:"]
    assert shown("s = '''\n```\nx = 1\n```'''", code=True) == ["s = '''\n```\nx = 1\n```'''"]
    text = "It is, so be it."
    offsets = [(0, 2), (2, 5), (5, 6), (6, 9), (9, 12), (12, 16), (16, 16)]
    assert step_ends(text, offsets, step_spans(text)) == [2, 5]
    assert step_ends(text, offsets, [(6, 7), (0, 4)]) == [None, 1]


def test_steps_of_a_toy_summary_are_labelled_at_their_ends(toy_model):  # Table 17
    """An annotation in mode STEPS → labels; a clause is correct where all its facts are."""
    _, tokenizer = toy_model
    row = toy.rows("train", 1)[0]
    other = next(p for p in toy.SLOTS["person"] if p != row["facts"]["person"])
    text = toy._SUMMARY[0].format(**row["facts"] | {"person": other})
    reply = designs.critique_steps(row, text)
    spans = feedback_of(text, reply, "experiments.modes:STEPS")[1].spans
    assert [span.label for span in spans] == [1, -1, 1]
    annotated = {"prompt": "p", "response": text, "spans": [vars(span) for span in spans]}
    x, y, labels = labelled_steps(annotated, tokenizer)
    ends = [tokenizer.decode(y[: t + 1]) for t, label in enumerate(labels) if label]
    assert ends == [text[: s.end] for s in spans]
    assert [label for label in labels if label] == [1, -1, 1]
    assert x == encode_prompt(tokenizer, "p") and y == encode_answer(tokenizer, text)


# ── Annotators of the toy world

MODES = {"critique_no_cot": "no_cot", "critique_dense": "experiments.modes:DENSE",
         "critique_steps": "experiments.modes:STEPS", "critique_human": "no_cot"}


@pytest.mark.parametrize("name", MODES)
def test_every_toy_annotator_can_be_read_and_repeats_itself(name):
    critic = getattr(designs, name)
    for row in toy.rows("train", 40):
        response = toy.write_summary(row["facts"], random.Random(row["id"]), 0.4)
        reply = critic(row, response)
        feedback, grounding = feedback_of(response, reply, MODES[name])
        assert reply == critic(row, response)
        assert feedback.critique and not grounding.unmatched
        if name == "critique_dense":            # a fact has the label of the careful critic
            for truth in feedback_of(response, toy.critique(row, response))[1].spans:
                around = next(s for s in grounding.spans
                              if s.start <= truth.start and truth.end <= s.end)
                assert around.label == truth.label


# ── Reward designs

def rollouts_of(tokenizer, n=6, only=None):
    """Summaries with faults, the last one empty; only: of these one alone."""
    rng, rows = random.Random(2), toy.rows("train", n)
    texts = [toy.write_summary(row["facts"], rng, 0.4) for row in rows[:-1]] + [""]
    if only is not None:
        rows, texts = rows[only : only + 1], texts[only : only + 1]
    ids = [encode_answer(tokenizer, text) for text in texts]
    prompts = [get_task("toy").policy_prompt(row) for row in rows]
    asked = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    offsets = [token_offsets(tokenizer, y)[1] for y in ids]
    return Rollouts(rows, prompts, texts, offsets, *pad_batch(asked, ids, 0, "cpu"))


def ids_of(rollouts, row):
    return rollouts.response_ids[row][rollouts.mask[row].bool()].tolist()


@pytest.mark.parametrize("name, mode", [("toy:critique", "cot")] + [
    (f"experiments.designs:{name}", MODES[name])
    for name in ("critique_dense", "critique_steps")])
def test_the_true_critic_judges_rollouts_as_phase_1_does(toy_model, name, mode):
    model, tokenizer = toy_model
    rollouts, critic = rollouts_of(tokenizer), name.rpartition(":")[2]
    critic = getattr(toy, critic, None) or getattr(designs, critic)
    found = true_critic(rollouts, model, tokenizer, Config(critic=name, mode=mode))
    places = zip(rollouts.rows, rollouts.texts, rollouts.offsets, found)
    for row, text, offsets, judged in list(places)[:-1]:
        spans = feedback_of(text, critic(row, text), mode)[1].spans
        assert judged.delta == token_rewards(text, offsets, spans)
        assert any(judged.delta) and not judged.reason
    assert not any(found[-1].delta) and "empty" in found[-1].reason


def test_setting_b_pays_the_same_sum_at_the_last_token(toy_model):
    """Appendix A: r_T = Σ δ_t, 0 before it; nothing else differs."""
    rollouts, asked = rollouts_of(toy_model[1]), (*toy_model, Config())
    placed, ends = (critic(rollouts, *asked) for critic in (true_critic, at_end(true_critic)))
    for a, b in zip(placed, ends):
        assert b.delta == [0.0] * (len(a.delta) - 1) + [sum(a.delta)]
        assert replace(b, delta=a.delta) == a
    assert any(sum(found.delta) for found in placed)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weighted_critics_pay_each_token_of_a_span_its_weight(toy_model, weighting):
    """Token by token (Appendix I.1): label · weight of the last span; conflicts stay 0."""
    text = "A nurse of York, sad, is not sad at all because of him."
    spans = [Span(2, 20, 1), Span(12, 20, -1), Span(25, 55, -1)]
    offsets = pieces(text)
    delta = token_rewards(text, offsets, spans)

    def critic(rollouts, *_):
        return [designs.Judgement("z", delta, spans=spans)]

    rollouts = SimpleNamespace(rows=[{}], texts=[text], offsets=[offsets])
    (found,) = weighted(critic, weighting)(rollouts, None, None, None)
    cores = [(b - len(text[a:b].strip()), b) for a, b in offsets]      # without leading space
    held = {span: [t for t, (a, b) in enumerate(cores) if span.start <= a and b <= span.end]
            for span in spans}
    want = []
    for t, (a, b) in enumerate(cores):
        around = [span for span in spans if t in held[span]]
        if {span.label for span in around} not in ({1}, {-1}):
            want.append(0.0)
            continue
        span, word = around[-1], text[a:b]
        want.append(span.label * {
            "linear_decay": 1 - 0.9 * held[span].index(t) / (len(held[span]) - 1),
            "importance": 1.0 if word in ("nurse", "York", "sad") else 0.2,
            "importance_code": 0.2 if word in (",", ".", "is", "not") else 1.0}[weighting])
    assert want.count(0.0) == 5 and any(abs(x) not in (0, 1) for x in want)
    assert found.delta == pytest.approx(want) and found.critique == "z"


def test_graded_delta_is_the_mean_over_sampled_critiques(toy_model, monkeypatch):
    """Of four that say good, good, poor and nothing readable, δ is (1 + 1 − 1 + 0) / 4."""
    rollouts, calls = rollouts_of(toy_model[1], only=0), []
    text, offsets = rollouts.texts[0], rollouts.offsets[0]
    fact = toy.said_facts(text)[0][2]

    def write(model, tokenizer, prompts, texts, most, temperature=0.0, uniforms=None):
        calls.append((list(texts), temperature, uniforms.shape))
        good, poor = (f"So.\n{json.dumps({'good_spans': g, 'poor_spans': p})}"
                      for g, p in (([fact], []), ([], [fact])))
        return [good, good, poor, "?"]

    monkeypatch.setattr(designs, "write_critiques", write)
    (found,) = designs.graded(rollouts, *toy_model, Config())
    at = text.index(fact)
    discrete = token_rewards(text, offsets, [Span(at, at + len(fact), 1)])
    assert [4 * d for d in found.delta] == discrete and any(discrete)
    assert calls == [([text] * 4, 1.0, (4, 128))]
    assert found.quotes == 3 and not found.reason


def test_what_is_drawn_for_graded_rewards_does_not_depend_on_the_batch(toy_model):
    add_lora(toy_model[0], "reward", 4, 8)
    config = Config(max_critique_tokens=12)
    whole = designs.graded(rollouts_of(toy_model[1], 4), *toy_model, config, draws=2)
    alone = designs.graded(rollouts_of(toy_model[1], 4, only=1), *toy_model, config, draws=2)
    assert whole[1] == alone[0] and whole[0].critique != whole[1].critique


def test_scalar_and_step_rewards_stand_where_they_belong(toy_model, monkeypatch):
    """r at the last token alone; tanh(ℓ/2) at the end of every clause; of this rank's rows."""
    model, tokenizer = toy_model
    randomise(model, "reward")
    rollouts, config = rollouts_of(tokenizer), Config(micro_batch_size=4)
    paid = [critic(rollouts, model, tokenizer, config) for critic in (scalar, steps)]
    for i, (r, s) in enumerate(zip(*paid, strict=True)):
        x, y, text = rollouts.prompts[i], ids_of(rollouts, i), rollouts.texts[i]
        with use_lora(model, "reward"), torch.no_grad():
            scores = token_scores(model, tokenizer, [(encode_prompt(tokenizer, x), y)])[0][0]
        last = pytest.approx(scores[-1].item(), abs=1e-3)
        assert r.delta == [0.0] * (len(y) - 1) + [last]
        ends = step_ends(text, rollouts.offsets[i], step_spans(text))
        of_step = torch.tanh(scores / 2).tolist()
        assert s.delta == [pytest.approx(of_step[t], abs=1e-3) if t in ends else 0.0
                           for t in range(len(y))]
    assert sum(map(bool, paid[1][0].delta)) >= 2 and not any(paid[1][-1].delta)
    monkeypatch.setattr(designs, "RANK", 1)
    monkeypatch.setattr(designs, "RANKS", 2)
    for critic in (steps, true_critic, weighted(true_critic, "importance")):
        found = critic(rollouts, model, tokenizer, config)
        lengths = [len(rollouts.offsets[i]) for i in (1, 3, 5)]
        assert [len(judged.delta) for judged in found] == lengths


@pytest.mark.parametrize("flags, said", [
    (["scalar"], "needs --reward_model"), (["true", "--critic", "none"], "needs --critic"),
    (["best"], "best: name one of critique"), ([], "no design: name one of")])
def test_a_design_that_cannot_be_is_refused(monkeypatch, flags, said):
    monkeypatch.setattr("sys.argv", ["designs", *flags])
    with pytest.raises(InputError, match=said):
        designs.main()


# ── Where pairs, references and refinements come from

def test_pairs_of_the_three_data_sets():
    def answer(text):
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]

    names = [f"generated_summary_for_comparison_{side}" for side in "AB"]
    compared = dict(zip(names, "ab"))
    assert own_pairs({"chosen": answer("w"), "rejected": answer("l")}) == [("w", "l")]
    assert own_pairs(compared | {"comparison_preference": "Summary A"}) == [("a", "b")]
    assert own_pairs(compared | {"comparison_preference": "B"}) == [("b", "a")]
    trials = {str(i): {"solution_code": code, "test_result": result}
              for i, (code, result) in enumerate([("f", "Fail"), ("p", "Pass"), ("q", "Pass")])}
    assert own_pairs({"trials": trials}) == [("p", "f")]
    assert own_pairs({"post": "x", "comparison_preference": None}) == []
    rows = {"ideal_human_summary": "s"}, {"solution": "c"}, {"chosen": answer("w")}, {}
    assert [reference(row) for row in rows] == ["s", "c", "w", None]


def test_samples_are_ranked_by_the_critic_or_by_tests():
    row, config = toy.rows("train", 1)[0], BaselineConfig()
    better = row["reference"]
    worse = better.replace(row["facts"]["city"], "Nowhere")
    assert merit(row, better, config) == 7 > merit(row, worse, config)
    want = [{"chosen": better, "rejected": worse}]
    assert baselines.rank_samples(row, [worse, better], config) == want
    assert baselines.rank_samples(row, [better, better], config) == []
    assert baselines.rank_samples(row, [worse], config) == want
    code = BaselineConfig(task="kodcode", allow_code_execution=True, critic=None)
    tested = {"test": "from solution import f\n\ndef test_f():\n    assert f() == 1\n"}
    answers = [f"def f():\n    return {n}" for n in (1, 2)]
    answers += [f"So:\n```python\n{answer}\n```\n" for answer in answers]
    assert [merit(tested, answer, code) for answer in answers] == [1.0, 0.0, 1.0, 0.0]
    assert baselines.rank_samples(tested, answers[2:0:-1], code) == [
        {"chosen": answers[2], "rejected": answers[1]}]
    assert merit(row, better, BaselineConfig(task="slf5k", critic=None)) is None


def test_refinements_mend_what_is_named_and_those_that_keep_a_fault_are_not_imitated(toy_model):
    rows = [{"id": str(i), "prompt": "p", "response": "It was York.", "critique": said,
             "poor_spans": ["York"]}
            for i, said in enumerate(["The city York was Oslo, wrong.", "York is poor."])]
    found = refinements(*toy_model, rows, BaselineConfig())
    assert [(row["refinement"], row["kept"]) for row in found] == [
        ("It was Oslo.", True), ("It was York.", False)]
    row = toy.rows("train", 1)[0]
    response = toy.write_summary(row["facts"], random.Random(5), 0.5)
    mended = toy.refine(response, toy.critique(row, response))
    assert toy.fact_accuracy(row, response) < 1 == toy.fact_accuracy(row, mended)


# ── Whole runs

SMALL = ["--annotated_rows", 48, "--batch_size", 8, "--minibatch_size", 8, "--eval_rows", 4,
         "--iterations", 1, "--ppo_epochs", 1]


def run(monkeypatch, method, out, *flags):
    monkeypatch.chdir(ROOT)
    baselines.main([str(x) for x in ("--method", method, "--output_dir", out, *flags)])
    return read_rows(out / "result.json")[0]


def falls(path, share):
    """The losses of the last third of the steps, against those of the first."""
    found = [row["loss"] for row in read_rows(path)]
    third = len(found) // 3
    return sum(found[-third:]) < share * sum(found[:third])


def test_dpo_learns_on_the_toy_world_and_reuses_what_is_done(tmp_path, monkeypatch, capsys):
    """Its loss falls, its policy moves, the table has the truth; other flags are refused."""
    out = tmp_path / "run"
    result = run(monkeypatch, "dpo", out, *SMALL)
    assert falls(out / "policy-losses.jsonl", 0.95)
    moved = load_file(out / "policy" / "adapter_model.safetensors")
    assert any(x.abs().max() > 0 for name, x in moved.items() if "lora_B" in name)
    assert {"fact accuracy", "response tokens"} <= result["before"].keys()
    assert result["before"].keys() == result["after"].keys()
    capsys.readouterr()
    assert run(monkeypatch, "dpo", out, *SMALL) == result
    assert capsys.readouterr().out.count("reused") == 3
    with pytest.raises(InputError, match="method was dpo, is sft"):
        run(monkeypatch, "sft", out, *SMALL)
    with pytest.raises(InputError, match="invalid choice: 'rlhf'"):
        run(monkeypatch, "rlhf", out)


def test_reflection_learns_to_rewrite_and_rewrites_when_asked(tmp_path, monkeypatch, toy_model):
    """SFT, R_φ, refinements and the rewriter; y' is drawn by the texts, not by the batch."""
    result = run(monkeypatch, "reflection", tmp_path, *SMALL)
    assert falls(tmp_path / "policy-losses.jsonl", 0.9)
    assert falls(tmp_path / "rewriter-losses.jsonl", 0.9)
    assert [*result] == ["before", "without reflection", "after"]
    assert result["without reflection"] != result["after"]
    model, tokenizer = toy_model
    for name, path in (("rewriter", "rewriter"), ("reward", "reward/adapter")):
        baselines.load_lora(model, name, tmp_path / path)
    both = reflect(rollouts_of(tokenizer, 3), model, tokenizer, BaselineConfig())
    alone = reflect(rollouts_of(tokenizer, 3, only=1), model, tokenizer, BaselineConfig())
    assert both.texts[1] == alone.texts[0] and len(both.offsets[1]) == both.mask[1].sum()


def test_prm_ppo_is_text2grad_with_a_reward_for_every_step(tmp_path, monkeypatch):
    """Step labels of the true critic, their reward model, and Algorithm 4 with it as critic."""
    result = run(monkeypatch, "prm_ppo", tmp_path, *SMALL)
    assert falls(tmp_path / "reward" / "adapter-losses.jsonl", 0.95)
    (sample,) = read_rows(tmp_path / "samples.jsonl")
    text, offsets = sample["response"], []
    for piece in sample["tokens"]:
        start = offsets[-1][1] if offsets else 0
        offsets.append((start, start + len(piece)))
    paid = [t for t, delta in enumerate(sample["delta"]) if delta]
    assert paid == step_ends(text, offsets, step_spans(text)) and len(paid) > 1
    assert result["after"]["response tokens"] > 0


def test_a_design_runs_by_its_name(tmp_path, monkeypatch):
    """The true critic's sum at the last token: no phase 1, no R_φ."""
    monkeypatch.chdir(ROOT)
    flags = ["true_end", "--output_dir", tmp_path, *SMALL]
    monkeypatch.setattr("sys.argv", ["designs", *map(str, flags)])
    designs.main()
    (metrics,), (sample,) = (read_rows(tmp_path / f"{name}.jsonl")
                             for name in ("metrics", "samples"))
    assert len(sample["delta"]) == len(sample["tokens"]) and not any(sample["delta"][:-1])
    assert math.isfinite(metrics["policy_loss"]) and not (tmp_path / "reward").exists()
