"""Metrics of texts and of code, and an interval for each figure (§4.3, Tables 2, 3 and 8).

    rows = [rouge(p, r)["rougeL"] for p, r in zip(predictions, references)]
    corpus(rows), interval(rows)                            # a mean: 0.29, (0.27, 0.31)
    rows = [bleu_counts(p, r) for p, r in zip(predictions, references)]
    corpus(rows, bleu_of), interval(rows, bleu_of)          # a figure of the whole corpus
    paired_bootstrap(before, rows, bleu_of)                 # a difference, row by row

Paper: §4.3, Tables 2, 3 and 8. Shapes: N rows, K counts of each, T tokens, H hidden units.

The numbers are those of rouge-score (no stemmer), sacrebleu (its defaults, one reference) and
bert-score (no rescaling by baselines, which are tables of the package), up to rounding. Every
figure works in the same way: each row gives counts, the corpus is their sum, and the figure is
a function of this sum. A mean is Σ value / Σ 1, perplexity is exp(Σ nats / Σ tokens). So every
reported figure has an interval, from resampled rows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from reprlib import repr as short_repr

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from data import InputError, chunks
from model import encode_prompt, response_hidden, use_lora
from sampling import context_length, head_weight, pad_batch, token_logprobs

# The layers that bert-score's authors chose by agreement with people; other encoders have none.
BERT_SCORE_LAYERS = {"roberta-large": 17, "roberta-base": 10, "bert-base-uncased": 9,
                     "distilbert-base-uncased": 5, "deberta-xlarge-mnli": 40}


# ── ROUGE (Lin 2004)

def _ngrams(tokens: list[str], n: int) -> Counter:
    return Counter(zip(*(tokens[i:] for i in range(n))))


def _common_subsequence(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence; keeps one row of the usual table."""
    row = [0] * (len(b) + 1)
    for word_a in a:
        above = row
        row = [0]
        for j, word_b in enumerate(b):
            row.append(above[j] + 1 if word_a == word_b else max(row[j], above[j + 1]))
    return row[-1]


def rouge(prediction: str, reference: str) -> dict[str, float]:
    """F1 of common words, word pairs and the longest common subsequence (Table 2).

    Words are runs of a–z and 0–9 in lower case, as in rouge-score, so other scripts have no
    words. A text without words scores 0.
    """
    p = re.findall("[a-z0-9]+", prediction.lower())
    r = re.findall("[a-z0-9]+", reference.lower())
    hits = [(_ngrams(p, n) & _ngrams(r, n)).total() for n in (1, 2)]
    hits.append(_common_subsequence(p, r))
    total = len(p) + len(r)                   # F1 = 2 hits / (units of p + units of r)
    return {f"rouge{n}": 2 * hit / max(units, 1)
            for n, hit, units in zip("12L", hits, (total, total - 2, total))}


# ── BLEU (Papineni et al. 2002), with sacrebleu's tokeniser 13a and exponential smoothing

def _words_13a(text: str) -> list[str]:
    """Words of mteval-v13a: ASCII punctuation is split off, except . and , inside a number."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, char in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(entity, char)
    text = re.sub(r"([{-~\[-` -&(-+:-@/])", r" \1 ", f" {text} ")
    text = re.sub(r"([^0-9])([.,])", r"\1 \2 ", text)
    text = re.sub(r"([.,])([^0-9])", r" \1 \2", text)
    return re.sub(r"([0-9])(-)", r"\1 \2 ", text).split()


def bleu_counts(prediction: str, reference: str) -> list[int]:
    """Counts of a row: [words, words of the reference, hits × 4, n-grams × 4]."""
    words = _words_13a(prediction)
    reference_words = _words_13a(reference)
    hits = [(_ngrams(words, n) & _ngrams(reference_words, n)).total() for n in range(1, 5)]
    ngrams = [max(len(words) - n + 1, 0) for n in range(1, 5)]
    return [len(words), len(reference_words), *hits, *ngrams]


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """BLEU, 0–1, of summed `bleu_counts`: [..., 10] → [...]

    The k-th order without a hit counts as 1/2^k of a hit (sacrebleu's "exp"). BLEU is 0 without
    any hit, or without any run of four words.
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


def bleu(predictions: list[str], references: list[str]) -> float:
    """Corpus BLEU, 0–1 (Table 2)."""
    pairs = zip(predictions, references, strict=True)
    return corpus([bleu_counts(*pair) for pair in pairs], bleu_of)


# ── BERTScore (Zhang et al. 2020)

def load_encoder(name):
    """(encoder, tokenizer, layer) of NAME or NAME:LAYER, where NAME is a directory or hub id.

    The weights are float32 and come from safetensors only. layer: as in `bert_score`. Raises
    InputError where the layer is no number or the encoder cannot be loaded.
    """
    path, colon, layer = str(name).partition(":")
    if colon and not layer.isdecimal():
        raise InputError(f"--encoder {name}: {layer!r} after the colon is no layer; write a "
                         f"number")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        encoder = AutoModel.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"cannot load an encoder from {path}: {reason}; name a directory in "
                         f"Hugging Face format or a hub id, with safetensors") from error
    encoder = encoder.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return encoder, tokenizer, int(layer) if colon else None


