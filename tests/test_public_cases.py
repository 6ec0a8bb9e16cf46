"""Inputs after public bug reports, and neighbours of each kind.

A reply with one possible reading is read, a reply with two is refused, and no damage to a reply
gives a token a reward that the reply does not contain.
"""

import json
import random
import re
from collections import Counter

import pytest
from annotate import FeedbackError, ground, parse_feedback
from helpers import SLOW
from reward_model import read_judgement

# ── Replies with one reading

TEXT = ('The cat sat on the mat. It said \\frac{1}{2} and re.sub("\\d+", x).\n'
        'Then it left early.')
GOOD, POOR, CRITIQUE = '["sat on the mat"]', '["left early"]', "Clear, but the end is wrong."
VALUE = {"reasoning": "r", "textual_feedback": CRITIQUE, "good_spans": ["sat on the mat"],
         "poor_spans": ["left early"]}
DRAFT = {"textual_feedback": "A draft.", "good_spans": ["left early"],
         "poor_spans": ["The cat"]}
FORM = {"reasoning": "…", "textual_feedback": "…", "good_spans": ["…"], "poor_spans": ["…"]}
REPLY, INDENTED, ECHO = json.dumps(VALUE), json.dumps(VALUE, indent=2), json.dumps(FORM)


def changed(*pairs: tuple[str, str]) -> str:
    """REPLY with some of its pieces replaced."""
    text = REPLY
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def labels(reply: str, response: str = TEXT) -> dict[str, list[str]]:
    """The passages of the response that a reply labels."""
    spans = ground(response, parse_feedback(reply, response=response)).spans
    return {name: [response[span.start : span.end] for span in spans if span.label == label]
            for name, label in (("good", 1), ("poor", -1))}


