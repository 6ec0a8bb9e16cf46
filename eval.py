"""Evaluation: the numbers of §4 for a base, for an adapter, and for one against the other.

    python eval.py                   # the toy world: its base against runs/toy/policy
    python eval.py --task slf5k --data test.jsonl --model MODEL --adapter runs/slf5k/policy \\
        --encoder roberta-large
    python eval.py --task reward_model --data feedback.jsonl --model MODEL \\
        --adapter runs/slf5k/reward/adapter
    python eval.py --task code --data HumanEvalPlus.jsonl.gz --model MODEL --adapter … \\
        --allow_code_execution
    python eval.py --task mt_bench --data question.jsonl --model MODEL --adapter … \\
        --judge_model gpt-4o --judge_prompts judge_prompts.jsonl

--adapter is measured beside the bare base, or beside --before. Either may be a file of answers
that another model wrote: rows with `id` and `response`. A figure has a 95 % interval by
bootstrap over rows, and so has the difference, the same rows drawn for both. Answers are kept
as they are written, judgements as they are paid for: the same command goes on from there.

Paper: §4 and Tables 1 to 8 and 16, Table 5 with another --model.

Departures from the paper, which gives no intervals: perplexity (Table 8) is given the prompt,
under the bare base. A row that cannot be scored is wrong, never left out; one that the judge
gave no verdict on is out of the judge's figures, and counted. In output_dir: answers, rows and
counts of each side, result.json, report.html.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Callable

import torch
from safetensors import SafetensorError
from tqdm import tqdm

import report
from annotate import feedback_row, ground, question_key
from data import (DTYPES, InputError, append_row, chunks, flag, get_task, parse_flags,
                  read_rows, reward_prompt, run_script, whole_rows, write_rows)
from measures import benchmarks
from measures import judge as judges
from measures.metrics import (bert_score, bleu_counts, bleu_of, corpus, interval, load_encoder,
                              paired_bootstrap, perplexity, perplexity_of, ratio, rouge, share)
from measures.spans import (FIGURES, SIGNS, audit, audit_text, colour_spans, compare, figures,
                            parts, read_spans, readable, response_tokens, span_table, total,
                            words)
from model import (checksum, encode_prompt, eos_ids, load_lora, load_model, lock_directory,
                   use_lora)
from sampling import context_length, generate

PRESETS = {"toy": {"adapter": "runs/toy/policy", "limit": 200, "temperature": 1.0,
                   "max_new_tokens": 32, "batch_size": 200},
           "slf5k": {"max_new_tokens": 89}, "reward_model": {"max_new_tokens": 768},
           "mt_bench": {"max_new_tokens": 1024}, "alpaca_eval": {"max_new_tokens": 2048}}
TEXTS = "toy", "slf5k", "ultrafeedback"
PAIRED = *TEXTS, "reward_model"                        # what a judge compares in pairs
CHATS = "mt_bench", "alpaca_eval"


@dataclass
class EvalConfig(judges.JudgeConfig):
    """Some defaults are set by --task. max_new_tokens is in tokens."""
    task: str = flag("toy", "toy, slf5k, ultrafeedback, reward_model, code, arc, mt_bench or "
                            "alpaca_eval", (*PAIRED, "code", "arc", *CHATS))
    model: str = flag("toy/base", "base model: a directory or hub id")
    adapter: str | None = flag(None, "what to measure: the adapter of a policy or of R_φ, or "
                                     "a file of answers; none: the base alone")
    before: str | None = flag(None, "what to compare it with, likewise; none: the bare base")
    data: str | None = flag(None, "the benchmark's rows; the toy world makes its own")
    limit: int = flag(10**6, "rows at most", least=1)
    output_dir: str = flag("runs/eval", "where answers, rows, result and report go")
    seed: int = flag(0, "of samples", most=10**9)
    dtype: str | None = flag(None, "of the base; none: bfloat16 on CUDA, float32 on a CPU",
                             DTYPES)
    batch_size: int = flag(64, "texts that are decoded at once", least=1)
    temperature: float = flag(0.0, "of the policy; 0: greedy")
    max_new_tokens: int = flag(512, "longest answer", least=1)
    encoder: str | None = flag(None, "summaries: BERTScore's, such as roberta-large, whose "
                                     "layer bert-score knows")
    samples_per_row: int = flag(1, "code: answers to each problem", least=1)
    k: int = flag(1, "code: pass@k beside pass@1", least=1)
    allow_code_execution: bool = flag(False, "code: run what the model wrote, in the sandbox")
    unsafe_sandbox: bool = flag(False, "code: run it also where a layer of that is lacking")
    code_timeout: float = flag(10.0, "code: CPU seconds for each program", least=0.01)
    references: str | None = flag(None, "mt_bench: reference answers in FastChat's form")
    difficulty: str | None = flag(None, "alpaca_eval: its df_gamed.csv, for the "
                                        "length-controlled rate")

    @property
    def adapters(self) -> list[str]:
        """The directories that were named, not the files of answers."""
        return [path for path in (self.before, self.adapter) if os.path.isdir(path or "")]

    GROUPS = {"judge_model": "the judge", "task": "start here", "seed": "writing the answers",
              "encoder": "of one benchmark, which the help names"}


# ── The sides of the table: one base, an adapter each

NAMES = "id", "task_id", "question_id", "prompt_id", "index"       # what data sets call a row


def name_rows(rows: list[dict], limit: int | None = None) -> list[dict]:
    """The first `limit` rows, or all, each with an `id`: its own, else its number from 0."""
    out = []
    for number, row in enumerate(rows[:limit]):
        own = (row[key] for key in NAMES if row.get(key) is not None)
        out.append(row | {"id": str(next(own, number))})
    return out


def identity(path: str) -> list | str:
    """What tells one base from another: its files, by size and time; a hub id stays itself."""
    if not os.path.isdir(path):
        return path
    found = {file.name: file.stat() for file in Path(path).iterdir()}
    return sorted((name, one.st_size, one.st_mtime_ns) for name, one in found.items())


@dataclass
class Side:
    """One side of the table: the base, the base with an adapter, or a file of answers.

    source: the adapter or the file; None: the bare base. load: () → (model, tokenizer), called
    where a benchmark needs them. rows, counts: what it returned; tables: (title, header,
    lines).
    """
    name: str
    source: str | None
    config: EvalConfig
    load: Callable
    rows: list[dict] = field(default_factory=list)
    counts: dict[str, list] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tables: list[tuple] = field(default_factory=list)

    @property
    def given(self) -> bool:
        """Whether its answers are in a file already."""
        return os.path.isfile(self.source or "")

    @property
    def lora(self) -> str | None:
        """The adapter's name for use_lora."""
        return self.name if os.path.isdir(self.source or "") else None

    @property
    def about(self) -> str:
        """What it is, and its notes, a line each."""
        what = self.source or "no adapter"
        base = "" if self.given else f" on {self.config.model}"
        return "\n· ".join([f"{self.name}: {what}{base}", *self.notes])

    @functools.cached_property
    def model(self):
        """(model, tokenizer), with this side's adapter."""
        model, tokenizer = self.load()
        weights = load_lora(model, self.lora, self.source) if self.lora else []
        if not all(p.isfinite().all() for p in weights):
            raise InputError(f"{self.source}: the adapter holds NaN or infinite weights; its "
                             f"training went wrong")
        return model, tokenizer

    def path(self, ending: str) -> Path:
        """A file of this side's own."""
        return Path(self.config.output_dir, self.name + ending)

    def write(self, talks: list[list[dict]], temperature: float, draws: int = 1) -> list[str]:
        """The assistant's next turn in each conversation, `draws` in a row; what is on file is
        reused. Each has random numbers of its own, of the seed and the conversation: it depends
        on no batch, and two sides are compared on the same draws."""
        n, seed = self.config.max_new_tokens, self.config.seed
        adapter = checksum(*sorted(Path(self.source).glob("adapter_*"))) if self.lora else None
        made = question_key(identity(self.config.model), adapter, self.config.dtype,
                            temperature, n)
        path = Path(self.config.output_dir, f"answers-{made[:12]}.jsonl")
        write_rows(path, whole_rows(path))                      # without what a kill has torn
        kept = {row["key"]: row["response"] for row in whole_rows(path)}
        drawn = [*product(talks, range(draws))]
        names = [question_key(seed, talk, k) for talk, k in drawn]
        asked = {key: talk for key, (talk, _) in zip(names, drawn) if key not in kept}
        model, tokenizer = self.model if asked else (None, None)
        prompts = {key: encode_prompt(tokenizer, talk) for key, talk in asked.items()}
        for key, prompt in prompts.items():
            if len(prompt) + n > context_length(model):
                raise InputError(f"a prompt of {len(prompt)} tokens and {n} new ones exceed "
                                 f"the model's context: lower --max_new_tokens, or shorten or "
                                 f"drop the row {asked[key][-1]['content'][:80]!r}")
        for keys in tqdm(chunks([*asked], self.config.batch_size), self.name,
                         disable=not asked):
            seeds = [torch.Generator().manual_seed(int(key[:15], 16)) for key in keys]
            uniforms = torch.stack([torch.rand(n, generator=one) for one in seeds])
            with use_lora(model, self.lora):
                ids = generate(model, [prompts[key] for key in keys], n, temperature,
                               eos_ids(tokenizer, model), tokenizer.pad_token_id,
                               uniforms=uniforms)
            for key, y in zip(keys, ids):
                kept[key] = tokenizer.decode(y, skip_special_tokens=True).strip()
                append_row(path, {"key": key, "response": kept[key]})
        return [kept[key] for key in names]

    def answer(self, rows: list[dict], draws: int = 1) -> list[dict]:
        """The rows {id, prompt}, each with its `response`: written, or of the file, by id."""
        if not self.given:
            talks = [[{"role": "user", "content": row["prompt"]}] for row in rows]
            texts = self.write(talks, self.config.temperature, draws)
            return [row | {"response": text}
                    for (row, _), text in zip(product(rows, range(draws)), texts)]
        theirs = name_rows(read_rows(self.source))
        found = {row["id"]: row.get("response", row.get("output")) for row in theirs}
        if len(found) < len(theirs):
            raise InputError(f"{self.source}: two rows have one id; leave one of them out")
        if lost := [row["id"] for row in rows if not isinstance(found.get(row["id"]), str)]:
            raise InputError(f"{self.source}: no answer to {len(lost)} of {len(rows)} rows, "
                             f"first {lost[0]}; an empty 'response' counts as wrong")
        return [row | {"response": found[row["id"]]} for row in rows]


