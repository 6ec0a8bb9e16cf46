"""metrics.py, spans.py and judge.py against standard packages, brute force and hand counts.

The package bert-score 0.3.13 (without idf, on torch 2.13.0) computed bert_score.json once, from
the encoders and texts of this file; its dependencies would double the test packages.
"""

import json
import math
import random
import shutil
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from loopback import loopback

from annotate import Feedback, Span
from data import InputError, read_rows, write_rows
from measures import judge, metrics, spans
from measures.metrics import bleu_counts, bootstrap, corpus, interval, load_encoder
from measures.spans import compare, label_table, words
from model import add_lora, encode_prompt, use_lora

WORDS = ("the The a cat CAT cat's sat on mat it's 3.5 1,000 1,000.50 $5 .5 5. -3 2-3 x-y -- … "
         ", . , ! ?! (so) [1] {a} naïve café Ünïcode ß İstanbul \u212a 日本語 привет ١٢ 😀 "
         "U.S. e.g. & &amp; &quot;hi&quot; &lt;b&gt; <skipped> a_b `x` ~ ^ 10% #1 @me "
         "/path/to \\ \" ' \u00a0 \u200b well- \r").split(" ")
LINES = "The cat sat on the mat and the dog lay by the fire, as it had done for years.".split()


@pytest.fixture(scope="module")
def pairs():
    """1,000 (prediction, reference) pairs; half of the references are edited predictions."""
    rng = random.Random(5)

    def sentence(longest=24):
        u = rng.random()
        if u < 0.08:
            return rng.choice(["", " ", "\n", "...", "\t \n"])
        sample = rng.choices(WORDS if u < 0.6 else WORDS + LINES * 3,
                             k=1 if u < 0.16 else rng.randint(2, longest))
        gaps = [" "] * 12 + ["\n", "-\n", "", "  "]
        return "".join(word + rng.choice(gaps) for word in sample)

    def edited(text):
        kept = [word for word in text.split(" ") if rng.random() < 0.7]
        return " ".join([*kept, sentence(4)])

    predictions = [sentence() for _ in range(1000)]
    return [(text, edited(text) if rng.random() < 0.5 else sentence()) for text in predictions]


# ── metrics.py: ROUGE, BLEU and BERTScore

def test_rouge_is_that_of_rouge_score(pairs):  # Table 2
    from rouge_score.rouge_scorer import RougeScorer
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    for prediction, reference in pairs[:400] + [("", ""), ("word", ""), ("word", "word")]:
        scores = scorer.score(reference, prediction)
        expected = {name: score.fmeasure for name, score in scores.items()}
        assert metrics.rouge(prediction, reference) == pytest.approx(expected, abs=1e-12, rel=0)


def test_bleu_is_that_of_sacrebleu(pairs):  # Table 2
    """Corpora of 1, 4 and 400 pairs; with one pair no error can hide in a sum."""
    import sacrebleu
    corpora = [[pair] for pair in pairs[:300]] + [pairs[i : i + 4] for i in range(30)]
    corpora.append(pairs[:400])
    expected = [sacrebleu.corpus_bleu(predictions, [references]).score / 100
                for predictions, references in (zip(*sample) for sample in corpora)]
    near = pytest.approx(np.array(expected), abs=1e-12, rel=0)
    sums = [np.sum([bleu_counts(*pair) for pair in sample], 0) for sample in corpora]
    assert metrics.bleu_of(np.array(sums)) == near
    assert metrics.corpus([bleu_counts(*pair) for pair in corpora[-1]], metrics.bleu_of) == (
        pytest.approx(expected[-1], abs=1e-12))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """A folder with two encoders. Their weights are a formula, equal in every torch."""
    from tokenizers import pre_tokenizers
    from transformers import (AutoModel, BertConfig, BertTokenizer, RobertaConfig,
                              RobertaTokenizer)
    folder = tmp_path_factory.mktemp("encoders")
    small = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
                 intermediate_size=64, initializer_range=0.5, max_position_embeddings=100)
    letters = [letter for i in range(33, 127) for letter in (chr(i), f"##{chr(i)}")]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    bert = BertTokenizer(vocab=dict(zip(pieces, range(999))), model_max_length=100)
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>",
              *sorted(pre_tokenizers.ByteLevel.alphabet())]
    roberta = RobertaTokenizer(vocab=dict(zip(pieces, range(999))), merges=[],
                               model_max_length=98)
    for name, tokenizer, config in (("bert", bert, BertConfig),
                                    ("roberta", roberta, RobertaConfig)):
        tokenizer.save_pretrained(folder / name)
        encoder = AutoModel.from_config(config(vocab_size=len(tokenizer), **small))
        for k, p in enumerate(encoder.parameters()):
            phases = torch.arange(p.numel(), dtype=torch.float64) * (k + 1) * 0.7
            p.data.copy_(phases.sin().reshape(p.shape) * (0.6 if p.dim() > 1 else 1))
        encoder.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_bert_score_is_that_of_the_package(encoders, pairs, name):  # Table 2
    """Uses the first and the last layer, and texts that are empty, repeated or too long."""
    stored = json.loads((ROOT / "tests" / "bert_score.json").read_text())
    sample = pairs[:62] + pairs[:5] + [
        ("x " * 90, "a cat " * 60), ("\u200b", "the mat"), ("", "a")]
    for layer, expected in stored[name].items():
        encoder = load_encoder(f"{encoders / name}:{layer}")
        rows = metrics.bert_score(*zip(*sample[40:]), *encoder)
        scores = np.array([[*row.values()] for row in rows])         # precision, recall, F1
        assert np.abs(scores - expected[40:]).max() < 1e-5
    assert (scores[-1] == 0).all() and scores.std() > 0.05
    assert metrics.BERT_SCORE_LAYERS == stored["layers"]


