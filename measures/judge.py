"""A language model as the judge: pairs, ratings, MT-Bench and AlpacaEval (§4.2–4.5; Table 4, Figure 3, Appendix E).

    config = JudgeConfig(judge_model="gpt-4o", price_in=2.5, price_out=10, max_usd=5)
    questions = pairwise_questions(after, before, config)            # rows {id, prompt, response} of two policies
    print(forecast(questions, config, "judge.journal"))              # asks nothing
    scores = pairwise_scores(questions, ask_judge(questions, config, "judge.journal"))
    print(win_tie_loss(scores))

Paper: §4.2–4.5, Table 4, Figure 3 and Appendix E; MT-Bench and AlpacaEval are others'. Shapes: k features.

Questions are built, asked and read apart, so one journal serves them all and a run that stopped goes on where it was.
Prompts are our own, in the manner of Appendix E, or the user's in FastChat's form (judge_prompts.jsonl).

Departures: Appendix E shuffles the order of the two; here both orders are asked, and disagreement is a tie. A reply
with no verdict, or several that differ, is counted as unreadable and asked again by the next run; FastChat takes the first.
AlpacaEval's leaderboard has a judge prompt of its own: for its scale, run alpaca_eval on what `write_alpaca` writes.
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Callable

import numpy as np

import annotate
from annotate import Journal, Question, Server, ask, check_asking, fenced, missing, question_key, schema_of
from data import InputError, flag, read_rows


class JudgeError(ValueError):
    """A reply that holds no clear verdict; the message is the reason."""


@dataclass
class JudgeConfig:
    """A judge behind an OpenAI-compatible server, and what it may cost. max_usd in USD, judge_tokens in tokens."""
    judge_model: str = flag("gpt-4o", "model that judges, on the server (paper: gpt-4o)")
    base_url: str | None = flag(None, "any OpenAI-compatible server; else OPENAI_BASE_URL")
    judge_prompts: str | None = flag(None, "judge prompts in FastChat's form, JSON lines; else our own")
    judge_temperature: float = flag(0.0, "temperature of the judge", least=0)
    judge_tokens: int = flag(2048, "longest reply of the judge, in tokens", least=1)
    concurrency: int = flag(8, "requests under way at once", least=1)
    price_in: float | None = flag(None, "USD per million prompt tokens", least=0)
    price_out: float | None = flag(None, "USD per million reply tokens", least=0)
    max_usd: float | None = flag(None, "stop before the judge has cost more, all runs together; needs prices", least=0)

    @cached_property
    def prompts(self) -> list[Prompt] | None:
        """The user's judge prompts, or None for our own. Raises InputError as `read_prompts`."""
        return read_prompts(self.judge_prompts) if self.judge_prompts else None


def _journal(path, config: JudgeConfig) -> Journal:
    return Journal(path, config.price_in, config.price_out, config.max_usd)


def check(config: JudgeConfig):
    """Raise InputError for a budget without prices, and a file of prompts that is none, before anything is spent."""
    asks = config.judge_model and not getattr(config, "dry_run", False)
    check_asking(config.price_in, config.price_out, config.max_usd, free=not asks)
    config.prompts                                             # read now


# ── What the judge is told ──────────────────────────────────────────────────────────────────────────────

CRITERIA = "how correct, helpful and complete an answer is, and whether it does what the question asks"
_FAIR = "Neither length nor the order of the two speaks for one of them."
_RATE = f"from 1 (useless) to 10 (as good as can be). Weigh {CRITERIA}. A reference answer, where given, is correct."
_ROLES = {      # kind of question → our own prompt
    "pairwise": "You compare two answers to a question, answer_a and answer_b. Weigh " + f"{CRITERIA}. {_FAIR}",
    "feedback": "You compare two pieces of feedback on an answer to a question, feedback_a and feedback_b. Weigh "
                "whether what they say is true and specific, whether the parts that they quote as good and as poor "
                "stand in the answer and deserve it, and what they overlook. " + _FAIR,
    "single": "You rate an answer to a question " + _RATE,
    "turns": "You rate the second answer of a conversation, answer_2, " + _RATE,
}
_TELLING = {"pairwise": "answer_a", "feedback": "feedback_a", "single": "answer", "turns": "answer_2"}
_FORMS = {      # form of a verdict → what the judge is asked for
    "winner": 'one JSON object of this form and nothing after it:\n{"reasoning": "…", "winner": "A|B|tie"}',
    "rating": 'one JSON object of this form and nothing after it:\n{"reasoning": "…", "rating": 5}',
    "[[A]]": "the final verdict alone: [[A]], [[B]], or [[C]] for a tie",
    "[[rating]]": "the rating alone, from 1 to 10, in this form: [[5]]",
}
_VALUES = {"winner": "A|B|tie", "rating": 5}
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


