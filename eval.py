"""Evaluation: the numbers of §4 for a base, for an adapter, and for one against the other.

    python eval.py                   # the toy world: its base against runs/toy/policy
    python eval.py --task slf5k --data test.jsonl --model MODEL --adapter runs/slf5k/policy \\
        --encoder roberta-large
    python eval.py --task reward_model --data feedback.jsonl --model MODEL \\
        --adapter runs/slf5k/reward/adapter
    python eval.py --task code --data HumanEvalPlus.jsonl.gz --model MODEL --adapter … \\
        --allow_code_execution
    python eval.py --task arc --data ARC-Challenge-Test.jsonl --model MODEL --adapter …
    python eval.py --task mt_bench --data question.jsonl --judge_prompts judge_prompts.jsonl \\
        --judge_model gpt-4o …

--adapter is measured beside the bare base, or beside --before, another adapter. Every figure
has a 95 % interval by bootstrap over the rows, and the difference an interval of its own, over
the same rows drawn for both. Answers are kept as they are written, judgements as they are paid
for, and the same command goes on from there.

Paper: §4 and Tables 1 to 8 and 16, Table 5 with another --model.

Departures from the paper, which gives no intervals: perplexity (Table 8) is given the prompt,
under the bare base; a row that cannot be scored is wrong, never left out. Files: answers of
each policy, scores.jsonl, result.json, report.html.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from safetensors import SafetensorError
from tqdm import tqdm

import report
from annotate import (FeedbackError, Span, feedback_row, ground, parse_feedback, question_key,
                      token_offsets)
from data import (InputError, append_row, chunks, flag, get_task, parse_flags, read_rows,
                  reward_prompt, run_script, write_rows)
from measures import benchmarks
from measures import judge as judges
from measures.audit import audit, audit_text, problems, words
from measures.metrics import (bert_score, bleu_counts, bleu_of, bootstrap, corpus, load_encoder,
                              paired_bootstrap, perplexity, perplexity_of, ratio, rouge)
from measures.sandbox import SandboxError
from measures.spans import SIGNS, compare, figures, parts, readable, span_table, total
from model import encode_prompt, eos_ids, load_lora, load_model, lora_parameters, use_lora
from sampling import generate

PRESETS = {
    "toy": {"temperature": 1.0, "max_new_tokens": 32, "batch_size": 200},
    "slf5k": {"adapter": None, "output_dir": "runs/slf5k/eval", "max_new_tokens": 89},
    "ultrafeedback": {"adapter": None, "output_dir": "runs/ultrafeedback/eval"},
    "reward_model": {"adapter": None, "output_dir": "runs/reward/eval", "max_new_tokens": 768},
    "code": {"adapter": None, "output_dir": "runs/code_eval"},
    "arc": {"adapter": None, "output_dir": "runs/arc_eval"},
    "mt_bench": {"adapter": None, "output_dir": "runs/mt_bench", "max_new_tokens": 1024},
    "alpaca_eval": {"adapter": None, "output_dir": "runs/alpaca_eval", "max_new_tokens": 2048},
}
DTYPES = (None, "bfloat16", "float16", "float32")


@dataclass
class EvalConfig(judges.JudgeConfig):
    """Defaults are the toy world's; --task sets the others'. Both max_… are in tokens."""
    task: str = flag("toy", "toy, slf5k, ultrafeedback, reward_model, code, arc, mt_bench or "
                            "alpaca_eval", choices=tuple(PRESETS))
    model: str = flag("toy/base", "base model: a directory or hub id")
    adapter: str | None = flag("runs/toy/policy", "the adapter to measure, of a policy or of "
                                                  "R_φ; none: the base alone")
    before: str | None = flag(None, "the adapter to compare it with; none: the bare base")
    responses: str | None = flag(None, "answers from a file instead of --adapter: rows with id "
                                       "and response")
    responses_before: str | None = flag(None, "the same for what it is compared with")
    data: str | None = flag(None, "the benchmark's rows; the toy world makes its own")
    limit: int = flag(0, "rows at most; 0: all", least=0)
    output_dir: str = flag("runs/toy/eval", "where answers, scores, result and report go")
    seed: int = flag(0, "of samples")
    dtype: str | None = flag(None, "bfloat16, float16 or float32, of the base; none: bfloat16 "
                                   "on CUDA, float32 on a CPU", choices=DTYPES)
    batch_size: int = flag(64, "texts that are decoded at once", least=1)
    max_prompt_tokens: int = flag(0, "leave out and count rows with longer prompts; 0: too "
                                     "long is an error", least=0)
    temperature: float = flag(0.0, "of the policy; 0: greedy", least=0)
    max_new_tokens: int = flag(512, "longest answer", least=1)
    samples_per_row: int = flag(1, "code: answers to each problem, for pass@k", least=1)
    k: str = flag("1", "code: the k of pass@k, with commas between")
    encoder: str | None = flag(None, "summaries: directory or hub id of BERTScore's encoder, "
                                     "such as roberta-large")
    encoder_layer: int | None = flag(None, "its layer; none: bert-score's choice for known "
                                           "encoders")
    idf: bool = flag(False, "BERTScore: weight words by their rarity in the references")
    allow_code_execution: bool = flag(False, "code: run what the model wrote, in the sandbox")
    unsafe_sandbox: bool = flag(False, "run it also where a layer of the sandbox cannot be put "
                                       "up")
    workers: int = flag(2, "code: programs that run at once", least=1)
    code_timeout: float = flag(10.0, "code: seconds for each program", least=0.01)
    judge_model: str | None = flag(None, "model on a server that judges; none: no judge is "
                                         "asked (paper: gpt-4o)")
    by_category: bool = flag(False, "mt_bench: FastChat's temperatures by category instead of "
                                    "--temperature")
    rate: bool = flag(False, "the judge rates each answer from 1 to 10 instead of comparing "
                             "two")
    dry_run: bool = flag(False, "write the answers, then say what the judge would cost and "
                                "stop")
    references: str | None = flag(None, "mt_bench: reference answers for math, reasoning and "
                                        "coding, FastChat's form")
    difficulty: str | None = flag(None, "alpaca_eval: its df_gamed.csv or "
                                        "instruction_difficulty.csv, for the length-controlled "
                                        "rate")

    GROUPS = {"judge_model": "the judge", "task": "start here", "seed": "writing the answers",
              "samples_per_row": "of one benchmark, which the help names"}


NAMES = ("id", "task_id", "question_id", "prompt_id")   # what data sets call the name of a row
ENDS = 1 << 20                      # bytes of a file at each end that `identity` looks at


# ── Policies: one base, an adapter each

def identity(path: str | None) -> list:
    """What tells one model from another: of every file of a directory the name, the size and
    both ends; a hub id stays itself."""
    if path is None or not Path(path).is_dir():
        return [path]
    out = []
    for place in sorted(one for one in Path(path).iterdir() if one.is_file()):
        size = place.stat().st_size
        with open(place, "rb") as file:
            ends = [file.read(ENDS)]
            file.seek(max(ENDS, size - ENDS))
            ends.append(file.read())
        out.append([place.name, size, *(hashlib.sha256(end).hexdigest() for end in ends)])
    return out


@dataclass
class Policy:
    """One of the models under test: the base, or the base with an adapter.

    Its answers are in output_dir/answers.jsonl. load: () → (model, tokenizer), called when the
    first answer has to be written, so that a run whose answers are all there loads no model.
    given: a file of answers that somebody else's model wrote.
    """
    name: str
    adapter: str | None
    config: EvalConfig
    load: Callable
    given: str | None = None

    @functools.cached_property
    def model(self):
        """(model, tokenizer), with this policy's adapter. Raises InputError for weights that
        are not finite."""
        model, tokenizer = self.load()
        if self.adapter:
            load_lora(model, self.name, self.adapter)
            if not all(p.isfinite().all() for p in lora_parameters(model, self.name)):
                raise InputError(f"{self.adapter}: the adapter holds NaN or infinite weights; "
                                 f"its training went wrong")
        return model, tokenizer

    @property
    def origin(self) -> str:
        """What files for other tools call it: its adapter, its file of answers, or the base."""
        return self.given or self.adapter or self.config.model

    @property
    def lora(self) -> str | None:
        """The adapter's name for use_lora."""
        return self.name if self.adapter else None

    def write(self, conversations: list[list[dict]], draws: int = 1,
              temperature: float | None = None) -> list[str]:
        """The assistant's next turn in each conversation; `draws` of them in a row for each.

        Those on file are reused. Each sample has random numbers of its own, a function of the
        seed and the conversation, so that it depends on no batch and two policies are compared
        on the same draws. Raises ModelError where one does not fit the context.
        """
        config, path = self.config, Path(self.config.output_dir, "answers.jsonl")
        heat = config.temperature if temperature is None else temperature
        made = [identity(config.model), identity(self.adapter), config.dtype, heat,
                config.max_new_tokens]
        drawn = [question_key(config.seed, talk, draw)
                 for talk in conversations for draw in range(draws)]
        keys = [question_key(made, key) for key in drawn]
        kept = kept_answers(path)
        wanted = [i for i, key in enumerate(keys) if key not in kept]
        parts = chunks(wanted, config.batch_size)
        for part in tqdm(parts, desc=self.name, disable=not wanted):
            model, tokenizer = self.model
            prompts = [encode_prompt(tokenizer, conversations[i // draws]) for i in part]
            uniforms = torch.stack([self.uniforms(drawn[i]) for i in part])
            with use_lora(model, self.lora):
                ids = generate(model, prompts, config.max_new_tokens, heat,
                               eos_ids(tokenizer, model), tokenizer.pad_token_id,
                               uniforms=uniforms)
            for i, y in zip(part, ids):
                kept[keys[i]] = tokenizer.decode(y, skip_special_tokens=True).strip()
                append_row(path, {"key": keys[i], "policy": self.name,
                                  "prompt": conversations[i // draws][-1]["content"],
                                  "response": kept[keys[i]]})
        return [kept[key] for key in keys]

    def uniforms(self, key: str) -> torch.Tensor:
        """The random numbers [max_new_tokens] of the sample with this key."""
        generator = torch.Generator().manual_seed(int(key[:15], 16))
        return torch.rand(self.config.max_new_tokens, generator=generator)

    def answer(self, rows: list[dict], prompts: list[str], draws: int = 1) -> list[str]:
        """Answers to prompts of one user turn; from the file of answers where the user gave
        one, by the rows' ids.

        Raises InputError where that file lacks an answer, or has some to no row.
        """
        if self.given is None:
            return self.write([[{"role": "user", "content": x}] for x in prompts], draws)
        found, ids = given_answers(self.given), [row["id"] for row in rows]
        if lost := [name for name in ids if name not in found]:
            raise InputError(f"{self.given}: no answer to {len(lost)} of {len(rows)} rows, "
                             f"first {lost[0]}; each row of the benchmark needs one (an empty "
                             f"one counts as wrong)")
        if len(found) > len(rows) and not self.config.limit:
            odd = next(name for name in found if name not in ids)
            raise InputError(f"{self.given}: {len(found)} answers to {len(rows)} rows; leave "
                             f"out what belongs to no row, such as {odd}")
        return [found[name] for name in ids]


def given_answers(path: str) -> dict[str, str]:
    """id → answer, of rows of a file. Raises InputError for a row without a name or a text,
    and for two of one id."""
    found: dict[str, str] = {}
    for number, row in enumerate(read_rows(path), 1):
        name = next((row[key] for key in NAMES if key in row), None)
        keys = ("response", "solution", "output")
        text = next((row[key] for key in keys if key in row), None)
        if name is None or not isinstance(text, str) or str(name) in found:
            raise InputError(f"{path}, row {number}: needed are an id of its own "
                             f"({', '.join(NAMES)}) and a text 'response'")
        found[str(name)] = text
    return found


def named(rows: list[dict], config: EvalConfig) -> list[dict]:
    """The first --limit rows, or all, each with an `id`: its own by whatever name, else its
    number in the file."""
    out = []
    for number, row in enumerate(rows[: config.limit or None], 1):
        own = (row[key] for key in NAMES if row.get(key) is not None)
        out.append(row | {"id": str(next(own, number))})
    return out


def kept_answers(path: Path) -> dict[str, str]:
    """Key → response of every whole line; a last line that a kill tore is cut off."""
    if not path.exists():
        return {}
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])
    rows = read_rows(path, (("key",),)) if b"\n" in text else []
    return {row["key"]: row["response"] for row in rows}


def policies(config: EvalConfig) -> list[Policy]:
    """[before, after] where there are two to compare, else the one there is, by the name of
    what it is.

    Raises InputError for an adapter that is not there, before anything is written.
    """
    for path in filter(None, (config.before, config.adapter)):
        if not Path(path, "adapter_config.json").is_file():
            raise InputError(f"{path}: there is no adapter; text2grad.py and reward_model.py "
                             f"make one, and --adapter none measures the base alone")
    dtype = config.dtype or ("bfloat16" if torch.cuda.is_available() else None)
    load = functools.cache(lambda: load_model(config.model, dtype))
    first = Policy("before", config.before, config, load, config.responses_before)
    second = Policy("after", config.adapter, config, load, config.responses)
    if not (second.adapter or second.given):
        name = "answers" if first.given else "adapter" if first.adapter else "base"
        return [replace(first, name=name)]
    # A file of answers beside nothing is scored by itself.
    alone = second.given and not (first.adapter or first.given)
    return [replace(second, name="answers")] if alone else [first, second]


# ── Measures: rows of counts, and a figure of their sum

@dataclass
class Measure:
    """One line of the table. rows: by policy, a value or K counts for every row; figure: of the
    summed counts."""
    name: str
    rows: dict[str, list]
    figure: Callable = ratio

    def line(self) -> dict:
        """{measure, before: {value, low, high, rows}, after: …, difference: …}; None where
        there is nothing to divide by."""
        out: dict = {"measure": self.name}
        for name, rows in self.rows.items():
            low, high = bootstrap(rows, self.figure) or (None, None)
            out[name] = {"value": corpus(rows, self.figure), "low": low, "high": high,
                         "rows": len(rows)}
        if len(self.rows) == 2:
            old, new = [out[name]["value"] for name in self.rows]
            low, high = paired_bootstrap(*self.rows.values(), self.figure) or (None, None)
            out["difference"] = {"value": None if None in (old, new) else new - old,
                                 "low": low, "high": high}
        return out


def mean_of(scored: dict[str, list[dict]]) -> list[Measure]:
    """A measure for every key of the rows' scores: the mean of its values. scored: by policy,
    one dict for each row."""
    keys = dict.fromkeys(key for rows in scored.values() for row in rows for key in row)
    return [Measure(key, {name: [row[key] for row in rows]
                          for name, rows in scored.items()}) for key in keys if key != "id"]


def shown(value: dict | None) -> str:
    """A figure with its interval, for a cell."""
    if not value or value["value"] is None:
        return "–"
    number, low, high = ("–" if value[key] is None else f"{value[key]:.3f}"
                         for key in ("value", "low", "high"))
    return f"{number} [{low}, {high}]"


def cells(lines: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the result, for the terminal and the page."""
    names = dict.fromkeys(name for line in lines for name in line)
    columns = [name for name in names if name != "measure"]
    return (["measure", *columns],
            [[line["measure"], *(shown(line.get(name)) for name in columns)] for line in lines])


@dataclass
class Outcome:
    """What a task found. examples: rows {id, prompt, before, after, …} to look at; notes: text
    for the reader."""
    measures: list[Measure]
    examples: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def side_by_side(rows: list[dict], prompts: list[str],
                 texts: dict[str, list[str]]) -> list[dict]:
    """Examples: every row's prompt with what each policy answered."""
    return [{"id": row["id"], "prompt": prompt, **{name: texts[name][i] for name in texts}}
            for i, (row, prompt) in enumerate(zip(rows, prompts))]


# ── Summaries (Tables 2 and 8, Figure 3)

REFERENCES = ("reference", "ideal_human_summary", "tldr_human_reference_summary")


def summaries(config: EvalConfig, tested: list[Policy]) -> Outcome:  # Table 2
    """ROUGE, BLEU, BERTScore and perplexity against the people's summaries; in a world whose
    truth is known (the toy's facts) also by that."""
    task, notes = get_task(config.task), []
    if task.rows and not config.data:
        rows = task.rows("eval", config.limit or 200, 0)
    else:
        rows = named(read_rows(config.data, (*task.needs, REFERENCES)), config)
    rows, prompts = fitting(rows, task.policy_prompt, config, tested, notes)
    references = [next(row[key] for key in REFERENCES if row.get(key)) for row in rows]
    texts = {policy.name: policy.answer(rows, prompts) for policy in tested}
    scored: dict[str, list[dict]] = {name: [] for name in texts}
    for name, found in texts.items():
        for row, text, reference in zip(rows, found, references):
            truth = {measure: of(row, text) for measure, of in task.truth.items()}
            scored[name].append(truth | rouge(text, reference))
    measures = mean_of(scored)
    measures.append(Measure("BLEU", {
        name: [bleu_counts(*pair) for pair in zip(found, references)]
        for name, found in texts.items()}, bleu_of))
    if config.encoder:
        encoder, by_policy = load_encoder(config.encoder), {}
        for name, found in texts.items():
            likeness = bert_score(found, references, *encoder, config.encoder_layer, config.idf)
            by_policy[name] = [row["f1"] for row in likeness]
        measures.append(Measure("BERTScore F1", by_policy))
    model, tokenizer = tested[0].model
    surprise = {name: perplexity(model, tokenizer, prompts, found)
                for name, found in texts.items()}
    lengths = {name: [tokens for _, tokens in rows] for name, rows in surprise.items()}
    measures += [Measure("perplexity", surprise, perplexity_of), Measure("tokens", lengths)]
    human = corpus(perplexity(model, tokenizer, prompts, references), perplexity_of)
    notes.append(f"perplexity of the references: {human:.3f}")
    outcome = Outcome(measures, side_by_side(rows, prompts, texts), notes)
    return with_judge(config, outcome, texts)


def fitting(rows: list, prompt: Callable, config: EvalConfig, tested: list[Policy],
            notes: list[str]) -> tuple[list, list]:
    """(rows, their prompts): those of at most --max_prompt_tokens; how many were left out is a
    note in the result.

    Raises InputError where none is left.
    """
    pairs, limit = [(row, prompt(row)) for row in rows], config.max_prompt_tokens
    if limit:
        tokenizer = tested[0].model[1]
        kept = [pair for pair in pairs if len(encode_prompt(tokenizer, pair[1])) <= limit]
        if not kept:
            raise InputError(f"{config.data}: every prompt is longer than --max_prompt_tokens "
                             f"{limit}")
        if len(kept) < len(pairs):
            notes.append(f"left out {len(pairs) - len(kept)} of {len(pairs)} rows, over "
                         f"{limit} tokens")
        pairs = kept
    return [row for row, _ in pairs], [text for _, text in pairs]


# ── The reward model (Tables 1, 6, 7, 15, 16, 18 and 19)

def reward_models(config: EvalConfig, tested: list[Policy]) -> Outcome:
    """The spans of R_φ (--adapter), of another (--before) or in files of replies, against the
    spans of --data.

    --data are rows of annotate.py, by an annotator or by people (agreement with these is Table
    16). The bare base is no R_φ, so there is a `before` only where one is given. Raises
    InputError where no R_φ is named.
    """
    rows = named(read_rows(config.data, (("prompt",), ("response",))), config)
    gold = [marked(row) for row in rows]
    labels = {span.label for spans in gold for span in spans}
    signs = {name for name, sign in SIGNS.items() if sign in labels}
    tested = [policy for policy in tested if policy.adapter or policy.given]
    if not tested:
        raise InputError("--task reward_model needs --adapter, the R_φ to judge, or "
                         "--responses, a file of its replies")
    asked = [reward_prompt(row["prompt"], row["response"]) for row in rows]
    critiques = {policy.name: policy.answer(rows, asked) for policy in tested}
    mine = [policy for policy in tested if not policy.given]
    if mine:
        offsets = [response_tokens(mine[0].model[1], row["response"]) for row in rows]
    else:
        offsets = [words(row["response"]) for row in rows]
    notes = [f"counted in {'tokens' if mine else 'words'} of the response"]
    if len(signs) < 2:
        notes[0] += (f"; nobody marked a span other than {' '.join(signs)}, so others are not "
                     f"judged")
    counts = {}
    for name, texts in critiques.items():
        counts[name] = [compare(row["response"], at, spans, readable(text), signs)
                        for row, at, spans, text in zip(rows, offsets, gold, texts)]
        found = [as_feedback(row, text, name, signs) for row, text in zip(rows, texts)]
        write_rows(Path(config.output_dir, f"{name}_feedback.jsonl"), found)
        sums = total(counts[name])
        notes.append(f"Table 6, {name}: " + "; ".join(
            f"{sign} {given} marked / {said} predicted ({exact} exact - {partial} partial)"
            for sign, given, said, exact, partial in span_table(sums)))
        if sums["unparseable"] < len(rows):
            wanted = ("Table 15", "Table 18", "Table 19")
            notes.append(audit_text([t for t in audit(found) if t[0].startswith(wanted)]))
    summed = [figures(total(rows)) for rows in counts.values()]
    known = [key for key in parts(Counter()) if any(one[key] is not None for one in summed)]
    measures = [Measure(key, {name: [parts(row)[key] for row in rows]
                              for name, rows in counts.items()}) for key in known]
    examples = side_by_side(rows, [row["response"] for row in rows], critiques)
    outcome = Outcome(measures, examples, notes)
    return with_judge(config, outcome, critiques, rows, "feedback")


def marked(row: dict) -> list[Span]:
    """The spans that a row brings. Raises InputError where its response has no such spans."""
    try:
        problems({"response": row["response"], "spans": row.get("spans")})
    except InputError as error:
        raise InputError(f"row {row['id']}: {error}; annotate.py writes such rows") from error
    return [Span(span["start"], span["end"], span["label"]) for span in row["spans"]]


def response_tokens(tokenizer, text: str) -> list[tuple[int, int]]:
    """[start, end) of the tokens of a response that was not sampled here; of its words where
    they do not spell it."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    spelt, offsets = token_offsets(tokenizer, ids)
    return offsets if spelt == text else words(text)


def as_feedback(row: dict, critique: str, name: str, signs: set[str]) -> dict:
    """R_φ's critique as a row of annotate.py, with the spans of the data as its gold;
    unreadable ones keep the reason.

    Spans of a sign that nobody marked in the data are left out: no table calls them wrong.
    """
    gold = {"gold_spans": row["spans"]}
    try:
        feedback = parse_feedback(critique)
    except FeedbackError as error:
        return {"id": row["id"], "response": row["response"], "reason": str(error),
                "reply": critique, **gold}
    found, labels = ground(row["response"], feedback), {SIGNS[sign] for sign in signs}
    found = replace(found, spans=[span for span in found.spans if span.label in labels])
    return feedback_row(row.get("task", ""), row, feedback, found, name) | gold


# ── Code (Table 3)

def code(config: EvalConfig, tested: list[Policy]) -> Outcome:
    """HumanEval, MBPP and their + versions: generation first, execution only with
    --allow_code_execution."""
    problems = benchmarks.read_problems(config.data)[: config.limit or None]
    rows = [{"id": problem.task_id} for problem in problems]
    prompts = [benchmarks.code_prompt(problem) for problem in problems]
    draws, out = config.samples_per_row, Path(config.output_dir)
    texts, scored, notes = {}, {}, []
    for policy in tested:
        name = policy.name
        if policy.given:                # programs already, in evalplus' or HumanEval's form
            samples = benchmarks.read_samples(policy.given, problems)
            first = {one["task_id"]: one["solution"] for one in reversed(samples)}
            texts[name] = [first.get(row["id"], "") for row in rows]
        else:
            written = policy.answer(rows, prompts, draws)
            texts[name] = written[::draws]
            samples = [{"task_id": problem.task_id,
                        "solution": benchmarks.extract_code(text, problem)}
                       for problem, answers in zip(problems, chunks(written, draws))
                       for text in answers]
        write_rows(out / f"{name}_samples.jsonl", samples)
        notes.append(f"{out / name}_samples.jsonl: {len(samples)} samples in evalplus' format, "
                     f"{sum(not one['solution'] for one in samples)} without any code")
        if config.allow_code_execution:
            ran = benchmarks.execute(problems, samples, config.workers, config.code_timeout,
                                     unsafe=config.unsafe_sandbox)
            write_rows(out / f"{name}_executed.jsonl", ran)
            scored[name] = benchmarks.code_scores(ran, numbers(config.k))
    if not config.allow_code_execution:
        notes.append("nothing was run: --allow_code_execution runs the samples in the sandbox")
    return Outcome(mean_of(scored), side_by_side(rows, prompts, texts), notes)


# ── Questions (Table 4)

def arc(config: EvalConfig, tested: list[Policy]) -> Outcome:
    """ARC-Challenge by the log-likelihood of each choice, plain and by its length; nothing is
    generated."""
    rows = benchmarks.read_arc(config.data)[: config.limit or None]
    return Outcome(mean_of({
        policy.name: benchmarks.arc_scores(*policy.model, rows, policy.lora, config.batch_size)
        for policy in tested}))


def chat(config: EvalConfig, tested: list[Policy]) -> Outcome:
    """Answers to the prompts of UltraFeedback's rows, or of any with a `prompt`; the judge
    compares them."""
    task, notes = get_task("ultrafeedback"), []
    rows = named(read_rows(config.data, task.needs), config)
    rows, prompts = fitting(rows, task.policy_prompt, config, tested, notes)
    texts = {policy.name: policy.answer(rows, prompts) for policy in tested}
    lengths = Measure("words", {name: [len(text.split()) for text in found]
                                for name, found in texts.items()})
    outcome = Outcome([lengths], side_by_side(rows, prompts, texts), notes)
    return with_judge(config, outcome, texts)


def mt_bench(config: EvalConfig, tested: list[Policy]) -> Outcome:
    """Both turns of every question, rated by the judge; answers also in FastChat's model_answer
    form."""
    questions = named(judges.read_mt_bench(config.data), config)
    references = judges.read_model_answers(config.references) if config.references else None
    texts, ratings, notes = {}, {}, []
    for policy in tested:
        name = policy.name
        if policy.given:
            found = judges.read_model_answers(policy.given)
        else:
            found = judges.mt_bench_answers(questions, policy.write, config.by_category)
            path = Path(config.output_dir, f"{name}_answers.jsonl")
            write_rows(path, judges.model_answers(found, policy.origin))
            notes.append(f"{path}: answers in FastChat's form")
        texts[name] = ["\n\n".join(found.get(q["question_id"], [])) for q in questions]
        asked = judges.mt_bench_questions(questions, found, config, references)
        if replies := judged(config, asked, notes):
            ratings[name] = judges.mt_bench_scores(*replies)
    measures = counted("score", ratings, "score", notes)
    for turn in ("turn_1", "turn_2"):
        measures += counted(turn.replace("_", " "), ratings, turn, [])
    for category in dict.fromkeys(q["category"] for q in questions):
        chosen = {name: [row for row in rows if row["category"] == category]
                  for name, rows in ratings.items()}
        measures += counted(category, chosen, "score", [])
    prompts = [q["turns"][0] for q in questions]
    return Outcome(measures, side_by_side(questions, prompts, texts), notes)


def alpaca_eval(config: EvalConfig, tested: list[Policy]) -> Outcome:
    """Win rate against the reference outputs of --data; outputs and annotations also in
    alpaca_eval's form."""
    reference, notes, scored = named(judges.read_alpaca(config.data), config), [], {}
    prompts, out = [row["prompt"] for row in reference], Path(config.output_dir)
    texts = {policy.name: policy.answer(reference, prompts) for policy in tested}
    for name, generator in ((policy.name, policy.origin) for policy in tested):
        rows = [base | {"response": text} for base, text in zip(reference, texts[name])]
        judges.write_alpaca(out / f"{name}_outputs.json", rows, generator)
        notes.append(f"{out / name}_outputs.json: for alpaca_eval --model_outputs")
        asked = judged(config, judges.pairwise_questions(rows, reference, config), notes)
        if not asked:
            continue
        scored[name] = judges.pairwise_scores(*asked)
        annotations = judges.alpaca_annotations(rows, reference, scored[name], generator,
                                                config.judge_model)
        (out / f"{name}_annotations.json").write_text(json.dumps(annotations, indent=1))
        if config.difficulty:
            difficulty = judges.read_difficulty(config.difficulty)
            rate = judges.length_controlled(annotations, difficulty)
            notes.append(f"{name}: length-controlled win rate "
                         f"{rate['length_controlled_winrate']:.2f} % (standard error "
                         f"{rate['lc_standard_error']:.2f}, {rate['glm']})")
    return Outcome(counted("win rate", scored, "win", notes),
                   side_by_side(reference, prompts, texts), notes)


# ── The judge (Figure 3, Appendix E)

def judged(config: EvalConfig, questions: list, notes: list[str]):
    """(questions, verdicts) where a judge was named, else None; --dry_run says what they would
    cost."""
    journal = Path(config.output_dir, "judge.journal")
    if config.judge_model is None:
        notes.append("nothing was judged: --judge_model names a judge")
        return None
    if config.dry_run:
        notes.append(judges.forecast(questions, config, journal))
        return None
    return questions, judges.ask_judge(questions, config, journal)


def counted(name: str, scored: dict[str, list[dict]], key: str,
            notes: list[str]) -> list[Measure]:
    """The mean of what the judge said. A row without a verdict on any side is left out of all,
    counted and named."""
    if not scored:
        return []
    rows = list(zip(*scored.values()))
    kept = [i for i, sides in enumerate(rows) if None not in [side[key] for side in sides]]
    if lost := [side for sides in rows for side in sides if side[key] is None]:
        notes.append(f"{name}: {len(rows) - len(kept)} of {len(rows)} rows without a verdict, "
                     f"first {lost[0]['id']}: {lost[0]['reason']}; the same command asks for "
                     f"them again")
    values = {policy: [found[i][key] for i in kept] for policy, found in scored.items()}
    return [Measure(name, values)] if kept else []


def with_judge(config: EvalConfig, outcome: Outcome, texts: dict[str, list[str]],
               rows: list[dict] | None = None, of: str = "response") -> Outcome:
    """Adds what a judge said, where one was named: each policy's rating (--rate), or who wins,
    where there are two.

    texts: by policy, what is judged; rows: what each is about, else the outcome's examples.
    """
    if config.judge_model is None:
        return outcome
    rows, notes = rows or outcome.examples, outcome.notes
    answers = {name: [row | {of: text} for row, text in zip(rows, found)]
               for name, found in texts.items()}
    if config.rate:
        scores = {}
        for name, found in answers.items():
            if asked := judged(config, judges.single_questions(found, config), notes):
                scores[name] = judges.single_scores(*asked)
        outcome.measures += counted("rating, 1 to 10", scores, "score", notes)
    elif len(answers) == 2:
        questions = judges.pairwise_questions(answers["after"], answers["before"], config, of)
        if asked := judged(config, questions, notes):
            pairs = judges.pairwise_scores(*asked)
            n = judges.win_tie_loss(pairs)
            notes.append(f"judge: {n['win']} : {n['tie']} : {n['loss']} (win : tie : loss of "
                         f"after; in {n['inconsistent']} ties the two orders disagree), "
                         f"{n['unreadable']} unreadable")
            outcome.measures += counted("win rate", {"after": pairs}, "win", notes)
    else:
        notes.append("nothing was judged: there is one policy; give two to compare, or --rate")
    return outcome


# ── Checks: before anything is written or paid for

TEXTS = ("toy", "slf5k", "ultrafeedback")
ONLY = {"max_prompt_tokens": TEXTS, "rate": TEXTS, "encoder": TEXTS[:2],
        "by_category": ("mt_bench",), "references": ("mt_bench",),
        "difficulty": ("alpaca_eval",), "allow_code_execution": ("code",),
        "responses": tuple(task for task in PRESETS if task != "arc")}


def numbers(text: str) -> list[int]:
    """The k of --k. Raises InputError unless they are whole and at least 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--k {text}: needed are whole numbers with commas between, such as "
                         f"1,10") from error
    if min(found) < 1:
        raise InputError(f"--k {text}: each must be at least 1")
    return found


def check(config: EvalConfig):
    """Raises InputError for flags that would do nothing or do not go together, and for files of
    the user's that are no such."""
    task, draws = config.task, config.samples_per_row
    for name, tasks in ONLY.items():
        if getattr(config, name) and task not in tasks:
            raise InputError(f"--{name} does nothing for --task {task}; it is for "
                             f"{', '.join(tasks)}")
    if max(numbers(config.k)) > draws and not config.responses:
        raise InputError(f"--k {config.k} needs at least as many --samples_per_row, not "
                         f"{draws}")
    if draws > 1 and config.temperature == 0:
        raise InputError(f"--samples_per_row {draws} at --temperature 0 would be one sample, "
                         f"many times over")
    if task != "toy" and config.data is None:
        raise InputError(f"--task {task} needs --data, the rows of the benchmark")
    judges.check(config)
    if config.difficulty:
        judges.read_difficulty(config.difficulty)


# ── Command line

TASKS = {"toy": summaries, "slf5k": summaries, "ultrafeedback": chat,
         "reward_model": reward_models, "code": code, "arc": arc, "mt_bench": mt_bench,
         "alpaca_eval": alpaca_eval}
INTERVALS = "intervals are 95 %, by bootstrap over rows"


def write_result(config: EvalConfig, outcome: Outcome) -> list[dict]:
    """scores.jsonl (counts of every row), result.json (figures with intervals) and report.html;
    returns the figures."""
    out, lines = Path(config.output_dir), [measure.line() for measure in outcome.measures]
    write_rows(out / "scores.jsonl", [
        {"measure": measure.name, "policy": name, "rows": np.array(rows).tolist()}
        for measure in outcome.measures for name, rows in measure.rows.items()])
    write_rows(out / "result.json", [{"task": config.task, "config": asdict(config),
                                      "figures": lines, "notes": outcome.notes}])
    report.write_page(out / "report.html", result_page(config, outcome, lines))
    return lines


def result_page(config: EvalConfig, outcome: Outcome, lines: list[dict]) -> str:
    """The page: figures, notes, up to 100 answers side by side, settings."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = asdict(config) | {"torch": torch.__version__, "device": device}
    settings = [[name, report.public(str(value))] for name, value in facts.items()]
    examples = outcome.examples[:100]
    cards = f'<p class="muted">{len(examples)} of {len(outcome.examples)} rows.</p>'
    for row in examples:
        texts = {name: report.text_block(text) for name, text in row.items()
                 if name not in ("id", "prompt")}
        cards += report.card(str(row["id"]), row["prompt"], texts)
    sections = {"Figures": report.html_table(*cells(lines)),
                "Notes": "".join(map(report.text_block, outcome.notes)),
                "Answers": cards,
                "Settings": report.html_table(["", ""], settings, kind="wide")}
    body = report.text_block(f"{config.model}; {INTERVALS}")
    for name, html in sections.items():
        body += f"<section><h2>{name}</h2>{html}</section>"
    return report.page(f"Text2Grad · {config.task}", body)


def main():
    """Measure, print the table, and say where everything is."""
    config = parse_flags(EvalConfig, sys.argv[1:], __doc__, lambda task: PRESETS.get(task, {}))
    config.adapter = None if config.responses else config.adapter
    check(config)
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    outcome = TASKS[config.task](config, policies(config))
    lines = write_result(config, outcome)
    if lines:
        print(report.table(*cells(lines)))
    print("\n".join(["", *outcome.notes]))
    print(f"{config.output_dir}/: result.json, scores.jsonl, report.html; {INTERVALS}")


if __name__ == "__main__":
    run_script(main, "eval", SandboxError, SafetensorError, torch.OutOfMemoryError)
