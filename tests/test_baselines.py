"""The baselines and the reward designs: losses against closed forms and TRL, then all of them on toy and real rows."""

import json
import math
import random
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_pipeline import rows_of, run_main

from experiments import baselines
from experiments import designs as rewards
import toy
from annotate import InputError, Span, get_task, read_reply, read_rows, token_offsets, token_rewards, write_rows
from experiments.baselines import (BaselineConfig, bradley_terry_loss, dpo_loss, labelled_loss, labelled_steps, merit, own_pairs,
                       preference_loss, ranking_loss, reference, refinements, sequence_logprobs, step_loss)
from model import add_lora, encode_answer, encode_prompt, lora_parameters, use_lora
from parts import OTHERS, WEIGHTINGS, is_content, span_weights, step_spans
from experiments.designs import sequence_scores, step_ends, token_scores, verdicts
from text2grad import Config

close = torch.testing.assert_close


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ── DPO, Bradley–Terry and step losses ──────────────────────────────────────────────────────────────────

def test_dpo_loss_and_its_gradient_are_the_closed_form():
    """−log σ(βu) with u = Δ_w − Δ_l; ∂/∂log π(y_w) = −β σ(−βu) = −∂/∂log π(y_l) (Rafailov et al. 2023, §4)."""
    w, l, ref_w, ref_l = (numbers(i, 50) * 5 for i in range(4))
    w.requires_grad_(), l.requires_grad_()
    for beta in (0.05, 0.1, 2.0):
        loss, u = dpo_loss(w, l, ref_w, ref_l, beta), (w - ref_w) - (l - ref_l)
        close(loss, torch.log1p(torch.exp(-beta * u)), rtol=1e-9, atol=1e-9)
        up_w, up_l = torch.autograd.grad(loss.sum(), (w, l))
        close(up_w, -beta / (1 + torch.exp(beta * u)), rtol=1e-9, atol=1e-12)
        close(up_l, -up_w)


def test_losses_are_log_2_where_nothing_is_preferred_and_finite_far_away():
    same = numbers(0, 4)
    close(dpo_loss(same, same, same, same, 0.1), torch.full((4,), math.log(2), dtype=torch.float64))
    close(dpo_loss(same, same + 3, same, same + 3, 0.7), torch.full((4,), math.log(2), dtype=torch.float64))
    close(bradley_terry_loss(same, same), torch.full((4,), math.log(2), dtype=torch.float64))
    assert bradley_terry_loss(torch.tensor([-1e4]), torch.tensor([1e4])).item() == pytest.approx(2e4)
    assert step_loss(torch.tensor([[0.0, 9.0]]), torch.tensor([[-1, 0]])).item() == pytest.approx(math.log(2))


def test_bradley_terry_is_cross_entropy_between_two_classes():
    """P(w ≻ l) = e^{r_w} / (e^{r_w} + e^{r_l}): the softmax of two scores; its gradient is −σ(r_l − r_w)."""
    scores = numbers(1, 40, 2) * 4
    chosen = scores[:, 0].clone().requires_grad_()
    loss = bradley_terry_loss(chosen, scores[:, 1])
    close(loss, F.cross_entropy(scores, torch.zeros(40, dtype=torch.long), reduction="none"), rtol=1e-9, atol=1e-9)
    close(torch.autograd.grad(loss.sum(), chosen)[0], -torch.sigmoid(scores[:, 1] - scores[:, 0]), rtol=1e-9, atol=1e-9)


def test_step_loss_is_binary_cross_entropy_over_the_labelled_tokens():
    scores, labels = numbers(2, 3, 9), torch.randint(-1, 2, (3, 9), generator=torch.Generator().manual_seed(0))
    at = labels != 0
    expected = F.binary_cross_entropy_with_logits(scores[at], (labels[at] > 0).double(), reduction="sum")
    close(step_loss(scores, labels), expected)