def test_the_layer_is_known_or_given_and_no_pickle_is_read(encoders, monkeypatch, tmp_path):
    for layer in (":x", ":4", ""):
        with pytest.raises(InputError, match="no layer .*bert:LAYER with a layer from 0"):
            load_encoder(f"{encoders / 'bert'}{layer}")
    with pytest.raises(InputError, match="cannot load an encoder from .*nowhere"):
        load_encoder(encoders / "nowhere")
    monkeypatch.setitem(metrics.BERT_SCORE_LAYERS, "bert", 2)
    assert load_encoder(encoders / "bert")[2] == 2
    copy = shutil.copytree(encoders / "bert", tmp_path / "bert")
    torch.save({}, copy / "x.bin")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"x": "x.bin"}}))
    with pytest.raises(InputError, match="cannot load .*bert: ValueError: .* is a pickle"):
        load_encoder(copy)


# ── metrics.py: metrics.perplexity, pass@k and intervals

def test_perplexity_is_cross_entropy_of_a_plain_forward(toy_model):  # Table 8
    model, tokenizer = toy_model
    for tensor in add_lora(model, "policy", target_modules=("q_proj", "v_proj")):
        torch.nn.init.normal_(tensor, std=0.2)
    prompts = ["Sum up the post.", "One", "A much longer prompt than the others are, by far."]
    texts = ["They met in May and parted in June.", "", "Yes."]
    sums = []                                              # (nats, tokens) of each text
    for prompt, text in zip(prompts, texts):
        x = encode_prompt(tokenizer, prompt)
        y = tokenizer(text, add_special_tokens=False).input_ids
        with torch.no_grad(), use_lora(model, None):
            logits = model(torch.tensor([[*x, *y]])).logits[0, len(x) - 1 : -1]
        targets = torch.tensor(y, dtype=torch.long)
        losses = F.cross_entropy(logits, targets, reduction="none")
        sums.append((losses.sum().item(), len(y)))
    with use_lora(model, "policy"):
        rows = metrics.perplexity(model, tokenizer, prompts, texts)       # in one batch
    assert np.array(rows) == pytest.approx(np.array(sums), abs=1e-4)
    long = "long " * model.config.max_position_embeddings
    rows = metrics.perplexity(model, tokenizer, [prompts[0], long], [long, "a"])
    room = model.config.max_position_embeddings - len(encode_prompt(tokenizer, prompts[0]))
    assert [tokens for _, tokens in rows] == [room, 0]     # as far as the text fits


def test_the_bootstrap_is_a_plain_loop_over_resamples_of_the_same_rows():
    rows = np.random.default_rng(3).poisson(20, size=(30, 2)) + 1.0
    rng = np.random.default_rng(0)
    samples = [rows[rng.integers(30, size=30)].sum(0) for _ in range(10_000)]
    means, nats = zip(*((a / b, math.exp(2 * a / b) - math.exp(a / b)) for a, b in samples))
    assert bootstrap(rows) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
    ends = metrics.paired_bootstrap(rows, rows * [2, 1], metrics.perplexity_of)
    assert ends == pytest.approx(tuple(np.quantile(nats, [0.025, 0.975])))
    assert corpus(rows[:, 0]) == pytest.approx(rows[:, 0].mean())       # a value is [value, 1]