@dataclass(frozen=True)
class Prompt:
    """form: a key of _FORMS; template: the user's, with {fields}; without one, material stands between marked tags."""
    name: str
    system: str
    form: str
    template: str | None = None

    @property
    def fields(self) -> set[str]:
        """Names of the template's {fields}."""
        return {found[1] for found in _FIELD.finditer(self.template or "") if found[1]}

    def messages(self, values: dict[str, str]) -> list[dict]:
        """The chat messages for this material; braces and tags inside the material mean nothing.

        Raises InputError for a {field} of the template that there is nothing to put for.
        """
        if self.template is not None:
            if lost := sorted(self.fields - values.keys()):
                raise InputError(f"judge prompt {self.name!r}: nothing is known to put for {{{lost[0]}}}; there are "
                                 f"{', '.join(values)}")
            system = self.system
            user = _FIELD.sub(lambda found: values[found[1]] if found[1] else found[0][0], self.template)
        else:
            told, user = fenced(values)
            system = f"{self.system}\n{told}\nReply with {_FORMS[self.form]}"
        return [{"role": role, "content": text} for role, text in (("system", system), ("user", user)) if text]


def read_table(path, **kinds) -> list[dict]:
    """Rows with fields of these types. Raises InputError with file, row and field."""
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        for name, kind in kinds.items():
            if not isinstance(row.get(name), kind) or row[name] == []:
                raise InputError(f"{path}, row {number}: field {name!r} is {str(row.get(name))[:40]!r}; rows of this "
                                 f"file have {', '.join(kinds)}")
    return rows


def read_prompts(path) -> list[Prompt]:
    """The user's judge prompts, in FastChat's form. Raises InputError with row and field for another."""
    rows = read_table(path, name=str, prompt_template=str, output_format=str)
    for number, row in enumerate(rows, 1):
        if row["output_format"] not in ("[[A]]", "[[rating]]"):
            raise InputError(f"{path}, row {number}: output_format {row['output_format']!r} is not [[A]] or [[rating]]")
    return [Prompt(row["name"], row.get("system_prompt") or "", row["output_format"], row["prompt_template"])
            for row in rows]


def choose_prompt(prompts: list[Prompt] | None, kind: str, reference: bool = False) -> Prompt:
    """Our own prompt of a kind (pairwise, feedback, single, turns), or the one of the user's that has its fields.

    Raises InputError where none or several of the user's have them.
    """
    pair, field = kind in ("pairwise", "feedback"), _TELLING[kind]
    if prompts is None:
        return Prompt(kind, _ROLES[kind], "winner" if pair else "rating")
    found = [prompt for prompt in prompts if field in prompt.fields and (prompt.form == "[[A]]") == pair
             and any(name.startswith("ref_answer") for name in prompt.fields) == reference]
    if len(found) != 1:
        raise InputError(f"--judge_prompts: {len(found)} prompts have output_format [[{'A' if pair else 'rating'}]], "
                         f"{{{field}}} and {'a' if reference else 'no'} {{ref_answer_…}}; there must be one")
    return found[0]


def _question(config: JudgeConfig, prompt: Prompt, values: dict, name: str, **about) -> Question:
    if lost := [field for field, text in values.items() if not isinstance(text, str)]:
        raise InputError(f"row {name}: there is no text to judge as {lost[0]} (prompt, response or feedback)")
    schema = schema_of({"reasoning": "…", prompt.form: _VALUES[prompt.form]}) if prompt.form in _VALUES else {}
    messages = prompt.messages(values)
    key = question_key("judge", config.judge_model, config.judge_temperature, prompt.form, messages)
    return Question(key, name, messages, schema, {"form": prompt.form, **about})


