"""annotate.py recomputed another way: characters by brute force, bytes by hand, real rows,
and thousands of damaged replies.

A damaged reply may be refused; it may give no label that it does not support. Every one is a
function of its seed, which a failure names. What a reply supports is read here by string
literals and regular expressions, and by comparing characters one by one.
"""

import json
import random
import re
import sys
import unicodedata
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Callable

import hypothesis
import pytest
import regex
from hypothesis import assume, given
from hypothesis import strategies as st
import annotate
import toy
from annotate import (Feedback, FeedbackError, Grounding, Span, annotation_messages,
                      conflicting_tokens, ground, half_inside_tokens, parse_feedback,
                      token_offsets, token_rewards, tokens_inside)
from data import InputError, examples, get_task, load_object, read_rows
from helpers import ROOT, SLOW, error_message, often
from reward_model import judge


def reply(critique="The plot is right, the name is wrong.", good=("the plot",),
          poor=("Bob",)) -> str:
    return json.dumps({"textual_feedback": critique, "good_spans": list(good),
                       "poor_spans": list(poor)})


def grounded(response, good=(), poor=()):
    return ground(response, Feedback("c", list(good), list(poor)))


# ── parse_feedback

READ = Feedback("The plot is right, the name is wrong.", ["the plot"], ["Bob"])
CODE = {"wrong_code": ["x = 1"], "improvement_code": ["for i in a:", "y"]}
CODE_QUOTES = ["x = 1", "for i in a:", "y"]
UNNAMED = '{"good_spans": ["a"], "poor_spans": []}\n```'


@pytest.mark.parametrize("text, feedback", [
    # FACTS §5: what models really write around the JSON
    (reply(), READ), (f"```json\n{reply()}\n```", READ), (f"```\n{reply()}```", READ),
    (f"Sure, {{here}} it is:\n\n{reply()}\n\nAnything?", READ),
    (f'{{"note": 1}} {reply()}', READ),
    (f'The dict {{"a": x}} is made twice.\n{reply()}', READ),
    (json.dumps(json.loads(reply()), indent=2), READ),
    (reply()[:-1] + ', "confidence": ' + "9" * 5000 + "}", READ),
    # FACTS §3: `Good spans` in the paper, `good_spans` in the release
    *[(json.dumps({critique: "c", good: ["a"], poor: ["b", "d"]}),
       Feedback("c", ["a"], ["b", "d"]))
      for critique, good, poor in [("textual_feedback", "good_spans", "poor_spans"),
                                   ("Textual feedback", "Good spans", "Poor spans"),
                                   ("critique", "Good Spans", "Poor Spans"),
                                   ("feedback", "GOOD_SPANS", "poor-spans")]],
    # FACTS §3: in rows of the code task, wrong and improvable code are both poor
    (json.dumps(CODE | {"code_feedback": "c"}), Feedback("c", [], CODE_QUOTES)),
    (json.dumps(CODE | {"Code Feedback": "c", "good_spans": ["z"]}),
     Feedback("c", ["z"], CODE_QUOTES)),
    # without a key the critique is the prose before the object
    *[(f"  It is\nshort. \n\n{fence}{UNNAMED}", Feedback("It is\nshort.", ["a"], []))
      for fence in ("", "```json\n", "```\n")],
    # a literal line break or tab in a string
    ('{"critique": "one\ntwo", "good_spans": ["a\n\tb"], "poor_spans": []}',
     Feedback("one\ntwo", ["a\n\tb"], []))])
def test_what_models_write_is_read(text, feedback):
    assert parse_feedback(text) == feedback


plain_critiques = st.text(
    st.characters(exclude_characters="{}`\0", exclude_categories=["Cs"])).filter(str.strip)


@often
@given(plain_critiques, st.lists(st.text()), st.lists(st.text()))
@hypothesis.example("Write this:\n```\nreturn 0\n```", ["a"], [])
def test_feedback_survives_its_own_text(critique, good, poor):  # Alg. 1 l.9
    """§3.4: z = [c ; span JSON] is read back as it was written; but "</think>" ends a thought
    wherever it stands, and "<think>" begins one in prose."""
    # Nor may the object seem to be a part of something.
    assume("<think>" not in critique and not re.search(r"""(["']\s*:|\[)\s*$""", critique))
    assume(not any("</think>" in text for text in (critique, *good, *poor)))
    assert (parse_feedback(Feedback(critique, good, poor).text())
            == Feedback(critique.strip(), good, poor))


