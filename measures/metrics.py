"""Measures of texts and of code, and an interval for each figure (§4.3, Tables 2, 3 and 8).

    rows = [rouge(p, r)["rougeL"] for p, r in zip(predictions, references)]
    corpus(rows), interval(rows)                            # a mean: 0.29, (0.27, 0.31)
    rows = [bleu_counts(p, r) for p, r in zip(predictions, references)]
    corpus(rows, bleu_of), interval(rows, bleu_of)          # a figure of the whole corpus
    paired_bootstrap(before, rows, bleu_of)                 # a difference, row by row

Paper: §4.3, Tables 2, 3 and 8. Shapes: N rows, K counts of each, T tokens, H hidden units.

The numbers are those of rouge-score (no stemmer), sacrebleu (its defaults, one reference) and
bert-score (no rescaling by baselines, which are tables of the package), to rounding. One idea
serves every figure: a row gives counts, the corpus is their sum, and the figure a function of
that sum: a mean is Σ value / Σ 1, perplexity exp(Σ nats / Σ tokens). So whatever is reported
has an interval, by drawing rows again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from reprlib import repr as shown

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from data import InputError, chunks
from model import encode_prompt, response_hidden, use_lora
from sampling import context_length, head_weight, pad_batch, token_logprobs

# The layer that bert-score's authors found to agree best with people; no other has a default.
BERT_SCORE_LAYERS = {"roberta-large": 17, "roberta-base": 10, "bert-base-uncased": 9,
                     "distilbert-base-uncased": 5, "deberta-xlarge-mnli": 40}


# ── ROUGE (Lin 2004)

def _ngrams(tokens: list[str], n: int) -> Counter:
    return Counter(zip(*(tokens[i:] for i in range(n))))


def _common_subsequence(a: list[str], b: list[str]) -> int:
    """The length, by the usual table, of which one row is kept."""
    row = [0] * (len(b) + 1)
    for word in a:
        above, row = row, [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if word == other else max(row[j], above[j + 1]))
    return row[-1]


def rouge(prediction: str, reference: str) -> dict[str, float]:
    """F1 of common words, word pairs and the longest common subsequence (Table 2).

    Words are runs of a–z and 0–9 in lower case, as in rouge-score: no other script has any. A
    text without words scores 0.
    """
    p, r = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, reference))
    hits = [(_ngrams(p, n) & _ngrams(r, n)).total() for n in (1, 2)]
    hits.append(_common_subsequence(p, r))
    total = len(p) + len(r)                   # F1 is twice the hits over all there are
    return {f"rouge{n}": 2 * hit / max(among, 1)
            for n, hit, among in zip("12L", hits, (total, total - 2, total))}


# ── BLEU (Papineni et al. 2002), with sacrebleu's tokeniser 13a and exponential smoothing

def _words_13a(text: str) -> list[str]:
    """mteval-v13a: ASCII punctuation stands alone, but full stop and comma inside a number."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, char in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(entity, char)
    text = re.sub(r"([{-~\[-` -&(-+:-@/])", r" \1 ", f" {text} ")
    text = re.sub(r"([^0-9])([.,])", r"\1 \2 ", text)
    text = re.sub(r"([.,])([^0-9])", r" \1 \2", text)
    return re.sub(r"([0-9])(-)", r"\1 \2 ", text).split()


def bleu_counts(prediction: str, reference: str) -> list[int]:
    """What a row gives: [words, words of the reference, hits × 4, n-grams × 4]."""
    words, truth = _words_13a(prediction), _words_13a(reference)
    hits = [(_ngrams(words, n) & _ngrams(truth, n)).total() for n in range(1, 5)]
    ngrams = [max(len(words) - n + 1, 0) for n in range(1, 5)]
    return [len(words), len(truth), *hits, *ngrams]


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """BLEU, 0–1, of summed `bleu_counts`: [..., 10] → [...]

    The k-th order without a hit counts as 1/2^k of one (sacrebleu's "exp"); 0 without any hit,
    or without a run of four words.
    """
    words, reference, hits, ngrams = sums[..., 0], sums[..., 1], sums[..., 2:6], sums[..., 6:]
    smoothed = np.where(hits > 0, hits, 0.5 ** np.cumsum(hits == 0, -1))
    precision = smoothed / np.maximum(ngrams, 1)
    brevity = np.minimum(1 - reference / np.maximum(words, 1), 0)
    score = np.exp(brevity + np.log(precision).mean(-1))
    return np.where(hits.any(-1) & ngrams.all(-1), score, 0.0)


def bleu(predictions: list[str], references: list[str]) -> float:
    """Corpus BLEU, 0–1 (Table 2)."""
    pairs = zip(predictions, references, strict=True)
    return corpus([bleu_counts(*pair) for pair in pairs], bleu_of)