# ── What the judge says ─────────────────────────────────────────────────────────────────────────────────

def read_verdict(form: str, text: str) -> str | float:
    """A, B or tie, or a rating from 1 to 10. Raises JudgeError for none or several: a verdict is never guessed."""
    text = text.rpartition("</think>")[2][-100_000:]           # some models reason aloud first; bounds a hostile reply
    if form == "[[A]]":
        found = [letter.replace("C", "tie") for letter in re.findall(r"\[\[([ABC])\]\]", text)]
    elif form == "[[rating]]":
        found = [float(number) for number in re.findall(r"\[\[(\d{1,3}(?:\.\d{1,3})?)\]\]", text)]
    else:
        right = (int, float) if form == "rating" else (str,)
        found = [value for value in _json_values(text, form) if type(value) in right]
    if len(set(found)) != 1:
        raise JudgeError(f"verdicts that differ: {str(found)[:40]}" if found else "no verdict in the reply")
    verdict = found[0]
    if not (verdict in ("A", "B", "tie") if isinstance(verdict, str) else 1 <= verdict <= 10):
        raise JudgeError(f"{str(verdict)[:20]!r} is no verdict")
    return verdict if isinstance(verdict, str) else float(verdict)


def _json_values(text: str, name: str) -> list:
    """Every value that an outermost JSON object in the text has under a name."""
    decoder, at, found = json.JSONDecoder(object_pairs_hook=list, strict=False), 0, []
    for _ in range(1000):                                      # bounds the work on a hostile reply
        if not (opening := re.compile(r'\{\s*"').search(text, at)):
            break
        try:
            pairs, at = decoder.raw_decode(text, opening.start())
            found += [value for key, value in pairs if key == name]
        except (ValueError, RecursionError):
            at = opening.end()
    return found


def review(question: Question, text: str) -> str | None:
    """Why a reply holds no verdict, or None."""
    try:
        read_verdict(question.about["form"], text)
    except JudgeError as error:
        return str(error)
    return None


# ── Asking ──────────────────────────────────────────────────────────────────────────────────────────────

def forecast(questions: list[Question], config: JudgeConfig, path) -> str:
    """How many questions the journal at `path` leaves to ask, and what they will cost, in a line; asks nothing."""
    with _journal(path, config) as journal:
        todo = missing(questions, journal)
        return f"{len(questions)} questions, {annotate.forecast(todo, journal, 250)}"


def ask_judge(questions: list[Question], config: JudgeConfig, path) -> dict[str, dict]:
    """Ask what the journal at `path` does not hold → key of each question → {verdict, reason, reply, usd}.

    verdict: see `read_verdict`, or None with the reason why there is none; such a question is asked again by the next
    run, and no other is. Raises InputError as `annotate.ask`; the same call goes on from what is done.
    """
    check(config)
    server = Server(config.judge_model, config.base_url, config.judge_temperature, config.judge_tokens)
    with _journal(path, config) as journal:
        records, found = ask(questions, journal, server, review, config.concurrency), {}
    for question in questions:
        record, form = records[question.key], question.about["form"]
        verdict = None if record["reason"] else read_verdict(form, record["reply"])
        found[question.key] = {"verdict": verdict, **{name: record[name] for name in ("reason", "reply", "usd")}}
    return found


# ── Pairs and ratings ───────────────────────────────────────────────────────────────────────────────────

