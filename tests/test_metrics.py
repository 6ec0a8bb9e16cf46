"""metrics.py against the standard packages, brute force and closed forms.

The package bert-score 0.3.13 (without idf, on torch 2.13.0) computed the figures in
bert_score.json once, from the encoders and texts of this file; its dependencies would more than
double the test packages.
"""

import json
import math
import random
from itertools import combinations, product

import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from helpers import ROOT
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import pre_tokenizers
from transformers import (AutoModel, BertConfig, BertTokenizer, RobertaConfig,
                          RobertaTokenizer)

from data import InputError
from measures.metrics import (BERT_SCORE_LAYERS, answer_logprobs, bert_score, bleu, bleu_counts,
                              bleu_of, bootstrap, corpus, interval, load_encoder,
                              paired_bootstrap, pass_at_k, perplexity, perplexity_of, rouge,
                              share)

WORDS = ("the The a cat CAT cat's sat on mat it's 3.5 1,000 1,000.50 $5 .5 5. -3 2-3 x-y -- … "
         ", . , ! ?! (so) [1] {a} naïve café Ünïcode ß İstanbul \u212a 日本語 привет ١٢ 😀 "
         "U.S. e.g. & &amp; &quot;hi&quot; &lt;b&gt; <skipped> a_b `x` ~ ^ 10% #1 @me "
         "/path/to \\ \" ' \u00a0 \u200b well- \r").split(" ")
LINES = "The cat sat on the mat and the dog lay by the fire, as it had done for years.".split()


def sentence(rng, longest=24):
    """Random words, numbers and punctuation in several scripts; sometimes only white space."""
    u = rng.random()
    if u < 0.08:
        return rng.choice(["", " ", "\n", "...", "\t \n"])
    sample = rng.choices(WORDS if u < 0.6 else WORDS + LINES * 3,
                         k=1 if u < 0.16 else rng.randint(2, longest))
    return "".join(word + rng.choice([" "] * 12 + ["\n", "-\n", "", "  "]) for word in sample)


@pytest.fixture(scope="module")
def pairs():
    """1,000 (prediction, reference) pairs; half of the references are edited predictions."""
    rng = random.Random(5)

    def edited(text):
        words = [word for word in text.split(" ") if rng.random() < 0.7]
        return " ".join([*words, sentence(rng, 4)])

    predictions = [sentence(rng) for _ in range(1000)]
    return [(text, edited(text) if rng.random() < 0.5 else sentence(rng))
            for text in predictions]


# ── ROUGE and BLEU

def test_rouge_is_that_of_rouge_score(pairs):
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    special_cases = [("", ""), ("word", ""), ("", "word"), ("word", "word"), ("日本", "日本")]
    for prediction, reference in pairs + special_cases:
        scores = scorer.score(reference, prediction)
        expected = {name: score.fmeasure for name, score in scores.items()}
        assert rouge(prediction, reference) == pytest.approx(expected, abs=1e-12, rel=0)


def test_bleu_is_that_of_sacrebleu(pairs):
    """Corpora of 1, 2, 7 and 1,000 pairs; with one pair no error can hide in a sum."""
    rng = random.Random(1)
    corpora = [[pair] for pair in pairs] + [pairs]
    corpora += [rng.sample(pairs, size) for size in [2] * 100 + [7] * 50]
    expected = []
    for predictions, references in (zip(*sample) for sample in corpora):
        expected.append(sacrebleu.corpus_bleu(predictions, [references]).score / 100)
    near = pytest.approx(np.array(expected), abs=1e-12, rel=0)
    assert np.array([bleu(*zip(*sample)) for sample in corpora]) == near
    sums = [np.sum([bleu_counts(*pair) for pair in sample], 0) for sample in corpora]
    assert bleu_of(np.array(sums)) == near
    with pytest.raises(ValueError, match="zip"):                # lists of different lengths
        bleu(["a", "b"], ["a"])


# ── BERTScore

