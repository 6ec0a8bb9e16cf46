"""annotate.py against independent implementations, real rows and thousands of damaged replies.

A damaged reply may be rejected, but it must not give a label that it does not contain. Here
regular expressions find the quotes of a reply, and they are matched character by character.
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
from data import InputError, examples, get_task, load_object, read_rows, write_rows
from helpers import ROOT, SLOW, error_message, often
from reward_model import judge


def reply(critique="The plot is right, the name is wrong.", good=("the plot",),
          poor=("Bob",)) -> str:
    return json.dumps({"textual_feedback": critique, "good_spans": list(good),
                       "poor_spans": list(poor)})


def grounded(response, good=(), poor=()):
    return ground(response, Feedback("c", list(good), list(poor)))


# ── parse_feedback

REPLY = Feedback("The plot is right, the name is wrong.", ["the plot"], ["Bob"])
CODE = {"wrong_code": ["x = 1"], "improvement_code": ["for i in a:", "y"]}
CODE_QUOTES = ["x = 1", "for i in a:", "y"]
UNNAMED = '{"good_spans": ["a"], "poor_spans": []}\n```'


@pytest.mark.parametrize("text, feedback", [
    # FACTS §5: models write fences and prose around the JSON
    (reply(), REPLY), (f"```json\n{reply()}\n```", REPLY), (f"```\n{reply()}```", REPLY),
    (f"Sure, {{here}} it is:\n\n{reply()}\n\nAnything?", REPLY),
    (f'{{"note": 1}} {reply()}', REPLY),
    (f'The dict {{"a": x}} is made twice.\n{reply()}', REPLY),
    (json.dumps(json.loads(reply()), indent=2), REPLY),
    (reply()[:-1] + ', "confidence": ' + "9" * 5000 + "}", REPLY),
    # FACTS §3: the key is `Good spans` in the paper and `good_spans` in the release
    *[(json.dumps({critique: "c", good: ["a"], poor: ["b", "d"]}),
       Feedback("c", ["a"], ["b", "d"]))
      for critique, good, poor in [("textual_feedback", "good_spans", "poor_spans"),
                                   ("Textual feedback", "Good spans", "Poor spans"),
                                   ("critique", "Good Spans", "Poor Spans"),
                                   ("feedback", "GOOD_SPANS", "poor-spans")]],
    # FACTS §3: in the code task, wrong code and improvable code are both poor spans
    (json.dumps(CODE | {"code_feedback": "c"}), Feedback("c", [], CODE_QUOTES)),
    (json.dumps(CODE | {"Code Feedback": "c", "good_spans": ["z"]}),
     Feedback("c", ["z"], CODE_QUOTES)),
    # if the object has no critique, the prose before it is the critique
    *[(f"  It is\nshort. \n\n{fence}{UNNAMED}", Feedback("It is\nshort.", ["a"], []))
      for fence in ("", "```json\n", "```\n")],
    # a literal line break or tab in a string
    ('{"critique": "one\ntwo", "good_spans": ["a\n\tb"], "poor_spans": []}',
     Feedback("one\ntwo", ["a\n\tb"], []))])
def test_replies_of_real_models_are_parsed(text, feedback):
    assert parse_feedback(text) == feedback


plain_critiques = st.text(
    st.characters(exclude_characters="{}`\0", exclude_categories=["Cs"])).filter(str.strip)


@often
@given(plain_critiques, st.lists(st.text()), st.lists(st.text()))
@hypothesis.example("Write this:\n```\nreturn 0\n```", ["a"], [])
def test_feedback_survives_its_own_text(critique, good, poor):  # Alg. 1 l.9
    """§3.4: parsing z = [c ; span JSON] gives back c and the spans, except for think tags."""
    # A critique that ends like a JSON key or list would make the object a part of another one.
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
def test_invalid_feedback_is_an_error_with_its_reason(text, reason):
    """Contract: feedback has a critique and lists of strings; nothing is guessed."""
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
def test_only_a_top_level_object_of_the_answer_is_feedback(text, reason):
    """Parts of a broken object, <think> text and copies from the response are not feedback."""
    response = f"Take this: {INNER}" if "It says" in text else ""
    with pytest.raises(FeedbackError, match=reason) if reason else nullcontext():
        feedback = parse_feedback(text, response=response)
        assert feedback.good_spans in (["the plot"], ["all of it"])


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
    # §4.2: precision matters most, so an ambiguous quote gives no span
    ("one two one one", ["one", "two"], ["one", "one"], [(4, 7, 1)], [], 2),
    ("he said ha ha ha", ["ha ha"], [], [], [], 1),
    ("Bob ran home", ["Bob ran"], ["Bob ran"], [(0, 7, 1), (0, 7, -1)], [], 0),
    ("two words here", [" two\nwords\n"], [], [(0, 9, 1)], [], 0),
    # an exact match takes precedence over a normalised one
    ("“a” and \"a\" and ‘a’", ['"a"'], [], [(8, 11, 1)], [], 0),
    ("caf\u00e9 cafe\u0301", ["cafe\u0301"], [], [(5, 10, 1)], [], 0)])
def test_quotes_are_found_by_hand(response, good, poor, spans, unmatched, ambiguous):
    grounding = grounded(response, good, poor)
    assert grounding.spans == [Span(*span) for span in spans]
    assert (grounding.unmatched, grounding.ambiguous) == (unmatched, ambiguous)


@pytest.mark.parametrize("response, good, poor, spans, ambiguous", [
    ("one two one one", ["one"], [], [(0, 3, 1), (8, 11, -1), (12, 15, -1)], 0),
    # Two of three places are quoted.
    ("one two one one", ["one", "one"], [], [(0, 3, 1), (8, 11, 1), (12, 15, -1)], 0),
    # Blame of a quote that occurs twice stays ambiguous.
    ("one two one two", ["two"], ["one"], [(4, 7, 1), (12, 15, -1)], 1)])
def test_a_task_may_read_repeated_praise_as_blame(response, good, poor, spans, ambiguous):
    grounding = ground(response, Feedback("c", good, poor), repeats_are_poor=True)
    assert grounding == Grounding([Span(*span) for span in spans], [], ambiguous)


@pytest.mark.parametrize("response, quote", [
    ("vi\u00ea\u0323t", "vi\u00eat"), ("x a\u0301\u0300 y", "x \u00e1 y"),
    ("x a\u0301\u0300 y", "\u00e1"), ("x \ud55c y", "\u1112\u1161"),
    ("a ﬁne day", "a fine day"),
    # FACTS §5: a fuzzy search matched unrelated text
    *[("The cat sat on a café.", quote) for quote in (
        "the cat sat", "The  Cat sat", "Thecat sat", "The cat sits", "The cat sat!",
        "A cat sat", "The ca...sat", "cafe", "", " ", "\n\t", "\u00a0")]])
def test_quotes_are_not_matched_fuzzily(response, quote):
    """A letter does not match without its accent, nor a syllable by one of its parts."""
    assert grounded(response, poor=[quote]) == Grounding([], [quote], 0)


letters = ["a", "b", " ", "\n", "\u00a0", "中", "🎉", "e", "\u0301", "é", "“", '"', "'"]


@st.composite
def texts_with_quotes(draw):
    """(text, good quotes, poor quotes). A quote is a substring, or "zq", which never occurs."""
    text = draw(st.lists(st.sampled_from(letters), min_size=1, max_size=25).map("".join))
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 4)).map(
        lambda cut: text[cut[0]:sum(cut)])
    no_overlap = lambda quote: text.count(quote) == len(
        re.findall(f"(?={re.escape(quote)})", text))
    quotes = st.lists((cuts | st.just("zq")).filter(lambda quote: quote and no_overlap(quote)),
                      max_size=4)
    return text, draw(quotes), draw(quotes)


# Unicode's tables of visible characters, and of words in scripts that separate them by spaces.
_WORD = (r"[[\p{L}\p{Mn}\p{Mc}\p{N}\p{Pc}]--\p{Han}--\p{Hiragana}--\p{Katakana}--\p{Hangul}"
         r"--\p{Thai}--\p{Lao}--\p{Khmer}--\p{Myanmar}]")
BETWEEN, INSIDE = regex.compile(r"\X"), regex.compile(rf"(?V1)(?<={_WORD})(?={_WORD})")


def splits(text: str) -> set[int]:
    """The indices that lie inside a word or inside a visible character."""
    edges = {m.start() for m in BETWEEN.finditer(text)} | {len(text)}
    return {m.start() for m in INSIDE.finditer(text)} | set(range(len(text))) - edges


@pytest.mark.parametrize("text, quote, spans", [
    ("concatenate the cat", "cat", 1), ("concatenate", "cat", 0), ("x_1 = 2", "x", 0),
    ("x = x1", "x", 1), ("in 2024", "20", 0), ("40 km", "40", 1), ("self.size", "size", 1),
    ("👩‍🚀 flies", "👩", 0), ("👩‍🚀 flies", "👩‍🚀", 1), ("👩‍🚀 flies", "🚀", 0),
    ("cafe\u0301", "cafe", 0), ("cafe\u0301s", "cafe\u0301", 0), ("1️⃣First", "First", 1),
    ("ｱｲｳ", "ｲｳ", 1), ("我爱北京", "北京", 1), ("это слово", "слов", 0),
    ("서울에서", "서울", 1), ("हिन्दी में", "हिन्दी", 1), ("हिन्दी", "हि", 0),
    ("الكتاب هنا", "كتاب", 0)])
def test_a_quote_matches_whole_words_and_visible_characters(text, quote, spans):
    """§3.3: a quote that occurs only inside a word is counted as unmatched."""
    grounding = grounded(text, [quote])
    assert (len(grounding.spans), grounding.unmatched) == (spans, [] if spans else [quote])


@often
@given(st.lists(st.sampled_from([*"ab_1 é'中한ก\r\n👩🚀❤\u0301\ufe0f\u200d\u0939\u093f\u0928"]),
                max_size=14).map("".join))
def test_boundaries_of_words_and_characters_are_those_of_unicode(text):
    """The places after a line break or a joiner are exceptions."""
    splitting = {i for i in range(len(text) + 1) if annotate._splits(text, i)}
    exceptions = {i for i in range(1, len(text)) if text[i - 1] in "\u200d\r\n"}
    assert splitting - exceptions == splits(text) - exceptions


def places(response: str, quote: str) -> list[tuple[int, int]]:
    """(start, end) of each occurrence of a quote that splits no word, by brute force."""
    inside = splits(response)
    ends = [(i, i + len(quote)) for i in range(len(response)) if response.startswith(quote, i)]
    return [(i, j) for i, j in ends if not quote.isspace() and not inside & {i, j}]


@often
@given(texts_with_quotes())
def test_ground_equals_brute_force_on_exact_quotes(case):
    """Contract: exact matches come first. No quote here overlaps with itself."""
    text, good, poor = case
    # test_boundaries_of_words_and_characters_are_those_of_unicode covers the exceptions.
    assume(splits(text) == {i for i in range(len(text) + 1) if annotate._splits(text, i)})
    spans, unmatched, ambiguous = [], [], 0
    for label, quotes in ((1, good), (-1, poor)):
        for quote, repeats in Counter(quotes).items():
            ends = places(text, quote)
            # Another test covers quotes that match only in normal form.
            assume(ends or not [*annotate.normal_places(text, quote)])
            if len(ends) > repeats:
                ambiguous += 1
            else:
                spans += [Span(*pair, label) for pair in ends]
                unmatched += [quote] * (repeats - len(ends))
    grounding = grounded(text, good, poor)
    assert Counter(grounding.spans) == Counter(spans)
    assert grounding.spans == sorted(grounding.spans, key=lambda s: (s.start, s.end))
    assert Counter(grounding.unmatched) == Counter(unmatched)
    assert grounding.ambiguous == ambiguous


def plain(text: str) -> str:
    """Normalise white space, quotation marks and the Unicode form of a text."""
    text = unicodedata.normalize("NFC", re.sub(r"\s+", " ", text)).strip()
    return re.sub("[‘’‚‛`´]", "'", re.sub("[“”„‟«»]", '"', text))


forms = [("a",), ("b",), ("中",), ("🎉",), (" ", "\u00a0", "\n", "  "), (*"'‘’‚‛`´",),
         (*'"“”„‟«»',), ("\u00e9", "e\u0301"), ("\ud55c", "\u1112\u1161\u11ab"),
         ("\u1e69", "s\u0323\u0307", "s\u0307\u0323"),
         ("\u0929", "\u0928\u093c"), ("\u0622", "\u0627\u0653")]
units = st.sampled_from(forms).flatmap(
    lambda variants: st.tuples(st.sampled_from(variants), st.sampled_from(variants)))


@often
@given(st.lists(units, min_size=1, max_size=16), st.data())
def test_a_span_is_its_quote_up_to_normal_form(pairs, data):
    """Contract: a span equals its quote except for white space, quotes and Unicode form."""
    start = data.draw(st.integers(0, len(pairs) - 1))
    end = data.draw(st.integers(start + 1, len(pairs)))
    response = "".join(a for a, _ in pairs)
    quote = "".join(b for _, b in pairs[start:end])
    assume(plain(quote))
    normal = plain(response)
    inside = splits(normal)
    matches = sum(not inside & {m.start(), m.start() + len(plain(quote))}
                  for m in re.finditer(f"(?={re.escape(plain(quote))})", normal))
    grounding = grounded(response, [quote])
    assert all(plain(response[span.start:span.end]) == plain(quote) for span in grounding.spans)
    if matches == 1 and response.count(quote) <= 1:
        assert len(grounding.spans) == 1 and not grounding.unmatched
    if matches > 1 and normal.count(plain(quote)) == matches and quote not in response:
        assert (grounding.spans, grounding.ambiguous) == ([], 1)


# ── token_offsets

@pytest.fixture(scope="module", params=["toy", "stories260K"])
def tokenizer(request):
    """A byte-level BPE tokenizer, and a SentencePiece tokenizer with byte fallback."""
    from transformers import AutoTokenizer
    if request.param == "toy":
        return AutoTokenizer.from_pretrained(ROOT / "toy" / "base")
    return AutoTokenizer.from_pretrained(
        request.getfixturevalue("shared") / "models" / "stories260K")


def gpt2_bytes() -> dict[str, int]:
    """GPT-2's table of bytes: printable Latin-1 as itself, the others as chr(256), …"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return ({chr(byte): byte for byte in printable}
            | {chr(256 + i): byte for i, byte in enumerate(unprintable)})