def paired(rows_a: list[dict], rows_b: list[dict]) -> list[tuple[dict, dict]]:
    """Rows of two sides by id, in the order of the first. Raises InputError where ids or prompts are not the same."""
    a, b = ({row.get("id"): row for row in rows} for rows in (rows_a, rows_b))
    for side, rows in ((a, rows_a), (b, rows_b)):
        if len(side) < len(rows):
            name, n = Counter(row.get("id") for row in rows).most_common(1)[0]
            raise InputError(f"{n} rows on one side of a comparison have the id {name!r}; ids must be unique")
    if odd := [name for name in [*a, *b] if name not in a or name not in b]:
        raise InputError(f"the two sides of a comparison have {len(a)} and {len(b)} rows, and {len(odd)} ids stand on "
                         f"one side only: first {odd[0]!r}, missing on the {'second' if odd[0] in a else 'first'}")
    if odd := [name for name in a if a[name].get("prompt") != b[name].get("prompt")]:
        raise InputError(f"{len(odd)} prompts differ between the two sides of a comparison, first that of {odd[0]!r}")
    return [(a[name], b[name]) for name in a]


def pairwise_questions(rows_a: list[dict], rows_b: list[dict], config: JudgeConfig,
                       of: str = "response") -> list[Question]:
    """Two questions for each row {id, prompt, response}: side a first, then side b first.

    of: "response" (Figure 3), or "feedback" (Table 1's win rate, Appendix E): rows then also have a text `feedback`,
    and the same response on both sides. Raises InputError where the responses differ, or there is no text to judge.
    """
    kind, side = ("feedback", "feedback") if of == "feedback" else ("pairwise", "answer")
    prompt, questions = choose_prompt(config.prompts, kind), []
    for number, (a, b) in enumerate(paired(rows_a, rows_b)):
        shown = {"question": a.get("prompt")} | ({"answer": a.get("response")} if of == "feedback" else {})
        if of == "feedback" and a.get("response") != b.get("response"):
            raise InputError(f"row {a['id']}: the two sides give feedback on different responses")
        for swapped, (first, second) in enumerate(((a, b), (b, a))):
            values = shown | {f"{side}_a": first.get(of), f"{side}_b": second.get(of)}
            questions.append(_question(config, prompt, values, str(a["id"]), row_id=a["id"], swapped=swapped))
    return questions


def pairwise_scores(questions: list[Question], verdicts: dict[str, dict]) -> list[dict]:
    """One row {id, win, inconsistent, reason} for each pair; win of side a: 1, 0.5 (tie), 0, or None with a reason.

    A side wins only where both orders say so; where they disagree it is a tie, and `inconsistent`.
    """
    points, scores = {"A": 1.0, "tie": 0.5, "B": 0.0}, []
    for question, turned in zip(questions[::2], questions[1::2], strict=True):
        assert not question.about["swapped"] and turned.about["swapped"], "both orders of one pair follow each other"
        one, two = verdicts[question.key], verdicts[turned.key]
        reason, win, odd = one["reason"] or two["reason"], None, False
        if reason is None:
            win, other = points[one["verdict"]], 1 - points[two["verdict"]]
            win, odd = (win, False) if win == other else (0.5, True)
        scores.append({"id": question.about["row_id"], "win": win, "inconsistent": odd, "reason": reason})
    return scores


def win_tie_loss(scores: list[dict]) -> dict:  # Figure 3
    """Counts of win, tie (of them inconsistent), loss and unreadable; win_rate and its standard_error in per cent."""
    wins = [row["win"] for row in scores if row["win"] is not None]
    count = Counter(wins)
    return {"win": count[1.0], "tie": count[0.5], "loss": count[0.0], "n": len(scores),
            "inconsistent": sum(row["inconsistent"] for row in scores), "unreadable": len(scores) - len(wins),
            "win_rate": 100 * float(np.mean(wins)) if wins else None, "standard_error": _standard_error(wins)}


def _standard_error(values) -> float | None:
    return 100 * float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def single_questions(rows: list[dict], config: JudgeConfig) -> list[Question]:
    """One question for the rating of each row {id, prompt, response}. Raises InputError where one has no text."""
    prompt = choose_prompt(config.prompts, "single")
    return [_question(config, prompt, {"question": row.get("prompt"), "answer": row.get("response")}, str(row["id"]),
                      row_id=row["id"]) for row in rows]


def single_scores(questions: list[Question], verdicts: dict[str, dict]) -> list[dict]:
    """One row {id, score, reason} for each question; score 1–10, or None with the reason."""
    return [{"id": question.about["row_id"], "score": verdicts[question.key]["verdict"],
             "reason": verdicts[question.key]["reason"]} for question in questions]