def bert_score(predictions: list[str], references: list[str], encoder, tokenizer,
               layer: int | None = None) -> list[dict[str, float]]:
    """{"precision", "recall", "f1"} of each row (Table 2): mean cosine of each word token and
    the most similar token of the other text.

    [CLS] and [SEP] may be the most similar token, but the means leave them out. layer: index of
    `hidden_states`, where 0 is the embeddings; None takes it from BERT_SCORE_LAYERS. A text is
    truncated at the tokenizer's model_max_length. A text without words scores 0. A cosine below
    0 counts as 0, which is an effect of padding in the package. Raises InputError where the
    layer is unknown.
    """
    layer = _find_layer(encoder, layer)
    rows = []
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id], device=encoder.device)

    def embed(texts):
        """For each text: unit vectors [T, H] of its tokens, and the mask [T] of word tokens."""
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
                cosine = (x @ y.T).clamp(min=0)                           # [T, T']
                p_best = cosine.amax(1)[p_words]
                r_best = cosine.amax(0)[r_words]
                has_words = len(p_best) and len(r_best)
                p = p_best.mean().item() if has_words else 0.0
                r = r_best.mean().item() if has_words else 0.0
                f1 = 2 * p * r / (p + r) if p + r else 0.0
                rows.append({"precision": p, "recall": r, "f1": f1})
    return rows


def _find_layer(encoder, layer: int | None) -> int:
    """The layer, or the default of BERT_SCORE_LAYERS if it is None."""
    name = str(encoder.config._name_or_path)
    last = encoder.config.num_hidden_layers
    if layer is None:
        layer = BERT_SCORE_LAYERS.get(name.rstrip("/").split("/")[-1])
    if layer is None or not 0 <= layer <= last:
        raise InputError(f"BERTScore with {name}: layer {layer} does not exist or has no "
                         f"default; name a layer from 0 (the embeddings) to {last} as "
                         f"NAME:LAYER, since scores of different layers do not compare")
    return layer


# ── Perplexity (Table 8) and pass@k (Table 3)

def perplexity(model, tokenizer, prompts: list[str],
               texts: list[str]) -> list[tuple[float, int]]:
    """(nats, tokens) of each text under the base model without adapter, given the prompt that
    the policy answers (Table 8; the paper does not define the condition).

    The perplexity of the corpus is `corpus(rows, perplexity_of)`. EOS is not scored, because it
    measures the length, not the wording. An empty text gives (0.0, 0). Raises InputError where
    a row does not fit the context.
    """
    pairs = [(encode_prompt(tokenizer, x), tokenizer(y, add_special_tokens=False).input_ids)
             for x, y in zip(prompts, texts, strict=True)]
    limit = context_length(model)
    lengths = [len(x) + len(y) for x, y in pairs]
    if max(lengths) > limit:
        raise InputError(f"row {np.argmax(lengths) + 1}: prompt and text are {max(lengths)} "
                         f"tokens, and the model's context is {limit}; shorten the row or "
                         f"remove it")
    return [(-sum(logprobs) or 0.0, len(logprobs))
            for logprobs in answer_logprobs(model, pairs)]


def answer_logprobs(model, pairs: list[tuple], adapter: str | None = None, batch_size: int = 8
                    ) -> list[list[float]]:
    """log π(y_t | x, y_<t) in nats of every token of each pair (x, y) of ids; [T] per pair.

    adapter: name of a loaded adapter; None uses the base model.
    """
    order = [i for i, (_, y) in enumerate(pairs) if y]
    order.sort(key=lambda i: sum(map(len, pairs[i])))        # similar lengths need less padding
    results: list[list[float]] = [[] for _ in pairs]
    with torch.inference_mode(), use_lora(model, adapter):
        for start in tqdm(range(0, len(order), batch_size), desc="score", delay=2):
            part = order[start : start + batch_size]
            batch = pad_batch(*zip(*(pairs[i] for i in part)), model.device)
            y = batch[2]                                        # [B, T]
            mask = batch[3].bool()                              # [B, T]
            hidden = response_hidden(model, *batch)[mask]       # [N, H]
            logprobs = token_logprobs(hidden, head_weight(model), y[mask])
            for i, row in zip(part, logprobs.split(mask.sum(1).tolist())):
                results[i] = row.tolist()
    return results