@pytest.mark.parametrize("text, reason", [
    ("", "no JSON object"), ("It is all fine.", "no JSON object"),
    ('{"score": 3}', "no JSON object"),
    ("['good_spans', 'poor_spans']", "no JSON object"), (reply()[:-10], "cut off"),
    ('{"critique": "c", "good_spans": []}', "'poor_spans' is missing"),
    ('{"critique": "c", "poor_spans": []}', "'good_spans' is missing"),
    ('{"critique": "c", "wrong_code": []}', "'improvement_code' is missing"),
    (reply(good=["a", 3]), "list of strings"), (reply(poor=[["a"]]), "list of strings"),
    ('{"critique": "c", "good_spans": "the plot", "poor_spans": []}', "list of strings"),
    ('{"critique": "c", "good_spans": {"a": "b"}, "poor_spans": []}', "list of strings"),
    ('{"critique": "c", "good_spans": null, "poor_spans": []}', "list of strings"),
    (reply() + reply(good=[]), "differ"), (reply(good=[]) + "\nNo:\n" + reply(), "differ"),
    ('{"critique": "c", "good_spans": ["a"], "good_spans": ["b"], "poor_spans": []}', "twice"),
    ('{"critique": "c", "good_spans": ["a"], "Good spans": [], "poor_spans": []}', "twice"),
    ('{"critique": "c", "critique": "d", "good_spans": [], "poor_spans": []}', "twice"),
    ('{"good_spans": ["a"], "poor_spans": []}', "no critique"), (reply(" \n"), "no critique"),
    ('```json\n{"good_spans": ["a"], "poor_spans": []}\n```', "no critique"),
    (reply(7), "not a string"), (reply(poor=["\ud83d"]), "surrogate"),
    ('c {"good_spans": ' + "[" * 10_000, "nested"), ('c {"a":' * 10_000, "nested|cut off"),
    ('{"a":[' * 400 + "{}," * 5000, "nested|cut off"),
    (reply() + '{"x ' * 500 + reply(good=[]), "differ")])
def test_what_is_not_feedback_is_an_error_with_its_reason(text, reason):
    """Contract: anything but lists of strings with a critique is an error, never a guess."""
    with pytest.raises(FeedbackError, match=reason):
        parse_feedback(text)


INNER = reply("Perfect.", ["all of it"], [])


@pytest.mark.parametrize("text, reason", [
    (f'{{"result": {INNER}, oops}}', "a part of"), (f'{{"result": {INNER}', "a part of"),
    (f'{{"result": {INNER}}}', "no JSON object with"),
    (f"<think>{INNER}</think> Fine.", "no JSON"),
    (f"{INNER} so</think> Fine.", "no JSON"), ('Hm <think> {"x": </think>', "no JSON"),
    (f"<think>I say {INNER}", "inside <think>"), (f"It says {INNER}.", "no JSON object"),
    (reply()[:-1] + ",}", "JSON is broken"), (reply().replace('"]', '",]'), "JSON is broken"),
    (reply()[:-1] + "} // done", None),
    (reply().replace(', "poor', ', # poor\n"poor'), "JSON is broken"),
    (reply().replace('"good', '"a": 1 "good'),
     "JSON is broken or cut off .Expecting ',' delimiter"),
    (f"<think>{INNER}</think>\n{reply()}", None), (f'<think>{{"x" </think> {reply()}', None),
    (f"{{\"x\" so</think> {reply()}", None), (f"It says {INNER}, but:\n{reply()}", None),
    (reply('The tag "</think>" is left.'), "no JSON object"),
    (reply('The tag "<think>" is left.'), None),
    (f'{{"textual_feedback": "use "}}" here", "spans": {INNER}}}', "a part of"),
    (f"{{'textual_feedback': 'x', 'spans': {INNER}}}", "a part of"),
    (f'{{ /* v */ "textual_feedback": "x", "spans": {INNER}}}', "a part of"),
    (f"[{INNER}]", "a part of"), (f"{{{INNER}}}", "a part of"), (f"[{INNER}", "a part of"),
    (f'{INNER} Or rather: {{"good_spans": ["a', "a part of"),
    (f'{{"reasoning": "it says {INNER} and', "a part of"),
    (f'{{"critique": "it says {INNER} and', "a part of"),
    (f'{{"Good spans": "as {INNER}', "a part of"),
    (f'Hm {{"good_spans": [], "good_spans": ["b"]}}\n</think>\n{reply()}', None),
    (f"{reply()}\nIt says {INNER}.", None)])
def test_only_an_object_of_the_answers_own_is_feedback(text, reason):
    """Neither a part of a broken one, nor what is thought aloud or stands in the response."""
    response = f"Take this: {INNER}" if "It says" in text else ""
    with pytest.raises(FeedbackError, match=reason) if reason else nullcontext():
        feedback = parse_feedback(text, response=response)
        assert feedback.good_spans in (["the plot"], ["all of it"])


def test_a_reply_cut_at_any_character_of_its_object_is_an_error():
    text = f"Let me see.\n```json\n{reply()}"
    assert parse_feedback(text)
    for end in range(len(text)):
        with pytest.raises(FeedbackError):
            parse_feedback(text[:end])


@pytest.mark.parametrize("copies", [1, 2])
def test_nesting_of_any_depth_is_a_feedback_error(copies):
    for depth in [*range(sys.getrecursionlimit() - 300, sys.getrecursionlimit() + 20), 100_000]:
        text = f'c {{"good_spans": {"[" * depth}{"]" * depth}, "poor_spans": []}}'
        with pytest.raises(FeedbackError):
            parse_feedback(text * copies)


# ── ground