def test_a_share_of_0_or_1_has_wilsons_interval():
    """Its ends p solve |p̂ − p| = 1.96 √(p (1 − p) / N), for N rows with a case."""
    for N, hit in product((1, 3, 50, 164), (0, 1)):
        ends = interval([hit] * N, metrics.share)
        p = ends[1 - hit]
        assert ends[hit] == corpus([hit] * N, metrics.share) == hit
        assert abs(hit - p) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / N))
    assert interval([(9, 9), (0, 0), (4, 4)], metrics.share) == interval([1, 1], metrics.share)
    assert interval([0, 1, 1], metrics.share) == bootstrap([0, 1, 1])
    assert interval([0, 0]) == (0, 0)                      # a mean, not a share


def test_intervals_refuse_what_cannot_be_averaged():
    assert corpus([]) is bootstrap([1.0]) is interval([], metrics.share) is None
    # one resample of 27 is 0/0 in the first case, and one of 16 in the second
    assert bootstrap([(0, 0), (1, 1), (1, 2)]) == pytest.approx((0.5, 1))
    assert bootstrap([(0, 0), (0, 0), (1, 1), (1, 2)]) is None
    for figure in (corpus, bootstrap):
        with pytest.raises(InputError, match="row 2 of the values is not finite"):
            figure([(1, 2), (math.inf, 2)])


# ── spans.py: scores of critiques

TEXT = "The cat sat on the mat and slept all day long"


def marked(*quotes, label=1):
    return [Span(TEXT.index(q), TEXT.index(q) + len(q), label) for q in quotes]


def counted(gold, good=(), poor=(), text=TEXT):
    return compare(text, words(text), gold, Feedback("c", list(good), list(poor)))


def test_a_hand_counted_response():  # Table 1; Table 6
    gold = marked("The cat", "the mat") + marked("all day", label=-1)
    counts = counted(gold, good=["The cat", "mat and", "a dog"], poor=["sat"])
    rates = {metric: hits / cases for metric, (hits, cases) in counts.items() if cases}
    # Good words: marked are "The cat the mat", predicted "The cat mat and"; they share three.
    assert [rates[f"good_{name}"] for name in ("precision", "recall")] == [0.75] * 2
    assert counts["poor_precision"] == (0, 1) and counts["poor_recall"] == (0, 2)
    assert spans.span_table(counts) == [["good", 2, 3, 1, 1], ["poor", 1, 1, 0, 0]]
    # "the mat" and "mat and" share 3 of the 11 characters of "the mat and".
    assert rates["good_overlap_index"] == pytest.approx((1 + 3 / 11) / 2)
    # The unmatched "a dog" counts as a prediction; 3 of the 6 letters of "mat and" are a tie.
    for metric in ("exact", "near", "agreement"):
        assert rates[f"good_{metric}"] == pytest.approx(1 / 3)
    assert rates["unmatched"] == 0.25 and rates["unparseable"] == 0


def test_near_means_ninety_percent_of_the_longer():  # Table 6; Table 7; Table 16
    text = "!#$%&()*+,-./:;<=>?@"                     # a quote may start or end anywhere
    for n, near in ((18, 1), (17, 0)):
        for gold, quote in ((Span(0, 20, 1), text[:n]), (Span(0, n, 1), text)):
            counts = counted([gold], [quote], text=text)
            assert (counts["good_exact"], counts["good_near"]) == ((0, 1), (near, 1))


def test_pairs_of_spans_against_brute_force():  # Table 6
    """Pairs are one to one, and the best come first."""
    rng = random.Random(1)

    def random_spans(text):
        """Up to six random spans of a text."""
        ends = [sorted(rng.sample(range(len(text) + 1), 2)) for _ in range(rng.randint(0, 6))]
        return [Span(start, end, rng.choice((1, -1))) for start, end in ends]

    def visible(text, span):
        """The characters of the span without white space at its ends."""
        return {i for i in range(span.start, span.end)
                if text[span.start : i + 1].strip() and text[i : span.end].strip()}

    for _ in range(200):
        text = "".join(rng.choices("ab .\n🏠", k=rng.randint(7, 25)))
        gold, predicted = random_spans(text), random_spans(text)
        shares = []
        for marked_span, span in product(gold, predicted):
            a, b = visible(text, marked_span), visible(text, span)
            shares.append(len(a & b) / len(a | b) if a & b else 0)
        indices = [index for index, _ in spans.overlaps(text, gold, predicted)]
        assert len(indices) <= min(len(gold), len(predicted))
        assert indices == sorted(indices, reverse=True)
        assert max(shares, default=0) == max(indices, default=0)