def token_bytes(tokenizer, ids) -> list[bytes]:
    """The bytes of each id, computed from the token strings only."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    table = gpt2_bytes()
    special = [index in tokenizer.all_special_ids for index in ids]
    if "<0x00>" not in tokenizer.get_vocab():
        return [b"" if skip else bytes(table[c] for c in token)
                for token, skip in zip(tokens, special)]
    pieces = [b"" if skip else bytes([int(token[3:5], 16)]) if re.fullmatch("<0x..>", token)
              else token.replace("▁", " ").encode() for token, skip in zip(tokens, special)]
    first = next((i for i, piece in enumerate(pieces) if piece), None)
    if first is not None:
        pieces[first] = pieces[first].removeprefix(b" ")        # SentencePiece's dummy prefix
    return pieces


def offsets_from_bytes(pieces: list[bytes]) -> tuple[str, list[tuple[int, int]]]:
    """(text, the interval of characters that each piece contributes to)."""
    text = b"".join(pieces).decode()
    characters = [i for i, character in enumerate(text) for _ in character.encode()]
    offsets = []
    position = 0                                                # in bytes
    for piece in pieces:
        end = offsets[-1][1] if offsets else 0
        touched = characters[position:position + len(piece)]
        offsets.append((touched[0], touched[-1] + 1) if piece else (end, end))
        position += len(piece)
    return text, offsets


units_of_text = st.sampled_from(["a", "th", " the", "Queen", " ", "  ", "\n", "\t", "7", "é",
                                 "e\u0301", "中文", "한", "ש", "🎉", "👩‍👩‍👧", "🇫🇷", "\u0300",
                                 "▁", "Ġ", "’", "\u2028", "𝔘"])
any_text = st.lists(units_of_text, max_size=10).map("".join) | st.text(
    st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=12)


@often
@given(text=any_text, eos=st.booleans())
def test_offsets_are_those_of_the_bytes(tokenizer, text, eos):
    """Contract: one interval per id, also for a character that spans several tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * eos
    decoded, offsets = token_offsets(tokenizer, ids)
    assert decoded == tokenizer.decode(ids, skip_special_tokens=True,
                                       clean_up_tokenization_spaces=False)
    assert (decoded == text.replace("▁", " ") or "<0x00>" not in tokenizer.get_vocab()
            and decoded == text)
    assert (decoded, offsets) == offsets_from_bytes(token_bytes(tokenizer, ids))


