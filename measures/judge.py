"""A language model as the judge: pairs of answers, MT-Bench, AlpacaEval.

    config = JudgeConfig(judge_model="gpt-4o", price_in=2.5, price_out=10, max_usd=5)
    questions = pairwise_questions(rows, after, before, config)     # rows {id, prompt}, texts
    print(forecast(questions, config, "judge.journal"))             # asks nothing
    scores = pairwise_scores(ask_judge(questions, config, "judge.journal"))
    print(win_tie_loss(scores))

Paper: §4.2–4.5, Table 4, Figure 3, Appendix E. Shapes: n rows, k features.

Departures: Appendix E shuffles the order of the two; here both orders are asked, and where they
disagree it is a tie. A reply without a verdict, or with several that differ, leaves its row
unjudged: it is counted, and asked again by the next run; FastChat takes the first. The prompt
of AlpacaEval's leaderboard is its own: run alpaca_eval on what `write_alpaca` writes.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import annotate
from annotate import fenced
from ask import Journal, Question, Server, ask, check_asking, missing, question_key
from data import InputError, chunks, flag, read_rows


TEMPERATURE = 0.0                                                             # of the judge


@dataclass
class JudgeConfig:
    """A judge behind an OpenAI-compatible server, and what it may cost."""
    judge_model: str | None = flag(None, "model on a server that judges (paper: gpt-4o); "
                                         "none: no judge is asked")
    base_url: str | None = flag(None, "any OpenAI-compatible server; else OPENAI_BASE_URL")
    judge_prompts: str | None = flag(None, "FastChat's judge_prompts.jsonl; else our own")
    judge_tokens: int = flag(2048, "longest reply of the judge, in tokens", least=1)
    concurrency: int = flag(8, "requests under way at once", least=1)
    price_in: float | None = flag(None, "USD per million prompt tokens", least=0)
    price_out: float | None = flag(None, "USD per million reply tokens", least=0)
    max_usd: float | None = flag(None, "what the judge may cost, all runs together", least=0)
    dry_run: bool = flag(False, "write the answers, then say what the judge would cost")

    @property
    def prices(self) -> tuple:
        """What a journal is told of money."""
        return self.price_in, self.price_out, self.max_usd

    @cached_property
    def prompts(self) -> dict[str, dict]:
        """By FastChat's name, {system_prompt, prompt_template}; ours are without the latter."""
        if self.judge_prompts is None:
            return {name: {"system_prompt": text} for name, text in OWN.items()}
        needs = ("name",), ("system_prompt",), ("prompt_template",)
        return {row["name"]: row for row in read_rows(self.judge_prompts, needs)}


def check(config: JudgeConfig):
    """Raise InputError for what would end the asking, before anything is spent."""
    free = config.judge_model is None or config.dry_run
    check_asking(*config.prices, config.base_url, free)
    config.prompts                                                   # read now


# ── What the judge is told (Appendix E)

_WEIGH = ("Weigh how correct, helpful and complete an answer is, and whether it does what the "
          "question asks.")
_FAIR = ("Neither length nor the order of the two speaks for one of them. Explain, then end "
         "with the verdict alone: [[A]], [[B]], or [[C]] for a tie.")
_RATE = (f"{_WEIGH} A reference answer, where given, is correct. Explain, then end with the "
         f"rating alone, from 1 (useless) to 10 (as good as can be), in this form: [[5]]")
_FIRST = f"You rate an answer to a question. {_RATE}"
_SECOND = f"You rate the second answer of a conversation, answer_2. {_RATE}"
OWN = {
    "pair-v2": f"You compare answer_a and answer_b to a question. {_WEIGH} {_FAIR}",
    "feedback": "You compare feedback_a and feedback_b on an answer to a question. Weigh if "
                "what they say is true and specific, if the parts that they quote as good and "
                f"poor stand in the answer and deserve it, and what they overlook. {_FAIR}",
    "single-v1": _FIRST, "single-math-v1": _FIRST,
    "single-v1-multi-turn": _SECOND, "single-math-v1-multi-turn": _SECOND,
}