# kind → replies that all label "sat on the mat" as good and "left early" as poor
NEIGHBOURS = {
    "trailing commas": [
        changed((GOOD, '["sat on the mat" ,\n]')), changed((POOR, '["left early",]')),
        REPLY[:-1] + ",}", f"[{REPLY},]", INDENTED.replace("]", ",]").replace("\n}", ",\n}")],
    "comments": [
        changed((', "poor', ', /* the bad\nones */ "poor')), REPLY + " // done",
        changed((', "poor', ', # the bad ones\n"poor')), REPLY[:-1] + "/* end */}",
        changed(('"textual', '/* the "bad" and the \'good\' */ "textual')),
        changed(('"textual', "// it didn't:\n\"textual"))],
    "empty or missing": [
        changed(('"r"', "null")), changed(('"r"', "None")), changed(('"reasoning": "r", ', "")),
        changed(("}", ', "wrong_code": null}')), changed(("}", ', "improvement_code": ""}')),
        changed(("}", ', "improvement_code": "No issues on the mat."}'))],
    "in a list": [
        f"[\n{REPLY}\n]", f"[{REPLY}, {REPLY}]", f"```json\n[{INDENTED}]\n```", f"[{VALUE!r}]"],
    "one key around it": [
        *[f'{{"{key}": {REPLY}}}' for key in ("answer", "Feedback JSON", "0")],
        f'{{"a": {{"b": [{REPLY}]}}}}', f"{{'answer': {REPLY}}}", f"{{answer: {REPLY}}}"],
    "function calls": [
        json.dumps({"type": "function", "function": {"name": "f", "parameters": VALUE}}),
        json.dumps({"tool_calls": [{"function": {"name": "f", "arguments": REPLY}}]}),
        f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': VALUE})}\n</tool_call>",
        f"submit({REPLY})", repr({"name": "f", "input": VALUE}), repr({"arguments": REPLY})],
    "JSON in a string": [
        json.dumps(json.dumps(REPLY)), json.dumps(REPLY)[1:-1], json.dumps([REPLY]),
        f"```json\n{json.dumps(INDENTED)}\n```", json.dumps({"type": "text", "text": REPLY})],
    "names of keys": [
        changed(("good_spans", good), ("poor_spans", poor), ("textual_feedback", critique))
        for good, poor, critique in [
            ("goodSpans", "poorSpans", "textualFeedback"),
            ("good-spans", "PoorSpans", "Critique"), ("GOOD_SPANS", "POOR_SPANS", "FEEDBACK"),
            ("Good spans:", "Poor spans:", "Textual feedback"),
            ("**good_spans**", "**poor_spans**", "codeFeedback")]],
    "Python and JavaScript": [
        repr(VALUE | {"more": None, "sure": True, "sorry": False}),
        repr(VALUE | {"textual_feedback": "It's clear."}), f"feedback = {VALUE!r}",
        repr(VALUE | {"textual_feedback": 'It\'s "clear".'}),
        re.sub(r'"(\w+)":', r"\1:", REPLY), re.sub(r'"(\w+)":', r"'\1' :", REPLY)],
    "an echo of the form": [
        *[f"{form}\n{REPLY}" for form in (
            ECHO, repr(FORM), ECHO.replace("\\u2026", "..."), ECHO.replace('"]', '", "…"]'))],
        f"{REPLY}\n{ECHO}", f"<think>{ECHO}</think>{ECHO}{REPLY}"],
    "a draft that is thought": [
        thought.replace("DRAFT", json.dumps(DRAFT)) + REPLY for thought in (
            "<Thinking>No: DRAFT\n</Thinking>\n", "<think>DRAFT</think><think>DRAFT</think>",
            "DRAFT</think>", "<thought>DRAFT</thought>", "<scratchpad>DRAFT, oops</scratchpad>",
            "<think>{'good_spans': ['It said'], or\nDRAFT</think>")],
    "tags in a critique": [
        changed((CRITIQUE, f"It has a {tag} tag.")) for tag in (
            "</think>", "<thinking>", "<think></think>", "</think> <think>", r"<\/think>")],
    "escapes that JSON lacks": [
        changed((CRITIQUE, text)) for text in (
            r"It\'s clear.", r"C:\Users", r"a \u12 b", r"\(x\)", "line\\\nbreak", r"\x41")],
    "line breaks and comments in strings": [
        changed(('"r"', f'"{text}"')) for text in (
            "one\r\n\ttwo", "a // b\nc", "# a\n", "/* a\n*/", "http://x", "{'good_spans': 1}")],
    "no list around a quote": [
        changed((GOOD, '"sat on the mat"'), (POOR, "'left early'")),
        changed((POOR, '"\\"left early\\""')), changed((POOR, '"left\nearly"')),
        changed((GOOD, '"\u200bsat on the mat"'))],
    "objects with a quote": [
        changed((POOR, f"[{item}]")) for item in (
            '{"text": "left early"}', "{'span': 'left early',}",
            '{"reason": "The cat", "quote": "left early"}',
            '{"Text": "left early", "Explanation": "The cat.", "comment": null}')],
}
# kind → (a quote between the quotation marks of JSON, the passage of TEXT that it means)
QUOTES = {
    "escapes read as control characters": [
        (r"\frac{1}{2}", r"\frac{1}{2}"), (r"\"\d+\"", r'"\d+"'),
        (r"and\nre.sub(\"\d", r'and re.sub("\d'), (r"\d+", r"\d+"),
        (r"\frac{1}{2} and re.sub(\"\d+\", x).\nThen", TEXT[32:-15])],
    "escapes written twice": [
        (r"x).\\nThen it", "x).\nThen it"), (r"\\\\frac{1}{2}", r"\frac{1}{2}"),
        (r"sub(\"\\\\d+\"", r'sub("\d+"'), (r"\\\\\\frac{1}{2}", r"\frac{1}{2}"),
        (r"\\\"\\\\d+\\\"", r'"\d+"')],
    "added quotation marks": [
        (r"\"left early\"", "left early"), ("'left early'", "left early"),
        ("“left early”", "left early"), ("«left early»", "left early"),
        ("`left early`", "left early"), (r" \"left early.\" ", "left early."),
        ("‘left\u00a0early’", "left early"), (r"\"\frac{1}{2}\"", r"\frac{1}{2}")],
    "characters of zero width": [
        *[(f"left {char}early", "left early")
          for char in "\u200b\u200c\u200d\u2060\ufeff\u00ad"],
        ("le\u200bft early", "left early"), ("\ufeffleft early\u200b", "left early")],
}