def test_losses_equal_trls():
    """TRL 0.11's DPOTrainer.dpo_loss and RewardTrainer.compute_loss, called as they are; later ones cannot be so called."""
    trl = pytest.importorskip("trl")
    if not hasattr(trl.DPOTrainer, "dpo_loss"):
        pytest.skip("this TRL has no DPOTrainer.dpo_loss to call")
    state = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), reference_free=False, f_divergence_type=None,
                            beta=0.1, f_divergence_params=None, label_smoothing=0, loss_type="sigmoid")
    logps = [numbers(i, 30) * 9 for i in range(4)]
    close(dpo_loss(*logps, 0.1), trl.DPOTrainer.dpo_loss(state, *logps)[0], rtol=0, atol=1e-6)
    state = SimpleNamespace(use_reward_data_collator=True, args=SimpleNamespace(center_rewards_coefficient=None))
    inputs = {f"{name}_{side}": scores for side, scores in zip(("chosen", "rejected"), logps)
              for name in ("input_ids", "attention_mask")}
    loss = trl.RewardTrainer.compute_loss(state, lambda input_ids, **_: {"logits": input_ids}, inputs)
    close(bradley_terry_loss(*logps[:2]).mean(), loss, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", [0.01, 0.1, 0.5])
def test_losses_equal_the_formulas_that_trl_writes(beta):
    """dpo_trainer.py (0.11.3): β((π_w − π_l) − (ref_w − ref_l)); reward_trainer.py: −logsigmoid(r_w − r_l)."""
    w, l, ref_w, ref_l = (numbers(i, 200).float() * 3 for i in range(4))
    close(dpo_loss(w, l, ref_w, ref_l, beta), -F.logsigmoid(beta * ((w - l) - (ref_w - ref_l))), rtol=0, atol=1e-6)
    close(bradley_terry_loss(w, l), -torch.nn.functional.logsigmoid(w - l), rtol=0, atol=1e-6)


PAIRS = [([5, 6, 7, 8], [9, 10, 1], [20, 1]), ([11], [12, 13, 14, 15, 1], [30, 31, 1]),
         ([16, 17], [1], [40, 41, 42, 1])]


def randomised(model, name, seed=3):
    torch.manual_seed(seed)
    for p in add_lora(model, name, 4, 8):
        p.data.normal_(std=0.1)


def test_sequence_logprobs_sum_the_models_own(toy_model):
    """Row by row through the plain logits; padding changes nothing."""
    model, _ = toy_model
    randomised(model, "policy")
    pairs = [(x, w) for x, w, _ in PAIRS]
    with use_lora(model, "policy"), torch.no_grad():
        got = sequence_logprobs(model, pairs, 0)
        for (x, y), value in zip(pairs, got):
            logprobs = model(torch.tensor([x + y])).logits[0].log_softmax(-1)[len(x) - 1 : -1]
            close(value, logprobs[torch.arange(len(y)), torch.tensor(y)].sum(), rtol=1e-4, atol=1e-4)


def test_preference_loss_starts_at_log_2_and_has_no_gradient_in_the_reference(toy_model):
    """A new adapter is the reference; afterwards each pair's loss is dpo_loss of four sums."""
    model, _ = toy_model
    add_lora(model, "policy", 4, 8)
    loss_of = preference_loss(BaselineConfig())
    with use_lora(model, "policy"):
        assert loss_of(model, PAIRS, 0)[0].item() == pytest.approx(3 * math.log(2), abs=1e-5)
    for p in lora_parameters(model, "policy"):
        p.data.normal_(std=0.1)
    with use_lora(model, "policy"):
        loss, n = loss_of(model, PAIRS, 0)
        sums = lambda side: sequence_logprobs(model, [(p[0], p[side]) for p in PAIRS], 0)
        policy = sums(1), sums(2)
        with use_lora(model, None):
            close(loss, dpo_loss(*policy, sums(1), sums(2), 0.1).sum(), rtol=1e-4, atol=1e-4)
        assert n == 3 and loss.requires_grad


# ── Scores that are read from the head ──────────────────────────────────────────────────────────────────

def test_scores_are_logit_differences_after_each_token(toy_model):
    """ℓ_t = logit(+) − logit(−) of the plain model after y_≤t; the sequence's is that after its last token."""
    model, tokenizer = toy_model
    randomised(model, "reward")
    plus, minus = (tokenizer(mark).input_ids[-1] for mark in "+-")
    pairs = [(x, w) for x, w, _ in PAIRS]
    with use_lora(model, "reward"), torch.no_grad():
        scores, mask = token_scores(model, tokenizer, pairs)
        last = sequence_scores(model, tokenizer, pairs)
        for (x, y), row, n, end in zip(pairs, scores, mask.sum(1), last):
            logits = model(torch.tensor([x + y])).logits[0, len(x):]
            close(row[: len(y)], logits[:, plus] - logits[:, minus], rtol=1e-3, atol=1e-3)
            assert n == len(y) and end == row[len(y) - 1]


def test_ranking_and_step_losses_of_rows_are_those_of_their_scores(toy_model):
    model, tokenizer = toy_model
    randomised(model, "reward")
    with use_lora(model, "reward"):
        r_w, r_l = (sequence_scores(model, tokenizer, [(p[0], p[side]) for p in PAIRS]) for side in (1, 2))
        close(ranking_loss(tokenizer)(model, PAIRS, 0)[0], bradley_terry_loss(r_w, r_l).sum(), rtol=1e-4, atol=1e-4)
        rows = [([5, 6], [7, 8, 9], [0, 1, -1]), ([5], [6], [1])]
        loss, n = labelled_loss(tokenizer)(model, rows, 0)
        a, b = (token_scores(model, tokenizer, [row[:2]])[0][0] for row in rows)
        close(loss, -F.logsigmoid(a[1]) - F.logsigmoid(-a[2]) - F.logsigmoid(b[0]), rtol=1e-4, atol=1e-4)
    assert n == 3


# ── Content words and steps ─────────────────────────────────────────────────────────────────────────────

def pieces(text):
    """Tokens that carry their leading space, as most tokenizers cut them, and marks alone."""
    return [m.span() for m in re.finditer(r"\s*(?:\w+|[^\w\s])", text)]


@pytest.mark.parametrize("text, content", [
    ("A nurse from York is sad, because the sister took it.", "nurse York sad sister took"),
    ("They've paid 300 dollars and don't care", "paid 300 dollars care"),
    ("IT WAS the BEST", "BEST")])
def test_importance_by_a_hand_made_list(text, content):  # Table 11
    """Appendix I.1: ±1.0 on content words, ±0.2 on others and on marks; a part of a word weighs as the word."""
    places = pieces(text)
    want = [1.0 if text[a:b].strip() in content.split() else OTHERS for a, b in places]
    assert span_weights(text, places, "importance") == want
    poor = token_rewards(text, places, [Span(0, len(text), -1)], "importance")
    assert poor == [-weight for weight in want] and {-1.0, -0.2} == set(poor)


def test_parts_of_a_word_weigh_as_the_word():
    text = "the wheelbarrow, without it"
    assert span_weights(text, [(0, 3), (3, 9), (9, 15), (15, 16), (16, 21), (21, 24), (24, 27)], "importance") == [
        .2, 1, 1, .2, .2, .2, .2]
    assert not is_content("couldn’t") and not is_content("it's") and is_content("John's") and not is_content("")


def test_importance_of_code():
    """Names, numbers and words of strings; no keyword and no mark."""
    text = 'def total(n):\n    return sum(range(n)) + 12 if n else "none of it"'
    weights = span_weights(text, pieces(text), "importance_code")
    content = [text[a:b].strip() for (a, b), weight in zip(pieces(text), weights) if weight == 1]
    assert content == ["total", "n", "sum", "range", "n", "12", "n", "none", "of", "it"]


def test_an_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match="'tfidf'"):
        span_weights("a", [(0, 1)], "tfidf")