@pytest.mark.parametrize("response, good, poor, spans, unmatched, ambiguous", [
    ("The cat sat. A dog ran.", ["cat sat"], ["A dog"], [(4, 11, 1), (13, 18, -1)], [], 0),
    # §3.3, Appendix L: the k-th repeat takes the k-th occurrence
    ("a man, a plan, a canal", ["a ", "plan", "a ", "a "], [],
     [(0, 2, 1), (7, 9, 1), (9, 13, 1), (15, 17, 1)], [], 0),
    ("one two one", [], ["one"] * 4, [(0, 3, -1), (8, 11, -1)], ["one"] * 2, 0),
    # §4.2: precision first, no place is guessed
    ("one two one one", ["one", "two"], ["one", "one"], [(4, 7, 1)], [], 2),
    ("he said ha ha ha", ["ha ha"], [], [], [], 1),
    ("Bob ran home", ["Bob ran"], ["Bob ran"], [(0, 7, 1), (0, 7, -1)], [], 0),
    ("two words here", [" two\nwords\n"], [], [(0, 9, 1)], [], 0),
    # the exact match is preferred to the normalised
    ("“a” and \"a\" and ‘a’", ['"a"'], [], [(8, 11, 1)], [], 0),
    ("caf\u00e9 cafe\u0301", ["cafe\u0301"], [], [(5, 10, 1)], [], 0)])
def test_quotes_are_found_by_hand(response, good, poor, spans, unmatched, ambiguous):
    found = grounded(response, good, poor)
    assert found.spans == [Span(*span) for span in spans]
    assert (found.unmatched, found.ambiguous) == (unmatched, ambiguous)


@pytest.mark.parametrize("response, quote", [
    ("vi\u00ea\u0323t", "vi\u00eat"), ("x a\u0301\u0300 y", "x \u00e1 y"),
    ("x a\u0301\u0300 y", "\u00e1"), ("x \ud55c y", "\u1112\u1161"),
    ("a ﬁne day", "a fine day"),
    # FACTS §5: a fuzzy search matched unrelated text
    *[("The cat sat on a café.", quote) for quote in (
        "the cat sat", "The  Cat sat", "Thecat sat", "The cat sits", "The cat sat!",
        "A cat sat", "The ca...sat", "cafe", "", " ", "\n\t", "\u00a0")]])
def test_nothing_is_matched_fuzzily(response, quote):
    """Nor a letter without its accent, or a part of a syllable."""
    assert grounded(response, poor=[quote]) == Grounding([], [quote], 0)


letters = ["a", "b", " ", "\n", "\u00a0", "中", "🎉", "e", "\u0301", "é", "“", '"', "'"]


@st.composite
def texts_with_quotes(draw):
    """A text, and lists of good and poor quotes:
    substrings of it, and some that it cannot hold."""
    text = draw(st.lists(st.sampled_from(letters), min_size=1, max_size=25).map("".join))
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 4)).map(
        lambda cut: text[cut[0]:sum(cut)])
    apart = lambda quote: text.count(quote) == len(re.findall(f"(?={re.escape(quote)})", text))
    quotes = st.lists((cuts | st.just("zq")).filter(lambda quote: quote and apart(quote)),
                      max_size=4)
    return text, draw(quotes), draw(quotes)


# By Unicode's own tables: visible characters, and words of scripts that have spaces.
_WORD = (r"[[\p{L}\p{Mn}\p{Mc}\p{N}\p{Pc}]--\p{Han}--\p{Hiragana}--\p{Katakana}--\p{Hangul}"
         r"--\p{Thai}--\p{Lao}--\p{Khmer}--\p{Myanmar}]")
BETWEEN, INSIDE = regex.compile(r"\X"), regex.compile(rf"(?V1)(?<={_WORD})(?={_WORD})")


def splits(text: str) -> set[int]:
    """The places inside a word or inside a visible character."""
    edges = {m.start() for m in BETWEEN.finditer(text)} | {len(text)}
    return {m.start() for m in INSIDE.finditer(text)} | set(range(len(text))) - edges


@pytest.mark.parametrize("text, quote, there", [
    ("concatenate the cat", "cat", 1), ("concatenate", "cat", 0), ("x_1 = 2", "x", 0),
    ("x = x1", "x", 1), ("in 2024", "20", 0), ("40 km", "40", 1), ("self.size", "size", 1),
    ("👩‍🚀 flies", "👩", 0), ("👩‍🚀 flies", "👩‍🚀", 1), ("👩‍🚀 flies", "🚀", 0),
    ("cafe\u0301", "cafe", 0), ("cafe\u0301s", "cafe\u0301", 0), ("1️⃣First", "First", 1),
    ("ｱｲｳ", "ｲｳ", 1), ("我爱北京", "北京", 1), ("это слово", "слов", 0),
    ("서울에서", "서울", 1), ("हिन्दी में", "हिन्दी", 1), ("हिन्दी", "हि", 0),
    ("الكتاب هنا", "كتاب", 0)])
def test_a_quote_is_of_whole_words_and_visible_characters(text, quote, there):
    """§3.3: what labels a part of a word labels nothing, and is counted."""
    found = grounded(text, [quote])
    assert (len(found.spans), found.unmatched) == ((1, []) if there else (0, [quote]))


@often
@given(st.lists(st.sampled_from([*"ab_1 é'中한ก\r\n👩🚀❤\u0301\ufe0f\u200d\u0939\u093f\u0928"]),
                max_size=14).map("".join))
def test_what_splits_a_word_or_a_character_is_as_unicode_has_it(text):
    """But for a line's end, of which half is as good as the whole,
    and for what a joiner joins."""
    ours = {at for at in range(len(text) + 1) if annotate._splits(text, at)}
    apart = {at for at in range(1, len(text)) if text[at - 1] in "\u200d\r\n"}
    assert ours - apart == splits(text) - apart


