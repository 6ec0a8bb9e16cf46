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
counts of each side, result.json. measures.spans makes a page of R_φ's rows.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Callable

import torch
from safetensors import SafetensorError
from tqdm import tqdm

import report
from annotate import Feedback, feedback_row, ground
from ask import question_key
from data import (DTYPES, InputError, append_row, chunks, flag, get_task, parse_flags,
                  read_rows, reward_prompt, run_script, whole_rows, write_rows)
from measures import benchmarks, judge as judges
from measures.metrics import (bert_score, bleu_counts, bleu_of, corpus, interval, load_encoder,
                              paired_bootstrap, perplexity, perplexity_of, ratio, rouge, share)
from measures.spans import (FIGURES, audit, audit_text, compare, figures, parts, read_spans,
                            readable, response_tokens, span_table, total, words)
from model import encode_prompt, eos_ids, load_lora, load_model, use_lora
from runtime import checksum, lock_directory
from sampling import context_length, generate

PRESETS = {"toy": {"adapter": "runs/toy/policy", "limit": 200, "temperature": 1.0,
                   "max_new_tokens": 32},
           "slf5k": {"max_new_tokens": 89}, "alpaca_eval": {"max_new_tokens": 2048}}
PAIRED = "toy", "slf5k", "ultrafeedback", "reward_model"       # what a judge compares in pairs


@dataclass
class EvalConfig(judges.JudgeConfig):
    """Some defaults are set by --task. max_new_tokens is in tokens."""
    task: str = flag("toy", "toy, slf5k, ultrafeedback, reward_model, code, arc, mt_bench or "
                            "alpaca_eval", (*PAIRED, "code", "arc", "mt_bench", "alpaca_eval"))
    model: str = flag("toy/base", "base model: a directory or hub id")
    adapter: str | None = flag(None, "what to measure: the adapter of a policy or of R_φ, or "
                                     "a file of answers; none: the base alone")
    before: str | None = flag(None, "what to compare it with, likewise; none: the bare base")
    data: str | None = flag(None, "the benchmark's rows; the toy world makes its own")
    limit: int = flag(10**6, "rows at most", least=1)
    output_dir: str = flag("runs/eval", "where answers, rows and result go")
    seed: int = flag(0, "of samples")
    dtype: str | None = flag(None, "of the base; none: bfloat16 on CUDA, float32 on a CPU",
                             DTYPES)
    batch_size: int = flag(64, "texts that are decoded at once", least=1)
    temperature: float = flag(0.0, "of the policy; 0: greedy; mt_bench has its own")
    max_new_tokens: int = flag(1024, "longest answer, where the context has room", least=1)
    encoder: str | None = flag(None, "summaries: BERTScore's, such as roberta-large, whose "
                                     "layer bert-score knows; or NAME:LAYER")
    allow_code_execution: bool = flag(False, "code: run what the model wrote, in the sandbox")
    unsafe_sandbox: bool = flag(False, "code: run it also where a layer of that is lacking")
    code_timeout: float = flag(10.0, "code: CPU seconds for each program", least=0.01)
    difficulty: str | None = flag(None, "alpaca_eval: its df_gamed.csv, for the "
                                        "length-controlled rate")

    @property
    def adapters(self) -> list[str]:
        """The directories that were named, not the files of answers."""
        return [path for path in (self.before, self.adapter) if os.path.isdir(path or "")]

    GROUPS = {"judge_model": "the judge", "task": "start here", "seed": "writing the answers",
              "encoder": "of one benchmark, which the help names"}


# ── The sides of the table: one base, an adapter each

NAMES = "id", "task_id", "question_id", "prompt_id"                # what data sets call a row
ANSWERS = "response", "output", "solution"                         # and what others answered


def name_rows(rows: list[dict]) -> list[dict]:
    """The rows, each with an `id`: its own, else its number from 0."""
    out = []
    for number, row in enumerate(rows):
        own = (row[key] for key in NAMES if row.get(key) is not None)
        out.append(row | {"id": str(next(own, number))})
    return out


