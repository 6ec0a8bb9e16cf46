// One response by hand: a critique's quotes → spans → δ → r → A, as it is typed.
// `parse`, `ground`, `rewards` are annotate.py's (Algorithm 2), `advantages` is text2grad.py's
// (Algorithm 4 l.14–17); tests/test_paper.py holds their numbers against Python's, with node.
// Left out: replies with more than one JSON object, scripts without spaces between words.
"use strict";

// A reply that ends in one JSON object → {good, poor}; throws its reason (Alg. 2 l.13).
function parse(reply) {
  const end = reply.lastIndexOf("}") + 1;
  for (const { index } of reply.matchAll(/\{\s*"/g)) {
    const value = {};
    try {
      for (const [key, part] of Object.entries(JSON.parse(reply.slice(index, end))))
        value[key.toLowerCase().replace(/[^a-z]+/g, "_").replace(/^_|_$/g, "")] = part;
    } catch { continue; }
    const said = value.textual_feedback ?? value.critique ?? reply.slice(0, index);
    if (!String(said).trim()) throw Error("it labels spans but holds no critique");
    const { good_spans: good, poor_spans: poor } = value;
    if (![good, poor].every((list) => list?.every?.((quote) => typeof quote === "string")))
      throw Error("good_spans and poor_spans must be lists of strings");
    return { good, poor };
  }
  throw Error("it does not end in a JSON object with good_spans and poor_spans");
}

const normal = (text) => text.replace(/\s+/g, " ").normalize("NFD")
  .replace(/[‘’‚‛`´]/g, "'").replace(/[“”„‟«»]/g, '"');

// Whether a place lies inside a word, or before what joins the character before it.
function splits(text, at) {
  const parted = `${text.slice(0, at)}\0${text.slice(at)}`;
  const inWord = /[\p{L}\p{N}\p{Mn}\p{Mc}\p{Pc}]\0[\p{L}\p{N}\p{Mn}\p{Mc}\p{Pc}]/u;
  return inWord.test(parted) || /.\0[\p{M}\u200d]|\u200d\0./su.test(parted);
}

function exactPlaces(text, quote) {
  const places = [];
  let at = quote.trim() ? text.indexOf(quote) : -1;
  for (; at >= 0; at = text.indexOf(quote, at + 1))
    if (!splits(text, at) && !splits(text, at + quote.length))
      places.push([at, at + quote.length]);
  return places;
}

function normalPlaces(response, quote) {
  const origin = [];                       // of each character of the normal form
  for (const found of response.matchAll(/\s+|\S/gu)) {
    const place = [found.index, found.index + found[0].length];
    for (let i = normal(found[0]).length; i > 0; i--) origin.push(place);
  }
  return exactPlaces(normal(response), normal(quote).trim())
    .map(([start, end]) => [origin[start][0], origin[end - 1][1]]);
}

// The k-th repeat of a quote takes the k-th occurrence; no place is guessed (§3.3, Appendix L).
function ground(response, { good, poor }) {
  const spans = [], unmatched = [], ambiguous = [];
  for (const [label, quotes] of [[1, good], [-1, poor]])
    for (const quote of new Set(quotes)) {
      const repeats = quotes.filter((other) => other === quote).length;
      let places = exactPlaces(response, quote);
      if (!places.length) places = normalPlaces(response, quote);
      if (places.length > repeats) { ambiguous.push(quote); continue; }
      for (const [start, end] of places) spans.push({ start, end, label });
      for (let i = places.length; i < repeats; i++) unmatched.push(quote);
    }
  return { spans, unmatched, ambiguous };
}

// δ_t, the sum of the labels of the spans that hold token t (§3.3, Alg. 2 l.15–28); and the
// tokens that get 0 since they are in spans of both signs, or half in one.
function rewards(text, offsets, spans) {
  const units = [0];                                     // Python counts characters, not halves
  for (const char of text) units.push(units.at(-1) + char.length);
  const found = { delta: [], conflicts: [], half: [] };
  offsets.forEach(([first, last], t) => {
    const piece = text.slice(units[first], units[last]), word = piece.trim() || piece;
    const start = units[first] + piece.indexOf(word), end = start + word.length;
    const holds = (span) => span.start <= start && start < end && end <= span.end;
    const labels = new Set(spans.filter(holds).map((span) => span.label));
    found.delta.push(labels.has(1) - labels.has(-1));
    if (labels.size > 1) found.conflicts.push(t);
    const part = (s) => text.slice(Math.max(start, s.start), Math.min(end, s.end)).trim();
    if (!labels.size && spans.some(part)) found.half.push(t);
  });
  return found;
}

// r_t = δ_t − β (log π − log π_ref), A_t by GAE with V = 0 after y, and A_t whitened.
function advantages(delta, logRatio, values, { gamma, lam, beta }) {
  const r = delta.map((d, t) => d - beta * logRatio[t]), A = Array(r.length).fill(0);
  for (let t = r.length - 1; t >= 0; t--) {
    const tdError = r[t] + gamma * (values[t + 1] ?? 0) - values[t];
    A[t] = tdError + gamma * lam * (A[t + 1] ?? 0);
  }
  const average = (row) => row.reduce((sum, x) => sum + x, 0) / row.length, mean = average(A);
  const variance = average(A.map((a) => (a - mean) ** 2));
  return { r, A, white: A.map((a) => (a - mean) / Math.sqrt(variance + 1e-8)) };
}

if (typeof module !== "undefined") module.exports = { parse, ground, rewards, advantages };

// ── The page: PAGE is {text, tokens, offsets, log_ratio}, put there by paper.py

const at = (id) => document.getElementById(id);

// A cell or a token in report.py's colours: green above 0, vermillion below, deepest at ±limit.
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
  try { quotes = parse(at("critique").value); } catch (error) { unreadable = error.message; }
  const { spans, unmatched, ambiguous } = ground(PAGE.text, quotes);
  const { delta, conflicts, half } = rewards(PAGE.text, PAGE.offsets, spans);
  const values = delta.map(() => set.value);
  const { r, A, white } = advantages(delta, PAGE.log_ratio, values, set);
  const idle = { "ambiguous quotes": ambiguous, "unmatched quotes": unmatched,
    "tokens half inside": half.map((t) => PAGE.tokens[t]),
    "tokens in spans of both signs": conflicts.map((t) => PAGE.tokens[t]) };
  const lines = Object.entries(idle).filter(([, some]) => some.length)
    .map(([what, some]) => `${what}: ‹${some.join("› ‹")}›`);
  const found = [`${spans.length} spans`, ...lines].join("; ");
  at("said").textContent = unreadable ? `No reward: ${unreadable}.` : found;
  for (const [id, row, limit] of [["delta", delta, 1], ["raw", A, 2], ["white", white, 2]])
    at(id).replaceChildren(...PAGE.tokens.map((y, t) => coloured("span", y, row[t], limit)));
  at("numbers").replaceChildren(...PAGE.tokens.map((token, t) => {
    const line = document.createElement("tr");
    line.append(coloured("td", token.trim(), 0, 1));
    for (const row of [delta, PAGE.log_ratio, r, A, white])
      line.append(coloured("td", row[t].toFixed(3), row[t], row === PAGE.log_ratio ? 1e9 : 2));
    return line;
  }));
}

if (typeof document !== "undefined") {
  at("touch").addEventListener("input", update);
  update();
}