def places(response: str, quote: str) -> list[tuple[int, int]]:
    """Where a quote stands as a whole, character by character."""
    inside = splits(response)
    ends = [(i, i + len(quote)) for i in range(len(response)) if response.startswith(quote, i)]
    return [(i, j) for i, j in ends if not quote.isspace() and not inside & {i, j}]


@often
@given(texts_with_quotes())
def test_ground_equals_brute_force_on_exact_quotes(case):
    """Contract: exact quotes first;
    quotes that overlap with themselves have a test of their own."""
    text, good, poor = case
    # Of what splits a word the test before is.
    assume(splits(text) == {at for at in range(len(text) + 1) if annotate._splits(text, at)})
    spans, unmatched, ambiguous = [], [], 0
    for label, quotes in ((1, good), (-1, poor)):
        for quote, repeats in Counter(quotes).items():
            ends = places(text, quote)
            # Its normal form may stand where it does not; of that are other tests.
            assume(ends or not [*annotate.normal_places(text, quote)])
            if len(ends) > repeats:
                ambiguous += 1
            else:
                spans += [Span(*pair, label) for pair in ends]
                unmatched += [quote] * (repeats - len(ends))
    found = grounded(text, good, poor)
    assert Counter(found.spans) == Counter(spans)
    assert found.spans == sorted(found.spans, key=lambda span: (span.start, span.end))
    assert (Counter(found.unmatched), found.ambiguous) == (Counter(unmatched), ambiguous)


def plain(text: str) -> str:
    """Text without what grounding may overlook:
    the amount of white space, the form of quotes, the Unicode form."""
    text = unicodedata.normalize("NFC", re.sub(r"\s+", " ", text)).strip()
    return re.sub("[‘’‚‛`´]", "'", re.sub("[“”„‟«»]", '"', text))


forms = [("a",), ("b",), ("中",), ("🎉",), (" ", "\u00a0", "\n", "  "), (*"'‘’‚‛`´",),
         (*'"“”„‟«»',), ("\u00e9", "e\u0301"), ("\ud55c", "\u1112\u1161\u11ab"),
         ("\u1e69", "s\u0323\u0307", "s\u0307\u0323"),
         ("\u0929", "\u0928\u093c"), ("\u0622", "\u0627\u0653")]
units = st.sampled_from(forms).flatmap(
    lambda ways: st.tuples(st.sampled_from(ways), st.sampled_from(ways)))


@often
@given(st.lists(units, min_size=1, max_size=16), st.data())
def test_a_span_is_its_quote_up_to_normal_form(pairs, data):
    """Contract: equality up to white space, quotes and Unicode form, and all of it."""
    start = data.draw(st.integers(0, len(pairs) - 1))
    end = data.draw(st.integers(start + 1, len(pairs)))
    response, quote = "".join(a for a, _ in pairs), "".join(b for _, b in pairs[start:end])
    assume(plain(quote))
    there, inside = plain(response), splits(plain(response))
    places = sum(not inside & {m.start(), m.start() + len(plain(quote))}
                 for m in re.finditer(f"(?={re.escape(plain(quote))})", there))
    found = grounded(response, [quote])
    assert all(plain(response[span.start:span.end]) == plain(quote) for span in found.spans)
    if places == 1 and response.count(quote) <= 1:
        assert len(found.spans) == 1 and not found.unmatched
    if places > 1 and there.count(plain(quote)) == places and quote not in response:
        assert (found.spans, found.ambiguous) == ([], 1)


# ── token_offsets

@pytest.fixture(scope="module", params=["toy", "stories260K"])
def tokenizer(request):
    """Byte-level BPE, and SentencePiece with byte fallback."""
    from transformers import AutoTokenizer
    where = ROOT / "toy" / "base" if request.param == "toy" else \
        request.getfixturevalue("shared") / "models" / "stories260K"
    return AutoTokenizer.from_pretrained(where)


def gpt2_bytes() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself,
    the other bytes for the characters from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return ({chr(byte): byte for byte in own}
            | {chr(256 + i): byte for i, byte in enumerate(rest)})


def token_bytes(tokenizer, ids) -> list[bytes]:
    """What each id writes, from the token strings alone."""
    tokens, table = tokenizer.convert_ids_to_tokens(ids), gpt2_bytes()
    special = [index in tokenizer.all_special_ids for index in ids]
    if "<0x00>" not in tokenizer.get_vocab():
        return [b"" if skip else bytes(table[c] for c in token)
                for token, skip in zip(tokens, special)]
    wrote = [b"" if skip else bytes([int(token[3:5], 16)]) if re.fullmatch("<0x..>", token) else
             token.replace("▁", " ").encode() for token, skip in zip(tokens, special)]
    first = next((i for i, piece in enumerate(wrote) if piece), None)
    if first is not None:
        wrote[first] = wrote[first].removeprefix(b" ")          # SentencePiece's dummy prefix
    return wrote


def offsets_from_bytes(pieces: list[bytes]) -> tuple[str, list[tuple[int, int]]]:
    """The valid UTF-8 text and the characters that each piece touches."""
    text = b"".join(pieces).decode()
    owner = [i for i, character in enumerate(text) for _ in character.encode()]
    offsets, at, shown = [], 0, 0
    for piece in pieces:
        touched = owner[at:at + len(piece)]
        offsets.append((touched[0], touched[-1] + 1) if piece else (shown, shown))
        at, shown = at + len(piece), offsets[-1][1]
    return text, offsets


