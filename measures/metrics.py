"""Measures of texts: ROUGE, BLEU, BERTScore, perplexity, pass@k, and an interval for each (§4.3, Tables 2, 3 and 8).

    rows = [rouge(p, r)["rougeL"] for p, r in zip(predictions, references)]       # a mean over rows
    counts = [bleu_counts(p, r) for p, r in zip(predictions, references)]         # a figure of the whole corpus
    corpus(rows), bootstrap(rows)                                                 # 0.29, (0.27, 0.31)
    corpus(counts, bleu_of), paired_bootstrap(before, counts, bleu_of)            # the difference, row by row

Paper: §4.3, Tables 2, 3 and 8. Shapes: N rows, K counts of each.

The numbers are those of rouge-score (no stemmer), sacrebleu (its defaults) and bert-score (no rescaling by baselines,
which are tables of the package), to rounding. One idea serves every figure: a row gives counts, the corpus is their
sum, and the figure a function of that sum; a mean is Σ value / Σ 1, perplexity exp(Σ nats / Σ tokens). So whatever is
reported has an interval, by drawing rows again. torch is imported where it is used: intervals do without it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import reduce
from operator import or_
from reprlib import repr as shown

import numpy as np
from tqdm import tqdm

from data import InputError, chunks

# The layer that bert-score's authors found to agree best with people (their WMT16 tuning); no other has a default.
BERT_SCORE_LAYERS = {"roberta-large": 17, "roberta-base": 10, "bert-base-uncased": 9, "bert-large-uncased": 18,
                     "bert-base-multilingual-cased": 9, "distilbert-base-uncased": 5, "xlm-roberta-large": 17,
                     "deberta-large-mnli": 18, "deberta-xlarge-mnli": 40}


def check_texts(**columns: list):
    """Raises InputError unless all columns have the same number of rows, at least one, and every row is a text."""
    counts = " and ".join(f"{len(column)} {name}" for name, column in columns.items())
    if len({len(column) for column in columns.values()}) > 1:
        raise InputError(f"{counts} do not pair: give one of each for every row, in the same order")
    for name, column in columns.items():
        if isinstance(column, str) or len(column) == 0:
            raise InputError(f"{name}: {shown(column)}; needed is a list of at least one text")
        for number, text in enumerate(column, 1):
            if not isinstance(text, str):
                raise InputError(f"row {number} of the {name} is {shown(text)}, no text: mend the row, or drop it")


# ── ROUGE (Lin 2004) ────────────────────────────────────────────────────────────────────────────────────

def _ngrams(tokens: list[str], n: int) -> Counter:
    return Counter(zip(*(tokens[i:] for i in range(n))))


def _common_subsequence(a: list[str], b: list[str]) -> int:
    """The length, by the usual table, a row of which is one integer: bit j is 0 where it grows at b[j] (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for j, word in enumerate(b):
        places[word] = places.get(word, 0) | 1 << j
    row = ones = (1 << len(b)) - 1
    for word in a:
        hits = row & places.get(word, 0)
        row = (row + hits | row - hits) & ones
    return len(b) - row.bit_count()


def rouge(prediction: str, reference: str) -> dict[str, float]:
    """F1 of common words, word pairs and the longest common subsequence; 0 where either text has no words (Table 2).

    Words are runs of a–z and 0–9 in lower case, as in rouge-score: no other script has any.
    """
    check_texts(predictions=[prediction], references=[reference])
    p, r = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, reference))
    words, pairs = ((_ngrams(p, n) & _ngrams(r, n)).total() for n in (1, 2))
    total = len(p) + len(r)                                                    # F1 is twice the hits over all there are
    return {"rouge1": 2 * words / max(total, 1), "rouge2": 2 * pairs / max(total - 2, 1),
            "rougeL": 2 * _common_subsequence(p, r) / max(total, 1)}


# ── BLEU (Papineni et al. 2002; sacrebleu's defaults: tokeniser 13a, exponential smoothing) ─────────────