@dataclass
class Side:
    """One side of the table: the base, the base with an adapter, or a file of answers.

    source: the adapter or the file; None: the bare base. load: () → (model, tokenizer), and
    score: (prompts, texts) → `perplexity` under the bare base, made once for both sides.
    """
    name: str
    source: str | None
    config: EvalConfig
    load: Callable
    score: Callable

    @property
    def lora(self) -> str | None:
        """The adapter's name for use_lora."""
        return self.name if os.path.isdir(self.source or "") else None

    def say(self, text: str):
        """Print a line about this side."""
        print(f"{self.name}: {text}")

    @functools.cached_property
    def model(self):
        """(model, tokenizer), with this side's adapter."""
        model, tokenizer = self.load()
        weights = load_lora(model, self.lora, self.source) if self.lora else []
        if not all(p.isfinite().all() for p in weights):
            raise InputError(f"{self.source}: the adapter holds NaN or infinite weights; its "
                             f"training went wrong")
        return model, tokenizer

    def write(self, talks: list[list[dict]], temperature: float) -> list[str]:
        """The assistant's next turn in each conversation; what is on file is reused. Each has
        random numbers of its own, of the seed and the conversation: it depends on no batch,
        and two sides are compared on the same draws."""
        config, base = self.config, Path(self.config.model).glob("*.safetensors")
        lora = sorted(Path(self.source).glob("adapter_*")) if self.lora else []
        made = checksum(*lora, state=[
            config.model, sorted(file.stat().st_mtime_ns for file in base), config.dtype,
            config.max_new_tokens, temperature])
        path = Path(config.output_dir, f"answers-{made[:12]}.jsonl")
        write_rows(path, whole_rows(path))                      # without what a kill has torn
        kept = {row["key"]: row["response"] for row in whole_rows(path)}
        keys = [question_key(config.seed, talk) for talk in talks]
        asked = {key: talk for key, talk in zip(keys, talks) if key not in kept}
        for key, text in self.decode(asked, temperature) if asked else ():
            kept[key] = text
            append_row(path, {"key": key, "response": text})
        return [kept[key] for key in keys]

    def decode(self, asked: dict[str, list[dict]], temperature: float):
        """(key, text) of each conversation, whose key seeds its random numbers."""
        model, tokenizer = self.model
        n, batches = self.config.max_new_tokens, []
        prompts = {key: encode_prompt(tokenizer, talk) for key, talk in asked.items()}

        def room(key: str) -> int:
            """Tokens for the answer, in steps of 64 where the context bounds it: then few
            batches are enough, and what else is in a batch does not matter."""
            left = context_length(model) - len(prompts[key])
            return n if left >= n else left // 64 * 64

        for most, alike in groupby(sorted(asked, key=room), room):
            batches += [(most, keys) for keys in chunks([*alike], self.config.batch_size)]
        for most, keys in tqdm(batches, self.name):
            if most < 1:
                raise InputError(f"the model's context has no room for an answer to "
                                 f"{asked[keys[0]][-1]['content'][:80]!r}: shorten or drop it")
            seeds = [torch.Generator().manual_seed(int(key[:15], 16)) for key in keys]
            uniforms = torch.stack([torch.rand(n, generator=one)[:most] for one in seeds])
            with use_lora(model, self.lora, merge=True):
                ids = generate(model, [prompts[key] for key in keys], most, temperature,
                               eos_ids(tokenizer, model), uniforms=uniforms)
            for key, y in zip(keys, ids):
                yield key, tokenizer.decode(y, skip_special_tokens=True).strip()

    def answer(self, rows: list[dict]) -> list[dict]:
        """The rows {id, prompt}, each with its `response`: written, or of the file, by id."""
        if self.lora or not self.source:
            talks = [[{"role": "user", "content": row["prompt"]}] for row in rows]
            texts = self.write(talks, self.config.temperature)
        else:
            theirs = name_rows(read_rows(self.source))
            found = {row["id"]: next((row[key] for key in ANSWERS if key in row), None)
                     for row in theirs}
            texts = [found.get(row["id"]) for row in rows]
            if len(found) < len(theirs):
                raise InputError(f"{self.source}: two rows have one id; leave one of them out")
            for row, text in zip(rows, texts):
                if not isinstance(text, str):
                    raise InputError(f"{self.source}: no answer to {row['id']}; an empty "
                                     f"'response' counts as wrong")
        return [row | {"response": text} for row, text in zip(rows, texts)]