def shown(text, code=False):
    return [text[a:b] for a, b in step_spans(text, code)]


def test_steps_of_a_text_are_its_clauses():
    """Appendix N: sentence- or clause-level units; together they are the text but for white space."""
    text = "A cook from York is sad, who left.  It rained because of me; so what?\nYes"
    assert shown(text) == ["A cook from York is sad,", "who left.", "It rained", "because of me;", "so what?", "Yes"]
    assert "".join("".join(shown(text)).split()) == "".join(text.split())
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


@pytest.mark.parametrize("before, after", [("", ""), ("Here it is:\n```python\n", "```\nDone, I hope.")])
def test_steps_of_code_are_its_statements(before, after):
    """Heads of compound statements, statements within, two on a line, several lines; columns count characters."""
    assert shown(before + PROGRAM + after, code=True) == [
        "import os", "@cache\ndef größe(n):", '"""Doc."""', "for i in range(n):", "if i > 2:", 'return "é"',
        "x = (1 +\n             2)", "return x", 'print("ü", größe(3))', "y = 1"]


def test_steps_of_code_that_does_not_parse_are_its_lines():
    assert shown("def f(:\n\n  return 1\nend", code=True) == ["def f(:", "return 1", "end"]


def test_step_ends_are_the_last_tokens_that_wrote_anything_of_a_step():
    text, offsets = "It is, so be it.", [(0, 2), (2, 5), (5, 6), (6, 9), (9, 12), (12, 16), (16, 16)]
    assert step_ends(text, offsets, step_spans(text)) == [2, 5]
    assert step_ends(text, offsets, [(6, 7), (0, 4)]) == [None, 1]