# ── MT-Bench (Zheng et al. 2023) ────────────────────────────────────────────────────────────────────────

NEED_REFERENCE = ("math", "reasoning", "coding")               # judged beside a reference answer where there is one
TEMPERATURE = {"writing": 0.7, "roleplay": 0.7, "extraction": 0.0, "math": 0.0, "coding": 0.0, "reasoning": 0.0,
               "stem": 0.1, "humanities": 0.1}                 # FastChat's, by category; 0.7 for any other


def _both_turns(value) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def read_mt_bench(path) -> list[dict]:
    """MT-Bench's questions {question_id, category, turns} of two turns each, and perhaps `reference` answers.

    Raises InputError with row and field for another form, and for an id that comes twice.
    """
    rows, seen = read_table(path, question_id=int | str, category=str, turns=list), set()
    for number, row in enumerate(rows, 1):
        if odd := [name for name in ("turns", "reference") if not _both_turns(row.get(name, ["", ""]))]:
            raise InputError(f"{path}, row {number}: field {odd[0]!r} must be a list of two texts")
        if row["question_id"] in seen:
            raise InputError(f"{path}, row {number}: question_id {row['question_id']!r} stands there twice")
        seen.add(row["question_id"])
    return rows


def mt_bench_answers(questions: list[dict], write: Callable[..., list[str]], by_category: bool = False) -> dict:
    """question_id → both answers; the second turn sees the first answer.

    write(conversations) → the next turn of each; with by_category it is called as write(conversations, temperature=t)
    for the questions of each temperature in FastChat's table.
    """
    heat = {q["question_id"]: TEMPERATURE.get(q["category"], 0.7) if by_category else None for q in questions}
    answers = dict.fromkeys(heat)
    for one in dict.fromkeys(heat.values()):
        some = [q for q in questions if heat[q["question_id"]] == one]
        options = {} if one is None else {"temperature": one}
        talks = [[{"role": "user", "content": q["turns"][0]}] for q in some]
        first = write(talks, **options)
        talks = [[*talk, {"role": "assistant", "content": answer}, {"role": "user", "content": q["turns"][1]}]
                 for talk, answer, q in zip(talks, first, some, strict=True)]
        second = write(talks, **options)
        answers |= {q["question_id"]: list(both) for q, *both in zip(some, first, second, strict=True)}
    return answers


def model_answers(answers: dict, model: str) -> list[dict]:
    """question_id → both answers, as rows of FastChat's model_answer files."""
    return [{"question_id": name, "answer_id": question_key(model, name, turns)[:22], "model_id": model,
             "choices": [{"index": 0, "turns": turns}], "tstamp": time.time()} for name, turns in answers.items()]


def read_model_answers(path) -> dict:
    """question_id → both answers, of FastChat's model_answer or reference_answer file. InputError for another form."""
    found = {}
    for number, row in enumerate(read_table(path, question_id=int | str, choices=list), 1):
        found[row["question_id"]] = row["choices"][0].get("turns") if isinstance(row["choices"][0], dict) else None
        if not _both_turns(found[row["question_id"]]):
            raise InputError(f"{path}, row {number}: field 'choices' must hold {{\"turns\": [two texts]}}")
    return found


def mt_bench_questions(questions: list[dict], answers: dict, config: JudgeConfig,
                       references: dict | None = None) -> list[Question]:
    """Two questions for each of MT-Bench's: rate the first answer, and the second in its conversation.

    answers, references: question_id → both texts. Math, reasoning and coding are judged beside the reference, of
    `references` or else of the question's own field; a turn that has none there is judged as in other categories.
    Raises InputError where a question has no answer.
    """
    if lost := [q["question_id"] for q in questions if q["question_id"] not in answers]:
        raise InputError(f"{len(lost)} of {len(questions)} MT-Bench questions have no answer, first {lost[0]!r}")
    asked = []
    for q in questions:
        name, (one, two), said = q["question_id"], q["turns"], answers[q["question_id"]]
        known = (references or {}).get(name) or q.get("reference") or ["", ""]
        for turn in (1, 2):
            reference = q["category"] in NEED_REFERENCE and all(known[:turn])
            values = ({"question": one, "answer": said[0]} if turn == 1 else
                      {"question_1": one, "answer_1": said[0], "question_2": two, "answer_2": said[1]})
            values |= {f"ref_answer_{k + 1}": known[k] for k in range(turn)} if reference else {}
            prompt = choose_prompt(config.prompts, "single" if turn == 1 else "turns", reference)
            asked.append(_question(config, prompt, values, f"{name}, turn {turn}", row_id=name, turn=turn,
                                   category=q["category"], reference=reference))
    return asked