def _words_13a(text: str) -> list[str]:
    """mteval-v13a: ASCII punctuation stands alone, except full stop and comma inside a number."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, char in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(entity, char)
    text = re.sub(r"([{-~\[-` -&(-+:-@/])", r" \1 ", f" {text} ")
    text = re.sub(r"([^0-9])([.,])", r"\1 \2 ", text)
    text = re.sub(r"([.,])([^0-9])", r" \1 \2", text)
    return re.sub(r"([0-9])(-)", r"\1 \2 ", text).split()


def bleu_counts(prediction: str, references: str | list[str]) -> list[int]:
    """What a row gives to the corpus score: [words, words of the reference nearest in length, hits × 4, n-grams × 4].

    Several references: an n-gram may be hit as often as the one that has it most; the shorter of two as near counts.
    """
    references = [references] if isinstance(references, str) else references
    check_texts(predictions=[prediction])
    check_texts(references=references)
    words, truths = _words_13a(prediction), [_words_13a(reference) for reference in references]
    nearest = min((abs(len(truth) - len(words)), len(truth)) for truth in truths)[1]
    hits = ((_ngrams(words, n) & reduce(or_, (_ngrams(truth, n) for truth in truths))).total() for n in range(1, 5))
    return [len(words), nearest, *hits, *(max(len(words) - n + 1, 0) for n in range(1, 5))]


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """BLEU, 0–1, of summed `bleu_counts`: [..., 10] → [...]; 0 without any hit, or without a run of four words.

    The k-th order without a hit counts as 1/2^k of one (sacrebleu's "exp").
    """
    words, reference, hits, ngrams = sums[..., 0], sums[..., 1], sums[..., 2:6], sums[..., 6:]
    precision = np.where(hits > 0, hits, 0.5 ** np.cumsum(hits == 0, -1)) / np.maximum(ngrams, 1)
    brevity = np.minimum(1 - reference / np.maximum(words, 1), 0)
    return np.where(hits.any(-1) & ngrams.all(-1), np.exp(brevity + np.log(precision).mean(-1)), 0.0)


def bleu(predictions: list[str], references: list[str] | list[list[str]]) -> float:
    """Corpus BLEU, 0–1, one or several references to a prediction (Table 2). Raises InputError as `check_texts`."""
    check_texts(predictions=predictions, references=[
        next((text for text in row if not isinstance(text, str)), "") if isinstance(row, list) and row else row
        for row in references])                                                     # of several, the first that is none
    return corpus([bleu_counts(p, r) for p, r in zip(predictions, references)], bleu_of)


# ── BERTScore (Zhang et al. 2020) ───────────────────────────────────────────────────────────────────────

def load_encoder(path, device=None, leading_space: bool = False):
    """(encoder, tokenizer) from a directory or a hub id, float32; only safetensors are read. Raises InputError.

    leading_space: byte-level tokenizers (RoBERTa) see " word" at the start of a text, as published scores were made;
    under transformers 5 bert-score's own request for it has no effect, hence the default.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer
    space = {"add_prefix_space": True} if leading_space else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **space)
        encoder = AutoModel.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"cannot load an encoder from {path}: {reason} (a directory in Hugging Face format, or a hub "
                         f"id, with safetensors)") from error
    if encoder.config.is_encoder_decoder:
        encoder = encoder.get_encoder()
    if tokenizer.model_max_length > 1 << 30:            # it does not say; RoBERTa's positions start after the padding's
        positions = getattr(encoder.config, "max_position_embeddings", 512)
        tokenizer.model_max_length = positions - (tokenizer.pad_token_id or 0) - 1
    return encoder.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu")), tokenizer