def sides_of(config: EvalConfig) -> list[Side]:
    """[before, after], or the one that there is; a file of answers, and an R_φ, is not
    compared with a base that nobody named."""
    load = functools.cache(lambda: load_model(config.model, config.dtype))
    sources = {"before": config.before, "after": config.adapter}
    sides = [Side(name, source, config, load) for name, source in sources.items()]
    there = [side for side in sides if side.source]
    for side in there:
        if not (side.given or Path(side.source, "adapter_config.json").is_file()):
            raise InputError(f"{side.source}: there is no adapter; text2grad.py and "
                             f"reward_model.py make one, and --adapter none measures the base")
    if sides[1].lora and config.task != "reward_model":
        return sides
    return there or [replace(sides[0], name="base")]


# ── Each benchmark: a side → its rows {id, prompt, response}, and the counts of every row

REFERENCES = "reference", "ideal_human_summary", "tldr_human_reference_summary"


def column(rows: list[dict], name: str) -> list:
    """One field of every row."""
    return [row[name] for row in rows]


def columns(scored: list[dict]) -> dict[str, list]:
    """Rows of scores as a column for each score."""
    return {name: column(scored, name) for name in scored[0] if name != "id"}


def summaries(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 2
    """ROUGE, BLEU, BERTScore and perplexity against people's summaries; in a world whose truth
    is known (the toy's facts) also by that. UltraFeedback's answers are for the judge alone."""
    config, task = side.config, get_task(side.config.task)
    needs = (*task.needs, REFERENCES) if config.task in TEXTS[:2] else task.needs
    if config.data:
        rows = name_rows(read_rows(config.data, needs), config.limit)
    else:
        rows = task.rows("eval", config.limit, 0)
    rows = side.answer([row | {"prompt": task.policy_prompt(row)} for row in rows])
    prompts, texts = column(rows, "prompt"), column(rows, "response")
    if needs == task.needs:
        return rows, {"words": [len(text.split()) for text in texts]}
    references = [next(row[key] for key in REFERENCES if row.get(key)) for row in rows]
    counts = {name: [*map(of, rows, texts)] for name, of in task.truth.items()}
    counts |= columns([*map(rouge, texts, references)])
    counts["BLEU"] = [*map(bleu_counts, texts, references)]
    if config.encoder:
        likeness = bert_score(texts, references, *load_encoder(config.encoder))
        counts["BERTScore F1"] = column(likeness, "f1")
    counts["perplexity"] = perplexity(*side.load(), prompts, texts)
    counts["perplexity of references"] = perplexity(*side.load(), prompts, references)
    counts["tokens"] = [tokens for _, tokens in counts["perplexity"]]
    return rows, counts


def held_out(side: Side) -> list[dict]:
    """The rows of --data that no tested R_φ was trained on, as samples.jsonl beside its adapter
    says; all of them, and a note, where that names none."""
    rows = name_rows(read_rows(side.config.data, (("prompt",), ("response",))))
    for source in side.config.adapters:
        path = Path(source).parent / "samples.jsonl"
        unseen = {(str(row["id"]), row["response"]) for row in whole_rows(path)}
        kept = [row for row in rows if (row["id"], row["response"]) in unseen]
        side.notes.append(
            f"{len(kept)} of {len(rows)} rows: those that {source} was not trained on" if kept
            else f"{source} may have been trained on these rows: {path} names none of them")
        rows = kept or rows
    return rows[: side.config.limit]


def reward_model(side: Side) -> tuple[list[dict], dict[str, list]]:  # Tables 1, 6, 7, 16
    """The spans of R_φ's critiques against those of --data, rows of annotate.py, by an
    annotator or by people (agreement with these is Table 16)."""
    config, rows, found, counts = side.config, held_out(side), [], []
    marked = [read_spans(row) for row in rows]
    labels = {span.label for span in chain(*marked)}
    signs = [name for name, sign in SIGNS.items() if sign in labels]
    asked = [row | {"prompt": reward_prompt(row["prompt"], row["response"])} for row in rows]
    replies, tokens = column(side.answer(asked), "response"), None
    if config.adapters:
        tokens = functools.partial(response_tokens, side.load()[1])
    side.notes.append(f"counted in {'tokens' if tokens else 'words'} of the response; signs "
                      f"that somebody marked: {', '.join(signs)}; no other is judged")
    for row, gold, reply in zip(rows, marked, replies):
        response, shown = row["response"], {"reply": reply, "gold_spans": row["spans"]}
        feedback = readable(reply, response)
        counts.append(compare(response, (tokens or words)(response), gold, feedback, signs))
        if feedback is None:
            found.append(row | shown | {"reason": "this critique cannot be read"})
            continue
        placed = ground(response, feedback)
        placed = replace(placed, spans=[span for span in placed.spans if span.label in labels])
        found.append(shown | feedback_row("", row, feedback, placed, side.name))
    header = ["", "marked", "predicted", "exact", "partial"]
    side.tables.append(("Table 6: spans", header, span_table(total(counts))))
    side.tables += audit([row for row in found if "reason" not in row], tokens)[:2]
    known = [key for key, value in figures(total(counts)).items() if value is not None]
    return found, {FIGURES[key][0]: [parts(one)[key] for one in counts] for key in known}


def code(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 3
    """HumanEval, MBPP and their + versions: generation first, execution only with
    --allow_code_execution."""
    config = side.config
    problems = benchmarks.read_problems(config.data)[: config.limit]
    rows = [{"id": problem.task_id, "prompt": benchmarks.code_prompt(problem)}
            for problem in problems]
    if side.given:                      # programs already, in evalplus' or HumanEval's form
        samples = benchmarks.read_samples(side.source, problems)
    else:
        asked = {problem.task_id: problem for problem in problems}
        samples = [{"task_id": row["id"],
                    "solution": benchmarks.extract_code(row["response"], asked[row["id"]])}
                   for row in side.answer(rows, config.samples_per_row)]
    write_rows(side.path("_samples.jsonl"), samples)
    first = {one["task_id"]: one["solution"] for one in reversed(samples)}
    rows = [row | {"response": first.get(row["id"], "")} for row in rows]
    if not config.allow_code_execution:
        side.notes.append("nothing was run: --allow_code_execution runs the samples")
        return rows, {}
    ran = benchmarks.execute(problems, samples, os.cpu_count(), config.code_timeout,
                             config.unsafe_sandbox)
    write_rows(side.path("_executed.jsonl"), ran)
    return rows, columns(benchmarks.code_scores(ran, sorted({1, config.k})))


def arc(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """ARC-Challenge by the log-likelihood of each choice, plain and by its length; nothing is
    generated."""
    rows = benchmarks.read_arc(side.config.data)[: side.config.limit]
    logprobs = benchmarks.choice_logprobs(*side.model, rows, side.lora, side.config.batch_size)
    return [], columns(benchmarks.arc_scores(rows, logprobs))


def mt_bench(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """Both turns of every question, rated by the judge; answers also in FastChat's form."""
    config = side.config
    questions = judges.read_mt_bench(config.data, config.references)
    questions = name_rows(questions, config.limit)
    if side.given:
        answers = judges.read_model_answers(side.source)
    else:
        answers = judges.mt_bench_answers(questions, side.write)
        model = side.source or config.model
        write_rows(side.path("_answers.jsonl"), judges.model_answers(answers, model))
    asked = judges.mt_bench_questions(questions, answers, config)
    scores = judges.mt_bench_scores(ask_judge(side, asked))
    counts = {"rating": column(scores, "score"), "rating, turn 1": column(scores, "turn_1"),
              "rating, turn 2": column(scores, "turn_2")}
    for row in scores:
        counts.setdefault(f"rating, {row['category']}", []).append(row["score"])
    return [{"id": q["id"], "prompt": q["turns"][0],
             "response": "\n\n".join(answers[q["question_id"]])} for q in questions], counts


def alpaca_eval(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """Win rate against the reference outputs of --data; outputs also in alpaca_eval's form."""
    config = side.config
    rows = judges.read_alpaca(config.data)[: config.limit]
    found = side.answer(rows)
    texts = column(found, "response")
    judges.write_alpaca(side.path("_outputs.json"), rows, texts, side.source or config.model)
    wins = ask_wins(side, rows, texts, column(rows, "response"))
    if wins and config.difficulty:
        gamed = judges.read_difficulty(config.difficulty)
        rate = judges.length_controlled(rows, texts, wins, gamed)
        side.tables.append(("length-controlled, %", [*rate], [[*rate.values()]]))
    return found, {"win rate": column(wins, "win")}


# ── The judge (Figure 3, Appendix E)

def ask_judge(side: Side, questions: list) -> list[dict]:
    """The verdicts; none where no judge was named, or where --dry_run says what they cost."""
    config, journal = side.config, Path(side.config.output_dir, "judge.journal")
    if config.judge_model is None:
        side.notes.append("nothing was judged: --judge_model names a judge")
    elif config.dry_run:
        side.notes.append(judges.forecast(questions, config, journal))
    else:
        verdicts = judges.ask_judge(questions, config, journal)
        if lost := [one for one in verdicts if one["reason"]]:
            side.notes.append(f"{len(lost)} of {len(verdicts)} questions have no verdict, "
                              f"first {lost[0]['id']}: {lost[0]['reason']}; the same command "
                              f"asks for them again")
        return verdicts
    return []


def ask_wins(side: Side, rows: list[dict], texts: list[str], others: list[str],
             of: str = "response") -> list[dict]:  # Figure 3
    """Who wins each row, this side's text or the other, and a table of how many."""
    asked = judges.pairwise_questions(rows, texts, others, side.config, of)
    wins = judges.pairwise_scores(ask_judge(side, asked))
    if wins:
        sums = judges.win_tie_loss(wins)
        side.tables.append(("Figure 3: by the judge", [*sums], [[*sums.values()]]))
    return wins


def compare_sides(before: Side, after: Side):  # Figure 3, Table 1's win rate
    """The judge's view of `after` beside `before`: of the answers, or of R_φ's critiques."""
    of = "reply" if after.config.task == "reward_model" else "response"
    wins = ask_wins(after, after.rows, column(after.rows, of), column(before.rows, of), of)
    after.counts["win rate"] = column(wins, "win")


# ── Rows of counts → the table and the page

LESS = ("0–1 ↓", share)
UNITS = {"BLEU": ("0–1 ↑", bleu_of), "perplexity": ("≥ 1 ↓", perplexity_of),
         "perplexity of references": ("≥ 1 ↓", perplexity_of), "tokens": ("a row", ratio),
         "words": ("a row", ratio), "rating": ("1–10 ↑", ratio),
         **{FIGURES[key][0]: LESS for key in ("unparseable", "unmatched", "ambiguous")}}
INTERVALS = "↑ more is better, ↓ less is; in brackets 95 %, by bootstrap over rows"
SHOWN = 100                                                            # rows on the page


def table_lines(counts: dict[str, dict[str, list]]) -> list[dict]:
    """{measure, unit, rows, before: [value, low, high], after: …, difference: …} of each
    measure; None where there is nothing to divide by. counts: by side and measure."""
    lines = []
    for key in dict.fromkeys(chain(*counts.values())):
        unit, figure = UNITS.get(key.partition(",")[0], ("0–1 ↑", share))
        sides = {name: own[key] for name, own in counts.items() if own.get(key)}
        rows = [row for row in zip(*sides.values()) if None not in row]   # judged on all sides
        line = {"measure": key, "unit": unit, "rows": len(rows)}
        for name, own in zip(sides, zip(*rows)):
            line[name] = [corpus(own, figure), *(interval(own, figure) or (None, None))]
        if {"before", "after"} <= line.keys():
            old, new = line["before"][0], line["after"][0]
            change = None if None in (old, new) else new - old
            ends = paired_bootstrap(*zip(*rows), figure) or (None, None)
            line["difference"] = [change, *ends]
        lines.append(line)
    return lines


def cells(lines: list[dict]) -> tuple[list[str], list[list]]:
    """Header and rows of the table, for the terminal and the page."""
    def cell(value):
        if not isinstance(value, list):
            return value
        value, *ends = ("–" if x is None else f"{x:z.3f}" for x in value)
        return f"{value} [{', '.join(ends)}]"

    header = max(lines, key=len)
    return [*header], [[cell(line.get(name)) for name in header] for line in lines]


def draw(row: dict) -> str:
    """An answer as HTML; of R_φ's the response with its spans in colour, then the critique."""
    if "gold_spans" not in row:
        return report.text_block(row["response"])
    if "reason" in row:
        return report.text_block(f"{row['reason']}:\n{row['reply']}")
    return colour_spans(row["response"], read_spans(row)) + report.text_block(row["critique"])


def page_body(sides: list[Side], lines: list[dict]) -> str:
    """What is compared, figures, tables, notes, and the first answers."""
    sections = {"Compared": "".join(report.text_block(side.about) for side in sides)}
    if lines:
        sections["Figures"] = report.html_table(*cells(lines)) + report.text_block(INTERVALS)
    for side in sides:
        sections |= {f"{side.name}: {title}": report.html_table(*table)
                     for title, *table in side.tables}
    cards = ""
    shown = [*zip(*(side.rows for side in sides))][:SHOWN]
    for rows in shown:
        first = rows[0]
        texts = {side.name: draw(row) for side, row in zip(sides, rows)}
        if "gold_spans" in first:
            gold = colour_spans(first["response"], read_spans(first, "gold_spans"))
            texts = {"as marked: good underlined, poor wavy": gold, **texts}
        cards += report.card(first["id"], first["prompt"], texts)
    sections[f"The first {len(shown)} rows"] = cards
    return "".join(f"<h2>{title}</h2>{html}" for title, html in sections.items())


# ── The script

TASKS = {"toy": summaries, "slf5k": summaries, "ultrafeedback": summaries,
         "reward_model": reward_model, "code": code, "arc": arc, "mt_bench": mt_bench,
         "alpaca_eval": alpaca_eval}
ONLY = {"encoder": TEXTS[:2], "references": CHATS[:1], "difficulty": CHATS[1:],
        "allow_code_execution": ("code",), "judge_model": PAIRED + CHATS,
        "temperature": (*PAIRED, "code", "alpaca_eval")}


def check(config: EvalConfig):
    """Raises InputError for flags that would do nothing or do not go together, and for files of
    the user's that are no such, before anything is written or paid for."""
    task, draws = config.task, config.samples_per_row
    for name, tasks in ONLY.items():
        if getattr(config, name) and task not in tasks:
            raise InputError(f"--{name} does nothing for --task {task}; it is for "
                             f"{', '.join(tasks)}")
    files = [path for path in (config.before, config.adapter) if os.path.isfile(path or "")]
    many = config.k > draws and config.adapter not in files
    if many or draws > 1 and config.temperature == 0:
        raise InputError(f"--k {config.k} needs as many --samples_per_row (now {draws}), and "
                         f"these a --temperature above 0")
    if task != "toy" and config.data is None:
        raise InputError(f"--task {task} needs --data, the rows of the benchmark")
    if task == "arc" and files:
        raise InputError(f"--task arc reads probabilities, and {files[0]} has none")
    if task == "reward_model" and config.adapter is None:
        raise InputError("--task reward_model needs --adapter, R_φ or a file of its critiques")
    judges.check(config)
    if config.difficulty:
        judges.read_difficulty(config.difficulty)


def main():
    """Measure, print the table, and say where everything is."""
    config = parse_flags(EvalConfig, sys.argv[1:], __doc__, lambda task: {
        "output_dir": f"runs/{task}/eval", **PRESETS.get(task, {})})
    check(config)
    sides, out = sides_of(config), Path(config.output_dir)
    _lock = lock_directory(out)                                         # held until the end
    for side in sides:
        side.rows, side.counts = TASKS[config.task](side)
    if len(sides) == 2 and config.judge_model and config.task in PAIRED:
        compare_sides(*sides)
    lines = table_lines({side.name: side.counts for side in sides})
    for side in sides:
        write_rows(side.path(".jsonl"), side.rows)
        write_rows(side.path("_counts.json"), [side.counts])
        print(side.about, audit_text(side.tables), sep="\n")
    write_rows(out / "result.json", [{"config": asdict(config), "figures": lines}])
    report.write_page(out / "report.html", report.page(
        f"Text2Grad: {config.task}", page_body(sides, lines)))
    print(report.table(*cells(lines)) if lines else "no figures")
    print(f"{INTERVALS}\n{out}/: result.json, report.html, and what each side wrote")


if __name__ == "__main__":
    run_script(main, "eval", SafetensorError, torch.OutOfMemoryError)