def mt_bench_scores(questions: list[Question], verdicts: dict[str, dict]) -> list[dict]:  # Table 4
    """One row {id, category, turn_1, turn_2, score, reason} for each question; score: the mean of both turns, 1–10.

    Where a turn has no verdict, its score is None with the reason, and so is the mean.
    """
    rows = {}
    for question, rated in zip(questions, single_scores(questions, verdicts)):
        row = rows.setdefault(rated["id"], {"id": rated["id"], "category": question.about["category"], "reason": None})
        row[f"turn_{question.about['turn']}"] = rated["score"]
        row["reason"] = row["reason"] or rated["reason"]
    return [row | {"score": None if row["reason"] else (row["turn_1"] + row["turn_2"]) / 2} for row in rows.values()]


# ── AlpacaEval (Dubois et al. 2024) ─────────────────────────────────────────────────────────────────────

def read_alpaca(path) -> list[dict]:
    """AlpacaEval's instructions with a reference's outputs → rows {id, prompt, response, generator, dataset}.

    id is AlpacaEval's index: the place in the file, from 0.
    """
    rows = read_table(path, instruction=str, output=str)
    return [{"id": row.get("index", number), "prompt": row["instruction"], "response": row["output"],
             "generator": row.get("generator", "reference"), "dataset": row.get("dataset", "")}
            for number, row in enumerate(rows)]


def write_alpaca(path, rows: list[dict], generator: str):
    """A policy's outputs as one JSON array, for alpaca_eval's --model_outputs."""
    Path(path).write_text(json.dumps([{"instruction": row["prompt"], "output": row["response"], "generator": generator,
                                       "dataset": row.get("dataset", "")} for row in rows], indent=1))


def alpaca_annotations(rows: list[dict], reference: list[dict], scores: list[dict], name: str,
                       judge: str) -> list[dict]:
    """Rows of alpaca_eval's annotations.json; preference: 1 (the reference is better) to 2 (`rows`, of `name`, are)."""
    return [{"index": row["id"], "instruction": row["prompt"], "dataset": base.get("dataset", ""), "annotator": judge,
             "output_1": base["response"], "generator_1": base.get("generator", "reference"),
             "output_2": row["response"], "generator_2": name,
             "preference": None if score["win"] is None else 1 + score["win"]}
            for (row, base), score in zip(paired(rows, reference), scores, strict=True)]


def read_difficulty(path) -> list[dict]:
    """Rows of AlpacaEval's instruction_difficulty.csv or df_gamed.csv. Raises InputError for any other file."""
    flags, needed = {"True": 1.0, "False": 0.0}, {"index", "instruction_difficulty"}
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        try:
            rows = [{name or "index": flags[text] if text in flags else float(text or "nan")
                     for name, text in row.items() if name != "model"} for row in csv.DictReader(file)]
        except (ValueError, TypeError, csv.Error) as error:
            raise InputError(f"{path}: a value is no number ({error}); expected df_gamed.csv of AlpacaEval") from error
    if rows and "preference" in rows[0]:
        needed = needed | {"std_delta_len", "not_gamed_baseline"}
    if not rows or needed - rows[0].keys():
        raise InputError(f"{path}: no rows with {', '.join(sorted(needed))}; expected df_gamed.csv or "
                         f"instruction_difficulty.csv of AlpacaEval")
    return rows