def bert_score(predictions: list[str], references: list[str], encoder, tokenizer, layer: int | None = None,
               idf: bool = False, batch_size: int = 64) -> list[dict[str, float]]:
    """One {"precision", "recall", "f1"} per row: each token against the most like of the other text (Table 2).

    layer: of `hidden_states`, 0 are the embeddings; None where `BERT_SCORE_LAYERS` knows the encoder's name. idf: a
    token weighs log((M + 1) / (m + 1)), where m of M references have it; else all weigh 1, [CLS] and [SEP] nothing.
    A text is cut at the tokenizer's model_max_length; one that is empty, or weighs nothing, scores 0. As in the
    package, padding has similarity 0: beside longer texts a token like no other (cosine < 0) counts as 0.
    Raises InputError where the texts do not pair, or no layer is given or known.
    """
    import torch
    check_texts(predictions=predictions, references=references)
    name, last = str(encoder.config._name_or_path), encoder.config.num_hidden_layers
    layer = BERT_SCORE_LAYERS.get(name.rstrip("/").rpartition("/")[2]) if layer is None else layer
    if layer is None or not 0 <= layer <= last:
        raise InputError(f"BERTScore with {name}: layer {layer}; there are 0 (the embeddings) to {last}: say which, "
                         f"scores of different layers do not compare")
    candidates, truths = ([tokenizer(text.strip(), truncation=True).input_ids for text in texts]
                          for texts in (predictions, references))
    found, ends = Counter(i for ids in truths for i in set(ids)), (tokenizer.cls_token_id, tokenizer.sep_token_id)
    bare, out = len(tokenizer("").input_ids), []

    def embed(rows):                                                            # → [B, T, H], weights and mask [B, T]
        T = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id or 0] * (T - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in rows], device=encoder.device)
        hidden = encoder(ids.to(encoder.device), attention_mask=mask, output_hidden_states=True).hidden_states[layer]
        weights = [[math.log((len(truths) + 1) / (found[i] + 1)) if idf else float(i not in ends) for i in row]
                   + [0.0] * (T - len(row)) for row in rows]
        return hidden / hidden.norm(dim=-1, keepdim=True), torch.tensor(weights, device=encoder.device), mask.float()

    for start in range(0, len(candidates), batch_size):
        rows = [texts[start : start + batch_size] for texts in (candidates, truths)]
        with torch.no_grad():
            (x, x_weights, x_mask), (y, y_weights, y_mask) = map(embed, rows)
            like = (x @ y.mT) * x_mask[:, :, None] * y_mask[:, None, :]                                     # [B, T, T']
            scores = [(best * weights).sum(1).div(weights.sum(1)).nan_to_num(0).tolist()
                      for best, weights in ((like.amax(2), x_weights), (like.amax(1), y_weights))]
        for p, r, *texts in zip(*scores, *rows):
            p, r = (0.0, 0.0) if min(map(len, texts)) <= bare else (p, r)
            out.append({"precision": p, "recall": r, "f1": 2 * p * r / (p + r) if p + r else 0.0})
    return out


# ── Perplexity (Table 8) and pass@k (Table 3) ───────────────────────────────────────────────────────────

def perplexity(model, tokenizer, prompts: list[str] | None, texts: list[str], adapter: str | None = None,
               batch_size: int = 8) -> list[tuple[float, int]]:  # Table 8
    """(nats, tokens) of each text under the model; the perplexity of all is `corpus(rows, perplexity_of)`.

    Given its prompt, as the policy answers it, or with prompts None given BOS alone (its own first token, where the
    tokenizer has no BOS); Table 8 does not say. EOS is not scored: it is about the length, not the wording.
    adapter: a loaded adapter's name, None the bare base. An empty text gives (0.0, 0). Raises InputError where a row
    does not fit the context.
    """
    from model import encode_prompt
    from sampling import context_length
    check_texts(texts=texts, **({} if prompts is None else {"prompts": prompts}))
    targets = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    if prompts is None:
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        pairs = [((bos + y)[:1], (bos + y)[1:]) for y in targets]
    else:
        pairs = [(encode_prompt(tokenizer, x), y) for x, y in zip(prompts, targets)]
    lengths = [len(x) + len(y) for x, y in pairs]
    if max(lengths) > context_length(model):
        raise InputError(f"row {np.argmax(lengths) + 1}: prompt and text are {max(lengths)} tokens, the model's "
                         f"context is {context_length(model)}: shorten or drop the row")
    found = answer_logprobs(model, pairs, adapter, batch_size, "perplexity")
    return [(-sum(logprobs) or 0.0, len(logprobs)) for logprobs in found]


def answer_logprobs(model, pairs: list[tuple], adapter: str | None = None, batch_size: int = 8,
                    said: str = "score") -> list[list[float]]:
    """log π(y_t | x, y_<t) in nats of every token of each pair (x, y) of ids, [T] for T tokens.

    adapter: a loaded adapter's name, None the bare base. said: the name of the progress bar.
    """
    import torch
    from model import response_hidden, use_lora
    from sampling import head_weight, pad_batch, token_logprobs
    order = sorted((i for i, (_, y) in enumerate(pairs) if y),
                   key=lambda i: sum(map(len, pairs[i])))
    found: list[list[float]] = [[] for _ in pairs]
    with torch.inference_mode(), use_lora(model, adapter):
        for at in tqdm(range(0, len(order), batch_size), desc=said, delay=2):
            part = order[at : at + batch_size]                                  # of like lengths: less padding
            batch = pad_batch(*zip(*(pairs[i] for i in part)), 0, model.device)
            y, mask = batch[2], batch[3].bool()
            hidden = response_hidden(model, *batch)[mask]                       # [N, H]
            logprobs = token_logprobs(hidden, head_weight(model), y[mask])
            for i, own in zip(part, logprobs.split(mask.sum(1).tolist())):
                found[i] = own.tolist()
    return found


