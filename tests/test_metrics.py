"""metrics.py against the tools that papers use, against brute force
and against closed forms."""

import json
import math
import random
from itertools import combinations

import bert_score as bert_score_package
import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from bert_score.utils import model2layers
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (BertConfig, BertModel, BertTokenizer, RobertaConfig, RobertaModel,
                          RobertaTokenizer)

from data import InputError
from measures.metrics import (BERT_SCORE_LAYERS, answer_logprobs, bert_score, bleu, bleu_counts,
                              bleu_of, bootstrap, corpus, interval, load_encoder,
                              paired_bootstrap, pass_at_k, perplexity, perplexity_of, ratio,
                              rouge, share)

WORDS = ("the The a cat CAT cat's sat on mat it's 3.5 1,000 1,000.50 $5 .5 5. -3 2-3 x-y -- … "
         ", . , ! ?! (so) [1] {a} naïve café Ünïcode ß İstanbul \u212a 日本語 привет ١٢ 😀 U.S. "
         "e.g. & &amp; &quot;hi&quot; &lt;b&gt; <skipped> a_b `x` ~ ^ 10% #1 @me /path/to \\ "
         "\" ' \u00a0 \u200b well- \r").split(" ")
LINES = "The cat sat on the mat and the dog lay by the fire, as it had done for years.".split()


def sentence(rng, longest=24):
    """Words, punctuation, numbers, scripts;
    now and then nothing, one word, a line break or mere space."""
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(["", " ", "\n", "...", "\t \n"])
    chosen = rng.choices(WORDS if kind < 0.6 else WORDS + LINES * 3,
                         k=1 if kind < 0.16 else rng.randint(2, longest))
    return "".join(word + rng.choice([" "] * 12 + ["\n", "-\n", "", "  "]) for word in chosen)


@pytest.fixture(scope="module")
def pairs():
    """1,000 pairs; half of the references are their prediction with some words taken out
    and others put in."""
    rng, out = random.Random(5), []
    for _ in range(1000):
        prediction = sentence(rng)
        kept = [word for word in prediction.split(" ")
                if rng.random() < 0.7] + [sentence(rng, 4)]
        out.append((prediction, " ".join(kept) if rng.random() < 0.5 else sentence(rng)))
    return out


@pytest.fixture(scope="module")
def real_pairs(shared):
    rows = [json.loads(line)
            for line in (shared / "data" / "slf5k.jsonl").read_text().splitlines()]
    assert len(rows) == 25
    return [(row["summary_prompt"].partition(" Text: ")[2][:400], row["ideal_human_summary"])
            for row in rows]


# ── ROUGE and BLEU

def test_rouge_is_that_of_rouge_score(pairs, real_pairs):
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    odd = [("", ""), ("word", ""), ("", "word"), ("word", "word"), ("日本", "日本")]
    for prediction, reference in pairs + real_pairs + odd:
        theirs = {name: score.fmeasure
                  for name, score in scorer.score(reference, prediction).items()}
        assert rouge(prediction, reference) == pytest.approx(theirs, abs=1e-12, rel=0)


def test_bleu_is_that_of_sacrebleu(pairs, real_pairs):
    """Each pair is a corpus of its own, so no row's error hides in the sum;
    then larger ones."""
    rng = random.Random(1)
    corpora = [[pair] for pair in pairs] + [real_pairs, pairs]
    corpora += [rng.sample(pairs, size) for size in [2] * 100 + [7] * 50]
    for chosen in corpora:
        predictions, references = map(list, zip(*chosen))
        theirs = sacrebleu.corpus_bleu(predictions, [references]).score / 100
        assert bleu(predictions, references) == pytest.approx(theirs, abs=1e-12, rel=0), chosen


def test_texts_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="zip"):
        bleu(["a", "b"], ["a"])


# ── BERTScore

@pytest.fixture(scope="module")
def encoders(tmp_path_factory, pairs):
    """Directories of two random encoders with tokenizers trained on the pairs:
    BERT's kind and RoBERTa's, 3 layers."""
    torch.manual_seed(0)
    texts, folder = ([text for pair in pairs for text in pair],
                     tmp_path_factory.mktemp("encoders"))
    small = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
                 intermediate_size=64, initializer_range=0.5)
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    BertTokenizer(vocab=pieces.get_vocab(),
                  model_max_length=40).save_pretrained(folder / "bert")
    BertModel(BertConfig(vocab_size=300, max_position_embeddings=40,
                         **small)).save_pretrained(folder / "bert")
    merged = Tokenizer(models.BPE())
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    merged.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False,
                                   initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe = json.loads(merged.to_str())["model"]
    RobertaTokenizer(vocab=bpe["vocab"], merges=[tuple(pair) for pair in bpe["merges"]],
                     model_max_length=38).save_pretrained(folder / "roberta")
    RobertaModel(RobertaConfig(vocab_size=400, max_position_embeddings=40,
                               **small)).save_pretrained(folder / "roberta")
    return folder