# ── spans.py: the spans of a row, and the paper's tables

def span(start, end, label):
    return {"start": start, "end": end, "label": label}


def row(response="The cat sat on the mat.", good=("cat",), poor=("mat",), **fields):
    """An annotated row in which each quote occurs once."""
    places = [span(response.index(q), response.index(q) + len(q), label)
              for label, quotes in ((1, good), (-1, poor)) for q in quotes]
    return {"id": "r", "prompt": "p", "response": response, "critique": "c",
            "good_spans": list(good), "poor_spans": list(poor), "spans": places,
            "unmatched": [], "ambiguous": 0, **fields}


def test_a_sign_that_no_row_has_gets_no_metrics():
    reply = json.dumps({"textual_feedback": "so", "good_spans": ["cat"], "poor_spans": ["mat"]})
    rows, shares, tables = spans.score_critiques([row(good=())] * 2, [reply, "so"], None, "R_φ")
    assert [(r["reason"] is None, r["reply"]) for r in rows] == [(1, reply), (0, "so")]
    assert shares["poor_exact"] == [(1, 1), (0, 0)] and json.dumps(shares)
    assert not any(name.startswith("good") for name in shares)
    assert [title.split(":")[0] for title, *_ in tables] == ["Table 6", "Table 15, §3.3"]


def test_the_text_of_a_span_must_match_its_offsets():
    rocket = {"id": "r7", "response": "A 🚀 rocket", "spans": [
        span(4, 10, "good") | {"text": "rocket"}, span(0, 1, "poor"), span(0, 3, -1)]}
    assert spans.read_spans(rocket) == [Span(4, 10, 1), Span(0, 1, -1), Span(0, 3, -1)]
    # JavaScript counts the emoji as two characters, so its offsets are off by one.
    for bad in (span(5, 10, 1) | {"text": "rocket"}, [0, 1, 1], span(0, 11, 1), span(1, 1, 1),
                span(-1, 1, 1), span(0, 1, 0), span(0, "1", 1)):
        with pytest.raises(InputError, match="row r7: .* not a valid span"):
            label_table([row(), rocket | {"spans": [bad]}])


def lines(rows):
    """{first cell: the other cells} of Table 15."""
    _, _, cells = label_table(rows)
    return {first: values for first, *values in cells}


def test_table_15_counts_quotes_and_labelled_words():  # Table 15, §3.3
    rows = [row(unmatched=["dog"], good_spans=["cat", "dog"]),
            row(unmatched=["dog", "dog"], poor_spans=["dog", "mat", "dog"], ambiguous=2),
            {"response": "a b", "spans": []}]                    # a row without quotes
    table = lines(rows)
    assert table["ambiguous quotes"] == [2, 3 + 4, pytest.approx(200 / 7)]
    assert table["unmatched quotes"] == [3, 3 + 4, pytest.approx(300 / 7)]
    rows = [row("a b c d e f g h", ["a b", "c"], ["c", "h"]), row("x y", [], ["y"])]
    table = lines(rows)                        # "c" is good and poor, so it counts as 0
    names = "good words", "poor words", "labelled words"
    assert [table[name] for name in names] == [[n, 10, 10.0 * n] for n in (2, 2, 4)]


# ── judge.py

def test_a_side_wins_only_if_both_orders_agree():  # Figure 3
    """A judge that always prefers the first answer gives only ties."""
    cases = [(1.0, 0.5, 0.5, True), (1.0, 1.0, 0.5, True), (0.0, 0.0, 0.5, True),
             (0.5, 0.5, 0.5, False), (0.0, 1.0, 0.0, False), (1.0, 0.0, 1.0, False),
             (1.0, None, None, False), (None, 0.0, None, False)]
    scores = judge.pairwise_scores([{"id": number, "verdict": verdict}
                              for number, case in enumerate(cases) for verdict in case[:2]])
    assert [(row["win"], row["inconsistent"]) for row in scores] == [case[2:] for case in cases]
    assert judge.win_tie_loss(scores) == {"win": 1, "tie": 4, "loss": 1, "inconsistent": 3,
                                    "unjudged": 2}