def sides_of(config: EvalConfig) -> list[Side]:
    """[before, after], or the one that there is; a file of answers, and an R_φ, is not
    compared with a base that nobody named."""
    load = functools.cache(lambda: load_model(config.model, config.dtype))
    score = functools.cache(lambda prompts, texts: perplexity(*load(), prompts, texts))
    sources = {"before": config.before, "after": config.adapter}
    sides = [Side(name, source, config, load, score) for name, source in sources.items()]
    there = [side for side in sides if side.source]
    for side in there:
        if not os.path.exists(side.source):
            raise InputError(f"{side.source}: there is no adapter; text2grad.py and "
                             f"reward_model.py make one, and --adapter none measures the base")
    if sides[1].lora and config.task != "reward_model":
        return sides
    return there or [replace(sides[0], name="base")]


# ── Each benchmark: a side → its rows {id, prompt, response}, and the counts of every row

def column(rows: list[dict], name: str) -> list:
    """One field of every row."""
    return [row[name] for row in rows]


def columns(scored: list[dict]) -> dict[str, list]:
    """Rows of scores, if there are any, as a column for each score."""
    return {name: column(scored, name) for name in (scored or [{}])[0] if name != "id"}


def summaries(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 2
    """ROUGE, BLEU, BERTScore and perplexity against people's summaries; in a world whose truth
    is known (the toy's facts) also by that. UltraFeedback's answers are for the judge alone."""
    config, task = side.config, get_task(side.config.task)
    if config.data:
        rows = name_rows(read_rows(config.data, task.needs))[: config.limit]
    else:
        rows = task.rows("eval", config.limit, 0)
    references = [row.get("reference") or row.get("ideal_human_summary") for row in rows]
    for number, reference in enumerate(references, 1):
        if not isinstance(reference, str) and config.task != "ultrafeedback":
            raise InputError(f"{config.data}, row {number}: its 'reference' or "
                             f"'ideal_human_summary' is {reference!r}, and no text")
    rows = side.answer([row | {"prompt": task.policy_prompt(row)} for row in rows])
    if config.task == "ultrafeedback":
        return rows, {}
    texts = column(rows, "response")
    counts = {name: [*map(of, rows, texts)] for name, of in task.truth.items()}
    counts |= columns([*map(rouge, texts, references)])
    counts["BLEU"] = [*map(bleu_counts, texts, references)]
    if config.encoder:
        likeness = bert_score(texts, references, *load_encoder(config.encoder))
        counts["BERTScore F1"] = column(likeness, "f1")
    prompts = tuple(column(rows, "prompt"))
    counts["perplexity"] = side.score(prompts, tuple(texts))
    counts["perplexity of references"] = side.score(prompts, tuple(references))
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
        said = f"{len(kept)} of {len(rows)} rows: those that {source} was not trained on"
        if not kept:
            said = f"{source} may have been trained on these rows: {path} names none of them"
        side.say(said)
        rows = kept or rows
    return rows[: side.config.limit]


def reward_model(side: Side) -> tuple[list[dict], dict[str, list]]:  # Tables 1, 6, 7, 16
    """The spans of R_φ's critiques against those of --data, rows of annotate.py, by an
    annotator or by people (agreement with these is Table 16). Whether a sign that nobody
    marked is right, nobody knows: it has no figures."""
    rows, tokens, found, counts = held_out(side), None, [], []
    marked = [read_spans(row) for row in rows]
    labels = {span.label for span in chain(*marked)}
    if side.config.adapters:
        tokens = functools.partial(response_tokens, side.load()[1])
    asked = [row | {"prompt": reward_prompt(row["prompt"], row["response"])} for row in rows]
    for row, gold, answered in zip(rows, marked, side.answer(asked)):
        response, reply = row["response"], answered["response"]
        feedback = readable(reply, response)
        counts.append(compare(response, (tokens or words)(response), gold, feedback))
        said = feedback or Feedback(reply, [], [])
        placed = ground(response, said)
        placed = replace(placed, spans=[span for span in placed.spans if span.label in labels])
        found.append({**feedback_row("", row, said, placed, side.name), "reply": reply,
                      "gold_spans": row["spans"],
                      "reason": None if feedback else "this critique cannot be read"})
    summed = total(counts)
    tables = [("Table 6", ["spans", "marked", "predicted", "exact", "partial"],
               span_table(summed)),
              *audit([row for row in found if not row["reason"]], tokens)[:2]]
    side.say(f"in {'tokens' if tokens else 'words'} of the response\n{audit_text(tables)}")
    known = [key for key, value in figures(summed).items() if value is not None]
    return found, {FIGURES[key][0]: [parts(one)[key] for one in counts] for key in known}


def code(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 3
    """HumanEval, MBPP and their + versions: generation first, execution only with
    --allow_code_execution. The rows are in evalplus' form, too."""
    config = side.config
    problems = benchmarks.read_problems(config.data)[: config.limit]
    rows = side.answer([{"id": problem.task_id, "prompt": benchmarks.code_prompt(problem)}
                        for problem in problems])
    for row, problem in zip(rows, problems):
        program = benchmarks.extract_code(row["response"], problem)
        row |= {"task_id": row["id"], "solution": program}
    if not config.allow_code_execution:
        side.say("nothing was run: --allow_code_execution runs the samples")
        return rows, {}
    ran = benchmarks.execute(problems, column(rows, "solution"), os.cpu_count(),
                             config.code_timeout, config.unsafe_sandbox)
    scores = benchmarks.code_scores(ran)
    return [row | result for row, result in zip(rows, ran)], columns(scores)


def arc(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """ARC-Challenge by the log-likelihood of each choice, plain and by its length; nothing is
    generated."""
    rows = benchmarks.read_arc(side.config.data)[: side.config.limit]
    logprobs = benchmarks.choice_logprobs(*side.model, rows, side.lora, side.config.batch_size)
    return [], columns(benchmarks.arc_scores(rows, logprobs))


def mt_bench(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """Both turns of every question, rated by the judge."""
    questions = name_rows(judges.read_mt_bench(side.config.data))[: side.config.limit]
    answers = judges.mt_bench_answers(questions, side.write)
    asked = judges.mt_bench_questions(questions, answers, side.config)
    scores = judges.mt_bench_scores(ask_judge(side, asked))
    return [q | {"response": answers[q["question_id"]]} for q in questions], columns(scores)


def alpaca_eval(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """Win rate against the reference outputs of --data; outputs also in alpaca_eval's form."""
    config = side.config
    rows = judges.read_alpaca(config.data)[: config.limit]
    found = side.answer(rows)
    texts = column(found, "response")
    judges.write_alpaca(Path(config.output_dir, f"{side.name}_outputs.json"), rows, texts,
                        side.source or config.model)
    wins = ask_wins(side, rows, texts, column(rows, "response"))
    if wins and config.difficulty:
        gamed = judges.read_difficulty(config.difficulty)
        rate = judges.length_controlled(rows, texts, wins, gamed)
        side.say(f"length-controlled, %\n{report.table([*rate], [[*rate.values()]])}")
    return found, {"win rate": column(wins, "win")}


# ── The judge (Figure 3, Appendix E)

def ask_judge(side: Side, questions: list) -> list[dict]:
    """The verdicts; none where no judge was named, or where --dry_run says what they cost."""
    config, journal = side.config, Path(side.config.output_dir, "judge.journal")
    if config.judge_model is None:
        side.say("nothing was judged: --judge_model names a judge")
    elif config.dry_run:
        side.say(judges.forecast(questions, config, journal))
    else:
        verdicts = judges.ask_judge(questions, config, journal)
        if lost := [one for one in verdicts if one["reason"]]:
            side.say(f"{len(lost)} of {len(verdicts)} questions have no verdict, "
                     f"first {lost[0]['id']}: {lost[0]['reason']}; the same command asks for "
                     f"them again")
        return verdicts
    return []


def ask_wins(side: Side, rows: list[dict], texts: list[str], others: list[str],
             of: str = "response") -> list[dict]:  # Figure 3
    """Who wins each row, this side's text or the other, and a table of how many."""
    asked = judges.pairwise_questions(rows, texts, others, side.config, of)
    wins = judges.pairwise_scores(ask_judge(side, asked))
    if wins:
        sums = judges.win_tie_loss(wins)
        side.say(f"Figure 3, by the judge\n{report.table([*sums], [[*sums.values()]])}")
    return wins


# ── Rows of counts → the table

UNITS = {"BLEU": ("0–1 ↑", bleu_of), "perplexity": ("≥ 1 ↓", perplexity_of),
         "perplexity of references": ("≥ 1 ↓", perplexity_of), "tokens": ("a row", ratio),
         "rating": ("1–10 ↑", ratio),
         **{FIGURES[key][0]: ("0–1 ↓", share)
            for key in ("unparseable", "unmatched", "ambiguous")}}
INTERVALS = "↑ more is better, ↓ less is; in brackets 95 %, by bootstrap over rows"


def table_lines(counts: dict[str, dict[str, list]]) -> list[dict]:
    """{measure, unit, rows, before: [value, low, high], after: …, difference: …} of each
    measure; None where there is nothing to divide by. counts: by side and measure."""
    lines, unknown = [], (None, None)
    for key in dict.fromkeys(chain(*counts.values())):
        unit, figure = UNITS.get(key.partition(",")[0], ("0–1 ↑", share))
        sides = {name: own[key] for name, own in counts.items() if own.get(key)}
        rows = [row for row in zip(*sides.values()) if None not in row]   # judged on all sides
        line = {"measure": key, "unit": unit, "rows": len(rows)}
        for name, own in zip(sides, zip(*rows)):
            line[name] = [corpus(own, figure), *(interval(own, figure) or unknown)]
        if {"before", "after"} <= line.keys():
            old, new = line["before"][0], line["after"][0]
            change = None if None in (old, new) else new - old
            ends = paired_bootstrap(*zip(*rows), figure) or unknown
            line["difference"] = [change, *ends]
        lines.append(line)
    return lines


def cells(lines: list[dict]) -> tuple[list[str], list[list]]:
    """Header and rows of the table."""
    def cell(value):
        if not isinstance(value, list):
            return value
        value, *ends = ("–" if x is None else f"{x:z.3f}" for x in value)
        return f"{value} [{', '.join(ends)}]"

    header = max(lines, key=len)
    return [*header], [[cell(line.get(name)) for name in header] for line in lines]


# ── The script

TASKS = {"toy": summaries, "slf5k": summaries, "ultrafeedback": summaries,
         "reward_model": reward_model, "code": code, "arc": arc, "mt_bench": mt_bench,
         "alpaca_eval": alpaca_eval}


def check(config: EvalConfig):
    """Raises InputError for flags that do not go together, and for files of the user's that
    are no such, before anything is written or paid for."""
    task = config.task
    if task != "toy" and config.data is None:
        raise InputError(f"--task {task} needs --data, the rows of the benchmark")
    for path in (config.before, config.adapter):
        if task in ("arc", "mt_bench") and os.path.isfile(path or ""):
            raise InputError(f"--task {task} asks a model itself, and {path} is none")
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
    rows, counts = {}, {}
    for side in sides:
        side.say(f"{side.source or 'no adapter'}, the base {config.model}")
        rows[side.name], counts[side.name] = TASKS[config.task](side)
    if len(sides) == 2 and config.judge_model and config.task in PAIRED:
        of = "reply" if config.task == "reward_model" else "response"
        old, new = (column(rows[side.name], of) for side in sides)
        wins = ask_wins(sides[1], rows["after"], new, old, of)    # Figure 3, Table 1's win rate
        counts["after"]["win rate"] = column(wins, "win")
    for side in sides:
        write_rows(out / f"{side.name}.jsonl", rows[side.name])
        write_rows(out / f"{side.name}_counts.json", [counts[side.name]])
    lines = table_lines(counts)
    write_rows(out / "result.json", [{"config": asdict(config), "figures": lines}])
    print(report.table(*cells(lines)) if lines else "no figures")
    print(f"{INTERVALS}\n{out}/: result.json, and what each side wrote")


if __name__ == "__main__":
    run_script(main, "eval", SafetensorError, torch.OutOfMemoryError)