def test_steps_of_a_toy_summary_are_labelled_at_their_ends(toy_model):  # Table 17
    """annotate --mode steps → labels; a clause is correct where all its facts are."""
    _, tokenizer = toy_model
    row = toy.rows("train", 1)[0]
    said = row["facts"] | {"person": next(p for p in toy.SLOTS["person"] if p != row["facts"]["person"])}
    text = toy._SUMMARY[0].format(**said)
    _, grounding = read_reply({"id": "", "prompt": "", "response": text}, toy.critique_steps(row, text), "steps")
    assert [span.label for span in grounding.spans] == [1, -1, 1]
    annotated = {"prompt": "p", "response": text, "spans": [vars(span) for span in grounding.spans]}
    x, y, labels = labelled_steps(annotated, tokenizer)
    ends = [tokenizer.decode(y[: t + 1]) for t, label in enumerate(labels) if label]
    assert ends == [text[: s.end] for s in grounding.spans] and [label for label in labels if label] == [1, -1, 1]
    assert x == encode_prompt(tokenizer, "p") and y == encode_answer(tokenizer, text)


# ── Annotators of the toy world ─────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("name, mode", [("critique", "cot"), ("critique_no_cot", "no_cot"), ("critique_dense", "dense"),
                                        ("critique_steps", "steps"), ("critique_human", "no_cot")])
def test_every_toy_annotator_can_be_read_and_repeats_itself(name, mode):
    critic = getattr(toy, name)
    for row in toy.rows("train", 40):
        response = toy.write_summary(row["facts"], random.Random(row["id"]), 0.4)
        reply = critic(row, response)
        feedback, grounding = read_reply({"id": "", "prompt": "", "response": response}, reply, mode)
        assert reply == critic(row, response) and feedback.critique and not grounding.unmatched
        if name == "critique_dense":            # a fact has the label that the careful critic gives it
            truth = read_reply({"id": "", "prompt": "", "response": response}, toy.critique(row, response))[1].spans
            label = lambda span: next(s.label for s in grounding.spans if s.start <= span.start and span.end <= s.end)
            assert [label(span) for span in truth] == [span.label for span in truth]