@often
@given(data=st.data())
def test_offsets_of_any_ids_cover_the_text(tokenizer, data):
    """Invariant 1: offsets cover the text even if a policy samples invalid UTF-8."""
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
    nonempty = [(start, end) for start, end in offsets if start < end]    # no special tokens
    for (start, end), (next_start, next_end) in zip(nonempty, nonempty[1:]):
        assert start <= next_start and end <= next_end
    covered = 0
    for start, end in offsets:
        assert start <= covered and start <= end <= len(text), "a gap, or outside the text"
        covered = max(covered, end)
    assert covered == len(text), "no token covers the end of the text"


def test_the_bytes_of_an_incomplete_character_share_one_replacement_character(tokenizer):
    """Each incomplete character decodes to one U+FFFD; the model may also write U+FFFD."""
    if "<0x00>" in tokenizer.get_vocab():
        pytest.skip("a byte-fallback tokenizer decodes each byte of it to a U+FFFD")
    ids = tokenizer.encode("a \ufffd b", add_special_tokens=False)
    assert token_offsets(tokenizer, ids) == offsets_from_bytes(token_bytes(tokenizer, ids))
    char_of_byte = {byte: char for char, byte in gpt2_bytes().items()}
    ids = tokenizer.convert_tokens_to_ids(
        [char_of_byte[byte] for byte in "中".encode()[:2] + b"a"])
    assert token_offsets(tokenizer, ids) == ("\ufffda", [(0, 1), (0, 1), (1, 2)])