def judge_messages(prompt: dict, values: dict[str, str]) -> list[dict]:
    """The chat messages: material in a template's {fields}, or else between marked tags."""
    system = prompt["system_prompt"]
    if template := prompt.get("prompt_template"):
        try:
            user = template.format(**values)
        except (LookupError, ValueError) as error:
            raise InputError(f"judge prompt {prompt['name']!r}: cannot fill in {error}; its "
                             f"fields may be {', '.join(values)}") from error
    else:
        told, user = fenced(values)
        system += f"\n{told}"
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _question(config: JudgeConfig, kind: str, values: dict, name) -> Question:
    """kind: the name of the prompt, as FastChat has it; name: the row's id."""
    if kind not in config.prompts:
        raise InputError(f"{config.judge_prompts}: there is no prompt named {kind!r}; add it, "
                         f"or leave --judge_prompts out")
    messages = judge_messages(config.prompts[kind], values)
    key = question_key("judge", config.judge_model, TEMPERATURE, messages)
    return Question(key, str(name), messages, about={"id": name, "kind": kind})


# ── What the judge says

WINS = {"A": 1.0, "C": 0.5, "B": 0.0}
RATING = r"\[(\d+\.?\d*)\]"


def read_verdict(kind: str, text: str) -> tuple[float | None, str | None]:
    """(verdict, None), or (None, why there is none): it is never guessed. A verdict is a rating
    from 1 to 10, or of a pair 1 (A is better), 0.5 (a tie) or 0."""
    text = text.rpartition("</think>")[2]                 # some models reason aloud first
    rates = kind.startswith("single")
    if rates:         # FastChat too reads a bare [7] where there is no [[7]]
        found = {*map(float, re.findall(rf"\[{RATING}\]", text) or re.findall(RATING, text))}
    else:
        found = {WINS[letter] for letter in re.findall(r"\[\[([ABC])\]\]", text)}
    if len(found) != 1:
        return None, "verdicts that differ" if found else "no verdict in the reply"
    verdict, = found
    if rates and not 1 <= verdict <= 10:
        return None, f"{verdict:g} is no rating from 1 to 10"
    return verdict, None


def forecast(questions: list[Question], config: JudgeConfig, path) -> str:
    """What the journal at `path` leaves to ask, and what it will cost, in a line."""
    with Journal(path, *config.prices) as journal:
        todo = missing(questions, journal)
        return f"{len(questions)} questions, {annotate.forecast(todo, journal, 250)}"


def ask_judge(questions: list[Question], config: JudgeConfig, path) -> list[dict]:
    """Ask what the journal at `path` does not hold → {id, verdict, reason} of each question.

    verdict: see `read_verdict`; the next run asks only for those that are None. Raises
    InputError as `annotate.ask`.
    """
    def review(question: Question, text: str) -> str | None:
        return read_verdict(question.about["kind"], text)[1]

    check(config)
    server = Server(config.judge_model, config.base_url, TEMPERATURE, config.judge_tokens)
    with Journal(path, *config.prices) as journal:
        records = ask(questions, journal, server, review, config.concurrency)
    verdicts = []
    for question in questions:
        about, record = question.about, records[question.key]
        said = None if record["reason"] else read_verdict(about["kind"], record["reply"])[0]
        verdicts.append({**about, "verdict": said, "reason": record["reason"]})
    return verdicts


# ── Pairs: who wins?

# The field that is compared → the name of its prompt, and of a side in it.
PAIRS = {"response": ("pair-v2", "answer"), "reply": ("feedback", "feedback")}


def pairwise_questions(rows: list[dict], texts_a: list[str], texts_b: list[str],
                       config: JudgeConfig, of: str = "response") -> list[Question]:
    """Two questions for each row {id, prompt}: side a first, then side b first.

    of: "response" (Figure 3), or "reply": critiques of it (Table 1's win rate, Appendix E).
    """
    (kind, side), questions = PAIRS[of], []
    for row, a, b in zip(rows, texts_a, texts_b, strict=True):
        about = {"answer": row["response"]} if of == "reply" else {}
        for first, second in ((a, b), (b, a)):
            values = {"question": row["prompt"], **about,
                      f"{side}_a": first, f"{side}_b": second}
            questions.append(_question(config, kind, values, row["id"]))
    return questions


def pairwise_scores(verdicts: list[dict]) -> list[dict]:
    """A row {id, win, inconsistent} for each pair: a has won (1) or lost (0) where both orders
    say so; where they disagree it is a tie (0.5), and inconsistent; None: one is unjudged."""
    scores = []
    for one, turned in chunks(verdicts, 2):
        assert one["id"] == turned["id"], "both orders of a pair follow each other"
        win, lost = one["verdict"], turned["verdict"]
        odd = None not in (win, lost) and win != 1 - lost
        win = 0.5 if odd else None if lost is None else win
        scores.append({"id": one["id"], "win": win, "inconsistent": odd})
    return scores