@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """A folder with 3-layer encoders: "bert" on characters and "roberta" on bytes.

    The weights are a formula, so that they are the same with every version of torch.
    """
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
    for name, tokenizer, config in (("bert", bert, BertConfig), ("roberta", roberta,
                                                                RobertaConfig)):
        tokenizer.save_pretrained(folder / name)
        encoder = AutoModel.from_config(config(vocab_size=len(tokenizer), **small))
        with torch.no_grad():
            for k, p in enumerate(encoder.parameters()):
                phases = torch.arange(p.numel(), dtype=torch.float64) * (k + 1) * 0.7
                p.copy_(phases.sin().reshape(p.shape) * (0.6 if p.dim() > 1 else 1))
        encoder.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def stored_figures() -> dict:
    """{"layers": of each encoder, "bert", "roberta": {layer: rows of P, R, F1}}."""
    return json.loads((ROOT / "tests" / "bert_score.json").read_text())


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_bert_score_is_that_of_the_package(encoders, pairs, name, stored_figures):
    """Uses the first and the last layer, and texts that are empty, repeated or too long."""
    sample = pairs[:62] + pairs[:5] + [
        ("x " * 90, "a cat " * 60), ("\u200b", "the mat"), ("", "a")]
    encoder, tokenizer, _ = load_encoder(encoders / name)
    for layer, expected in stored_figures[name].items():
        rows = bert_score(*zip(*sample), encoder, tokenizer, int(layer))
        scores = np.array([[*row.values()] for row in rows])         # precision, recall, F1
        assert np.abs(scores - expected).max() < 1e-5
    assert (scores[-1] == 0).all() and scores.std() > 0.05


def test_the_layer_is_known_or_given(encoders, stored_figures):
    encoder, tokenizer, layer = load_encoder(f"{encoders / 'bert'}:2")
    assert layer == 2
    with pytest.raises(InputError, match="bert:x: the layer .x. is not a number"):
        load_encoder(f"{encoders / 'bert'}:x")
    for layer, message in ((None, "layer None"), (4, "layer 4.*to 3"), (-1, "layer -1")):
        with pytest.raises(InputError, match=message):
            bert_score(["a"], ["b"], encoder, tokenizer, layer)
    assert BERT_SCORE_LAYERS == stored_figures["layers"]
    encoder.config._name_or_path = "models/bert-base-uncased/"
    encoder.config.num_hidden_layers = 2
    with pytest.raises(InputError, match="layer 9"):
        bert_score(["a"], ["b"], encoder, tokenizer)
    with pytest.raises(InputError, match="cannot load an encoder from .*nowhere"):
        load_encoder(encoders / "nowhere")


# ── Perplexity

def test_perplexity_is_cross_entropy_of_a_plain_forward(toy_model):  # Table 8
    from model import add_lora, encode_prompt, use_lora
    model, tokenizer = toy_model
    torch.manual_seed(3)
    for tensor in add_lora(model, "policy", target_modules=("q_proj", "v_proj")):
        torch.nn.init.normal_(tensor, std=0.2)
    prompts = ["Sum up the post.", "One", "A much longer prompt than the others are, by far."]
    texts = ["They met in May and parted in June.", "", "Yes."]
    sums = []                              # (nats, tokens) of each adapter and text
    for adapter, (prompt, text) in product((None, "policy"), zip(prompts, texts)):
        x = encode_prompt(tokenizer, prompt)
        y = tokenizer(text, add_special_tokens=False).input_ids
        with torch.no_grad(), use_lora(model, adapter):
            logits = model(torch.tensor([[*x, *y]])).logits[0, len(x) - 1 : -1]
        losses = F.cross_entropy(logits, torch.tensor(y, dtype=torch.long), reduction="none")
        logprobs, = answer_logprobs(model, [(list(x), y)], adapter)
        assert logprobs == pytest.approx((-losses).tolist(), abs=1e-5)
        sums.append((losses.sum().item(), len(y)))
    rows = perplexity(model, tokenizer, prompts, texts)    # one batch, without the adapter
    assert np.array(rows) == pytest.approx(np.array(sums[:3]), abs=1e-4)
    nats, tokens = np.array(rows).sum(0)
    assert corpus(rows, perplexity_of) == pytest.approx(math.exp(nats / tokens))
    assert abs(sums[0][0] - sums[3][0]) > 1e-3, "the adapter has no effect"
    texts[1] = "long " * model.config.max_position_embeddings
    first, too_long, last = perplexity(model, tokenizer, prompts, texts)
    assert too_long is None
    assert np.array([first, last]) == pytest.approx(np.array(rows)[::2], abs=1e-4)