def test_people_miss_faults_and_quote_more_than_the_fault():
    """The rougher annotator: recall of wrong facts about .8, some long quotes, a few mistaken verdicts."""
    rng, wrong, found, long, mistaken = random.Random(0), 0, 0, 0, 0
    for row in toy.rows("train", 300):
        response = toy.write_summary(row["facts"], rng, 0.4)
        example = {"id": "", "prompt": "", "response": response}
        reply = read_reply(example, toy.critique_human(row, response), "no_cot")[0]
        faults = [value for _, _, value, _, right in toy.judged_facts(row, response) if not right]
        wrong, found = wrong + len(faults), found + sum(any(f in quote for quote in reply.poor_spans) for f in faults)
        long += sum(" " in quote for quote in reply.poor_spans + reply.good_spans)
        mistaken += sum(quote in faults for quote in reply.good_spans)
    assert 0.6 < found / wrong < 0.9 and long > 100 and mistaken > 5


def test_the_refiner_mends_what_the_critique_names_and_nothing_else():
    row = toy.rows("train", 1)[0]
    response = toy.write_summary(row["facts"], random.Random(5), 0.5)
    mended = toy.refine(response, toy.critique(row, response))
    assert toy.fact_accuracy(row, response) < 1 == toy.fact_accuracy(row, mended)
    assert toy.refine(response, "It is poor.") == response


# ── Reward designs ──────────────────────────────────────────────────────────────────────────────────────

def rollouts_of(tokenizer, n=6):
    """Rows, prompts, summaries with faults (the last one empty), their ids with EOS and offsets."""
    rng, rows = random.Random(2), toy.rows("train", n)
    texts = [toy.write_summary(row["facts"], rng, 0.4) for row in rows[:-1]] + [""]
    ids = [encode_answer(tokenizer, text) for text in texts]
    prompts = [get_task("toy").policy_prompt(row) for row in rows]
    return rows, prompts, texts, ids, [token_offsets(tokenizer, y)[1] for y in ids]


@pytest.mark.parametrize("name, mode", [("critique", "cot"), ("critique_dense", "dense"), ("critique_steps", "steps")])
def test_the_true_critic_judges_rollouts_as_phase_1_does(toy_model, name, mode):
    model, tokenizer = toy_model
    rows, prompts, texts, ids, offsets = rollouts_of(tokenizer)
    config = Config(reward="true", critic=f"toy:{name}", mode=mode)
    found, written = verdicts(model, tokenizer, config, rows, prompts, texts, ids, offsets)
    for row, text, at, verdict in list(zip(rows, texts, offsets, found))[:-1]:
        spans = read_reply({"id": "", "prompt": "", "response": text}, getattr(toy, name)(row, text), mode)[1].spans
        assert verdict.delta == token_rewards(text, at, spans) and any(verdict.delta) and not verdict.reason
    assert written == 0 and not any(found[-1].delta) and "empty" in found[-1].reason


def test_setting_b_pays_the_same_sum_at_the_last_token(toy_model):
    """Appendix A: r_T = Σ δ_t, 0 before it; nothing else differs."""
    model, tokenizer = toy_model
    rollouts = rollouts_of(tokenizer)
    placed, _ = verdicts(model, tokenizer, Config(reward="true"), *rollouts)
    ends, _ = verdicts(model, tokenizer, Config(reward="true_end"), *rollouts)
    for a, b in zip(placed, ends):
        assert b.delta == [0.0] * (len(a.delta) - 1) + [sum(a.delta)] and replace(b, delta=a.delta) == a
    assert any(sum(v.delta) for v in placed)


def test_graded_delta_is_the_mean_over_sampled_critiques(toy_model, monkeypatch):
    """Of four critiques that say good, good, poor and nothing readable, δ is (1 + 1 − 1 + 0) / 4."""
    model, tokenizer = toy_model
    rows, prompts, texts, ids, offsets = (x[:1] for x in rollouts_of(tokenizer))
    fact, calls = toy.said_facts(texts[0])[0][2], []

    def write(model, tokenizer, prompts, texts, most, temperature=0.0, generator=None, uniforms=None):
        calls.append((list(texts), temperature, uniforms))
        good, poor = (f'So.\n{json.dumps({"good_spans": g, "poor_spans": p})}' for g, p in (([fact], []), ([], [fact])))
        return [good, good, poor, "?"][: len(texts)], 7

    monkeypatch.setattr(rewards, "write_critiques", write)
    (graded,), written = verdicts(model, tokenizer, Config(reward="graded"), rows, prompts, texts, ids, offsets)
    (discrete,), _ = verdicts(model, tokenizer, Config(reward="critique"), rows, prompts, texts, ids, offsets)
    at = texts[0].index(fact)
    assert discrete.delta == token_rewards(texts[0], offsets[0], [Span(at, at + len(fact), 1)])
    assert [4 * d for d in graded.delta] == discrete.delta and (graded.quotes, written) == (3, 7)
    assert calls[0][0] == texts * 4 and calls[0][1] == 1.0 and calls[0][2].shape == (4, 128)
    assert calls[1] == (texts, 0.0, None) and not graded.reason