def win_tie_loss(scores: list[dict]) -> dict:  # Figure 3
    """How many win, tie (of them inconsistent), loss and unjudged, and `win_rate` of these."""
    wins = [row["win"] for row in scores if row["win"] is not None]
    count = Counter(wins)
    return {"win": count[1.0], "tie": count[0.5], "loss": count[0.0],
            "inconsistent": sum(row["inconsistent"] for row in scores),
            "unjudged": len(scores) - len(wins), **win_rate(wins)}


def win_rate(wins) -> dict:
    """The mean of wins [n] and its standard_error in per cent; None where there are too few."""
    n = len(wins)
    return {"win_rate": 100 * float(np.mean(wins)) if n else None,
            "standard_error": 100 * float(np.std(wins, ddof=1)) / n**0.5 if n > 1 else None}


# ── MT-Bench (Zheng et al., 2023)

NEED_REFERENCE = "math", "reasoning", "coding"   # judged beside a reference, where there is one
ANSWER_TEMPERATURE = {"extraction": 0.0, "math": 0.0, "coding": 0.0, "reasoning": 0.0,
                      "stem": 0.1, "humanities": 0.1}     # FastChat's; of other categories 0.7


def read_mt_bench(path) -> list[dict]:
    """Its questions {question_id, category, turns}, and perhaps a `reference` of two texts."""
    rows = read_rows(path, (("question_id",), ("category",), ("turns",)))
    for number, row in enumerate(rows, 1):
        for name in {"turns", "reference"} & row.keys():
            if not isinstance(row[name], list) or [*map(type, row[name])] != [str, str]:
                raise InputError(f"{path}, row {number}: {name!r} must be a list of two texts, "
                                 f"for two turns")
    return rows


def mt_bench_answers(questions: list[dict], write) -> dict:
    """question_id → both answers, at FastChat's temperature for its category; the second sees
    the first. write(conversations, temperature=…) → the next turn of each."""
    talks = {q["question_id"]: [] for q in questions}
    heats = [ANSWER_TEMPERATURE.get(q["category"], 0.7) for q in questions]
    for temperature in dict.fromkeys(heats):
        some = [q for q, heat in zip(questions, heats) if heat == temperature]
        own = [talks[q["question_id"]] for q in some]
        for turn in (0, 1):
            for talk, q in zip(own, some):
                talk.append({"role": "user", "content": q["turns"][turn]})
            for talk, text in zip(own, write(own, temperature=temperature), strict=True):
                talk.append({"role": "assistant", "content": text})
    return {name: [said["content"] for said in talk[1::2]] for name, talk in talks.items()}


# By turn: which prompt, and the parts of the conversation in it.
TURNS = (("v1", ("question", "answer")),
         ("v1-multi-turn", ("question_1", "answer_1", "question_2", "answer_2")))


def mt_bench_questions(questions: list[dict], answers: dict,
                       config: JudgeConfig) -> list[Question]:
    """Two for each of MT-Bench's: rate the first answer, and the second in its conversation.

    answers: question_id → both texts. Math, reasoning and coding are judged beside the
    question's reference, where the turn has one.
    """
    asked = []
    for q in questions:
        name, known = q["question_id"], q.get("reference", ["", ""])
        talk = [text for pair in zip(q["turns"], answers[name]) for text in pair]
        for turn, (version, parts) in enumerate(TURNS, 1):
            values, kind = dict(zip(parts, talk)), "single"
            if q["category"] in NEED_REFERENCE and all(known[:turn]):
                values |= dict(zip(("ref_answer_1", "ref_answer_2"), known[:turn]))
                kind = "single-math"
            asked.append(_question(config, f"{kind}-{version}", values, name))
    return asked


def mt_bench_scores(verdicts: list[dict]) -> list[dict]:  # Table 4
    """A row {id, rating, "rating, turn 1", "rating, turn 2"} for each question, 1–10; rating:
    the mean of both turns, or None where one has no verdict."""
    rows = []
    for one, two in chunks(verdicts, 2):
        turns = one["verdict"], two["verdict"]
        rating = None if None in turns else sum(turns) / 2
        rows.append({"id": one["id"], "rating": rating, "rating, turn 1": turns[0],
                     "rating, turn 2": turns[1]})
    return rows


# ── AlpacaEval (Dubois et al., 2024)

