"""What report.py draws, read back by an HTML parser."""

import re
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report import colour_tokens, heatmap, html_table, split_text, table

often = settings(max_examples=100, deadline=None, derandomize=True)
HOSTILE = ["</script><img src=x onerror=\"document.title='owned'\">", "<!-- <script>",
           "a\"b'c&amp;<b>", "nul \0 here", "line\u2028para\u2029graph",
           "half \ud83d of a pair", "نص عربي", "👨‍👩‍👧 🏠 é\u0301", "</style></title><b>"]
texts = st.one_of(st.sampled_from(HOSTILE),
                  st.text("<>/!-'\"\ud800🏠é\u0301\n\t x", max_size=20))


class Page(HTMLParser):
    """What a browser sees: tags with their attributes and text, in reading order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append([tag, dict(attributes), ""])
        self.open.append(self.tags[-1])

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for tag in self.open[-1:]:
            tag[2] += data

    def all(self, name, **wanted):
        return [(attributes, text) for tag, attributes, text in self.tags
                if tag == name and wanted.items() <= attributes.items()]


def assert_closed(text):
    """No script, nothing that asks a network, and a policy that forbids both."""
    page = Page(text)
    names = {tag for tag, *_ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "form", "base"}
    for _, attributes, _ in page.tags:
        assert not {"src", "action", "srcset", "data"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
    (meta, _), = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert meta["content"].startswith("\ndefault-src 'none'; style-src 'unsafe-inline'")
    assert "script-src" not in meta["content"]
    style = "".join(text for _, text in page.all("style"))
    assert "color-scheme: light dark" in style and "@media print" in style
    assert not re.search(r"@import|url\(", text)


# ── The terminal

def test_tokens_are_marked_by_their_sign_in_runs_and_lose_no_text(monkeypatch):  # Figure 1
    assert (split_text("a🏠b", [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)])
            == ["a", "🏠", "", "b", ""])
    tokens, delta = ["The", " big", " cat", " ", "flew", " \n"], [0, 1, .5, -1, -1, 1]
    assert colour_tokens(tokens, delta, False) == "The [+big cat+] [-flew-] \n"
    coloured = "The \033[32mbig cat\033[0m \033[31mflew\033[0m \n"
    assert colour_tokens(tokens, delta, True) == coloured
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert colour_tokens(tokens, delta) == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in colour_tokens(tokens, delta)


def test_tables_are_aligned_and_absent_figures_are_dashes():
    lines = table(["name", "x"], [["a", 1.0], ["long one", None], ["b", -0.0001]],
                  2).split("\n")
    assert lines == ["name         x", "──────────────", "a         1.00", "long one     –",
                     "b         0.00"]
    cells = Page(html_table(["a", "<b>"], [["x&y", None], ["z", 0.5]]))
    assert [text for _, text in cells.all("td")] == ["x&y", "–", "z", "0.50"]
    assert [text for _, text in cells.all("th")] == ["a", "<b>"]


# ── Heatmaps

@often
@given(st.lists(st.tuples(texts, st.floats(-3, 3)), max_size=8))
def test_a_heatmap_shows_every_token_with_its_value_and_no_other_markup(pairs):
    tokens, values = [token for token, _ in pairs], [value for _, value in pairs]
    found = Page(heatmap(tokens, values))
    assert len(found.tags) == 1 + len(tokens)
    for token, value, (attributes, text) in zip(tokens, values, found.all("span"), strict=True):
        shown = text.replace("↵\n", "\n").replace("⇥\t", "\t").replace("\ufffd", "\0")
        assert shown == (token or "▯")
        assert float(attributes["title"]) == pytest.approx(value, rel=1e-3)


def test_colours_are_symmetric_deepest_at_the_limit_and_told_apart_by_lines():
    found = Page(heatmap([*"abcdef", "", "g"], [-4, -2, -1, 0, 1, 2, 1, float("nan")], limit=2))
    style = r"background:(#\w{6})(\w\w);text-decoration:(.*) #\w{6}(\w\w)"
    colours, depth, lines, ink = zip(*(re.match(style, attributes["style"]).groups()
                                       for attributes, _ in found.all("span")))
    depth, ink = [int(value, 16) for value in depth], [int(value, 16) for value in ink]
    assert depth[0] == depth[1] > depth[2] > depth[3] == depth[7] == ink[3] == 0
    assert depth[1:4] == depth[5:2:-1] and ink[1] > ink[2] > 0
    assert set(zip(colours[:3], lines[:3])).isdisjoint(zip(colours[4:7], lines[4:7]))
    with pytest.raises(ValueError):
        heatmap(["a"], [])