def test_what_is_drawn_for_graded_rewards_does_not_depend_on_the_batch(toy_model):
    model, tokenizer = toy_model
    add_lora(model, "reward", 4, 8)
    config = Config(reward="graded", critique_samples=2, max_critique_tokens=12)
    rollouts = rollouts_of(tokenizer, 4)
    whole, _ = verdicts(model, tokenizer, config, *rollouts)
    alone, _ = verdicts(model, tokenizer, config, *(x[1:2] for x in rollouts))
    assert whole[1] == alone[0] and whole[0].critique != whole[1].critique


def test_scalar_and_step_rewards_stand_where_they_belong(toy_model):
    """r at the last token alone; tanh(ℓ/2) at the end of every clause; both from the adapter "reward"."""
    model, tokenizer = toy_model
    randomised(model, "reward")
    _, prompts, texts, ids, offsets = rollouts = rollouts_of(tokenizer)
    scalar, steps = (verdicts(model, tokenizer, Config(reward=name, micro_batch_size=4), *rollouts)[0]
                     for name in ("scalar", "steps"))
    for x, text, y, at, r, s in zip(prompts, texts, ids, offsets, scalar, steps):
        with use_lora(model, "reward"), torch.no_grad():
            scores = token_scores(model, tokenizer, [(encode_prompt(tokenizer, x), y)])[0][0]
        assert r.delta == [0.0] * (len(y) - 1) + [pytest.approx(scores[-1].item(), abs=1e-3)]
        ends, paid = step_ends(text, at, step_spans(text)), torch.tanh(scores / 2).tolist()
        assert s.delta == [pytest.approx(paid[t], abs=1e-3) if t in ends else 0.0 for t in range(len(y))]
    assert sum(map(bool, steps[0].delta)) >= 2 and not any(steps[-1].delta)


# ── Where pairs, references and refinements come from ───────────────────────────────────────────────────