# ── BERTScore (Zhang et al. 2020)

def load_encoder(name):
    """(encoder, tokenizer, layer) of NAME or NAME:LAYER, a directory or hub id; float32, from
    safetensors alone. layer: as `bert_score` takes it."""
    path, colon, layer = str(name).partition(":")
    if colon and not layer.isdecimal():
        raise InputError(f"--encoder {name}: what follows the colon is no layer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        encoder = AutoModel.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"cannot load an encoder from {path}: {reason} (a directory in "
                         f"Hugging Face format, or a hub id, with safetensors)") from error
    encoder = encoder.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return encoder, tokenizer, int(layer) if colon else None


def bert_score(predictions: list[str], references: list[str], encoder, tokenizer,
               layer: int | None = None) -> list[dict[str, float]]:
    """One {"precision", "recall", "f1"} per row: each token beside the most like of the other
    text (Table 2); [CLS] and [SEP] may be that, and have no mean of their own.

    layer: of `hidden_states`, 0 are the embeddings; None where BERT_SCORE_LAYERS has the
    encoder. A text is cut at the tokenizer's model_max_length; one without words scores 0. A
    cosine below 0 counts as 0, as beside padding in the package. Raises InputError where no
    layer is known.
    """
    layer, rows = _known_layer(encoder, layer), []
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id], device=encoder.device)

    def embed(texts):
        """The direction [T, H] of each token of each text, and whether it is a word's [T]."""
        batch = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
        batch = batch.to(encoder.device)
        hidden = encoder(**batch, output_hidden_states=True).hidden_states[layer]
        units = torch.nn.functional.normalize(hidden, dim=-1)
        for ids, unit, mask in zip(batch.input_ids, units, batch.attention_mask.bool()):
            yield unit[mask], ~torch.isin(ids[mask], ends)

    pairs = [(p.strip(), r.strip()) for p, r in zip(predictions, references, strict=True)]
    for texts in chunks(pairs, 64):
        with torch.no_grad():
            for (x, p_words), (y, r_words) in zip(*map(embed, zip(*texts))):
                like = (x @ y.T).clamp(min=0)                             # [T, T']
                best = like.amax(1)[p_words], like.amax(0)[r_words]
                known = all(map(len, best))
                p, r = (one.mean().item() if known else 0.0 for one in best)
                f1 = 2 * p * r / (p + r) if p + r else 0.0
                rows.append({"precision": p, "recall": r, "f1": f1})
    return rows


def _known_layer(encoder, layer: int | None) -> int:
    name, last = str(encoder.config._name_or_path), encoder.config.num_hidden_layers
    layer = BERT_SCORE_LAYERS.get(name.rstrip("/").split("/")[-1]) if layer is None else layer
    if layer is None or not 0 <= layer <= last:
        raise InputError(f"BERTScore with {name}: layer {layer}; there are 0 (the embeddings) "
                         f"to {last}: say which (NAME:LAYER), scores of different layers do "
                         f"not compare")
    return layer


# ── Perplexity (Table 8) and pass@k (Table 3)

def perplexity(model, tokenizer, prompts: list[str],
               texts: list[str]) -> list[tuple[float, int]]:
    """(nats, tokens) of each text under the bare base, given its prompt as the policy answers
    it (Table 8, which does not say what is given); the perplexity of all is
    `corpus(rows, perplexity_of)`.

    EOS is not scored: it is about the length, not the wording. An empty text gives (0.0, 0).
    Raises InputError where a row does not fit the context.
    """
    pairs = [(encode_prompt(tokenizer, x), tokenizer(y, add_special_tokens=False).input_ids)
             for x, y in zip(prompts, texts, strict=True)]
    longest, most = context_length(model), [len(x) + len(y) for x, y in pairs]
    if max(most) > longest:
        raise InputError(f"row {np.argmax(most) + 1}: prompt and text are {max(most)} tokens, "
                         f"the model's context is {longest}: shorten or drop the row")
    return [(-sum(logprobs) or 0.0, len(logprobs))
            for logprobs in answer_logprobs(model, pairs)]


