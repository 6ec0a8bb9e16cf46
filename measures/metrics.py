"""Metrics of text and code, with a confidence interval for each (§4.3, Tables 2, 3 and 8).

    rows = [rouge(p, r)["rougeL"] for p, r in zip(predictions, references)]
    corpus(rows), interval(rows)                            # a mean: 0.29, (0.27, 0.31)
    rows = [bleu_counts(p, r) for p, r in zip(predictions, references)]
    corpus(rows, bleu_of), interval(rows, bleu_of)          # a corpus-level metric
    paired_bootstrap(before, rows, bleu_of)                 # interval of a paired difference

Paper: §4.3, Tables 2, 3 and 8. Shapes: N rows, K counts per row, T tokens, H hidden size.

Up to rounding, the results equal those of rouge-score (no stemmer), sacrebleu (defaults, one
reference; here from 0 to 1) and bert-score. BERTScores are not rescaled by bert-score's
baselines, because these are tables inside that package.

Every metric is computed in the same way: each row yields counts, the counts are summed over
the corpus, and the metric is a function of the sums. For example, a mean is Σ value / Σ 1 and
perplexity is exp(Σ nats / Σ tokens). Resampling the rows then gives each metric an interval.
"""

import math
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from data import InputError, chunks, error_text
from model import (NO_PICKLES, encode_prompt, encode_text, response_hidden,
                   use_lora)
from sampling import context_length, head_weight, pad_batch, token_logprobs

# bert-score's default layers, which its authors chose by correlation with human judgements.
# For any other encoder, the user must name the layer.
BERT_SCORE_LAYERS = {"roberta-large": 17, "roberta-base": 10, "bert-base-uncased": 9,
                     "distilbert-base-uncased": 5, "deberta-xlarge-mnli": 40}


# ── ROUGE (Lin 2004)

def _ngrams(tokens: list[str], n: int) -> Counter:
    return Counter(zip(*(tokens[i:] for i in range(n))))


def _matches(prediction: list[str], reference: list[str], n: int) -> int:
    """Number of n-grams that both texts contain. A repeated n-gram counts as often as it occurs
    in the text that has fewer of it."""
    return (_ngrams(prediction, n) & _ngrams(reference, n)).total()