# ── pass@k and intervals

def test_pass_at_k_is_the_share_of_subsets_with_a_pass():
    for n, c, k in ((n, c, k) for n in range(1, 8) for c in range(n + 1)
                    for k in range(1, n + 1)):
        chance = np.mean([*map(any, combinations([True] * c + [False] * (n - c), k))])
        assert pass_at_k(n, c, k) == pytest.approx(chance, abs=1e-12)
    # the product formula of Chen et al.
    product = 1 - math.prod(1 - 100 / i for i in range(10_001 - 7, 10_001))
    assert pass_at_k(10_000, 7, 100) == pytest.approx(product, abs=1e-12)
    for n, c, k in ((2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0), (0, 0, 1)):
        with pytest.raises(InputError, match=f"pass@{k} of {n} samples"):
            pass_at_k(n, c, k)


def test_bootstrap_of_a_mean_is_a_plain_loop():
    """The 10,000 resamples are independent across chunks, which hold 3,333 resamples each."""
    values = np.random.default_rng(3).normal(size=30)
    rng = np.random.default_rng(0)
    means = [values[rng.integers(30, size=30)].mean() for _ in range(10_000)]
    ends = pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=1e-12)
    assert bootstrap(values) == bootstrap(values.tolist()) == ends
    assert corpus(values) == pytest.approx(values.mean())


def test_paired_bootstrap_is_that_of_the_differences():
    rng = np.random.default_rng(3)
    before = rng.normal(scale=10, size=50)
    after = before + rng.normal(0.5, 0.1, size=50)
    assert (paired_bootstrap(before, after, n=500)
            == pytest.approx(bootstrap(after - before, n=500)))
    low, high = paired_bootstrap(before, after)
    # without pairing, the two intervals overlap
    assert 0.4 < low < high < 0.6 and bootstrap(after)[0] < bootstrap(before)[1]
    rows = rng.poisson(20, size=(30, 2)) + 1.0
    low, high = paired_bootstrap(rows, rows * [2, 1], perplexity_of, n=200)
    rng = np.random.default_rng(0)
    sums = [rows[rng.integers(30, size=30)].sum(0) for _ in range(200)]
    differences = [math.exp(2 * a / b) - math.exp(a / b) for a, b in sums]
    assert (low, high) == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])))


def test_a_share_of_0_or_1_has_wilsons_interval():
    """Its ends p solve |p̂ − p| = 1.96 √(p (1 − p) / N); other shares use the bootstrap."""
    for N, hit in product((1, 3, 50, 164), (0, 1)):
        ends = interval([hit] * N, share)
        p = ends[1 - hit]
        assert ends[hit] == corpus([hit] * N, share) == hit
        assert abs(hit - p) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / N))
    # N is the number of rows with a case, not the number of cases
    assert interval([(9, 9), (0, 0), (4, 4)], share) == interval([1, 1], share)
    assert interval([0, 1, 1], share) == bootstrap([0, 1, 1]) and interval([0, 0]) == (0, 0)
    assert interval([], share) is interval([(0, 0)], share) is None


def test_intervals_refuse_what_cannot_be_averaged():
    assert corpus([]) is bootstrap([]) is bootstrap([1.0]) is paired_bootstrap([1], [2]) is None
    assert corpus([(0, 0), (0, 0)]) is None and bootstrap([(0, 0), (0, 0)]) is None
    # one resample of 27 is 0/0 in the first case, and one of 16 in the second
    assert bootstrap([(0, 0), (1, 1), (1, 2)]) == pytest.approx((0.5, 1))
    assert bootstrap([(0, 0), (0, 0), (1, 1), (1, 2)]) is None
    for rows in ([0.5, math.nan], [0.5, None], [0.5, math.inf], [(1, 2), (math.nan, 2)]):
        with pytest.raises(InputError, match="row 2 of the values is"):
            bootstrap(rows)
        with pytest.raises(InputError, match="row 2 of the values is"):
            corpus(rows)