@pytest.fixture()
def package(monkeypatch):
    """bert-score, where it asks for a method that transformers 5 took away
    to encode an empty text."""
    for kind in (BertTokenizer, RobertaTokenizer):
        monkeypatch.setattr(kind, "build_inputs_with_special_tokens",
                            lambda self, ids: self.encode(""), raising=False)
    return lambda pairs, path, **options: torch.stack(bert_score_package.score(
        *map(list, zip(*pairs)), model_type=str(path), device="cpu", nthreads=0,
        **options), 1).tolist()


def rows_of(scores):
    return np.array([[row["precision"], row["recall"], row["f1"]] for row in scores])


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_bert_score_is_that_of_the_package(encoders, package, pairs, name):
    """Empty, repeated, too long texts among them; the first and the last layer;
    a smaller batch."""
    some = pairs[:62] + pairs[:5] + [
        ("x " * 90, "a cat " * 60), ("\u200b", "the mat"), ("", "a")]
    encoder, tokenizer, _ = load_encoder(encoders / name)
    for layer in (0, 3):
        ours = rows_of(bert_score(*map(list, zip(*some)), encoder, tokenizer, layer))
        theirs = np.array(package(some, encoders / name, num_layers=layer))
        assert np.abs(ours - theirs).max() < 1e-5
    assert (ours[-1] == 0).all() and ours.std() > 0.05


def test_the_layer_is_known_or_given(encoders):
    encoder, tokenizer, layer = load_encoder(f"{encoders / 'bert'}:2")
    assert layer == 2
    with pytest.raises(InputError, match="bert:x: what follows the colon is no layer"):
        load_encoder(f"{encoders / 'bert'}:x")
    for layer, said in ((None, "layer None"), (4, "layer 4.*to 3"), (-1, "layer -1")):
        with pytest.raises(InputError, match=said):
            bert_score(["a"], ["b"], encoder, tokenizer, layer)
    packages = {name.rpartition("/")[2]: layer for name, layer in model2layers.items()}
    assert BERT_SCORE_LAYERS == {name: packages[name] for name in BERT_SCORE_LAYERS}
    encoder.config._name_or_path, encoder.config.num_hidden_layers = (
        "models/bert-base-uncased/", 2)
    with pytest.raises(InputError, match="layer 9"):
        bert_score(["a"], ["b"], encoder, tokenizer)


def test_an_encoder_that_is_none_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot load an encoder from .*nowhere"):
        load_encoder(tmp_path / "nowhere")


# ── Perplexity

def test_perplexity_is_cross_entropy_of_a_plain_forward(toy_model):  # Table 8
    from model import add_lora, encode_prompt, use_lora
    model, tokenizer = toy_model
    torch.manual_seed(3)
    for tensor in add_lora(model, "policy", target_modules=("q_proj", "v_proj")):
        torch.nn.init.normal_(tensor, std=0.2)
    prompts = ["Sum up the post.", "One", "A much longer prompt than the others are, by far."]
    texts = ["They met in May and parted in June.", "", "Yes."]
    seen = []
    for adapter in (None, "policy"):
        for prompt, text in zip(prompts, texts):
            ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids,
                               dtype=torch.long)
            x = encode_prompt(tokenizer, prompt)
            with torch.no_grad(), use_lora(model, adapter):
                logits = model(
                    torch.cat([torch.tensor(x), ids])[None]).logits[0, len(x) - 1 : -1]
            each = F.cross_entropy(logits, ids, reduction="none")
            scored, = answer_logprobs(model, [(list(x), ids.tolist())], adapter)
            assert scored == pytest.approx((-each).tolist(), abs=1e-5)
            seen.append((each.sum().item(), len(ids)))
    rows = perplexity(model, tokenizer, prompts, texts)  # in one batch, the bare base
    assert np.array(rows) == pytest.approx(np.array(seen[:3]), abs=1e-4)
    total = np.array(rows).sum(0)
    assert corpus(rows, perplexity_of) == pytest.approx(math.exp(total[0] / total[1]))
    assert abs(seen[0][0] - seen[3][0]) > 1e-3


def test_perplexity_names_the_row_that_does_not_fit(toy_model):
    model, tokenizer = toy_model
    with pytest.raises(InputError, match="row 2: prompt and text are .* the model's context"):
        perplexity(model, tokenizer, ["a", "b"],
                   ["short", "long " * model.config.max_position_embeddings])


# ── pass@k and intervals