def read_alpaca(path) -> list[dict]:
    """Instructions with a reference's outputs → rows {id, prompt, response}; id: from 0."""
    rows = read_rows(path, (("instruction",), ("output",)))
    return [{"id": str(number), "prompt": row["instruction"], "response": row["output"]}
            for number, row in enumerate(rows)]


def write_alpaca(path, rows: list[dict], texts: list[str], generator: str):
    """A policy's outputs as one JSON array, for alpaca_eval's --model_outputs."""
    outputs = [{"instruction": row["prompt"], "output": text, "generator": generator}
               for row, text in zip(rows, texts, strict=True)]
    Path(path).write_text(json.dumps(outputs, indent=1))


def read_difficulty(path) -> list[dict]:
    """Rows of AlpacaEval's df_gamed.csv: two baselines, and how hard each instruction is."""
    names, rows = ("std_delta_len", "instruction_difficulty", "preference"), []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                numbers = {name: float(row[name] or "nan") for name in names}
                rows.append({"index": row["index"], **numbers})
    except (LookupError, ValueError, TypeError) as error:
        raise InputError(f"{path}: it is not df_gamed.csv of AlpacaEval ({error!r})") from error
    return rows


def length_controlled(rows: list[dict], texts: list[str], scores: list[dict],
                      gamed: list[dict]) -> dict:  # Table 4
    """AlpacaEval 2's length-controlled win rate in per cent, as alpaca_eval 0.6.6 fits it.

    P(texts win) = σ(φ tanh(Δ/s) + ψ γ_x + θ): Δ is by how many characters the reference is
    longer, s its standard deviation, γ_x how hard the instruction is; the rate is the mean of P
    at Δ = 0. gamed: of `read_difficulty`, a verbose and a concise baseline that hold φ, of
    weight 0.2 together. A row that is unjudged is predicted, not fitted.
    """
    hard = {row["index"]: row["instruction_difficulty"] for row in gamed}
    if lost := [row["id"] for row in rows if row["id"] not in hard]:
        raise InputError(f"no instruction_difficulty is known of index {lost[0]}")
    if (judged := sum(score["win"] is not None for score in scores)) < 5:
        raise InputError(f"{judged} rows are judged; a length-controlled rate needs five")
    longer = np.array([len(row["response"]) - len(text)
                       for row, text in zip(rows, texts, strict=True)])
    even = np.array([[0, hard[row["id"]], 1] for row in rows])                  # Δ = 0
    own = even + np.outer(longer / (longer.std(ddof=1) or 1), [1, 0, 0])
    x = np.array([[row["std_delta_len"], row["instruction_difficulty"], 0] for row in gamed]
                 + own.tolist())
    x[:, 0] = np.tanh(x[:, 0])                                                  # [n, k]
    liked = [row["preference"] for row in gamed] + [score["win"] for score in scores]
    y = np.array(liked, dtype=float)                                            # None: nan
    weight, known = np.where(x[:, 2] == 1, 1.0, 0.2 / 2), ~np.isnan(y)
    w = fit_cross_validated(x[known], y[known], weight[known])
    return win_rate(1 / (1 + np.exp(-even @ w)))


def fit_cross_validated(x, y, weight) -> np.ndarray:
    """Coefficients [k] under that penalty whose held-out loss is least; scikit-learn's grid."""
    fold = (len(x) - 1 - np.arange(len(x))) % 5                  # scikit-learn's GroupKFold

    def held_out(strength: float) -> float:
        losses = []
        for k in range(5):
            kept, left = fold != k, fold == k
            z = x[left] @ fit_logistic(x[kept], y[kept], weight[kept], strength)
            losses.append(np.mean(weight[left] * (np.logaddexp(0, z) - y[left] * z)))
        return np.mean(losses)
    return fit_logistic(x, y, weight, min(np.logspace(-4, 4, 10), key=held_out))


def fit_logistic(x, y, weight, strength: float) -> np.ndarray:
    """argmin_w [k] ‖w‖₁ + C Σ weight · cross-entropy(y, σ(x w)), by proximal gradient steps."""
    rate = 4 / strength / np.linalg.norm((x.T * weight) @ x, 2)      # one over the curvature
    w, last = np.zeros(x.shape[1]), np.inf
    for _ in range(2000):
        if np.abs(w - last).max() < 1e-8:
            break
        slope = strength * x.T @ (weight * (1 / (1 + np.exp(-x @ w)) - y))
        step = w - rate * slope
        w, last = np.sign(step) * np.maximum(np.abs(step) - rate, 0), w
    return w
