"""Mutated replies: FeedbackError alone comes out, and no label that the reply does not support.

Every case is a function of its seed, which a failure names. What a reply supports is read here
in another way than annotate.py reads it: by string literals and regular expressions, and by
comparing characters one by one.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections import Counter

import pytest
from conftest import SLOW

from annotate import Feedback, FeedbackError, ground, parse_feedback, read_reply
from reward_model import judge
from test_annotate import splits

CASES = 100_000 if SLOW else 4000
BLOCKS = 6  # of seeds, so that a failing run shows where

PIECES = ["the plot", "Bob", "“hero”", "it's", "nai\u0308ve", "naïve", "  ", "\n", "\t",
          "x = 1", "é", "e\u0301", "한", 'say "no"', "\\n", "{", "}", "[", "a", "aa", "a a",
          "good_spans", "\u00a0", "—", "Ω", "\u2126", "x\u0302", "</response>", "```", "İ", "ſ",
          "\x00", "’", "`", "\\", "\\u0041", "12345", "🎉"]


# ── Replies and what is done to them

def a_response(rng) -> str:
    return rng.choice(["", " ", " "]).join(rng.choices(PIECES, k=rng.randrange(1, 14)))


def a_quote(rng, response: str) -> str:
    """Mostly a piece of the response, sometimes written in another way,
    sometimes from elsewhere."""
    start = rng.randrange(len(response))
    quote = (response[start : start + rng.choice([1, 2, 5, 9, 20])] if rng.random() < .8
             else rng.choice(PIECES))
    return rng.choice([
        str, str, str, str.strip, str.upper,
        lambda q: q.replace(" ", rng.choice(["  ", "\n", ""])),
        lambda q: unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKC"]), q),
        lambda q: q.translate({ord(a): b for a, b in zip("\"'“”’", "”’\"\"'", strict=True)}),
    ])(quote)


def a_wrong_value(rng, value):
    """The value, or something of another type that stands for it."""
    wrong = [None, True, 0, 1.5, "text", [], {}, [value], {"text": value}, 10 ** 30,
             float("nan"), [None, value]]
    return rng.choice(wrong) if rng.random() < .03 else value


def a_reply(rng, response: str) -> str:
    """A reply as models write them,
    with the keys of the paper, of its release or of the code task."""
    good, poor = ([a_quote(rng, response) for _ in range(rng.randrange(4))] for _ in range(2))
    poor += good[: rng.random() < .2]  # a quote that is called good and poor
    said = rng.choice(["It is fine, but {Bob} is wrong.", "c", "", 'She said "so".',
                       "Ende 🎉\n```"])
    names = rng.choice([("textual_feedback", "good_spans", "poor_spans"),
                        ("critique", "GOOD-SPANS", "poor_spans"),
                        ("Textual feedback", "Good spans", "Poor spans"),
                        ("reasoning", "good_spans", "poor_spans"),
                        ("code_feedback", "wrong_code", "improvement_code")])
    value = {name: a_wrong_value(rng, part)
             for name, part in zip(names, (said, good, poor), strict=True)}
    if rng.random() < .1:
        draft = {"good_spans": ["a"]}
        value = rng.choice([{"answer": value}, [value], {**value, "more": value},
                            {**value, "draft": draft}])
    text = json.dumps(value, ensure_ascii=rng.random() < .3, indent=rng.choice([None, None, 1]))
    return rng.choice([text, f"```json\n{text}\n```", f"Let me {{think}}.\n{text}\nDone.",
                       f"{said}\n{text}"])


def mutated(rng, text: str, other: str) -> str:
    """One change of the text; `other` is a second reply to the same response."""
    i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    k = min(j, i + rng.choice([1, 2, 8, 40]))
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data:
        data[rng.randrange(len(data))] = rng.choice(b'"\\{}[],: \x00\xff\x80aZ0')
    return rng.choice([
        lambda: text[:i] + text[k:],                                            # delete
        lambda: text[:k] + text[i:],                                            # duplicate
        lambda: text[:i] + text[k:j] + text[i:k] + text[j:],                    # swap
        lambda: text[:i] + rng.choice(['"', "\\", "{", "}", "[", "]", ",", ":", "\x00",
                                       "\ud83d", "\\ud83d", "\\u0000", "9" * 5000, "1e999", "-",
                                       "NaN", "\u2028", "'", "```", *PIECES]) + text[i:],
        lambda: bytes(data).decode("utf-8",
                                   rng.choice(["replace", "surrogateescape", "ignore"])),
        lambda: text[:i],                                                       # cut
        lambda: text[i:],
        lambda: text[:i] + other[rng.randrange(len(other) + 1) :],              # splice
        lambda: text + rng.choice(["", "\n", ", ", "Or rather:\n"]) + other,
        lambda: text[:i] + other + text[i:],
        lambda: rng.choice(['{"x": %s}', '{"good_spans": [%s], "poor_spans": []}', "[%s]",
                            "{%s", '"%s"']) % text,
        lambda: json.dumps(text),                                               # escape
        lambda: text[:i] + rng.choice("[{") * rng.choice([10, 400, 900, 5000]) + text[i:],
        lambda: text.replace("good", "poor", 1), lambda: text.replace("[", "[[", 1),
        lambda: text.replace('"', "'"),
        lambda: text.replace(rng.choice(["_", "s", "["]),
                             rng.choice(["\\u005f", "{", "\ud800"]), 1),
    ])()


def a_case(seed: int) -> tuple[str, str]:
    """A response and a reply to it; a sixth of the replies are left as they are."""
    rng = random.Random(seed)
    response = a_response(rng)
    reply = a_reply(rng, response)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        reply = mutated(rng, reply, a_reply(rng, response))
    return response, reply


# ── What a reply supports

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f",
           '"': '"', "\\": "\\", "/": "/"}
LITERAL = r'"(?:[^"\\]|\\.)*"'
PAIR = re.compile(rf"({LITERAL})\s*:\s*\[\s*((?:{LITERAL}\s*,\s*)*{LITERAL})?\s*\]", re.DOTALL)


def unescaped(literal: str) -> str:
    """What a JSON string literal says, its surrogate pairs joined."""
    text = re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))",
                  lambda m: chr(int(m[1], 16)) if m[1] else ESCAPES.get(m[2], m[2]),
                  literal[1:-1], flags=re.DOTALL)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def lists_in(reply: str) -> dict[str, list[list[str]]]:
    """Every list of strings that stands in the reply under a key, by what the key means."""
    found = {"good": [], "poor": [], "wrong": [], "improvement": []}
    for start in (m.start() for m in re.finditer('"', reply)):
        pair = PAIR.match(reply, start)
        for kind, noun in (("good", "spans"), ("poor", "spans"), ("wrong", "code"),
                           ("improvement", "code")):
            if pair and re.fullmatch(rf"[^a-z]*{kind}[^a-z]+{noun}[^a-z]*",
                                     unescaped(pair[1]).lower()):
                found[kind].append([unescaped(m[0])
                                    for m in re.finditer(LITERAL, pair[2] or "", re.DOTALL)])
    return found


def letters(text: str) -> str:
    """Text without what grounding may overlook:
    the amount of white space, the form of quotes, the Unicode form."""
    text = unicodedata.normalize("NFC", re.sub(r"\s+", " ", text)).strip()
    return re.sub("[‘’‚‛`´]", "'", re.sub("[“”„‟«»]", '"', text))


def places(response: str, quote: str) -> set[tuple[int, int]]:
    """Where a quote stands, character by character."""
    inside = splits(response)
    found = {(i, i + len(quote)) for i in range(len(response)) if response.startswith(quote, i)}
    return {(i, j) for i, j in found if not inside & {i, j}}


def check_quotes(reply: str, feedback: Feedback):
    """Each list of the feedback is one that stands in the reply under the key of its label."""
    found = lists_in(reply)
    assert feedback.good_spans in [*found["good"], []]
    code = [wrong + better for wrong in found["wrong"] for better in found["improvement"]]
    assert feedback.poor_spans in [*code, *found["poor"]]
    assert feedback.critique.strip() and feedback.critique == feedback.critique.strip()
    assert feedback.text().encode()                           # whole characters only


def check_spans(response: str, feedback: Feedback, grounding):
    """Every span is a quote of its label's list that says which place it means;
    every quote has one of three ends."""
    ambiguous, missing, whole, cited = (
        0, Counter(), letters(response), feedback.good_spans + feedback.poor_spans)
    composite = any(unicodedata.category(char)[0] == "M" or "\u1160" <= char <= "\u11ff"
                    for char in whole)
    for label, quotes in ((1, feedback.good_spans), (-1, feedback.poor_spans)):
        spans = [span for span in grounding.spans if span.label == label]
        exact = {quote: places(response, quote) if quote.strip() else set() for quote in quotes}
        for span in spans:
            said = letters(response[span.start : span.end])
            assert 0 <= span.start < span.end <= len(response)
            assert any(letters(quote) == said
                       and len(at or places(whole, said)) <= quotes.count(quote)
                       for quote, at in exact.items()) or composite
            assert said in map(letters, quotes)
        for quote, at in exact.items():
            repeats = quotes.count(quote)
            ambiguous += len(at) > repeats
            assert len(at) > repeats or at <= {(span.start, span.end) for span in spans}
            if at:
                missing[quote] += max(0, repeats - len(at))
            elif cited.count(quote) == 1 and not composite:
                assert (quote in grounding.unmatched) == (
                    not letters(quote) or not places(whole, letters(quote)))
    assert {span.label for span in grounding.spans} <= {1, -1}
    assert all(grounding.unmatched.count(quote) == count for quote, count in missing.items())
    assert ambiguous <= grounding.ambiguous
    assert len(grounding.spans) + len(grounding.unmatched) + grounding.ambiguous <= len(cited)


def check_delta(words, grounding, delta: list[float]):
    """A word is rewarded where one span of one kind covers it,
    and none of the other kind does."""
    for (start, end), value in zip(words, delta, strict=True):
        kinds = {span.label for span in grounding.spans
                 if span.start <= start and end <= span.end}
        assert value == (kinds.pop() if len(kinds) == 1 else 0)


def check(seed: int) -> Counter:
    """One case; what became of it."""
    response, reply = a_case(seed)
    words = [match.span() for match in re.finditer(r"\S+", response)]
    judgement = judge(reply, response, words)
    try:
        feedback = parse_feedback(reply)
    except FeedbackError:
        assert judgement.delta == [0] * len(words) and judgement.reason
        return Counter(refused=1)
    grounding = ground(response, feedback)
    check_quotes(reply, feedback)
    check_spans(response, feedback, grounding)
    check_delta(words, grounding, judgement.delta)
    return Counter(read=1, good=judgement.delta.count(1), poor=judgement.delta.count(-1),
                   unmatched=len(grounding.unmatched), ambiguous=grounding.ambiguous)


def each(seeds, what) -> Counter:
    """The sum of what(seed); an error names the seed."""
    total = Counter()
    for seed in seeds:
        try:
            total += what(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return total


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_label_that_the_reply_does_not_support(block):
    total, size = each(range(block, CASES, BLOCKS), check), len(range(block, CASES, BLOCKS))
    print(total)
    # else nothing was tested
    for outcome in ("refused", "read", "good", "poor", "unmatched", "ambiguous"):
        assert total[outcome] > size / 80, outcome


def test_the_other_kinds_of_reply_raise_nothing_else():
    """Labels for words and steps: mutated, they are read or refused,
    and speak of words that are there."""
    def one(seed):
        rng = random.Random(seed)
        response = a_response(rng)
        words, mode = response.split(), rng.choice(["DENSE", "STEPS"])
        value = ({"textual_feedback": "c",
                  "labels": [{"word": w, "label": rng.choice(["good", "poor", "neutral"])}
                             for w in words]} if mode == "DENSE" else
                 {"steps": [{"step": " ".join(words[i : i + 2]), "reason": "r",
                             "correct": i % 4 == 0} for i in range(0, len(words), 2)]})
        original = reply = json.dumps(value)
        for _ in range(rng.choice([0, 1, 2])):
            reply = mutated(rng, reply, original)
        try:
            feedback, grounding = read_reply({"id": "1", "prompt": "p", "response": response},
                                             reply, f"experiments.modes:{mode}")
        except FeedbackError:
            return Counter(refused=1)
        for span in grounding.spans:
            assert response[span.start : span.end] in (
                feedback.good_spans if span.label == 1 else feedback.poor_spans)
        return Counter(read=1, spans=len(grounding.spans))
    total = each(range(CASES // 4), one)
    assert min(total["read"], total["refused"], total["spans"]) > CASES / 80


N = 5000


@pytest.mark.parametrize("text", [
    '{"a":[' * 400 + "{}," * N, '{"a":[' * 400 + "1e5," * N, '{"good_spans":[' * N,
    '{"a":' * N, '{"' * N, "[" * 10 * N, '{"a":[1,1} ' * N, "x" * 10**6,
    '{"critique":"c","good_spans":["a"],"poor_spans":[]} ' + '{"x ' * 500
    + '{"critique":"c","good_spans":[],"poor_spans":["a"]}'])
def test_hostile_replies_are_refused(text):
    with pytest.raises(FeedbackError):
        parse_feedback(text)