def _common_subsequence(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence, by dynamic programming with two rows."""
    row = [0] * (len(b) + 1)
    for word_a in a:
        above = row
        row = [0]
        for j, word_b in enumerate(b):
            row.append(above[j] + 1 if word_a == word_b else max(row[j], above[j + 1]))
    return row[-1]


def rouge(prediction: str, reference: str) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L of a text as F1 scores (Table 2).

    A word is a run of a–z and 0–9 in the lowercased text, as in rouge-score. Text in another
    script therefore has no words. A text without words scores 0.
    """
    p = re.findall("[a-z0-9]+", prediction.lower())
    r = re.findall("[a-z0-9]+", reference.lower())
    hits = [_matches(p, r, 1), _matches(p, r, 2), _common_subsequence(p, r)]
    total = len(p) + len(r)                   # F1 = 2 hits / (units of p + units of r)
    return {f"rouge{n}": 2 * hit / max(units, 1)
            for n, hit, units in zip("12L", hits, (total, total - 2, total))}


# ── BLEU (Papineni et al. 2002), with sacrebleu's tokeniser 13a and exponential smoothing

def _words_13a(text: str) -> list[str]:
    """Split a text into words as mteval-v13a does.

    An ASCII punctuation mark is a word of its own, with these exceptions: an apostrophe, a
    hyphen that does not follow a digit, and a . or , between two digits.
    """
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, char in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(entity, char)
    text = re.sub(r"([{-~\[-` -&(-+:-@/])", r" \1 ", f" {text} ")
    text = re.sub(r"([^0-9])([.,])", r"\1 \2 ", text)
    text = re.sub(r"([.,])([^0-9])", r" \1 \2", text)
    return re.sub(r"([0-9])(-)", r"\1 \2 ", text).split()


def bleu_counts(prediction: str, reference: str) -> list[int]:
    """Counts of one row: [words, reference words, hits of 1- to 4-grams, 1- to 4-grams]; [10].

    A hit is an n-gram of the prediction that is also in the reference, counted by `_matches`.
    The last four are the numbers of n-grams in the prediction.
    """
    words = _words_13a(prediction)
    reference_words = _words_13a(reference)
    hits = [_matches(words, reference_words, n) for n in range(1, 5)]
    ngrams = [max(len(words) - n + 1, 0) for n in range(1, 5)]
    return [len(words), len(reference_words), *hits, *ngrams]


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """BLEU from 0 to 1, computed from summed `bleu_counts`: [..., 10] → [...]

    Smoothing is sacrebleu's "exp": of the n-gram orders without hits, the first counts as 1/2
    hit, the second as 1/4, and so on. BLEU is 0 if there are no hits at all, or if no
    prediction has four words.
    """
    words = sums[..., 0]
    reference = sums[..., 1]
    hits = sums[..., 2:6]
    ngrams = sums[..., 6:]
    smoothed = np.where(hits > 0, hits, 0.5 ** np.cumsum(hits == 0, -1))
    precision = smoothed / np.maximum(ngrams, 1)
    brevity = np.minimum(1 - reference / np.maximum(words, 1), 0)
    score = np.exp(brevity + np.log(precision).mean(-1))
    return np.where(hits.any(-1) & ngrams.all(-1), score, 0.0)


# ── BERTScore (Zhang et al. 2020)

def load_encoder(name):
    """Load (encoder, tokenizer, layer) from NAME or NAME:LAYER; NAME is a directory or hub id.

    The weights are loaded as float32, from safetensors files only. layer: index into
    `hidden_states`, where 0 is the embeddings; the default is that of BERT_SCORE_LAYERS. Raises
    InputError if the encoder cannot be loaded or has no such layer.
    """
    path, _, layer = str(name).partition(":")
    layer = layer or str(BERT_SCORE_LAYERS.get(Path(path).name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        with NO_PICKLES:
            encoder = AutoModel.from_pretrained(
                path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot load an encoder from {path}: {error_text(error)}; --encoder "
                         f"needs a Hugging Face directory or hub id with safetensors"
                         ) from error
    last = encoder.config.num_hidden_layers
    if not layer.isdecimal() or int(layer) > last:
        raise InputError(f"--encoder {name}: there is no layer {layer}; write {path}:LAYER "
                         f"with a layer from 0 (the embeddings) to {last}; scores of different "
                         f"layers cannot be compared")
    encoder = encoder.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return encoder, tokenizer, int(layer)


@torch.no_grad()
def bert_score(predictions: list[str], references: list[str], encoder, tokenizer,
               layer: int) -> list[dict[str, float]]:
    """BERTScore {"precision", "recall", "f1"} of each row (Table 2).

    For each token, the cosine similarity to the most similar token of the other text is
    computed. Precision is its mean over the prediction, recall its mean over the reference.
    [CLS] and [SEP] can be the most similar token, but the means leave them out. A negative
    cosine counts as 0; in the bert-score package this is a side effect of padding. A text with
    no other tokens scores 0. encoder, tokenizer, layer: see `load_encoder`. Texts are truncated
    at the tokenizer's model_max_length.
    """
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id], device=encoder.device)

    def embed(text):
        """The unit vectors [T, H] of the tokens, and the mask [T] without [CLS] and [SEP]."""
        batch = tokenizer(text.strip(), truncation=True, return_tensors="pt").to(encoder.device)
        hidden = encoder(**batch, output_hidden_states=True).hidden_states[layer][0]
        return torch.nn.functional.normalize(hidden), ~torch.isin(batch.input_ids[0], ends)

    rows = []
    pairs = [*zip(predictions, references, strict=True)]
    for prediction, reference in tqdm(pairs, "BERTScore", delay=2):
        x, p_words = embed(prediction)
        y, r_words = embed(reference)
        cosine = (x @ y.T).clamp(min=0)                                   # [T, T']
        p = r = f1 = 0.0
        if p_words.any() and r_words.any():
            p = cosine.amax(1)[p_words].mean().item()
            r = cosine.amax(0)[r_words].mean().item()
            f1 = 2 * p * r / max(p + r, 1e-9)
        rows.append({"precision": p, "recall": r, "f1": f1})
    return rows


def reference_scores(texts: list[str], references: list[str],
                     encoder: str | None) -> dict[str, list]:  # Table 2
    """ROUGE, BLEU and, with an encoder, BERTScore: measure → its value for each text.

    For BLEU, the value is `bleu_counts`. All values are None for a text without reference. If
    no text has one, the result is {}.
    """
    if not any(references):
        return {}
    rows = [*map(rouge, texts, references)]
    scores = {name: [row[name] for row in rows] for name in rows[0]}
    scores["BLEU"] = [*map(bleu_counts, texts, references)]
    if encoder:
        rows = bert_score(texts, references, *load_encoder(encoder))
        scores["BERTScore F1"] = [row["f1"] for row in rows]
    return {name: [value if reference else None for value, reference in zip(values, references)]
            for name, values in scores.items()}


# ── Perplexity (Table 8)

def perplexity(model, tokenizer, prompts: list[str], texts: list[str]) -> list[tuple]:
    """(negative log-likelihood in nats, number of tokens) of each text (Table 8).

    The base model without adapter scores each text, given the prompt of the policy. The paper
    does not say what perplexity is conditioned on. `corpus(rows, perplexity_of)` computes the
    perplexity of the corpus. EOS is not scored, because it depends on the length rather than on
    the wording. If prompt and text exceed the context, the end of the text is not scored.
    """
    pairs = []
    for prompt, text in zip(prompts, texts, strict=True):
        x = encode_prompt(tokenizer, prompt)
        room = max(0, context_length(model) - len(x))
        pairs.append((x, encode_text(tokenizer, text)[:room]))
    order = [i for i, (_, y) in enumerate(pairs) if y]
    order.sort(key=lambda i: sum(map(len, pairs[i])))        # similar lengths need less padding
    results = [(0.0, 0)] * len(pairs)
    with torch.inference_mode(), use_lora(model, None):
        for indices in tqdm(chunks(order, 8), "score", delay=2):
            for i, row in zip(indices, answer_logprobs(model, [pairs[i] for i in indices])):
                results[i] = -sum(row.tolist()), len(row)
    return results


def answer_logprobs(model, pairs: list[tuple]) -> tuple[torch.Tensor, ...]:
    """log π(y_t | x, y_<t) in nats of every token of y, with the active adapter.

    pairs: [(x, y)] as token ids → a tensor [T] for each pair.
    """
    batch = pad_batch(*zip(*pairs), model.device)
    _, _, tokens, mask = batch                                  # [B, T]
    is_token = mask.bool()
    hidden = response_hidden(model, *batch)[is_token]           # [N, H]
    logprobs = token_logprobs(hidden, head_weight(model), tokens[is_token])
    return logprobs.split(mask.sum(1).tolist())


def perplexity_of(sums: np.ndarray) -> np.ndarray:
    """exp(Σ nats / Σ tokens): [..., 2] → [...]"""
    return np.exp(ratio(sums))


# ── From counts per row to a metric, its interval and a table

def ratio(sums: np.ndarray) -> np.ndarray:
    """The mean, Σ value / Σ 1: [..., 2] → [...]; NaN for 0/0."""
    return sums[..., 0] / sums[..., 1]


def share(sums: np.ndarray) -> np.ndarray:
    """Σ hits / Σ cases, such as accuracy or recall: [..., 2] → [...]; NaN for 0/0."""
    return ratio(sums)


def _counts(rows) -> np.ndarray:
    """The rows as an array of counts [N, K]. A plain value counts as [value, 1]."""
    counts = np.array(rows, dtype=np.float64)
    if counts.ndim == 1:
        counts = np.stack([counts, np.ones_like(counts)], 1)
    is_finite = np.isfinite(counts).all(1)
    if not is_finite.all():
        raise InputError(f"row {is_finite.argmin() + 1} of the values is not finite; score the "
                         f"row again, or remove it from all runs that you compare")
    return counts


@np.errstate(divide="ignore", invalid="ignore")       # 0/0 gives NaN, which is handled below
def corpus(rows, figure=ratio) -> float | None:
    """The metric of the whole corpus; None if it is 0/0 or there are no rows.

    rows: values [N] or counts [N, K]. figure: function from summed counts to the metric. Raises
    InputError, which names the row, if a value is NaN or infinite.
    """
    value = float(figure(_counts(rows).sum(0))) if len(rows) else math.nan
    return None if math.isnan(value) else value


@np.errstate(divide="ignore", invalid="ignore")
def bootstrap(rows, figure=ratio) -> tuple | None:
    """The 95 % bootstrap interval of `corpus(rows, figure)` (Efron 1979).

    Its ends are percentiles over 10,000 samples of N rows, drawn with replacement. figure maps
    sums [..., K] to [...]. Samples in which the metric is 0/0 are left out. The result is None
    if these are more than 5 % of the samples, or if there are fewer than two rows.
    """
    counts = _counts(rows)
    N = len(counts)
    if N < 2:
        return None
    rng = np.random.default_rng(0)
    sums = [counts[rng.integers(N, size=(100, N))].sum(1) for _ in range(100)]
    figures = figure(np.concatenate(sums))
    defined = figures[~np.isnan(figures)]
    if len(defined) < 9_500:
        return None
    return tuple(np.quantile(defined, [0.025, 0.975]).tolist())


def interval(rows, figure=ratio) -> tuple | None:
    """The 95 % interval of `corpus(rows, figure)`, by bootstrap or by Wilson (1927).

    Wilson's interval is used for a share of 0 or 1, where all bootstrap samples agree and their
    interval has no width. It counts each row with cases as one case, because the cases of one
    row depend on each other.
    """
    value = corpus(rows, figure)
    if figure is not share or value not in (0, 1):
        return bootstrap(rows, figure)
    N = np.count_nonzero(_counts(rows)[:, 1])
    width = 1.96**2 / (N + 1.96**2)
    return (1 - width, 1.0) if value else (0.0, width)


def paired_bootstrap(before, after, figure) -> tuple | None:
    """The 95 % interval of figure(after) − figure(before).

    Each sample has the same rows on both sides, so that easy and hard rows do not add variance.
    """
    before = _counts(before)
    K = before.shape[-1]
    return bootstrap(np.hstack([before, _counts(after)]),
                     lambda sums: figure(sums[..., K:]) - figure(sums[..., :K]))


def table_lines(counts: dict[str, dict[str, list]], units: dict) -> list[dict]:
    """A line {measure, unit, rows, before: [value, low, high], after, difference} per measure.

    A value is None if its denominator is 0. `difference` needs both sides. counts: side →
    measure → counts of each row. units: measure up to its comma → (unit, function from summed
    counts to the value).
    """
    lines = []
    for key in dict.fromkeys(chain(*counts.values())):
        unit, figure = units.get(key.partition(",")[0], ("↑", share))
        sides = {name: by_key[key] for name, by_key in counts.items() if by_key.get(key)}
        rows = [row for row in zip(*sides.values()) if None not in row]   # scored on both sides
        line = {"measure": key, "unit": unit, "rows": len(rows)}
        for name, values in zip(sides, zip(*rows)):
            line[name] = [corpus(values, figure), *(interval(values, figure) or (None, None))]
        if rows and len(sides) == 2:
            old = line["before"][0]
            new = line["after"][0]
            change = None if None in (old, new) else new - old
            ends = paired_bootstrap(*zip(*rows), figure) or (None, None)
            line["difference"] = [change, *ends]
        lines.append(line)
    return lines


def cells(lines: list[dict]) -> tuple[list[str], list[list]]:
    """The header and the rows of the printed table."""
    def cell(value):
        if not isinstance(value, list):
            return value
        value, *ends = ("–" if x is None else f"{x:z.3f}" for x in value)
        return f"{value} [{', '.join(ends)}]"

    header = max(lines, key=len)
    return [*header], [[cell(line.get(name)) for name in header] for line in lines]