units_of_text = st.sampled_from(["a", "th", " the", "Queen", " ", "  ", "\n", "\t", "7", "é",
                                 "e\u0301", "中文", "한", "ש", "🎉", "👩‍👩‍👧", "🇫🇷", "\u0300",
                                 "▁", "Ġ", "’", "\u2028", "𝔘"])
any_text = st.lists(units_of_text, max_size=10).map("".join) | st.text(
    st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=12)


@often
@given(text=any_text, eos=st.booleans())
def test_offsets_are_those_of_the_bytes(tokenizer, text, eos):
    """Contract: one interval per id, for byte-level BPE and SentencePiece,
    characters split over tokens included."""
    ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * eos
    shown, offsets = token_offsets(tokenizer, ids)
    assert shown == tokenizer.decode(ids, skip_special_tokens=True,
                                     clean_up_tokenization_spaces=False)
    assert (shown == text.replace("▁", " ") or "<0x00>" not in tokenizer.get_vocab()
            and shown == text)
    assert (shown, offsets) == offsets_from_bytes(token_bytes(tokenizer, ids))


@often
@given(data=st.data())
def test_offsets_of_any_ids_cover_the_text(tokenizer, data):
    """Invariant 1: a policy may sample bytes that are no UTF-8."""
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    single_bytes = [i for i, t in enumerate(vocabulary)
                    if re.fullmatch("<0x..>", t) or len(t) == 1 and ord(t) > 0x7F]
    ids = data.draw(st.lists(st.sampled_from(single_bytes) | st.integers(0, len(tokenizer) - 1),
                             max_size=12))
    text, offsets = token_offsets(tokenizer, ids)
    assert text == tokenizer.decode(ids, skip_special_tokens=True,
                                    clean_up_tokenization_spaces=False)
    if "<0x00>" not in tokenizer.get_vocab():
        assert text == b"".join(token_bytes(tokenizer, ids)).decode(errors="replace")
    assert len(offsets) == len(ids)
    # a special token writes nothing
    written = [(start, end) for start, end in offsets if start < end]
    for (start, end), (next_start, next_end) in zip(written, written[1:]):
        assert start <= next_start and end <= next_end
    reached = 0
    for start, end in offsets:
        assert start <= reached and start <= end <= len(text), "a gap, or outside the text"
        reached = max(reached, end)
    assert reached == len(text), "characters at the end belong to no token"


def test_a_replacement_mark_is_a_character_and_shared_by_the_bytes_it_stands_for(tokenizer):
    """U+FFFD stands for as many bytes as begin a character, unless the model wrote it."""
    if "<0x00>" in tokenizer.get_vocab():
        pytest.skip("byte fallback shows a mark for every byte, also half way to a character")
    ids = tokenizer.encode("a \ufffd b", add_special_tokens=False)
    assert token_offsets(tokenizer, ids) == offsets_from_bytes(token_bytes(tokenizer, ids))
    char_of_byte = {byte: char for char, byte in gpt2_bytes().items()}
    ids = tokenizer.convert_tokens_to_ids(
        [char_of_byte[byte] for byte in "中".encode()[:2] + b"a"])
    assert token_offsets(tokenizer, ids) == ("\ufffda", [(0, 1), (0, 1), (1, 2)])


@pytest.mark.parametrize("text", ["The end", "a 中 b", "the plot 🎉 is é"])
def test_a_special_token_has_an_empty_interval_and_moves_no_other(tokenizer, text):
    """Also before a word's space, and inside a character."""
    ids, eos = tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id
    shown, offsets = token_offsets(tokenizer, ids)
    for cut in range(len(ids) + 1):
        found = token_offsets(tokenizer, [*ids[:cut], eos, *ids[cut:]])
        start, end = found[1].pop(cut)
        assert start == end and found == (shown, offsets)


# ── token_rewards

@st.composite
def tilings(draw):
    """A text and intervals that tile it, some of them empty or shared by two tokens,
    none of spaces alone."""
    text = draw(st.text("ab 中\n\u00a0", min_size=1, max_size=24).filter(str.strip))
    cuts, last = [0], len(text.rstrip())
    for cut in sorted(draw(st.lists(st.integers(0, last), max_size=10))):
        cuts += [cut] if cut == cuts[-1] or text[cuts[-1]:cut].strip() else []
    cuts = ([cut for cut in cuts if text[cut:].strip()]
            + [len(text)] * draw(st.sampled_from([1, 1, 2])))
    return text, [pair for pair in zip(cuts, cuts[1:])
                  for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]


def some_spans(text):
    ends = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted)
    return st.lists(st.builds(lambda e, label: Span(*e, label), ends, st.sampled_from([1, -1])),
                    max_size=5)


def lies_in(text, offset, span) -> bool:
    """By characters: the token has one that is no space,
    and each of those is in this one span."""
    solid = [i for i in range(*offset) if not text[i].isspace()]
    return bool(solid) and all(i in range(span.start, span.end) for i in solid)