def perplexity_of(sums: np.ndarray) -> np.ndarray:
    """exp(Σ nats / Σ tokens): [..., 2] → [...]"""
    return np.exp(sums[..., 0] / sums[..., 1])


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k samples passes, where c of n did (Table 3): 1 − C(n−c, k) / C(n, k) (Chen et al. 2021).

    Raises InputError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise InputError(f"pass@{k} of {n} samples, {c} passed: needed are 1 ≤ k ≤ samples and 0 ≤ passed ≤ samples")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def calibration(cases: list[tuple[float, bool]], bins: int = 5) -> tuple[list[list], float]:
    """Is what is held likely right as often? cases: (probability, whether it was right), one at least.

    → a line for each of `bins` equal parts of [0, 1]: from, to, how many, how many right, their mean probability (None
    of none); and the expected calibration error, |mean probability − share right| weighted by how many (Guo et al. 2017).
    """
    lines, error = [], 0.0
    for part in range(bins):
        inside = [case for case in cases if min(int(case[0] * bins), bins - 1) == part]
        n, likely, right = len(inside), sum(p for p, _ in inside), sum(right for _, right in inside)
        lines.append([part / bins, (part + 1) / bins, n, right, likely / n if n else None])
        error += abs(likely - right) / len(cases)
    return lines, error


# ── Rows → a figure and its interval ────────────────────────────────────────────────────────────────────

def ratio(sums: np.ndarray) -> np.ndarray:
    """Σ hits / Σ cases: a mean, a precision, a recall, an accuracy. [..., 2] → [...], NaN for 0/0."""
    return sums[..., 0] / sums[..., 1]


def _counts(rows) -> np.ndarray:
    """Rows of K counts, [N, K]; plain values become [value, 1]. Raises InputError where one is no finite number."""
    try:
        counts = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"these rows are not numbers, equally many in each ({error})") from error
    counts = np.stack([counts, np.ones_like(counts)], 1) if counts.ndim == 1 else counts
    for row in np.argwhere(~np.isfinite(counts))[:1, 0]:
        raise InputError(f"row {row + 1} of the values is {shown(rows[row])}, so nothing holds of all rows: score it, "
                         f"or leave it out of all that is compared")
    return counts


def _figure(figure, sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):             # 0/0 is NaN, and both callers look for it
        return np.asarray(figure(sums), dtype=np.float64)


def corpus(rows, figure=ratio) -> float | None:
    """The figure of the summed rows: values [N], whose mean it is, or counts [N, K]. None where it is 0/0.

    Raises InputError for NaN, naming the row, and for rows that are not numbers, equally many in each.
    """
    value = float(_figure(figure, _counts(rows).sum(0))) if len(rows) else math.nan
    return None if math.isnan(value) else value


def bootstrap(rows, figure=ratio, n: int = 10_000, seed: int = 0, level: float = 0.95) -> tuple[float, float] | None:
    """The percentile interval of `corpus(rows, figure)` over n draws of as many rows with replacement (Efron 1979).

    figure: sums [..., K] → [...]. Draws where it is 0/0 are left out; None where these are more than the 1 − level
    that an interval leaves out anyway, and for fewer than two rows. Raises InputError for NaN, naming the row.
    """
    counts, rng = _counts(rows), np.random.default_rng(seed)
    if (N := len(counts)) < 2:
        return None
    sums = []
    for draws in chunks(range(n), max(1, 100_000 // N)):                # as many as memory is for
        drawn = rng.integers(N, size=(len(draws), N)) + N * np.arange(len(draws))[:, None]
        times = np.bincount(drawn.ravel(), minlength=drawn.size)        # how often each row
        sums.append(times.reshape(-1, N) @ counts)
    sums = np.concatenate(sums)                                         # [n, K]
    figures = _figure(figure, sums)
    defined = figures[~np.isnan(figures)]
    if len(defined) < level * n:
        return None
    return tuple(np.quantile(defined, [(1 - level) / 2, (1 + level) / 2]).tolist())


def paired_bootstrap(before, after, figure=ratio, **options) -> tuple[float, float] | None:
    """The interval of figure(after) − figure(before), the same rows drawn for both, so that hard rows cancel.

    Raises InputError as `bootstrap`, and where the two do not pair.
    """
    before, after = _counts(before), _counts(after)
    if before.shape != after.shape:
        raise InputError(f"{before.shape} counts before and {after.shape} after do not pair: score the same rows, in "
                         f"the same order, by the same measure")
    K = before.shape[-1]
    return bootstrap(np.hstack([before, after]), lambda sums: figure(sums[..., K:]) - figure(sums[..., :K]), **options)