@pytest.mark.parametrize("text", ["The end", "a 中 b", "the plot 🎉 is é"])
def test_a_special_token_has_an_empty_interval_and_moves_no_other(tokenizer, text):
    """Tries every position, including those before a space and inside a character."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = token_offsets(tokenizer, ids)
    for cut in range(len(ids) + 1):
        with_eos = token_offsets(tokenizer, [*ids[:cut], tokenizer.eos_token_id, *ids[cut:]])
        start, end = with_eos[1].pop(cut)
        assert start == end and with_eos == expected


# ── token_rewards

@st.composite
def tilings(draw):
    """(text, intervals that tile it): some are empty or shared, none is only white space."""
    text = draw(st.text("ab 中\n\u00a0", min_size=1, max_size=24).filter(str.strip))
    cuts = [0]
    last = len(text.rstrip())
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
    """Whether a token has visible characters and the span contains them all."""
    visible = [i for i in range(*offset) if not text[i].isspace()]
    return bool(visible) and all(i in range(span.start, span.end) for i in visible)


@often
@given(tilings(), st.data())
def test_delta_equals_brute_force_over_characters(tiling, data):  # Eq. §3.3 δ; Alg. 2 l.18–25
    """§3.3, Algorithm 2 l.15–27: ±1 in spans of one label; else 0, also half inside."""
    text, offsets = tiling
    spans = data.draw(some_spans(text))
    labels = [{span.label for span in spans if lies_in(text, offset, span)}
              for offset in offsets]
    assert token_rewards(text, offsets, spans) == [sum(signs) for signs in labels]
    assert conflicting_tokens(text, offsets, spans) == sum(signs == {1, -1} for signs in labels)
    assert tokens_inside(text, offsets, spans) == [
        [t for t, offset in enumerate(offsets) if lies_in(text, offset, span)]
        for span in spans]
    labelled = {i for span in spans for i in range(span.start, span.end)
                if not text[i].isspace()}
    is_touched = [bool(labelled & {*range(*offset)}) for offset in offsets]
    assert half_inside_tokens(text, offsets, spans) == sum(
        touched and not signs for touched, signs in zip(is_touched, labels))


def test_tokens_by_hand():  # Alg. 2 l.15; Alg. 2 l.16–17
    text, offsets = "Bob ran home", [(0, 3), (3, 5), (5, 7), (7, 12), (12, 12)]
    assert token_rewards(text, offsets, [Span(0, 7, 1), Span(9, 12, -1)]) == [1, 1, 1, 0, 0]
    assert token_rewards(text, offsets, [Span(0, 3, 1), Span(5, 12, -1)]) == [1, 0, -1, -1, 0]
    assert token_rewards(text, offsets, [Span(4, 6, -1)]) == [0, -1, 0, 0, 0]
    halves = [Span(0, 2, 1), Span(2, 3, 1)]         # neither span contains the first token
    assert token_rewards(text, offsets, halves) == [0] * 5
    assert half_inside_tokens(text, offsets, halves) == 1


def test_a_token_of_white_space_is_in_a_span_that_contains_all_of_it():
    """Alg. 2 l.19, y_t ∈ s_k: a line break inside quoted code belongs to the span."""
    text, offsets = "a  \n b", [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert token_rewards(text, offsets, [Span(0, 6, 1)]) == [1, 1, 1, 1]
    assert token_rewards(text, offsets, [Span(0, 2, -1)]) == [-1, 0, 0, 0]


# ── Tasks

def check_examples(name, rows, expected) -> list[dict]:
    """Check the examples of rows and return them; §B: the prompts contain the row's texts.

    expected: (id, response, texts of the prompt) of each example.
    """
    task = get_task(name)
    task_examples = list(examples(task, rows))
    assert [(e["id"], e["response"]) for e in task_examples] == [x[:2] for x in expected]
    for example, (_, response, *texts) in zip(task_examples, expected):
        system, user = annotation_messages(task, example)
        assert (system["role"], user["role"]) == ("system", "user")
        for text in texts:
            assert text in user["content"] and text in task.policy_prompt(example["row"])
        for text in (response, example["prompt"], example.get("outcome", "")):
            assert text in user["content"]
    return task_examples


def test_slf5k_rows_become_messages(shared):
    rows = read_rows(shared / "data" / "slf5k.jsonl", get_task("slf5k").needs)
    check_examples("slf5k", rows, [])                       # these rows have no response
    summaries = [row["ideal_human_summary"] for row in rows]
    expected = [(str(i), summary, row["summary_prompt"].strip())
                for i, (row, summary) in enumerate(zip(rows, summaries), 1)]
    rows = [row | {"response": summary} for row, summary in zip(rows, summaries)]
    assert len(check_examples("slf5k", rows, expected)) == 25


def test_slf5k_rows_of_the_hub_use_their_response_or_else_their_summary():
    """FACTS §3: the schema of JeremyAlain/SLF5K on the Hugging Face Hub."""
    row = {"id": "t3", "title": "A title", "post": "My post.",
           "generated_summary_for_feedback": "He posts."}
    check_examples("slf5k", [row, row | {"id": "t4", "response": "mine"}], [
        ("t3", "He posts.", "A title", "My post."), ("t4", "mine", "A title", "My post.")])


def test_kodcode_rows_become_messages(shared):
    rows = read_rows(shared / "data" / "kodcode_leetcode.jsonl", get_task("kodcode").needs)
    expected = [(f"{row['question_id']}/{k}", trial["solution_code"], row["question"].strip())
                for row in rows for k, trial in enumerate(row["trials"].values())]
    trials = check_examples("kodcode", rows, expected)
    assert len(trials) == len({example["id"] for example in trials}) == 87
    results = [trial["test_result"] for row in rows for trial in row["trials"].values()]
    assert all(result in example["outcome"] for result, example in zip(results, trials))


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
def test_the_error_of_a_bad_row_names_file_line_and_field(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"rows.jsonl.*({message})") as error:
        read_rows(path, (("post",),))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("response", [None, 7, ["a"]])
def test_a_response_without_text_is_refused(tmp_path, response):
    write_rows(tmp_path / "rows.jsonl", [{"post": "p", "response": "a"},
                                         {"post": "p", "response": response}])
    with pytest.raises(InputError, match="rows.jsonl, line 2: field 'response'"):
        read_rows(tmp_path / "rows.jsonl", task=get_task("slf5k"))


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


# ── Assertions of the mathematics

@pytest.mark.parametrize("ends, quotes, equation", [
    ([(1, 4)], ["cat"], "Appendix L"), ([(0, 3), (0, 3)], ["cat", "cat"], "§3.3.*k-th")])
def test_a_wrong_place_of_a_quote_is_an_error(monkeypatch, ends, quotes, equation):
    """Two repeats of a quote must not share a place."""
    monkeypatch.setattr(annotate, "_exact_places", lambda text, quote: iter(ends))
    with pytest.raises(AssertionError, match=equation):
        grounded("cat sat", quotes)


def test_a_label_other_than_1_and_minus_1_is_an_error():
    with pytest.raises(AssertionError, match="§3.3"):
        token_rewards("a", [(0, 1)], [Span(0, 1, 2)])


def test_offsets_that_do_not_match_the_text_are_an_error(monkeypatch, tokenizer):
    """This fake backend decodes several ids to more text than the sum of its parts."""
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
    """A random reply with the keys of the paper, of its release or of the code task."""
    starts = [rng.randrange(len(response)) for _ in range(6)]
    quotes = [rng.choice([*PIECES, *[response[i : i + n] for n in (1, 2, 5, 9, 20)] * 40])
              for i in starts]
    good, poor = (quotes[k : k + rng.randrange(4)] for k in (0, 3))
    poor += good[: rng.random() < .2]               # one quote is both good and poor
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


def damage(rng, text: str, second_reply: str) -> str:
    """Apply one random change to a reply; `second_reply` is to the same response."""
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
        text[:i], text[i:], text[:i] + second_reply[rng.randrange(len(second_reply) + 1) :],
        text + rng.choice(["", "\n", ", ", "Or rather:\n"]) + second_reply,
        text[:i] + second_reply + text[i:], frame % text, json.dumps(text),
        text.replace(*pair, 1), text.replace('"', "'")])


LITERAL = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
PAIR = re.compile(rf"({LITERAL})\s*:\s*\[\s*((?:{LITERAL}\s*,\s*)*{LITERAL})?\s*\]")
KEYS = {"good": "good[^a-z]+spans", "poor": "poor[^a-z]+spans", "wrong": "wrong[^a-z]+code",
        "improvement": "improvement[^a-z]+code"}


def lists_in(reply: str) -> dict[str, list[list[str]]]:
    """All lists of strings in a reply, by the meaning of their key."""
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
    """Check one reply, of which five in six are damaged, and count its labels."""
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
    quotes = {1: {*map(plain, feedback.good_spans)}, -1: {*map(plain, feedback.poor_spans)}}
    grounding = ground(response, feedback)
    for span in grounding.spans:
        assert plain(response[span.start:span.end]) in quotes[span.label]
    for (start, end), value in zip(words, judgement.delta, strict=True):
        labels = {span.label for span in grounding.spans
                  if span.start <= start and end <= span.end}
        assert value == (labels.pop() if len(labels) == 1 else 0)
    return Counter(read=1, good=judgement.delta.count(1), poor=judgement.delta.count(-1))


def test_a_damaged_reply_gives_no_label_that_it_does_not_contain():
    total = Counter()
    for seed in range(CASES):
        try:
            total += check_case(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert min(total[name] for name in ("refused", "read", "good", "poor")) > CASES / 80