@often
@given(tilings(), st.data())
def test_delta_equals_brute_force_over_characters(tiling, data):  # Eq. §3.3 δ; Alg. 2 l.18–25
    """§3.3, Algorithm 2 l.15–27: ±1 in a span of one kind, 0 outside,
    half inside and in both kinds."""
    text, offsets = tiling
    spans = data.draw(some_spans(text))
    labels = [{span.label for span in spans if lies_in(text, offset, span)}
              for offset in offsets]
    assert token_rewards(text, offsets, spans) == [sum(found) for found in labels]
    assert conflicting_tokens(text, offsets, spans) == sum(found == {1, -1} for found in labels)
    assert tokens_inside(text, offsets, spans) == [
        [t for t, offset in enumerate(offsets) if lies_in(text, offset, span)]
        for span in spans]
    marked = {i for span in spans for i in range(span.start, span.end) if not text[i].isspace()}
    touched = [bool(marked & {*range(*offset)}) for offset in offsets]
    assert half_inside_tokens(text, offsets, spans) == sum(
        some and not found for some, found in zip(touched, labels))


def test_tokens_by_hand():  # Alg. 2 l.15; Alg. 2 l.16–17
    text, offsets = "Bob ran home", [(0, 3), (3, 5), (5, 7), (7, 12), (12, 12)]
    assert token_rewards(text, offsets, [Span(0, 7, 1), Span(9, 12, -1)]) == [1, 1, 1, 0, 0]
    assert token_rewards(text, offsets, [Span(0, 3, 1), Span(5, 12, -1)]) == [1, 0, -1, -1, 0]
    assert token_rewards(text, offsets, [Span(4, 6, -1)]) == [0, -1, 0, 0, 0]
    halves = [Span(0, 2, 1), Span(2, 3, 1)]                           # which are no whole
    assert token_rewards(text, offsets, halves) == [0] * 5
    assert half_inside_tokens(text, offsets, halves) == 1