def perplexity_of(sums: np.ndarray) -> np.ndarray:
    """exp(Σ nats / Σ tokens): [..., 2] → [...]"""
    return np.exp(sums[..., 0] / sums[..., 1])


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples passes, if c of n passed (Table 3):
    1 − C(n−c, k) / C(n, k) (Chen et al. 2021).

    Raises InputError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise InputError(f"pass@{k} of {n} samples, of which {c} passed, is not defined; it "
                         f"needs 1 ≤ k ≤ samples and 0 ≤ passed ≤ samples")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


# ── Rows → a figure and its interval

def ratio(sums: np.ndarray) -> np.ndarray:
    """The mean Σ value / Σ 1: [..., 2] → [...], NaN for 0/0."""
    return sums[..., 0] / sums[..., 1]


def share(sums: np.ndarray) -> np.ndarray:
    """Σ hits / Σ cases, such as accuracy or recall: [..., 2] → [...], NaN for 0/0."""
    return ratio(sums)


def _counts(rows) -> np.ndarray:
    """Rows of K counts, [N, K]; plain values become [value, 1]."""
    counts = np.array(rows, dtype=np.float64)
    counts = np.stack([counts, np.ones_like(counts)], 1) if counts.ndim == 1 else counts
    for row in np.argwhere(~np.isfinite(counts))[:1, 0]:
        raise InputError(f"row {row + 1} of the values is {short_repr(rows[row])}, which is "
                         f"not finite; score the row, or leave it out of every compared run")
    return counts


@np.errstate(divide="ignore", invalid="ignore")       # 0/0 gives NaN, tested below
def corpus(rows, figure=ratio) -> float | None:
    """The figure of the summed rows: values [N] or counts [N, K]; None if it is 0/0.

    Raises InputError, which names the row, where a value is NaN or infinite.
    """
    value = float(figure(_counts(rows).sum(0))) if len(rows) else math.nan
    return None if math.isnan(value) else value


@np.errstate(divide="ignore", invalid="ignore")
def bootstrap(rows, figure=ratio, n: int = 10_000) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of `corpus(rows, figure)` (Efron 1979).

    It holds percentiles over n draws of N rows with replacement. figure: sums [..., K] → [...].
    Draws where the figure is 0/0 are left out. None if these are more than 5 % of the draws,
    and for fewer than two rows.
    """
    counts = _counts(rows)
    rng = np.random.default_rng(0)
    N = len(counts)
    if N < 2:
        return None
    sums = []
    chunk_size = max(1, 10**5 // N)                       # few draws at once fit into a cache
    for start in range(0, n, chunk_size):
        draws = rng.integers(N, size=(min(chunk_size, n - start), N))
        places = draws + N * np.arange(len(draws))[:, None]
        repeats = np.bincount(places.ravel(), minlength=draws.size)      # draws of each row
        sums.append(repeats.reshape(draws.shape) @ counts)
    figures = figure(np.concatenate(sums))
    defined = figures[~np.isnan(figures)]
    if len(defined) < 0.95 * n:
        return None
    return tuple(np.quantile(defined, [0.025, 0.975]).tolist())


def interval(rows, figure=ratio) -> tuple[float, float] | None:
    """The bootstrap interval, or Wilson's (1927) for a share of 0 or 1, where all draws agree.

    For Wilson's interval a row is one case, because the counts of a row are not independent.
    """
    value = corpus(rows, figure)
    if figure is not share or value not in (0, 1):
        return bootstrap(rows, figure)
    N = np.count_nonzero(_counts(rows)[:, 1])
    width = 1.96**2 / (N + 1.96**2)
    return (1 - width, 1.0) if value else (0.0, width)


def paired_bootstrap(before, after, figure=ratio,
                     n: int = 10_000) -> tuple[float, float] | None:
    """The 95 % interval of figure(after) − figure(before).

    Each draw takes the same rows for both, so that the difficulty of rows cancels.
    """
    before = _counts(before)
    K = before.shape[-1]
    return bootstrap(np.hstack([before, _counts(after)]),
                     lambda sums: figure(sums[..., K:]) - figure(sums[..., :K]), n)