def length_controlled(annotations: list[dict], difficulty: list[dict] | None = None) -> dict:  # Table 4
    """AlpacaEval 2's length-controlled win rate in per cent, as alpaca_eval 0.6.6 fits it.

    P(the policy wins) = σ(φ tanh(Δ/s) + ψ γ_x + θ): Δ is the reference's length less the policy's in characters, s its
    standard deviation, γ_x how hard the instruction is; the rate is the mean of P at Δ = 0. difficulty: rows by `index`
    of df_gamed.csv (length_controlled_v1: a verbose and a concise baseline, of weight 0.2 together, hold φ), those of
    instruction_difficulty.csv (length_controlled_noreg), or None (length_controlled_minimal, without γ). Rows without a
    preference are predicted, not fitted. Raises InputError where an instruction has no difficulty.
    """
    known = {row["index"]: row["instruction_difficulty"] for row in reversed(difficulty or [])}
    gamed = [row for row in difficulty or [] if "preference" in row]
    if known and (lost := [row["index"] for row in annotations if row["index"] not in known]):
        raise InputError(f"{len(lost)} instructions have no instruction_difficulty, first that of index {lost[0]}")
    lengths = np.array([len(row["output_1"]) - len(row["output_2"]) for row in annotations], dtype=float)
    same = np.array([[0.0, known.get(row["index"], 0.0), 1.0] for row in annotations])         # as if both were as long
    x = np.concatenate([np.array([[np.tanh(g["std_delta_len"]), g["instruction_difficulty"], g["not_gamed_baseline"]]
                                  for g in gamed]).reshape(-1, 3),
                        same + np.outer(np.tanh(lengths / (lengths.std(ddof=1) or 1)), [1, 0, 0])])
    y = np.array([g["preference"] for g in gamed] +
                 [np.nan if row["preference"] is None else row["preference"] - 1 for row in annotations])
    weight, judged = np.where(x[:, 2] == 1, 1.0, 0.2 / 2), ~np.isnan(y)
    if judged.sum() < 5:
        raise InputError(f"{judged.sum()} rows have a preference; a length-controlled win rate needs five or more")
    wins = 1 / (1 + np.exp(-same @ fit_cross_validated(x[judged], y[judged], weight[judged])))
    return {"length_controlled_winrate": 100 * float(wins.mean()), "lc_standard_error": _standard_error(wins),
            "glm": "length_controlled_" + ("v1" if gamed else "noreg" if known else "minimal")}


def _losses(x, y, w) -> np.ndarray:
    """[n] cross-entropy of each row, with targets y in [0, 1]."""
    return np.logaddexp(0, x @ w) - y * (x @ w)


def fit_cross_validated(x, y, weight, folds: int = 5) -> np.ndarray:
    """Coefficients [k] of k features, under that penalty, of ten, whose held-out loss is least; scikit-learn's grid."""
    fold = (len(x) - 1 - np.arange(len(x))) % folds

    def held_out(strength: float) -> float:
        fits = [fit_logistic(x[fold != k], y[fold != k], weight[fold != k], strength) for k in range(folds)]
        return float(np.mean([np.mean((weight * _losses(x, y, w))[fold == k]) for k, w in enumerate(fits)]))
    return fit_logistic(x, y, weight, min(np.logspace(-4, 4, 10), key=held_out))


def fit_logistic(x, y, weight, strength: float) -> np.ndarray:
    """argmin_w [k] ‖w‖₁ + C Σ weight · cross-entropy(y, σ(x w)): Newton's steps, kinks by coordinate descent."""
    def objective(w):
        return np.abs(w).sum() + strength * (weight * _losses(x, y, w)).sum()
    w = np.zeros(x.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-x @ w))
        slope = strength * x.T @ (weight * (p - y))
        curve = strength * (x.T * (weight * p * (1 - p))) @ x + 1e-12 * np.eye(len(w))
        new = w.copy()
        for j in [*range(len(w))] * 50:
            z = curve[j, j] * new[j] - slope[j] - curve[j] @ (new - w)
            new[j] = np.sign(z) * max(abs(z) - 1, 0) / curve[j, j]
        step = new - w
        while np.abs(step).max() > 1e-10 and objective(w + step) > objective(w):
            step = step / 2
        w = w + step
        if np.abs(step).max() <= 1e-10:
            break
    return w