def test_a_token_of_spaces_alone_is_in_a_span_only_where_all_of_it_is():
    """Alg. 2 l.19, y_t ∈ s_k: the line break inside a quoted block of code belongs to it."""
    text, offsets = "a  \n b", [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert token_rewards(text, offsets, [Span(0, 6, 1)]) == [1, 1, 1, 1]
    assert token_rewards(text, offsets, [Span(0, 2, -1)]) == [-1, 0, 0, 0]


def test_human_spans_hold_on_real_tokens(tokenizer, shared):
    """Fine-grained RLHF: every span that a person marked gives −1 to its own words, all of
    them, and to nothing else."""
    rows, n = read_rows(shared / "data" / "finegrained_qa_human_spans.jsonl"), 0
    for row in rows:
        ids = tokenizer.encode(row["prediction 1"], add_special_tokens=False)
        text, offsets = token_offsets(tokenizer, ids)
        assert text == row["prediction 1"]
        solid = {i for i, char in enumerate(text) if not char.isspace()}
        for error in row["feedback"]["errors"]:
            span = Span(error["start"], error["end"], -1)
            delta = token_rewards(text, offsets, [span])
            covered = {i for d, offset in zip(delta, offsets) for i in range(*offset) if d}
            assert covered & solid == solid & {*range(span.start, span.end)}
            assert -1 in delta and set(delta) <= {0, -1}
            n += 1
    assert n > 100


# ── Tasks

def check_examples(name, rows, expected) -> list[dict]:
    """The examples of the rows are the expected (id, response, texts of the prompt), and §B:
    the request and the policy's prompt hold them. Returns the examples."""
    task = get_task(name)
    made = list(examples(task, rows))
    assert [(e["id"], e["response"]) for e in made] == [(x[0], x[1]) for x in expected]
    for example, (_, response, *texts) in zip(made, expected):
        system, user = annotation_messages(task, example)
        assert (system["role"], user["role"]) == ("system", "user")
        for text in texts:
            assert text in user["content"] and text in task.policy_prompt(example["row"])
        for text in (response, example["prompt"], example.get("outcome", "")):
            assert text in user["content"]
    return made


def test_slf5k_rows_become_messages(shared):
    rows = read_rows(shared / "data" / "slf5k.jsonl", get_task("slf5k").needs)
    check_examples("slf5k", rows, [])                       # these rows bring no response
    summaries = [row["ideal_human_summary"] for row in rows]
    expected = [(str(i), summary, row["summary_prompt"].strip())
                for i, (row, summary) in enumerate(zip(rows, summaries), 1)]
    rows = [row | {"response": summary} for row, summary in zip(rows, summaries)]
    assert len(check_examples("slf5k", rows, expected)) == 25


def test_slf5k_rows_of_the_hub_bring_their_summary_and_their_own_response_wins():
    """FACTS §3: the schema of JeremyAlain/SLF5K."""
    row = {"id": "t3", "title": "A title", "post": "My post.",
           "generated_summary_for_feedback": "He posts."}
    check_examples("slf5k", [row, row | {"id": "t4", "response": "mine"}], [
        ("t3", "He posts.", "A title", "My post."), ("t4", "mine", "A title", "My post.")])


def test_kodcode_rows_become_messages(shared):
    rows = read_rows(shared / "data" / "kodcode_leetcode.jsonl", get_task("kodcode").needs)
    expected = [(f"{row['question_id']}/{k}", trial["solution_code"], row["question"].strip())
                for row in rows for k, trial in enumerate(row["trials"].values())]
    made = check_examples("kodcode", rows, expected)
    assert len(made) == len({example["id"] for example in made}) == 87
    results = [trial["test_result"] for row in rows for trial in row["trials"].values()]
    assert all(result in example["outcome"] for result, example in zip(results, made))


def test_ultrafeedback_rows_become_messages(shared):
    row, = read_rows(shared / "data" / "ultrafeedback_binarized_example.jsonl")
    check_examples("ultrafeedback", [row], [
        (f"{row['prompt_id']}/{k}", row[side][1]["content"], row["prompt"])
        for k, side in enumerate(("chosen", "rejected"))])


def test_toy_rows_become_messages():
    rows = toy.rows("train", 3)
    check_examples("toy", [row | {"response": row["reference"]} for row in rows],
                   [(row["id"], row["reference"], row["post"]) for row in rows])


# ── Bad input

@pytest.mark.parametrize("content, message", [
    (b'{"post": "a"}\n{"post": \n', "line 2: not JSON"),
    (b'{"post": "a"}\n\n{"past": "a"}', "line 3: field 'post'"),
    (b'{"post": ""}', "line 1: field 'post'"), (b'{"post": null}', "line 1: field 'post'"),
    (b'{"post": "a"}\n["b"]\n', "line 2: expected a JSON object, found a list"),
    (b'3\n', "line 1: .* a int"), (b"", "no rows"), (b" \n\n", "no rows"),
    ('{"post": "café"}\n'.encode("latin-1"), "UTF-8|utf-8"),
    (b'{"post": "a"}\n{"post": ' + b"1" * 5000 + b"}", "line 2"), (b"[" * 100_000, "not JSON")],
    ids=["json", "absent", "empty", "null", "list", "number", "nothing", "blank", "latin-1",
         "5000-digits", "deep"])
def test_bad_rows_are_one_line_with_file_line_and_field(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"rows.jsonl.*({message})") as caught:
        read_rows(path, (("post",),))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("response", ["", " \n", None, 7, ["a"]])
def test_a_response_without_text_is_refused(response):
    with pytest.raises(InputError, match="row 2.*r2"):
        list(examples(get_task("slf5k"), [{"post": "p", "response": "a"},
                                          {"id": "r2", "post": "p", "response": response}]))


@pytest.mark.parametrize("name", ["", "toy", "toy:", "toy:absent", ":critique",
                                  "no_such_module:f", "./toy:critique", "toy:SLOTS"])
def test_a_critic_that_cannot_be_called_is_refused(name):
    with pytest.raises(InputError, match="--annotator_function"):
        load_object("--annotator_function", name, Callable)


@pytest.mark.parametrize("flags, message", [
    (["--task", "nope", "--data", "r.jsonl"], "nope"), (["--mood", "x"], "--mood"),
    ([], "--data")])
def test_the_command_line_fails_in_one_line(flags, message):
    assert message in error_message("annotate.py", *flags)


# ── Assertions at the seams

@pytest.mark.parametrize("ends, quotes, equation", [
    ([(1, 4)], ["cat"], "Appendix L"), ([(0, 3), (0, 3)], ["cat", "cat"], "§3.3.*k-th")])
def test_a_quote_that_is_placed_wrongly_is_no_span(monkeypatch, ends, quotes, equation):
    """Nor do two repeats of it share a place."""
    monkeypatch.setattr(annotate, "_exact_places", lambda text, quote: iter(ends))
    with pytest.raises(AssertionError, match=equation):
        grounded("cat sat", quotes)


def test_a_label_that_is_none_is_no_reward():
    with pytest.raises(AssertionError, match="§3.3"):
        token_rewards("a", [(0, 1)], [Span(0, 1, 2)])


def test_offsets_that_are_not_those_of_the_text_are_refused(monkeypatch, tokenizer):
    """What this backend decodes of several ids is more than of each beside its neighbour."""
    backend = SimpleNamespace(decode=lambda ids, **options: "a" * len(ids) ** 2)
    monkeypatch.setattr(type(tokenizer), "backend_tokenizer", backend, raising=False)
    with pytest.raises(AssertionError, match="Appendix L.*one offset per"):
        token_offsets(tokenizer, tokenizer.encode("the plot is", add_special_tokens=False))


# ── Damaged replies

CASES = 100_000 if SLOW else 4000
PIECES = ["the plot", "Bob", "“hero”", "it's", "nai\u0308ve", "naïve", "  ", "\n", "\t",
          "x = 1", "é", "e\u0301", "한", 'say "no"', "\\n", "{", "}", "[", "a", "aa", "a a",
          "good_spans", "\u00a0", "—", "Ω", "\u2126", "x\u0302", "</response>", "```", "İ", "ſ",
          "\x00", "’", "`", "\\", "\\u0041", "12345", "🎉"]


def draw_reply(rng, response: str) -> str:
    """A reply as models write them,
    with the keys of the paper, of its release or of the code task."""
    starts = [rng.randrange(len(response)) for _ in range(6)]
    quotes = [rng.choice([*PIECES, *[response[i : i + n] for n in (1, 2, 5, 9, 20)] * 40])
              for i in starts]
    good, poor = (quotes[k : k + rng.randrange(4)] for k in (0, 3))
    poor += good[: rng.random() < .2]  # a quote that is called good and poor
    critique = rng.choice(["It is fine, but {Bob} is wrong.", "c", "", 'She said "so".',
                           "Ende 🎉\n```"])
    names = rng.choice([("textual_feedback", "good_spans", "poor_spans"),
                        ("critique", "GOOD-SPANS", "poor_spans"),
                        ("Textual feedback", "Good spans", "Poor spans"),
                        ("reasoning", "good_spans", "poor_spans"),
                        ("code_feedback", "wrong_code", "improvement_code")])
    value = dict(zip(names, (critique, good, poor)))
    if rng.random() < .1:
        value[rng.choice(names)] = rng.choice([None, True, 1.5, "text", [], {}, [good], [None],
                                               {"text": good}, 10 ** 30, float("nan")])
    if rng.random() < .1:
        value = rng.choice([{"answer": value}, [value], {**value, "more": value},
                            {**value, "draft": {"good_spans": ["a"]}}])
    text = json.dumps(value, ensure_ascii=rng.random() < .3, indent=rng.choice([None, None, 1]))
    return rng.choice([text, f"```json\n{text}\n```", f"Let me {{think}}.\n{text}\nDone.",
                       f"{critique}\n{text}"])


def damage(rng, text: str, other: str) -> str:
    """One change of the text; `other` is a second reply to the same response."""
    i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    k = min(j, i + rng.choice([1, 2, 8, 40]))
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data:
        data[rng.randrange(len(data))] = rng.choice(b'"\\{}[],: \x00\xff\x80aZ0')
    inserted = rng.choice([
        '"', "\\", "{", "}", "[", "]", ",", ":", "\x00", "\ud83d", "\\ud83d", "\\u0000",
        "9" * 5000, "1e999", "-", "NaN", "\u2028", "'", "```", "[" * 900, "{" * 5000, *PIECES])
    frame = rng.choice(['{"x": %s}', '{"good_spans": [%s], "poor_spans": []}', "[%s]", "{%s",
                        '"%s"'])
    pair = rng.choice([("good", "poor"), ("[", "[["), ("_", "\\u005f"), ("s", "\ud800")])
    return rng.choice([
        text[:i] + text[k:], text[:k] + text[i:], text[:i] + text[k:j] + text[i:k] + text[j:],
        text[:i] + inserted + text[i:], data.decode("utf-8", rng.choice(["replace", "ignore"])),
        text[:i], text[i:], text[:i] + other[rng.randrange(len(other) + 1) :],
        text + rng.choice(["", "\n", ", ", "Or rather:\n"]) + other,
        text[:i] + other + text[i:], frame % text, json.dumps(text), text.replace(*pair, 1),
        text.replace('"', "'")])


LITERAL = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
PAIR = re.compile(rf"({LITERAL})\s*:\s*\[\s*((?:{LITERAL}\s*,\s*)*{LITERAL})?\s*\]")
KEYS = {"good": "good[^a-z]+spans", "poor": "poor[^a-z]+spans", "wrong": "wrong[^a-z]+code",
        "improvement": "improvement[^a-z]+code"}


def lists_in(reply: str) -> dict[str, list[list[str]]]:
    """Every list of strings that stands in the reply under a key, by what the key means."""
    lists = {name: [] for name in KEYS}
    for start in (match.start() for match in re.finditer('"', reply)):
        pair = PAIR.match(reply, start)
        key = json.loads(pair[1], strict=False).lower() if pair else ""
        for name, pattern in KEYS.items():
            if re.fullmatch(f"[^a-z]*{pattern}[^a-z]*", key):
                lists[name].append([json.loads(literal, strict=False)
                                    for literal in re.findall(LITERAL, pair[2] or "")])
    return lists


def check_case(seed: int) -> Counter:
    """A reply to a response, a sixth of them as they were drawn: what became of it."""
    rng = random.Random(seed)
    response = rng.choice(["", " ", " "]).join(rng.choices(PIECES, k=rng.randrange(1, 14)))
    reply = draw_reply(rng, response)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        reply = damage(rng, reply, draw_reply(rng, response))
    words = [match.span() for match in re.finditer(r"\S+", response)]
    judgement = judge(reply, response, words)
    try:
        feedback = parse_feedback(reply)
    except FeedbackError:
        assert judgement.delta == [0] * len(words) and judgement.reason
        return Counter(refused=1)
    lists = lists_in(reply)
    assert feedback.good_spans in [*lists["good"], []]
    code = [wrong + better for wrong in lists["wrong"] for better in lists["improvement"]]
    assert feedback.poor_spans in [*code, *lists["poor"]]
    assert feedback.critique.strip() and feedback.critique == feedback.critique.strip()
    assert feedback.text().encode()                           # whole characters only
    quotes = {1: [*map(plain, feedback.good_spans)], -1: [*map(plain, feedback.poor_spans)]}
    grounding = ground(response, feedback)
    for span in grounding.spans:
        assert plain(response[span.start:span.end]) in quotes[span.label]
    for (start, end), value in zip(words, judgement.delta, strict=True):
        labels = {span.label for span in grounding.spans
                  if span.start <= start and end <= span.end}
        assert value == (labels.pop() if len(labels) == 1 else 0)
    return Counter(read=1, good=judgement.delta.count(1), poor=judgement.delta.count(-1))


def test_no_label_that_the_reply_does_not_support():
    total = Counter()
    for seed in range(CASES):
        try:
            total += check_case(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert min(total[kind] for kind in ("refused", "read", "good", "poor")) > CASES / 80