def answer_logprobs(model, pairs: list[tuple], adapter: str | None = None, batch_size: int = 8
                    ) -> list[list[float]]:
    """log π(y_t | x, y_<t) in nats of every token of each pair (x, y) of ids, [T] for T tokens.

    adapter: a loaded adapter's name, None the bare base.
    """
    order = [i for i, (_, y) in enumerate(pairs) if y]
    order.sort(key=lambda i: sum(map(len, pairs[i])))           # of like lengths: less padding
    found: list[list[float]] = [[] for _ in pairs]
    with torch.inference_mode(), use_lora(model, adapter):
        for at in tqdm(range(0, len(order), batch_size), desc="score", delay=2):
            part = order[at : at + batch_size]
            batch = pad_batch(*zip(*(pairs[i] for i in part)), model.device)
            y, mask = batch[2], batch[3].bool()
            hidden = response_hidden(model, *batch)[mask]       # [N, H]
            logprobs = token_logprobs(hidden, head_weight(model), y[mask])
            for i, own in zip(part, logprobs.split(mask.sum(1).tolist())):
                found[i] = own.tolist()
    return found


def perplexity_of(sums: np.ndarray) -> np.ndarray:
    """exp(Σ nats / Σ tokens): [..., 2] → [...]"""
    return np.exp(sums[..., 0] / sums[..., 1])


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k samples passes, where c of n did (Table 3): 1 − C(n−c, k) /
    C(n, k) (Chen et al. 2021). Raises InputError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise InputError(f"pass@{k} of {n} samples, {c} passed: needed are 1 ≤ k ≤ samples and "
                         f"0 ≤ passed ≤ samples")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


# ── Rows → a figure and its interval

def ratio(sums: np.ndarray) -> np.ndarray:
    """Σ value / Σ 1: a mean. [..., 2] → [...], NaN for 0/0."""
    return sums[..., 0] / sums[..., 1]


def share(sums: np.ndarray) -> np.ndarray:
    """Σ hits / Σ cases: an accuracy, a precision, a recall. [..., 2] → [...], NaN for 0/0."""
    return ratio(sums)


def _counts(rows) -> np.ndarray:
    """Rows of K counts, [N, K]; plain values become [value, 1]."""
    counts = np.array(rows, dtype=np.float64)
    counts = np.stack([counts, np.ones_like(counts)], 1) if counts.ndim == 1 else counts
    for row in np.argwhere(~np.isfinite(counts))[:1, 0]:
        raise InputError(f"row {row + 1} of the values is {shown(rows[row])}, so nothing holds "
                         f"of all rows: score it, or leave it out of all that is compared")
    return counts


@np.errstate(divide="ignore", invalid="ignore")       # 0/0 is NaN, which is looked for
def corpus(rows, figure=ratio) -> float | None:
    """The figure of the summed rows: values [N] or counts [N, K]; None where it is 0/0.

    Raises InputError for NaN, naming the row.
    """
    value = float(figure(_counts(rows).sum(0))) if len(rows) else math.nan
    return None if math.isnan(value) else value


@np.errstate(divide="ignore", invalid="ignore")
def bootstrap(rows, figure=ratio, n: int = 10_000) -> tuple[float, float] | None:
    """The 95 % interval of `corpus(rows, figure)`: percentiles over n draws of as many rows
    with replacement (Efron 1979).

    figure: sums [..., K] → [...]. Draws where it is 0/0 are left out; None where these are more
    than the 5 % that an interval leaves out anyway, and for fewer than two rows.
    """
    counts, rng = _counts(rows), np.random.default_rng(0)
    if (N := len(counts)) < 2:
        return None
    sums, most = [], max(1, 10**5 // N)                   # draws at once: few fit a cache
    for first in range(0, n, most):
        draws = rng.integers(N, size=(min(most, n - first), N))
        places = draws + N * np.arange(len(draws))[:, None]
        often = np.bincount(places.ravel(), minlength=draws.size)     # how often each row
        sums.append(often.reshape(draws.shape) @ counts)
    figures = figure(np.concatenate(sums))
    defined = figures[~np.isnan(figures)]
    if len(defined) < 0.95 * n:
        return None
    return tuple(np.quantile(defined, [0.025, 0.975]).tolist())


def interval(rows, figure=ratio) -> tuple[float, float] | None:
    """The bootstrap's; Wilson's (1927) of a share that is 0 or 1, where all draws are the same.

    A row is one case for it, however many it counts: they hang together.
    """
    value = corpus(rows, figure)
    if figure is not share or value not in (0, 1):
        return bootstrap(rows, figure)
    N = np.count_nonzero(_counts(rows)[:, 1])
    room = 1.96**2 / (N + 1.96**2)
    return (1 - room, 1.0) if value else (0.0, room)


def paired_bootstrap(before, after, figure=ratio,
                     n: int = 10_000) -> tuple[float, float] | None:
    """The interval of figure(after) − figure(before), the same rows drawn for both, so that
    hard rows cancel."""
    before, after = _counts(before), _counts(after)
    K = before.shape[-1]
    return bootstrap(np.hstack([before, after]),
                     lambda sums: figure(sums[..., K:]) - figure(sums[..., :K]), n)