CASES = [
    ("A is longer, but [[B]] it is. [[B]]", 0.0), ("[[Assistant C]]", 0.5),
    ("<think>[[B]]? No.</think>[[A]]", 1.0), ("[[A]] or [[ answer: a ]]", 1.0),
    ("x[[B]] + f(y)[[C]]: [[A]]", 1.0), ("[[A/B]]", "no verdict"),
    ("[A] [[D]] [[7]]", "no verdict"), ("[[A]] or [[B]]?", "differ"),
    # A verdict that does not end the reply, or that the judge quotes, is not its own.
    ("Neither [[A]] nor another word", "no verdict"),
    ("It says “I win [[A]] here” itself. I choose [[B]]", 0.0),
    ("> [[A]]\nNo, [[B]]", 0.0), ("```\n[[A]]\n```\nNo: [[B]]", 0.0),
    ("It's '[[A]]'. [[B]]", 0.0), ("So:\n```\n[[A]]", "no verdict"),
    # Reasoning without an end is not read; the word alone is no reasoning.
    *[(text, "no verdict") for text in ("<think>so [[A]]", "Ok\n <thinking>\n[[A]]",
                                        "<think>a</think>\n<think>[[A]]")],
    ("Its <think> tag is open. [[B]]", 0.0),
    # The last line may be in quotation marks, as in FastChat's prompt.
    *[(text, 1.0) for text in (
        '"[[A]]"', 'A is better.\n"[[A]]"', 'A\n\nFinal verdict: "[[A]]".', "So.\n`[[A]]`",
        "**A is better.**\n\nMy verdict is:\n\n**“[[A]]”**", 'B says "[[B]]".\n"[[A]]"',
        'Good.\n"Verdict: [[A]]"')],
    ('[[B]] first.\n"[[A]]"', "differ"),
    *[(text, "no verdict") for text in (                 # these quote the answer
        'It ends with\n"[[A]]"', 'It ends with:\n\n"[[A]]"', '**It says:**\n\n"[[A]]"',
        'Its last line is "Verdict: [[A]]"', 'Bad.\n> "[[A]]"', 'Bad.\n```\n"[[A]]"',
        'Bad.\nThe answer: "[[A]]"')]]


def test_verdicts_are_parsed_and_never_guessed(shared):
    """A case: the judge's reply, and the verdict or the reason why there is none."""
    file = shared / "data" / "public_cases" / "verdicts.jsonl"
    public = [(row["reply"], row["right"]) for row in read_rows(file)
              if row["kind"].startswith("pair")]
    assert public
    for text, expected in [*CASES, *public]:
        try:
            verdict = judge.read_verdict({}, text)
        except ValueError as error:
            assert expected is None or str(expected) in str(error), text
        else:
            assert verdict == expected, text


def test_the_prompts_of_a_file_are_filled_in_and_checked(tmp_path):
    def questions_of(prompts):
        write_rows(tmp_path / "prompts.jsonl", [
            {"name": name, "system_prompt": "Be fair.", "prompt_template": template}
            for name, template in prompts.items()])
        config = judge.JudgeConfig(judge_model="tiny", base_url="http://fake/v1",
                                   judge_prompts=str(tmp_path / "prompts.jsonl"))
        row = {"id": 7, "prompt": "Who?"}
        return judge.pairwise_questions([row], ["{x}"], ["Ann"], config), config

    questions, config = questions_of(
        {"pair-v2": "{question}|{answer_a}|{answer_b} {{no field}}"})
    replies = {"Who?|{x}|Ann {no field}": "[[A]]", "Who?|Ann|{x} {no field}": "well"}
    assert [question.messages[1]["content"] for question in questions] == [*replies]
    with loopback(lambda body: replies[body["messages"][1]["content"]]) as server:
        for _ in range(2):
            scores = judge.pairwise_scores(judge.ask_judge(questions, config, tmp_path / "j"))
    assert len(server.requests) == 2 + 1, "only the reply without a verdict is asked again"
    assert scores == [{"id": 7, "win": None, "inconsistent": False}]
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "Be fair."}
    for prompts, message in (({"other": "x"}, "is no prompt named 'pair-v2'"),
                             ({"pair-v2": "{answer_c}"}, "cannot fill in 'answer_c'; .* ")):
        with pytest.raises(InputError, match=message):
            questions_of(prompts)


def test_the_published_prompts_are_read(shared):
    config = judge.JudgeConfig(judge_prompts=shared / "data" / "mt_bench_judge_prompts.jsonl")
    questions = judge.pairwise_questions([{"id": 1, "prompt": "{q}"}], ["a }"], ["b"], config)
    for question, (first, second) in zip(questions, (("a }", "b"), ("b", "a }"))):
        text = question.messages[1]["content"]
        assert f"[The Start of Assistant A's Answer]\n{first}\n" in text
        assert f"[The Start of Assistant B's Answer]\n{second}\n" in text and "{q}" in text