def test_pairs_of_the_three_data_sets():
    answer = lambda text: [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    compared = {"generated_summary_for_comparison_A": "a", "generated_summary_for_comparison_B": "b"}
    trial = lambda code, said: {"solution_code": code, "test_result": said}
    assert own_pairs({"chosen": answer("w"), "rejected": answer("l")}) == [("w", "l")]
    assert own_pairs(compared | {"comparison_preference": "Summary A"}) == [("a", "b")]
    assert own_pairs(compared | {"comparison_preference": "B"}) == [("b", "a")]
    trials = {"0": trial("f", "Fail"), "1": trial("p", "Pass"), "2": trial("q", "Pass")}
    assert own_pairs({"trials": trials}) == [("p", "f")]
    assert own_pairs({"post": "x", "comparison_preference": None}) == []
    rows = {"ideal_human_summary": "s"}, {"solution": "c"}, {"chosen": answer("w")}, {}
    assert [reference(row) for row in rows] == ["s", "c", "w", None]


def test_samples_are_ranked_by_the_critic_or_by_tests():
    row = toy.rows("train", 1)[0]
    better, worse = row["reference"], row["reference"].replace(row["facts"]["city"], "Nowhere")
    assert merit(row, better, BaselineConfig()) == 7 > merit(row, worse, BaselineConfig())
    code = BaselineConfig(task="kodcode", allow_code_execution=True, critic=None)
    tested = {"test": "from solution import f\n\ndef test_f():\n    assert f() == 1\n"}
    assert [merit(tested, f"def f():\n    return {n}", code) for n in (1, 2)] == [1.0, 0.0]
    assert merit(row, better, BaselineConfig(task="slf5k", critic=None)) is None


def test_refinements_that_keep_a_fault_are_not_imitated(toy_model):
    rows = [{"id": str(i), "prompt": "p", "response": "It was York.", "critique": said, "poor_spans": ["York"]}
            for i, said in enumerate(["The city York was Oslo, wrong.", "York is poor."])]
    found = refinements(*toy_model, rows, BaselineConfig())
    assert [(row["refinement"], row["kept"]) for row in found] == [("It was Oslo.", True), ("It was York.", False)]


# ── Whole runs: the toy world ───────────────────────────────────────────────────────────────────────────

SMALL = ["--annotated_rows", 128, "--batch_size", 16, "--minibatch_size", 16, "--eval_rows", 8, "--iterations", 2,
         "--ppo_epochs", 1, "--save_every", 2]


def losses(path):
    """Means of the first and the last third of the steps."""
    found = [row["loss"] for row in rows_of(path)]
    third = len(found) // 3
    return sum(found[:third]) / third, sum(found[-third:]) / third


def baseline(monkeypatch, out, method, *flags):
    run_main(monkeypatch, "--method", method, "--output_dir", out, *SMALL, *flags, module=baselines)
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize("method, fitted", [("sft", "policy"), ("ilf", "policy"), ("dpo", "policy"),
                                            ("ppo", "reward/adapter"), ("prm_ppo", "reward/adapter")])
def test_a_baseline_learns_on_the_toy_world(tmp_path, monkeypatch, capsys, method, fitted):
    """Its loss goes down, its policy moves, the table has the truth; a second run reuses every phase."""
    result = baseline(monkeypatch, tmp_path / "run", method)
    first, last = losses(tmp_path / "run" / f"{fitted}-losses.jsonl")
    assert last < first * (0.98 if method == "ppo" else 0.9)
    moved = load_file(tmp_path / "run" / "policy" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in moved.items() if "lora_B" in name)
    assert {"fact accuracy", "response tokens"} <= result["before"].keys() == result["after"].keys()
    assert method not in ("sft", "ilf") or result["after"]["fact accuracy"] > result["before"]["fact accuracy"] + 0.1
    capsys.readouterr()
    phases = len(rows_of(tmp_path / "run" / "phases.jsonl"))
    assert baseline(monkeypatch, tmp_path / "run", method) == result
    said = capsys.readouterr().out
    assert said.count("reused") == phases >= 2 and "fact accuracy" in said


def test_reflection_learns_to_rewrite_and_rewrites_when_asked(tmp_path, monkeypatch):
    result = baseline(monkeypatch, tmp_path / "run", "reflection")
    for name in ("policy", "rewriter"):
        first, last = losses(tmp_path / "run" / f"{name}-losses.jsonl")
        assert last < 0.9 * first
    assert result["without_reflection"] != result["after"] and result["after"].keys() == result["before"].keys()


def test_a_method_that_there_is_not_is_named(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--method rlhf: it is one of sft"):
        run_main(monkeypatch, "--method", "rlhf", "--output_dir", tmp_path, module=baselines)


@pytest.mark.parametrize("flags, said", [
    (("--reward", "scalar"), "needs --reward_model"), (("--reward", "true", "--critic", ""), "needs --critic"),
    (("--reward", "best"), "it is one of critique"), (("--weighting", "tfidf"), "it is one of uniform")])
def test_a_design_that_cannot_be_is_refused(tmp_path, monkeypatch, flags, said):
    with pytest.raises(InputError, match=said):
        run_main(monkeypatch, *flags, "--output_dir", tmp_path / "run")


# ── Whole runs: real rows and a real checkpoint ─────────────────────────────────────────────────────────

FILES = {"slf5k": "slf5k", "ultrafeedback": "ultrafeedback_binarized_example", "kodcode": "kodcode_leetcode"}


def critic(row, response):
    """Reads nothing: the first word is good and the last one poor."""
    words = response.split()
    return "Mixed.\n" + json.dumps({"good_spans": words[:1], "poor_spans": words[-1:]})


def step_critic(row, response):
    """Every other step is correct."""
    return json.dumps({"steps": [{"step": response[a:b], "reason": "so", "correct": i % 2 == 0}
                                 for i, (a, b) in enumerate(step_spans(response, "question" in row))]})


@pytest.fixture(scope="module")
def stories_base(shared, tmp_path_factory):
    """stories260K with room for long posts."""
    base = tmp_path_factory.mktemp("base") / "stories260K"
    shutil.copytree(shared / "models" / "stories260K", base, copy_function=shutil.copyfile)
    base.chmod(0o755)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return base


def real_flags(shared, base, task, out):
    """Flags for four short rows of a task; UltraFeedback's one row is there with four ids."""
    rows = read_rows(shared / "data" / f"{FILES[task]}.jsonl")
    rows = sorted(rows, key=lambda row: len(str(row)))[:4]
    if task == "ultrafeedback":
        rows = [rows[0] | {"prompt_id": f"r{i}", "prompt": f"{rows[0]['prompt']} ({i})"} for i in range(4)]
    write_rows(out / "rows.jsonl", rows)
    return ["--task", task, "--model", base, "--data", out / "rows.jsonl", "--output_dir", out / "run",
            "--eval_rows", 1, "--critic", "test_baselines:critic", "--iterations", 1, "--batch_size", 2, "--minibatch_size", 2,
            "--ppo_epochs", 1, "--micro_batch_size", 2, "--max_new_tokens", 16, "--max_critique_tokens", 24,
            "--temperature", 1.0, *(["--allow_code_execution"] if task == "kodcode" else [])]


@pytest.mark.parametrize("task", FILES)
@pytest.mark.parametrize("method", baselines.METHODS)
def test_every_baseline_runs_on_real_rows(shared, stories_base, tmp_path, monkeypatch, task, method):
    critic = ["--critic", "test_baselines:step_critic"] if method == "prm_ppo" else []
    run_main(monkeypatch, "--method", method, *real_flags(shared, stories_base, task, tmp_path), *critic, "--epochs", 1,
             module=baselines)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["after"]["response tokens"] > 0
    assert (tmp_path / "run" / "policy" / "adapter_model.safetensors").is_file()
    if method == "dpo" and task != "slf5k":                # these bring pairs of their own
        texts = json.dumps(read_rows(tmp_path / "rows.jsonl"))
        assert all(json.dumps(row[side])[1:-1] in texts for row in rows_of(tmp_path / "run" / "preferences.jsonl")
                   for side in ("chosen", "rejected"))
    if method in ("ppo", "prm_ppo"):
        sample, = rows_of(tmp_path / "run" / "samples.jsonl")
        paid = [t for t, delta in enumerate(sample["delta"]) if delta]
        assert paid[-1:] == [len(sample["delta"]) - 1] if method == "ppo" else paid


@pytest.mark.parametrize("design", [
    ["--reward", "critique"], ["--reward", "graded", "--critique_samples", 2], ["--reward", "end"],
    ["--reward", "true_end"], *(["--reward", "true", "--weighting", weighting] for weighting in WEIGHTINGS)])
def test_every_reward_design_runs_on_real_rows(shared, stories_base, tmp_path, monkeypatch, design):
    task = "kodcode" if "importance_code" in design else "slf5k"
    run_main(monkeypatch, *real_flags(shared, stories_base, task, tmp_path), *design)
    metrics, = rows_of(tmp_path / "run" / "metrics.jsonl")
    sample, = rows_of(tmp_path / "run" / "samples.jsonl")
    assert len(sample["delta"]) == len(sample["tokens"]) and math.isfinite(metrics["policy_loss"])
    if design[1] == "true":
        assert metrics["good"] > 0 and metrics["poor"] > 0 and metrics["critique_tokens"] == 0
    if design[1].endswith("end"):
        assert not any(sample["delta"][:-1])