def test_public_replies_are_read(shared):
    path = shared / "data" / "public_cases" / "replies.jsonl"
    cases = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len(cases) >= 18
    for case in cases:
        assert labels(case["reply"], case["response"]) == case["right"], case["id"]


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_a_neighbour_of_a_public_reply_is_read(kind):
    for reply in NEIGHBOURS[kind]:
        assert labels(reply) == {"good": ["sat on the mat"], "poor": ["left early"]}, reply


@pytest.mark.parametrize("kind", QUOTES)
def test_a_quote_is_found_as_the_response_has_it(kind):
    for literal, passage in QUOTES[kind]:
        reply = f'{{"critique": "c", "good_spans": [], "poor_spans": ["{literal}"]}}'
        assert labels(reply) == {"good": [], "poor": [passage]}, literal


# ── Replies with two readings, or with none

def spans(good: str, poor: str) -> str:
    return f'{{"critique": "c", "good_spans": {good}, "poor_spans": {poor}}}'


OTHER = json.dumps(DRAFT)
REFUSED = {
    "two objects that differ": [
        REPLY + OTHER, f"{REPLY}\nOr rather:\n{OTHER}", f"[{REPLY}, {OTHER}]",
        json.dumps({"draft": DRAFT, "final": VALUE}), json.dumps(VALUE | {"draft": DRAFT}),
        f"<think>hm</think>{OTHER}{REPLY}", json.dumps(VALUE | {"more": {"poor_spans": []}}),
        json.dumps({"good": {"good_spans": ["The cat"]}, "poor": {"poor_spans": []}})],
    "a key with two values": [
        REPLY[:-1] + ', "good_spans": []}', REPLY[:-1] + ', "Poor spans": ["The cat"]}',
        REPLY[:-1] + ', "goodSpans": null}', REPLY[:-1] + ", textual_feedback: 'No.'}",
        f"[{REPLY[:-1]}, 'poor_spans': []}}]", f'{{"a": {REPLY[:-1]}, "goodspans": []}}}}'],
    "a part of a broken text": [
        f'{{"answer": {REPLY}, oops}}', f'{{"answer": {REPLY}', f"[{REPLY}", f"{REPLY}]",
        f'{{"draft": [{OTHER}], "good_spans": ["It said', f"{{{REPLY}}}", REPLY[:-9] + REPLY,
        f"{OTHER} No: {{'good_spans': ['It said", f'"poor_spans": ["The cat"], {REPLY}',
        f"{OTHER}\n{{critique: 'c', good_spans: ['The cat'", REPLY.partition("],")[0] + REPLY],
    "a comment that holds JSON": [
        changed((', "good', f', {comment} "good')) for comment in (
            '/* "good_spans": ["The cat"], */', '// "poor_spans": [],\n',
            "# 'good_spans': 'It',\n",
            "// </think>\n", "/* {} */", "// see")],
    "broken or cut off": [
        REPLY[:-1], REPLY[:-10], REPLY[1:], changed((",", "")), changed(('"good', 'good "')),
        repr(VALUE | {"textual_feedback": "It is clear."}).replace("It is", "It's"),
        changed((CRITIQUE, 'The word "clear" is.')), changed((GOOD, '["sat" "on the mat"]')),
        REPLY.replace("]", ")"), "{" * 30 + REPLY],
    "thought, echoed or copied": [
        f"<think>{REPLY}", f"<thinking>{REPLY}</thinking> So it is.", ECHO, f"[{ECHO}]",
        f"{REPLY}</think>", json.dumps({"quote": json.loads(spans('["The cat"]', "[]"))}),
        "It says " + spans('["The cat"]', "[]"), spans("[ 'The cat' ]", "[ ]")],
    "lists that are no lists of quotes": [
        spans(GOOD, poor) for poor in (
            '["left early", 3]', '[["left early"]]', '{"left early": "The cat"}', "true",
            '[{"text": "left early", "label": "good"}]', '[{"text": "left", "quote": "early"}]',
            '[{"reason": "left early"}]', "[null]", '[{"a": "left early"}]', "left early")],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_two_readings_or_none_is_refused_in_one_line(kind):
    copied = spans('["The cat"]', "[]")
    for reply in REFUSED[kind]:
        response = TEXT + copied * (kind == "thought, echoed or copied")
        with pytest.raises(FeedbackError) as error:
            print(reply, parse_feedback(reply, response=response))
        assert 20 < len(str(error.value)) < 160 and "\n" not in str(error.value)


def test_a_list_that_says_that_it_is_empty_labels_nothing():
    for text in ("None", "n/a", "no.", "Nothing", "null", "(none)", "No cat", "-", ""):
        assert labels(spans(GOOD, f'"{text}"'), f"{TEXT} None, no. {text}")["poor"] == []


# ── Damaged replies

WORDS = [first + last for first in ("ba", "ce", "di", "fo", "gu", "hy", "jy")
         for last in ("lam", "mek", "nip", "rot", "suv")]
GLUE = [" ", " ", " ", "\n", "\n\n", " \\frac{1} ", ' "', "' ", ", ", "\\n ", " \t", "“", " é ",
        " e\u0301 ", "\\\\", " 🎉 ", "中", "{", "}", "[", "\x00"]
KEYS = {"goodspans": 1, "poorspans": -1, "wrongcode": -1, "improvementcode": -1,
        "textualfeedback": 0, "critique": 0, "reasoning": 0}


def written(rng, value, mark: str) -> str:
    """The value in JSON, or as models write it. mark: the quotation mark of strings."""
    if isinstance(value, str):
        body = json.dumps(value, ensure_ascii=rng.random() < .3)[1:-1]
        if mark == "'":
            body = body.replace('\\"', '"').replace("'", "\\'")
        return mark + body.replace("\\n", rng.choice(["\n", "\\n", "\\n"])) + mark
    if isinstance(value, list):
        items = [written(rng, item, mark) for item in value]
        if rng.random() < .2 and len(items) < 2:
            return items[0] if items else rng.choice(["null", "None", '""'])
        items = [rng.choice([item] * 4 + [f'{{"text": {item}, "reason": "ok"}}'])
                 for item in items]
    else:
        style = rng.choice([str, str, str.upper, lambda key: key.replace("_", " "),
                            lambda key: key.title().replace("_", "")])
        items = [f"{mark}{style(key)}{mark}: {written(rng, item, mark)}"
                 for key, item in value.items()]
    comma = rng.choice([", "] * 6 + [",\n", " , // see below\n", ", /* so */"])
    end = rng.choice(["", "", "\n", ","]) if items else ""
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return opening + comma.join(items) + end + closing


def random_case(rng):
    """(response, text before the reply, reply with one reading, label of each word)."""
    words = rng.sample(WORDS, 14)
    response = "".join(word + rng.choice(GLUE) for word in words)
    truth = dict.fromkeys(words, 0)
    quotes = {1: [], -1: [], 0: []}
    place = 0
    while place < 10:                             # the last four words occur in drafts alone
        label = rng.choice((1, -1, 0))
        chosen = words[place : min(place + rng.choice((1, 2, 3)), 10)]
        start, end = response.index(chosen[0]), response.index(chosen[-1]) + len(chosen[-1])
        quotes[label].append(response[start:end])
        truth.update(dict.fromkeys(chosen, label))
        place += len(chosen) + 1
    value = {"critique": "It is fine.", "good_spans": quotes[1],
             rng.choice(("poor_spans", "wrong_code")): quotes[-1]}
    reply = written(rng, value, rng.choice(['"', '"', "'"]))
    reply = rng.choice([
        reply, reply, f"```json\n{reply}\n```", f"[{reply}]", f'{{"answer": {reply}}}',
        f'{{"name": "json", "arguments": {reply}}}', f"It is so: {reply}\nDone.",
        json.dumps({"answer": json.dumps(value)}), json.dumps(json.dumps(value, indent=1))])
    draft = written(rng, {"critique": "A draft.", "good_spans": words[10:12],
                          "poor_spans": words[12:]}, '"')
    before = rng.choice(["", "", f"<think>Hm. {draft}</think>\n", f"{ECHO}\n",
                         f"<thinking>{draft[: rng.randrange(len(draft))]}</thinking>"])
    return response, before, reply, truth


def damaged(rng, text: str) -> str:
    """The text after one random change. No passage moves to another place."""
    i = rng.randrange(len(text) + 1)
    j = min(len(text), i + rng.choice((1, 1, 1, 2, 5, 20, 80)))
    data = bytearray(text.encode("utf-8", "surrogatepass")) or bytearray(1)
    data[rng.randrange(len(data))] = rng.choice(b'"\\{}[],: \x00\xff\x80aZ0')
    inserted = rng.choice([*"\"'\\{}[],:/#*` \n\x00n\ud83d\u2028", "//", "/*", "*/", "```",
                           '\\"', "[]", "{}", "null", '": ', '", "', "</think>", "<think>", "…",
                           "[" * 900, "{" * 500, "9" * 5000, "\\ud83d", "\\u0041"])
    frame = rng.choice(['{"x": %s}', "[%s]", '"%s"', "{%s", "%s]", "%s</think>"])
    return rng.choice([
        text[:i] + text[j:], text[:i] + inserted + text[i:], text[:i], text[i:],
        text[:i] + inserted + text[j:], data.decode("utf-8", rng.choice(["replace", "ignore"])),
        frame.replace("%s", text), json.dumps(text), text.replace('"', "'"),
        text.replace(*rng.choice([("[", "[["), ("_", "\\u005f"), ("s", "\ud800")]), 1)])


def supported(reply: str, word: str) -> set[int]:
    """The labels of a word by brute force: those of the nearest keys before it in a reply."""
    labels = {0}
    for answer in (reply, reply.rpartition("</think>")[2], re.sub(r"\\(n|u\w{4})", "", reply),
                   reply.replace("\\u0041", "a")):
        letters = re.sub("[^a-z]", "", answer.lower())
        for match in re.finditer(word, letters):
            key = max(KEYS, key=letters[: match.start()].rfind)
            labels.add(KEYS[key] * (key in letters[: match.start()]))
    return labels


def read_labels(response: str, reply: str, words) -> dict[str, float] | None:
    """The label of each word of the response that a reply gives; None if it is refused."""
    places = [(response.index(word), response.index(word) + len(word)) for word in words]
    judgement = read_judgement(reply, response, places)
    if judgement.reason:
        assert not any(judgement.delta) and "\n" not in judgement.reason[:100]
        return None
    assert parse_feedback(reply, response=response).text().encode()     # whole characters only
    return dict(zip(words, judgement.delta))


CASES = 100_000 if SLOW else 4000


def test_no_damage_to_a_reply_gives_a_reward_that_it_does_not_contain():
    """Half of the replies are whole and must be read. The others are damaged, up to twice."""
    total = Counter()
    for seed in range(CASES):
        rng = random.Random(seed)
        response, before, reply, truth = random_case(rng)
        if seed % 2:
            assert read_labels(response, before + reply, truth) == truth, (seed, before + reply)
            continue
        for _ in range(rng.choice((1, 1, 2))):
            reply = damaged(rng, reply)
        found = read_labels(response, before + reply, truth) or {}
        for word, label in found.items():
            assert label in supported(reply, word), (seed, word, label, before + reply)
        total += Counter(labelled=sum(map(bool, found.values())), read=bool(found),
                         whole=found == truth, refused=not found)
    assert min(total[name] for name in ("labelled", "read", "whole", "refused")) > CASES / 20
