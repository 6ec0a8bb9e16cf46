"""spans.py against hand-counted responses and brute force over characters."""

import json
import math
import random
from itertools import permutations

import pytest

from annotate import Feedback, Span, ground
from measures.audit import words
from measures.spans import SIGNS, compare, confidences, figures, overlaps, readable, span_table, total

TEXT = "The cat sat on the mat and slept all day long"


def spans(*quotes, label=1, text=TEXT):
    return [Span(text.index(q), text.index(q) + len(q), label) for q in quotes]


def counted(gold, good=(), poor=(), text=TEXT):
    return compare(text, words(text), gold, Feedback("c", list(good), list(poor)))


def test_a_hand_counted_response():  # Table 1; Table 6
    gold = spans("The cat", "the mat") + spans("all day", label=-1)
    got = counted(gold, good=["The cat", "mat and", "a dog"], poor=["sat"])
    told = figures(got)
    # good tokens: marked The cat the mat; predicted The cat mat and → 3 hits of 4, and 3 of 4 found
    assert (told["good_precision"], told["good_recall"], told["good_f1"]) == (0.75, 0.75, 0.75)
    assert (told["poor_precision"], told["poor_recall"], told["poor_f1"]) == (0, 0, 0)
    assert span_table(got) == [["good", 2, 3, 1, 1], ["poor", 1, 1, 0, 0]]
    assert told["good_overlap_index"] == pytest.approx((1 + 3 / 11) / 2)          # "mat" of "the mat and"
    assert told["good_exact"] == told["good_near"] == pytest.approx(1 / 3)        # "a dog" is a prediction, too
    assert told["good_agreement"] == pytest.approx(1 / 3)                         # "mat and": 3 of 6 letters is no majority
    assert told["unmatched"] == 0.25 and told["unparseable"] == 0
    assert told["row_f1"] == pytest.approx(2 * 3 / (4 + 2 + 4 + 1))


def test_an_unreadable_critique_is_wrong_and_not_left_out():
    gold = spans("The cat")
    assert readable("I like it.") is None
    lost = figures(compare(TEXT, words(TEXT), gold, readable("I like it.")))
    assert (lost["row_f1"], lost["good_recall"], lost["unparseable"], lost["good_precision"]) == (0, 0, 1, None)
    both = figures(total([counted(gold, good=["The cat"]), compare(TEXT, words(TEXT), gold, None)]))
    assert (both["row_f1"], both["good_recall"], both["unparseable"]) == (0.5, 0.5, 0.5)
    silent = figures(compare(TEXT, words(TEXT), [], None))
    assert silent["row_f1"] == 0                       # also where there was nothing to find; readable silence is right
    assert figures(counted([]))["row_f1"] == 1


def test_white_space_at_the_ends_of_a_span_changes_nothing():
    wide = [Span(3, 8, 1)]                             # " cat "
    assert overlaps(TEXT, wide, spans("cat")) == [(1.0, 1.0)]
    assert overlaps(TEXT, [Span(3, 4, 1)], [Span(3, 4, 1)]) == []


def test_near_means_ninety_percent_of_the_longer():  # Table 6; Table 7; Table 16
    """Of a span of 20 characters 18 are near and 17 are not; neither is exact; both are of the span's own label."""
    text = "abcdefghijklmnopqrst"
    for n, near in ((20, 1), (18, 1), (17, 0)):
        got = compare(text, [(0, 20)], [Span(0, 20, 1)], Feedback("c", [text[:n]], []))
        told = figures(got)
        assert (told["good_exact"], told["good_near"], told["good_agreement"]) == (n == 20, near, 1)
        assert told["good_overlap_index"] == n / 20 and span_table(got)[0] == ["good", 1, 1, n == 20, n < 20]
    apart = compare(text, [(0, 20)], [Span(0, 8, 1), Span(8, 20, -1)], Feedback("c", [text], []))
    assert figures(apart)["good_agreement"] == 0                                  # 8 of 20 characters are no majority


def test_pairs_are_one_to_one_and_the_best_come_first():
    rng, text = random.Random(1), "x" * 30
    for _ in range(300):
        gold, predicted = ([Span(a, a + rng.randint(1, 6), 1) for a in rng.sample(range(24), rng.randint(0, 4))]
                           for _ in range(2))
        pairs = overlaps(text, gold, predicted)
        share = lambda g, p: max(0, min(g.end, p.end) - max(g.start, p.start)) / (
            max(g.end, p.end) - min(g.start, p.start))
        every = [share(g, p) for g in gold for p in predicted]
        assert len(pairs) <= min(len(gold), len(predicted))
        assert max(every, default=0) == max((either for either, _ in pairs), default=0)
        small, large = sorted((gold, predicted), key=len)
        most = max((sum(share(a, b) > 0 for a, b in zip(small, chosen)) for chosen in permutations(large, len(small))),
                   default=0)
        assert len(pairs) <= most and len(pairs) >= most / 2           # greedy finds at least half of the largest pairing


def test_token_counts_against_brute_force_over_characters():  # Table 1
    rng = random.Random(2)
    for _ in range(200):
        picks = [rng.choice(words(TEXT)) for _ in range(rng.randint(0, 6))]
        gold = [Span(s, e, rng.choice((1, -1))) for s, e in picks]
        quotes = [TEXT[s:e] for s, e in rng.sample(words(TEXT), rng.randint(0, 5))]
        good, poor = [q for q in quotes if rng.random() < 0.5], []
        poor = [q for q in quotes if q not in good]
        got = counted(gold, good, poor)
        placed = ground(TEXT, Feedback("c", good, poor)).spans
        def label(i, given):
            signs = {span.label for span in given if all(span.start <= c < span.end for c in range(*words(TEXT)[i]))}
            return sum(signs)
        for name, sign in SIGNS.items():
            marked = [i for i in range(len(words(TEXT))) if label(i, gold) == sign]
            said = [i for i in range(len(words(TEXT))) if label(i, placed) == sign]
            assert got[f"{name} marked"] == len(marked) and got[f"{name} predicted"] == len(said)
            assert got[f"{name} hit"] == len(set(marked) & set(said))


def test_what_was_said_has_the_probability_of_its_own_tokens():
    """One token a character, each of probability .5: n characters have .5 ** n. A quote in both lists stands twice."""
    quote = 'a "b"\\c'
    z = f"The cat sat. It slept, wrong.\n{json.dumps({'poor_spans': ['mat', quote], 'good_spans': ['mat']})}"
    offsets, logprobs = [(i, i + 1) for i in range(len(z))], [math.log(0.5)] * len(z)
    found = confidences(z, offsets, logprobs)
    assert [(kind, words, round(-math.log2(p))) for kind, words, p in found] == [
        ("sentence", "The cat sat", 12), ("sentence", "It slept, wrong", 17), ("good_spans", "mat", 3),
        ("poor_spans", "mat", 3), ("poor_spans", json.dumps(quote)[1:-1], len(json.dumps(quote)) - 2)]
    assert [kind for kind, *_ in confidences(z[:40], offsets, logprobs)] == ["sentence", "sentence"]
