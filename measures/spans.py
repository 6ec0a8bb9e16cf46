"""How well critiques find the spans that somebody else marked (§4.2; Tables 1, 6, 7 and 16).

    counts = [compare(response, offsets, gold_spans, readable(critique)) for …]     # one response each
    figures(total(counts))                                                          # the tables' figures

Paper: §4.2, Appendix C, Tables 1, 6, 7 and 16.

R_φ is judged so against its annotator, and an annotator against people. Every figure is a function of counts that are
summed over responses, so that an interval needs no more than the counts of resampled responses. A critique that cannot
be read has found nothing and is wrong: it costs recall, scores 0 in the F1 by response, and is counted. T tokens.

What the paper names and does not define, as read here. Predicted and marked spans of one sign are paired one to one,
those first that share most. Exact: the same characters, white space at the ends aside. Partial: any shared character.
Overlap index (OUI, Table 6): shared characters over those of either, averaged over the pairs, exact ones too. ≥ 90 %
overlap (Table 7): the pair shares 90 % of the longer of the two. A quote that is not in the response is a prediction
without a pair. Agreement (Table 16): more than half of a predicted span's characters have the label that people gave.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter

from annotate import Feedback, FeedbackError, Span, ground, parse_feedback, token_rewards
from measures.audit import gold_labels, span_accuracy, trimmed
from reward_model import count_tokens

SIGNS = {"good": 1, "poor": -1}


def readable(critique: str) -> Feedback | None:
    """The feedback in a critique, or None where it cannot be read."""
    try:
        return parse_feedback(critique)
    except FeedbackError:
        return None


def confidences(z: str, offsets, logprobs: list[float]) -> list[tuple[str, str, float]]:
    """The sentences of z's critique and its quotes, each with the probability that R_φ gave to
    just these words.

    offsets: the characters [start, end) of z's tokens; logprobs: theirs, [T] in nats, such as
    `metrics.answer_logprobs` finds of what was written. → (kind, words, probability), where
    kind is "sentence", "good_spans" or "poor_spans"; a z that cannot be read has sentences
    alone. Raises ValueError where a readable z has not the form of `Feedback.text`.
    """
    feedback, critique = readable(z), z.split("\n")[0]
    places = [("sentence", *match.span()) for match in re.finditer(r"[^.]+\.", critique)]
    for kind in ("good_spans", "poor_spans") if feedback else ():
        at = z.index("[", z.rindex(f'"{kind}"'))
        for quote in getattr(feedback, kind):
            at = z.index(written := json.dumps(quote, ensure_ascii=False)[1:-1], at + 1)
            places.append((kind, at, at + len(written)))
            at += len(written)
    found = []
    for kind, start, end in places:
        inside = (p for p, (a, b) in zip(logprobs, offsets) if a < end and start < b)
        found.append((kind, z[start:end].strip(" ."), math.exp(sum(inside))))
    return found


def overlaps(response: str, gold: list[Span], predicted: list[Span]) -> list[tuple[float, float]]:
    """(shared / either, shared / longer) in characters of every pair (Appendix C), one to one, the greatest first.

    White space at the ends of a span counts for nothing; a span of nothing else has no pair.
    """
    golden, said = ([trimmed(response, span.start, span.end) for span in spans] for spans in (gold, predicted))
    found = []
    for i, (start, end) in enumerate(golden):
        for j, (begin, stop) in enumerate(said):
            if (shared := min(end, stop) - max(start, begin)) > 0:
                union = max(end, stop) - min(start, begin)
                found.append((shared / union, shared / max(end - start, stop - begin), i, j))
    out, golds, predictions = [], set(), set()
    for either, longer, i, j in sorted(found, key=lambda pair: (-pair[0], *pair[2:])):
        if i not in golds and j not in predictions:
            golds.add(i), predictions.add(j)
            out.append((either, longer))
    return out


def compare(response: str, offsets, gold: list[Span], feedback: Feedback | None, signs=frozenset(SIGNS)) -> Counter:
    """The counts of one response (Tables 1, 6, 7 and 16). offsets: the characters [start, end) of its tokens; feedback:
    None for a critique nobody can read.

    signs: which ones somebody marked in the corpus; others do not enter the F1 by response, since nobody knows of them.
    """
    said = feedback or Feedback("", [], [])
    found = ground(response, said)
    truth, labels = (token_rewards(response, offsets, spans) for spans in (gold, found.spans))
    counts = count_tokens(truth, labels)
    counts.update(rows=1, unparseable=int(feedback is None),
                  quotes=len(said.good_spans + said.poor_spans),
                  unmatched=len(found.unmatched), ambiguous=found.ambiguous)
    characters = gold_labels(response, [vars(span) for span in gold])
    for name, sign in SIGNS.items():
        marked, placed = ([span for span in spans if span.label == sign] for spans in (gold, found.spans))
        pairs = overlaps(response, marked, placed)
        right = [span_accuracy(response, vars(span), characters) or 0.0 for span in placed]
        exact = sum(either == 1 for either, _ in pairs)
        counts.update({
            f"{name} spans marked": len(marked),
            f"{name} spans predicted": len(said.good_spans if sign > 0 else said.poor_spans),
            f"{name} exact": exact, f"{name} partial": len(pairs) - exact,
            f"{name} near": sum(longer >= 0.9 for _, longer in pairs),
            f"{name} overlap": sum(either for either, _ in pairs),
            f"{name} agreed": sum(share > 0.5 for share in right)})
    hit = sum(counts[f"{name} hit"] for name in signs)
    either = sum(counts[f"{name} marked"] + counts[f"{name} predicted"] for name in signs)
    counts["f1 of rows"] = 0.0 if feedback is None else 2 * hit / either if either else 1.0
    return counts


def total(counts) -> Counter:
    """The sum over responses; counts of nothing stay."""
    out = Counter()
    for one in counts:
        out.update(one)
    return out


def parts(counts: Counter) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of every figure; both are sums over responses."""
    out = {"row_f1": (counts["f1 of rows"], counts["rows"]), "unparseable": (counts["unparseable"], counts["rows"]),
           "unmatched": (counts["unmatched"], counts["quotes"]), "ambiguous": (counts["ambiguous"], counts["quotes"])}
    for name in SIGNS:
        hit, marked, predicted = (counts[f"{name} {what}"] for what in ("hit", "marked", "predicted"))
        exact, partial, quotes = (counts[f"{name} {what}"] for what in ("exact", "partial", "spans predicted"))
        out |= {f"{name}_precision": (hit, predicted), f"{name}_recall": (hit, marked),                       # Table 1
                f"{name}_f1": (2 * hit, marked + predicted),
                f"{name}_overlap_index": (counts[f"{name} overlap"], exact + partial),                        # Table 6
                f"{name}_exact": (exact, quotes), f"{name}_near": (counts[f"{name} near"], quotes),           # Table 7
                f"{name}_agreement": (counts[f"{name} agreed"], quotes)}                                      # Table 16
    return out


def figures(counts: Counter) -> dict[str, float | None]:
    """What Tables 1, 6, 7 and 16 show, from summed counts; None where there is nothing to divide by.

    Of a sign that nobody marked in any response (people who only marked errors) every figure is None: whether a
    prediction of that sign is right is not known.
    """
    unknown = tuple(f"{name}_" for name in SIGNS if not counts[f"{name} spans marked"])
    return {name: part / whole if whole and not name.startswith(unknown) else None
            for name, (part, whole) in parts(counts).items()}


def span_table(counts: dict) -> list[list]:  # Table 6
    """Table 6's counts: sign, marked, predicted, exact, partial."""
    return [[name, *(counts[f"{name} {what}"] for what in ("spans marked", "spans predicted", "exact", "partial"))]
            for name in SIGNS]
