// Recomputes one response while it or its critique is edited: quotes → spans → δ → A.
// `parse`, `ground` and `rewards` follow annotate.py (Algorithm 2), `advantages` follows
// policy.py (Algorithm 4 l.15–17). tests/test_paper.py compares their numbers with Python's.
// Not supported: text after the JSON object, and languages without spaces between words.
"use strict";

// Reads {good, poor} from a reply that ends in a JSON object; throws the reason if it cannot.
function parse(reply) {
  for (const { index } of reply.matchAll(/\{/g)) {
    const value = {};
    try {
      for (const [key, part] of Object.entries(JSON.parse(reply.slice(index))))
        value[key.toLowerCase().replace(/[^a-z]/g, "")] = part;
    } catch { continue; }
    if (!("goodspans" in value || "poorspans" in value)) break;
    const critique = value.textualfeedback ?? value.critique ?? reply.slice(0, index);
    if (!critique.trim()) throw Error("the reply labels spans but has no critique");
    const good = value.goodspans ?? [], poor = value.poorspans ?? [];
    if (![good, poor].every((list) => list.every?.((quote) => typeof quote === "string")))
      throw Error("good_spans and poor_spans must be lists of strings");
    return { good, poor };
  }
  throw Error("the reply does not end in a JSON object with good_spans and poor_spans");
}

const normal = (text) => text.replace(/\s+/g, " ").normalize("NFD")
  .replace(/[‘’‚‛`´]/g, "'").replace(/[“”„‟«»]/g, '"');

// Whether a cut at this index would split a word, or a character from its combining marks.
function splits(text, index) {
  const halves = `${text.slice(0, index)}\0${text.slice(index)}`;
  const inWord = /[\p{L}\p{N}\p{Mn}\p{Mc}\p{Pc}]\0[\p{L}\p{N}\p{Mn}\p{Mc}\p{Pc}]/u;
  return inWord.test(halves) || /.\0[\p{M}\u200d]|\u200d\0./su.test(halves);
}

function exactPlaces(text, quote) {
  const places = [];
  let start = quote.trim() ? text.indexOf(quote) : -1;
  for (; start >= 0; start = text.indexOf(quote, start + 1))
    if (!splits(text, start) && !splits(text, start + quote.length))
      places.push([start, start + quote.length]);
  return places;
}

function normalPlaces(response, quote) {
  const origin = [];     // character of the normal form → [start, end] in the response
  for (const match of response.matchAll(/\s+|\S/gu)) {
    const place = [match.index, match.index + match[0].length];
    for (let i = normal(match[0]).length; i > 0; i--) origin.push(place);
  }
  return exactPlaces(normal(response), normal(quote).trim())
    .map(([start, end]) => [origin[start][0], origin[end - 1][1]]);
}

// The k-th repeat of a quote labels its k-th occurrence; extra occurrences make it ambiguous.
function ground(response, { good, poor }) {
  const spans = [], unmatched = [], ambiguous = [];
  for (const [label, quotes] of [[1, good], [-1, poor]])
    for (const quote of new Set(quotes)) {
      const repeats = quotes.filter((text) => text === quote).length;
      let places = exactPlaces(response, quote);
      if (!places.length) places = normalPlaces(response, quote);
      if (places.length > repeats) { ambiguous.push(quote); continue; }
      for (const [start, end] of places) spans.push({ start, end, label });
      for (let i = places.length; i < repeats; i++) unmatched.push(quote);
    }
  return { spans, unmatched, ambiguous };
}

// δ_t of each token: +1 in a good span, −1 in a poor span, else 0 (§3.3, Alg. 2 l.15–28).
// `conflicts` lists the tokens in spans of both signs.
function rewards(text, offsets, spans) {
  const units = [0];    // Python offsets count characters, JavaScript counts UTF-16 units
  for (const char of text) units.push(units.at(-1) + char.length);
  const result = { delta: [], conflicts: [] };
  offsets.forEach(([first, last], t) => {
    const piece = text.slice(units[first], units[last]), word = piece.trim() || piece;
    const start = units[first] + piece.indexOf(word), end = start + word.length;
    const holds = (span) => span.start <= start && start < end && end <= span.end;
    const labels = new Set(spans.filter(holds).map((span) => span.label));
    result.delta.push(labels.has(1) - labels.has(-1));
    if (labels.size > 1) result.conflicts.push(t);
  });
  return result;
}

// Returns A_t by GAE, with r_t = δ_t and V = 0 after y, and A_t whitened.
function advantages(delta, values, { gamma, lam }) {
  const A = Array(delta.length).fill(0);
  for (let t = A.length - 1; t >= 0; t--) {
    const tdError = delta[t] + gamma * (values[t + 1] ?? 0) - values[t];
    A[t] = tdError + gamma * lam * (A[t + 1] ?? 0);
  }
  const average = (row) => row.reduce((sum, x) => sum + x, 0) / row.length, mean = average(A);
  const variance = average(A.map((a) => (a - mean) ** 2));
  return { A, white: A.map((a) => (a - mean) / Math.sqrt(variance + 1e-8)) };
}

// A of token t with all its numbers, so that a reader can check it by hand.
function workedOut(t, { delta, values, A }, { gamma, lam }) {
  const n = (x = 0) => x < 0 ? `(−${(-x).toFixed(3)})` : x.toFixed(3);
  return `A = δ + γ V(next) − V + γ λ A(next) = ${n(delta[t])} + ${n(gamma)} · ` +
    `${n(values[t + 1])} − ${n(values[t])} + ${n(gamma)} · ${n(lam)} · ${n(A[t + 1])} = ` +
    n(A[t]);
}

// An edited response in words, marks and an end. Offsets count characters, as in Python.
function split(text) {
  const tokens = [...text.match(/\s*[\p{L}\p{N}\p{M}]+|\s*\S|\s+/gu) ?? [], ""], offsets = [];
  for (const token of tokens) {
    const start = offsets.at(-1)?.[1] ?? 0;
    offsets.push([start, start + [...token].length]);
  }
  return { text, tokens, offsets };
}

if (typeof module !== "undefined")
  module.exports = { parse, ground, rewards, advantages, workedOut, split };

// ── The page: paper.py defines PAGE = {text, tokens, offsets}

const byId = (id) => document.getElementById(id);

// An element in report.py's colours: green above 0, vermillion below, strongest at ±limit.
function coloured(tag, text, value, limit) {
  const node = document.createElement(tag), level = Math.min(1, Math.abs(value) / limit);
  const [ink, line] = value < 0 ? ["213 94 0", "wavy"] : ["0 158 115", "solid"];
  Object.assign(node, { textContent: text || "▯", title: value.toFixed(3) });
  node.style.background = `rgb(${ink} / ${level / 2})`;
  if (tag === "span") node.style.textDecoration = `underline ${line} rgb(${ink} / ${level})`;
  return node;
}

function update() {
  const set = {};
  for (const slider of document.querySelectorAll("#touch input")) {
    set[slider.id] = Number(slider.value);
    slider.nextElementSibling.textContent = set[slider.id].toFixed(2);
  }
  let quotes = { good: [], poor: [] }, unreadable = "";
  try { quotes = parse(byId("critique").value); } catch (error) { unreadable = error.message; }
  const response = byId("response").value;
  const { text, tokens, offsets } = response === PAGE.text ? PAGE : split(response);
  const { spans, unmatched, ambiguous } = ground(text, quotes);
  const { delta, conflicts } = rewards(text, offsets, spans);
  const values = delta.map(() => set.value);
  const { A, white } = advantages(delta, values, set);
  const limit = delta.some(Boolean) ? 2 : Infinity;    // no colour if nothing is rewarded
  const unrewarded = { "ambiguous quotes": ambiguous, "unmatched quotes": unmatched,
    "tokens in spans of both signs": conflicts.map((t) => tokens[t]) };
  const lines = Object.entries(unrewarded).filter(([, items]) => items.length)
    .map(([name, items]) => `${name}: ‹${items.join("› ‹")}›`);
  if (limit > 2) lines.push("no token is rewarded, so A holds only V");
  const summary = [`${spans.length} spans`, ...lines].join("; ");
  byId("result").textContent = unreadable ? `No reward: ${unreadable}.` : summary;
  for (const [id, row, scale] of [["delta", delta, .5], ["raw", A, 1], ["white", white, 1]])
    byId(id).replaceChildren(
      ...tokens.map((y, t) => coloured("span", y, row[t], limit * scale)));
  const first = Math.max(0, delta.findIndex(Boolean));
  const equation = workedOut(first, { delta, values, A }, set);
  byId("worked").textContent = `Token ${first}, ‹${tokens[first]}›:\n${equation}`;
  byId("numbers").replaceChildren(...tokens.map((token, t) => {
    const line = document.createElement("tr");
    line.append(coloured("td", `${t} ${token.trim() || "▯"}`, 0, 1));
    for (const row of [delta, A, white])
      line.append(coloured("td", row[t].toFixed(3), row[t], limit));
    return line;
  }));
}

if (typeof document !== "undefined") {
  byId("touch").addEventListener("input", update);
  update();
}