def test_pass_at_k_is_the_share_of_subsets_with_a_pass():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                assert (pass_at_k(n, c, k)
                        == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12))
    # Chen et al.'s own product
    product = 1 - math.prod(1 - 100 / i for i in range(10_001 - 7, 10_001))
    assert pass_at_k(10_000, 7, 100) == pytest.approx(product, abs=1e-12)
    for n, c, k in ((2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0), (0, 0, 1)):
        with pytest.raises(InputError, match=f"pass@{k} of {n} samples"):
            pass_at_k(n, c, k)


def test_bootstrap_of_a_mean_is_a_plain_loop():
    values, rng = np.random.default_rng(3).normal(size=30), np.random.default_rng(0)
    means = [values[rng.integers(30, size=30)].mean() for _ in range(400)]
    low, high = bootstrap(values, n=400)
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
    assert corpus(values) == pytest.approx(values.mean())
    assert bootstrap(values, n=400) == bootstrap(values.tolist(), n=400)


def test_bootstrap_of_bleu_scores_the_drawn_rows(pairs):
    rows, rng = ([(p, r) for p, r in pairs if p.strip() and r.strip()][:40],
                 np.random.default_rng(0))
    counts = [bleu_counts(*row) for row in rows]
    drawn = [list(map(list, zip(*(rows[i] for i in rng.integers(40, size=40)))))
             for _ in range(100)]
    scores = [sacrebleu.corpus_bleu(p, [r]).score / 100 for p, r in drawn]
    assert (bootstrap(counts, bleu_of, n=100)
            == pytest.approx(tuple(np.quantile(scores, [0.025, 0.975])), abs=1e-12))


def test_bootstrap_of_a_ratio_draws_rows_and_not_cases():
    rows = [(9, 10)] * 20 + [(1, 10)] * 20  # 400 cases, but they hang together in 40 rows
    low, high = bootstrap(rows, ratio)
    assert ((high - low) / 2 == pytest.approx(1.96 * 0.4 / math.sqrt(40), rel=0.1)
            and corpus(rows) == pytest.approx(0.5))


def test_paired_bootstrap_is_that_of_the_differences():
    rng = np.random.default_rng(3)
    before = rng.normal(scale=10, size=50)
    after = before + rng.normal(0.5, 0.1, size=50)
    assert (paired_bootstrap(before, after, n=500)
            == pytest.approx(bootstrap(after - before, n=500)))
    low, high = paired_bootstrap(before, after)
    # apart only when paired
    assert 0.4 < low < high < 0.6 and bootstrap(after)[0] < bootstrap(before)[1]
    rows = rng.poisson(20, size=(30, 2)) + 1.0
    low, high = paired_bootstrap(rows, rows * [2, 1], perplexity_of, n=200)
    drawn = np.random.default_rng(0)
    sums = [rows[drawn.integers(30, size=30)].sum(0) for _ in range(200)]
    differences = [math.exp(2 * a / b) - math.exp(a / b) for a, b in sums]
    assert (low, high) == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])))


def test_a_share_of_0_or_1_has_wilsons_interval():
    """Its ends p solve |p̂ − p| = 1.96 √(p (1 − p) / N); within them the bootstrap is asked."""
    for N in (1, 3, 50, 164):
        for p, end in ((0, 1), (1, 0)):
            found = interval([p] * N, share)
            assert found[p] == p and corpus([p] * N, share) == p
            assert (abs(p - found[end])
                    == pytest.approx(1.96 * math.sqrt(found[end] * (1 - found[end]) / N)))
    # a row is a case
    assert interval([(9, 9), (0, 0), (4, 4)], share) == interval([1, 1], share)
    assert interval([0, 1, 1], share) == bootstrap([0, 1, 1]) and interval([0, 0]) == (0, 0)
    assert interval([], share) is interval([(0, 0)], share) is None


def test_intervals_refuse_what_cannot_be_averaged():
    assert corpus([]) is bootstrap([]) is bootstrap([1.0]) is paired_bootstrap([1], [2]) is None
    assert corpus([(0, 0), (0, 0)]) is None and bootstrap([(0, 0), (0, 0)]) is None
    # 0/0 in one draw of 27
    assert bootstrap([(0, 0), (1, 1), (1, 2)]) == pytest.approx((0.5, 1))
    assert bootstrap([(0, 0), (0, 0), (1, 1), (1, 2)]) is None  # in one of 16
    for rows in ([0.5, math.nan], [0.5, None], [0.5, math.inf], [(1, 2), (math.nan, 2)]):
        with pytest.raises(InputError, match="row 2 of the values is"):
            bootstrap(rows)
        with pytest.raises(InputError, match="row 2 of the values is"):
            corpus(rows)
