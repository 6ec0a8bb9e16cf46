"""Evaluate a base model, an adapter, or both side by side, on a task or a benchmark of §4.

    python eval.py                   # the toy world: its base against runs/toy/policy
    python eval.py --adapter runs/headlines/policy
    python eval.py --task slf5k --data test.jsonl --model MODEL --adapter runs/slf5k/policy \\
        --encoder roberta-large
    python eval.py --task reward_model --data feedback.jsonl --model MODEL \\
        --adapter runs/slf5k/reward/adapter
    python eval.py --task code --data HumanEvalPlus.jsonl.gz --model MODEL --adapter … \\
        --allow_code_execution
    python eval.py --task mt_bench --data question.jsonl --model MODEL --adapter … \\
        --judge_model gpt-4o --judge_prompts judge_prompts.jsonl

--adapter is compared with the base model without adapter, or with --before. Either flag also
takes a file with another model's answers, which are rows with `id` and `response`. The task,
its data, the base, R_φ, the annotator function, the temperature and the limits of lengths are
those of the run that trained --adapter (config.json beside it), unless other flags are given.

Every metric has a 95 % bootstrap interval over rows. So does every difference between the two
sides, for which the same rows are resampled on both. Answers and judgements are saved one by
one, so that the same command resumes an interrupted run.

A task is measured by its `truth`, by δ of R_φ and of an annotator function, by a judge, and by
ROUGE, BLEU and BERTScore where a row has a `reference` (or another of data.REFERENCES). If
--data is the file that the adapter was trained on, only its held-out prompts are used.

--output_dir receives the answers, the rows and the counts of each side, and result.json. To see
R_φ's spans on a page, run measures.spans on the rows of --task reward_model.

Paper: §4, Tables 1 to 8 and 16 (Table 5 with another --model).

Departures: the paper reports no intervals. Perplexity (Table 8) is conditioned on the prompt
and computed by the base without adapter. A row that cannot be scored is not dropped, but counts
as wrong; a task leaves out prompts that are too long, as its training does. A row without a
verdict from the judge is excluded from the judge's metrics. The number of such rows is printed.
"""

import functools
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Callable

import torch
from safetensors import SafetensorError
from tqdm import tqdm

import report
from annotate import annotation_question, load_annotator
from ask import question_key
from data import (InputError, append_row, chunks, examples, get_task, read_rows, reward_prompt,
                  run_script, whole_rows, write_rows)
from measures import benchmarks, judge as judges
from measures.metrics import (bleu_of, cells, columns, perplexity, perplexity_of, ratio,
                              reference_scores, share, table_lines)
from measures.spans import (audit_text, delta_scores, judge_texts, read_spans,
                            response_tokens, score_critiques)
from model import (ADAPTER_FILES, encode_prompt, eos_ids, find_model, load_lora, load_model,
                   use_lora)
from runtime import WORLD_SIZE, checksum, lock_directory
from sampling import context_length, generate
from settings import AnnotateConfig, Config, flag, parse_flags
from text2grad import drop_long_rows

PRESETS = {"toy": {"adapter": "runs/toy/policy", "temperature": 1.0},
           "alpaca_eval": {"max_new_tokens": 2048}}


@dataclass
class EvalConfig(judges.JudgeConfig):
    """Settings of an evaluation. Some defaults depend on --task."""
    task: str = flag("toy", "a task of text2grad.py (toy, slf5k, ultrafeedback, kodcode or "
                            "module:NAME), or reward_model, code, arc, mt_bench, alpaca_eval")
    model: str = flag("toy/base", "base model: a directory or hub id")
    adapter: str | None = flag(None, "adapter of a policy or of R_φ to evaluate, or a file of "
                                     "answers; None evaluates only the base")
    before: str | None = flag(None, "adapter or file of answers to compare with; None is the "
                                    "base without adapter")
    data: str | None = flag(None, "rows of the task; the toy task generates its rows")
    reward_model: str | None = flag(None, "adapter of R_φ that judges the answers to a task")
    annotator_function: str | None = flag(None, "module:function(row, response) that judges "
                                                "the answers to a task")
    limit: int = flag(10**6, "maximum number of rows", least=1)
    output_dir: str | None = flag(None, "directory for answers, rows and result; None is "
                                        "ADAPTER-eval-TASK")
    seed: int = flag(0, "random seed of the answers")
    dtype: str | None = flag(None, "dtype of the base; None is bfloat16 on CUDA and "
                                   "float32 on CPU", ("bfloat16", "float16", "float32", None))
    batch_size: int = flag(64, "number of texts in a batch", least=1)
    temperature: float = flag(0.0, "sampling temperature; 0 is greedy; unused by mt_bench")
    max_new_tokens: int = flag(1024, "maximum tokens of an answer; less in a short context",
                               least=1)
    max_critique_tokens: int = flag(768, "maximum tokens of R_φ's critique", least=1)
    encoder: str | None = flag(None, "BERTScore encoder for summaries, such as roberta-large, "
                                     "or NAME:LAYER; None computes no BERTScore")
    allow_code_execution: bool = flag(False, "run the programs of --task code in a sandbox")
    unsafe_sandbox: bool = flag(False, "run programs even if a sandbox layer is missing")
    code_timeout: float = flag(10.0, "CPU seconds for each program of --task code", least=0.01)

    max_prompt_tokens = None                 # no flag: only the context limits the prompts

    @property
    def adapters(self) -> list[str]:
        """Adapter directories in --before and --adapter; files of answers are left out."""
        return [path for path in (self.before, self.adapter) if os.path.isdir(path or "")]


# ── The sides of the table: the same base with different adapters

NAMES = "id", "task_id", "question_id", "prompt_id"           # fields that may hold a row's id
ANSWERS = "response", "output", "solution"                    # fields that may hold an answer


def name_rows(rows: list[dict]) -> list[dict]:
    """Add an `id` to each row: its first field out of NAMES, or else its index."""
    named_rows = []
    for number, row in enumerate(rows):
        ids = (row[key] for key in NAMES if row.get(key) is not None)
        named_rows.append(row | {"id": str(next(ids, number))})
    return named_rows


@dataclass
class Side:
    """One side of the table: the base, the base with an adapter, or a file of answers.

    source: path of the adapter or file; None is the base without adapter. Both sides share the
    other fields. load() returns (model, tokenizer), rows() the rows of the task, and
    score(texts) their `perplexity` under the base; these functions cache their results.
    critic: R_φ, which writes critiques, or None.
    """
    name: str
    source: str | None
    config: EvalConfig
    load: Callable
    rows: Callable
    score: Callable
    critic: "Side | None" = None

    @property
    def lora(self) -> str | None:
        """Name of the adapter for use_lora; None if this side has no adapter."""
        return self.name if os.path.isdir(self.source or "") else None

    def print(self, text: str):
        """Print a text that begins with the name of this side."""
        print(f"{self.name}: {text}")

    @functools.cached_property
    def model(self):
        """(model, tokenizer), with the adapter of this side loaded."""
        model, tokenizer = self.load()
        if self.lora:
            load_lora(model, self.lora, self.source)
        return model, tokenizer

    def _answers_path(self, temperature: float) -> Path:
        """File of saved answers, named by a checksum of the model, adapter and settings."""
        config = self.config
        base = Path(find_model(config.model)).glob("*.safetensors")
        lora = sorted(Path(self.source).glob("adapter_*")) if self.lora else []
        digest = checksum(*lora, state=[
            config.model, sorted(file.stat().st_mtime_ns for file in base), config.dtype,
            config.max_new_tokens, temperature])
        return Path(config.output_dir, f"answers-{digest[:12]}.jsonl")

    def write(self, conversations: list[list[dict]], temperature: float) -> list[str]:
        """The assistant's next turn in each conversation. Saved answers are reused.

        The random numbers of an answer depend only on the seed and the conversation. So an
        answer does not depend on its batch, and both sides use the same random numbers.
        """
        path = self._answers_path(temperature)
        write_rows(path, whole_rows(path))               # removes a line that a crash cut off
        answers = {row["key"]: row["response"] for row in whole_rows(path)}
        keys = [question_key(self.config.seed, conversation) for conversation in conversations]
        missing = {key: conversation for key, conversation in zip(keys, conversations)
                   if key not in answers}
        if missing:
            for key, text in self.decode(missing, temperature):
                answers[key] = text
                append_row(path, {"key": key, "response": text})
        return [answers[key] for key in keys]

    def decode(self, conversations: dict[str, list[dict]], temperature: float):
        """Yield (key, answer) for each conversation. The key seeds the random numbers."""
        model, tokenizer = self.model
        limit = self.config.max_new_tokens
        prompts = {key: encode_prompt(tokenizer, conversation)
                   for key, conversation in conversations.items()}

        def answer_tokens(key: str) -> int:
            """Maximum number of tokens in the answer.

            If the context limits it, it is a multiple of 64. So there are few batches, and the
            limit of an answer does not depend on the other answers in its batch.
            """
            room = context_length(model) - len(prompts[key])
            return limit if room >= limit else room // 64 * 64

        batches = []
        for tokens, group in groupby(sorted(conversations, key=answer_tokens), answer_tokens):
            batches += [(tokens, keys) for keys in chunks([*group], self.config.batch_size)]
        for tokens, keys in tqdm(batches, self.name):
            if tokens < 1:
                self.print(f"the context has no room for {len(keys)} answers, which count as "
                           f"wrong; the prompts are too long")
                yield from ((key, "") for key in keys)
                continue
            seeds = [torch.Generator().manual_seed(int(key[:15], 16)) for key in keys]
            uniforms = torch.stack([torch.rand(limit, generator=seed)[:tokens]
                                    for seed in seeds])
            with use_lora(model, self.lora, merge=True):
                ids = generate(model, [prompts[key] for key in keys], tokens, temperature,
                               eos_ids(tokenizer, model), uniforms=uniforms)
            for key, y in zip(keys, ids):
                yield key, tokenizer.decode(y, skip_special_tokens=True).strip()

    def _file_answers(self, rows: list[dict]) -> list[str]:
        """The answer of each row, looked up by id in the file of answers."""
        file_rows = name_rows(read_rows(self.source))
        answers = {row["id"]: next((row[key] for key in ANSWERS if key in row), None)
                   for row in file_rows}
        repeats = Counter(column(file_rows, "id")) - Counter([*answers])
        if repeats:
            raise InputError(f"{self.source}: two rows have the id {min(repeats)}; remove one "
                             f"of them")
        for row in rows:
            if not isinstance(answers.get(row["id"]), str):
                raise InputError(f"{self.source}: row {row['id']} has no 'response'; add "
                                 f"one, or \"\" to count the row as wrong")
        return [answers[row["id"]] for row in rows]

    def answer(self, rows: list[dict]) -> list[dict]:
        """Add a `response` to each row {id, prompt}, generated or read from the file.

        A prompt is a text, or a list of chat messages.
        """
        if self.lora or not self.source:
            conversations = [[{"role": "user", "content": row["prompt"]}]
                             if isinstance(row["prompt"], str) else row["prompt"]
                             for row in rows]
            texts = self.write(conversations, self.config.temperature)
        else:
            texts = self._file_answers(rows)
        return [row | {"response": text} for row, text in zip(rows, texts)]


def sides_of(config: EvalConfig) -> list[Side]:
    """[before, after], or the only side to evaluate.

    The base without adapter is the side "before" of a policy's adapter; without --before and
    --adapter it is the only side.
    """
    load = functools.cache(lambda: load_model(config.model, config.dtype))
    rows = functools.cache(lambda: task_rows(config, load))
    score = functools.cache(lambda texts: perplexity(
        *load(), map(get_task(config.task).policy_prompt, rows()), texts))
    critic = None
    if config.reward_model:
        settings = replace(config, max_new_tokens=config.max_critique_tokens, temperature=0.0)
        critic = Side("R_φ", config.reward_model, settings, load, rows, score)
    sides = [Side(name, source, config, load, rows, score, critic)
             for name, source in (("before", config.before), ("after", config.adapter))]
    given_sides = [side for side in sides if side.source]
    if sides[1].lora and config.task != "reward_model":
        return sides
    return given_sides or [replace(sides[0], name="base")]


# ── A function per benchmark, from a side to (rows {id, prompt, response}, counts of each row)

def column(rows: list[dict], name: str) -> list:
    """The value of one field in each row."""
    return [row[name] for row in rows]


def data_rows(config: EvalConfig) -> list[dict]:
    """The rows of --data; if adapters were trained on this file, only their held-out prompts.

    Raises InputError if no prompt is held out from both adapters.
    """
    task = get_task(config.task)
    rows = name_rows(read_rows(config.data, task=task))
    for source in config.adapters:
        for run in whole_rows(Path(source).parent / "config.json"):         # at most one row
            held_out = Path(source).parent / "held_out.jsonl"
            if held_out.exists() and run["data"] and Path(run["data"]).exists() and (
                    os.path.samefile(run["data"], config.data)):
                prompts = [task.policy_prompt(row) for row in read_rows(held_out)]
                held_rows = [row for row in rows if task.policy_prompt(row) in prompts]
                print(f"uses {len(held_rows)} of {len(rows)} rows, held out from {source}")
                rows = held_rows
    if not rows:
        raise InputError(f"{config.data}: no prompt is held out from both adapters; evaluate "
                         f"them on rows that neither was trained on")
    return rows


def task_rows(config: EvalConfig, load: Callable) -> list[dict]:
    """The rows of a task, without prompts that its training would leave out as too long.

    load() returns (model, tokenizer).
    """
    if config.data:
        rows = data_rows(config)
    else:
        rows = get_task(config.task).rows("eval", config.limit, 0)
    return drop_long_rows(rows, *load(), config)[: config.limit]


def ask_critics(side: Side, pairs: list[dict]) -> dict[str, list[str]]:
    """What each critic, R_φ and the annotator function, writes about every response."""
    config = side.config
    critiques = {}
    if side.critic:  # Alg. 4 l.12
        rows = [{"prompt": reward_prompt(x["prompt"], x["response"])} for x in pairs]
        critiques["R_φ"] = column(side.critic.answer(rows), "response")
    if config.annotator_function:
        annotation = AnnotateConfig(task=config.task,
                                    annotator_function=config.annotator_function)
        annotator = load_annotator(annotation)
        critiques["annotator"] = [
            annotator(annotation_question(pair, annotation)).text
            if pair["response"].strip() else "" for pair in pairs]
    return critiques


def policy(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 2
    """The task's `truth`, δ by each critic, perplexity, and scores against references.

    No score against a reference is computed for a row without one.
    """
    task = get_task(side.config.task)
    rows = side.rows()
    answers = side.answer([{"id": row.get("id"), "prompt": task.policy_prompt(row)}
                           for row in rows])
    texts = column(answers, "response")
    counts = {name: [*map(truth, rows, texts)] for name, truth in task.truth.items()}
    # A test outcome in a row belongs to another response.
    pairs = [*examples(task, [row | {"response": text, "outcome": None}
                              for row, text in zip(rows, texts)])]
    for critic, critiques in ask_critics(side, pairs).items():
        judgements = judge_texts(side.load()[1], texts, critiques)
        counts |= delta_scores(judgements, critic)
        for pair, judgement in zip(pairs, judgements):
            pair[f"judgement of {critic}"] = asdict(judgement)
    references = [pair.get("reference", "") for pair in pairs]
    counts |= reference_scores(texts, references, side.config.encoder)
    counts["perplexity"] = side.score(tuple(texts))
    if any(references):
        counts["perplexity of references"] = side.score(tuple(references))
    counts["tokens"] = [score and score[1] for score in counts["perplexity"]]
    return pairs, counts


def held_out(side: Side) -> list[dict]:
    """The rows of --data on which no evaluated R_φ was trained.

    They are listed in samples.jsonl in the parent directory of each adapter. If this file lists
    none of the rows, all of them are used and a note is printed.
    """
    rows = name_rows(read_rows(side.config.data, (("prompt",), ("response",))))
    for row in rows:
        read_spans(row)                                  # an invalid row is reported now
    for source in side.config.adapters:
        path = Path(source).parent / "samples.jsonl"
        samples = {(str(row["id"]), row["response"]) for row in whole_rows(path)}
        held_rows = [row for row in rows if (row["id"], row["response"]) in samples]
        if held_rows:
            side.print(f"uses {len(held_rows)} of {len(rows)} rows, held out from {source}")
        else:
            side.print(f"{source} may have been trained on these rows, because {path} does not "
                       f"list them as held out")
        rows = held_rows or rows
    return rows[: side.config.limit]


def reward_model(side: Side) -> tuple[list[dict], dict[str, list]]:  # Tables 1, 6, 7, 16
    """The spans of R_φ's critiques, scored against the spans of the rows in --data.

    The rows come from annotate.py, or from people (Table 16).
    """
    rows = held_out(side)
    tokens = None                                        # text → offsets; None counts words
    if side.config.adapters:
        tokens = functools.partial(response_tokens, side.load()[1])
    answers = side.answer([row | {"prompt": reward_prompt(row["prompt"], row["response"])}
                           for row in rows])
    scored, counts, tables = score_critiques(rows, column(answers, "response"), tokens,
                                             side.name)
    side.print(f"in {'tokens' if tokens else 'words'} of the response\n{audit_text(tables)}")
    return scored, counts


def code(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 3
    """pass@1 on HumanEval, MBPP and their + versions.

    All programs are generated before the first one runs, which needs --allow_code_execution.
    The rows have the fields that evalplus reads.
    """
    config = side.config
    problems = benchmarks.read_problems(config.data)[: config.limit]
    rows = side.answer([{"id": problem.task_id, "prompt": benchmarks.code_prompt(problem)}
                        for problem in problems])
    for row, problem in zip(rows, problems):
        program = benchmarks.extract_code(row["response"], problem)
        row |= {"task_id": row["id"], "solution": program}
    if not config.allow_code_execution:
        side.print("nothing was run; to run the programs, add --allow_code_execution")
        return rows, {}
    results = benchmarks.execute(problems, column(rows, "solution"), os.cpu_count(),
                                 config.code_timeout, config.unsafe_sandbox)
    scores = benchmarks.code_scores(results)
    return [row | result for row, result in zip(rows, results)], columns(scores)


def arc(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """ARC-Challenge accuracy by the log-likelihood of each choice; no text is generated."""
    rows = benchmarks.read_arc(side.config.data)[: side.config.limit]
    logprobs = benchmarks.choice_logprobs(*side.model, rows, side.lora, side.config.batch_size)
    return [], columns(benchmarks.arc_scores(rows, logprobs))


def mt_bench(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """MT-Bench: the judge rates the answers to both turns of every question."""
    questions = name_rows(judges.read_mt_bench(side.config.data))[: side.config.limit]
    answers = judges.mt_bench_answers(questions, side.write)
    judge_questions = judges.mt_bench_questions(questions, answers, side.config)
    verdicts = request_verdicts(side, judge_questions)
    ratings = columns(judges.mt_bench_scores(verdicts))
    answered_rows = [q | {"response": answers[q["question_id"]]} for q in questions]
    return answered_rows, {name + why_unjudged(verdicts): ratings[name] for name in ratings}


def alpaca_eval(side: Side) -> tuple[list[dict], dict[str, list]]:  # Table 4
    """Win rate against the reference outputs in --data.

    Also writes the outputs for alpaca_eval, and prints the command that computes their
    length-controlled win rate.
    """
    config = side.config
    rows = judges.read_alpaca(config.data)[: config.limit]
    answered_rows = side.answer(rows)
    texts = column(answered_rows, "response")
    command = judges.write_alpaca(Path(config.output_dir, f"{side.name}_outputs.json"), rows,
                                  texts, side.source or config.model)
    side.print(f"for the length-controlled win rate, run: {command}")
    return answered_rows, ask_wins(side, rows, texts, column(rows, "response"))


# ── The judge (Figure 3, Appendix E)

def request_verdicts(side: Side, questions: list) -> list[dict]:
    """The judge's verdicts; [] without a judge or with --dry_run, which prints the cost."""
    config = side.config
    journal = Path(config.output_dir, "judge.journal")
    if config.judge_model is None:
        side.print("nothing was judged; to name a judge, add --judge_model")
        return []
    if config.dry_run:
        side.print(judges.forecast_cost(questions, config, journal))
        return []
    verdicts = judges.ask_judge(questions, config, journal)
    failed = [verdict for verdict in verdicts if verdict["reason"]]
    if failed:
        side.print(f"{len(failed)} of {len(verdicts)} questions have no verdict; the first is "
                   f"{failed[0]['id']}: {failed[0]['reason']}; run "
                   f"the same command again to repeat them")
    return verdicts


def ask_wins(side: Side, rows: list[dict], texts: list[str], other_texts: list[str],
             field: str = "response") -> dict[str, list]:  # Figure 3
    """{"win rate": [whether this side's text wins, for each row]}; prints the counts."""
    questions = judges.pairwise_questions(rows, texts, other_texts, side.config, field)
    verdicts = request_verdicts(side, questions)
    wins = judges.pairwise_scores(verdicts)
    if wins:
        sums = judges.win_tie_loss(wins)
        side.print(f"Figure 3, by the judge\n{report.table([*sums], [[*sums.values()]])}")
    return {f"win rate{why_unjudged(verdicts)}": column(wins, "win")}


def why_unjudged(verdicts: list[dict]) -> str:
    """For the table, the first reason where no question has a verdict; otherwise ""."""
    reasons = [verdict["reason"] for verdict in verdicts]
    return f", {reasons[0]}" if reasons and all(reasons) else ""


# ── The table

LOWER_IS_BETTER = ("poor", "unparseable", "unmatched", "ambiguous")
UNITS = {"repeated facts": ("a row ↓", share),
         "BLEU": ("0–1 ↑", bleu_of), "perplexity": ("≥ 1 ↓", perplexity_of),
         "perplexity of references": ("≥ 1 ↓", perplexity_of), "tokens": ("a row", ratio),
         "rating": ("1–10 ↑", ratio), "delta": ("−1–1 ↑", ratio),
         **dict.fromkeys(LOWER_IS_BETTER, ("0–1 ↓", share))}


# ── The script

BENCHMARKS = {"reward_model": reward_model, "code": code, "arc": arc, "mt_bench": mt_bench,
              "alpaca_eval": alpaca_eval}                 # every other --task is a data.Task


def settings_of(task: str) -> dict:
    """Defaults for --task. Those of a data.Task are the settings of its training."""
    if task in BENCHMARKS:
        return PRESETS.get(task, {})
    training = vars(parse_flags(Config, argv=["--task", task]))
    settings = {name: training[name] for name in (
        "model", "annotator_function", "max_new_tokens", "max_critique_tokens")}
    if get_task(task).rows:
        settings["limit"] = training["eval_rows"]
    return settings | PRESETS.get(task, {})


def run_flags(config: EvalConfig) -> list[str]:
    """The settings of the run that trained --adapter as flags, from config.json beside it.

    If --task is another one than that of the run, only its base model counts.
    """
    if config.adapter is None:
        return []
    out = Path(config.adapter).parent
    names = ["model"]
    flags = []
    for run in whole_rows(out / "config.json"):           # at most one row
        if config.task in (run["task"], EvalConfig.task):
            names += ["task", "data", "reward_model", "annotator_function", "dtype",
                      "temperature", "max_new_tokens", "max_critique_tokens"]
        reward_model = out / "reward" / "adapter"
        if run.get("reward_model") is None and reward_model.exists():
            run["reward_model"] = reward_model
        samples = whole_rows(out / "samples.jsonl")
        if samples and not any(row["critique"] for row in samples):
            run["annotator_function"] = None              # it returned numbers, not critiques
        flags += [f"--{name}={run[name]}" for name in names if run.get(name) is not None]
    return flags


def check_adapter(path: str):
    """Raise InputError if a path is no file and has no adapter; name the adapters inside it."""
    if os.path.isfile(path) or os.path.isfile(os.path.join(path, ADAPTER_FILES[0])):
        return
    inside = sorted(str(file.parent) for file in Path(path).rglob(ADAPTER_FILES[0]))
    remedy = f"name {' or '.join(inside[:3])}" if inside else (
        "train one with text2grad.py or reward_model.py, or evaluate the base with --adapter "
        "none")
    raise InputError(f"{path}: there is no adapter here; {remedy}")


def check_flags(config: EvalConfig):
    """Check the flags and the files that they name, before anything is written or paid for.

    Raises InputError if flags contradict each other or a file has the wrong format.
    """
    task = config.task
    if WORLD_SIZE > 1:
        raise InputError("evaluation runs in one process only: start it without torchrun")
    if config.data is None and (task in BENCHMARKS or get_task(task).rows is None):
        raise InputError(f"--task {task} needs --data, the file with its rows")
    if task == "reward_model" and config.adapter is None:
        raise InputError("--task reward_model needs --adapter, R_φ or a file of critiques")
    judges.check_judge(config)
    for path in filter(None, (config.before, config.adapter, config.reward_model)):
        runs_model = task in ("arc", "mt_bench") or path == config.reward_model
        if runs_model and os.path.isfile(path):
            raise InputError(f"{path} is a file of answers, but the model must run; name the "
                             f"directory of an adapter")
        check_adapter(path)


def output_directory(config: EvalConfig) -> Path:
    """The directory for the results. Raises InputError if it has those of another adapter."""
    source = config.adapter or config.before or "runs/base"
    task = config.task.rpartition(":")[2].lower()
    out = Path(config.output_dir or f"{Path(source)}-eval-{task}")
    path = out / "result.json"
    for saved in whole_rows(path):                        # at most one row
        for name in ("task", "before", "adapter"):
            if saved["config"][name] != getattr(config, name):
                raise InputError(f"{path} is a result of --{name} {saved['config'][name]}; "
                                 f"choose another --output_dir")
    return out


def main():
    """Evaluate each side, print the table and write the results."""
    config = parse_flags(EvalConfig, __doc__, preset=settings_of)
    flags = run_flags(config) + sys.argv[1:]             # a later flag replaces an earlier one
    config = parse_flags(EvalConfig, __doc__, flags, settings_of)
    check_flags(config)
    out = output_directory(config)
    config = replace(config, output_dir=str(out))
    sides = sides_of(config)
    _lock = lock_directory(out)                                         # until main returns
    rows = {}
    counts = {}
    for side in sides:
        side.print(f"{side.source or 'no adapter'}, the base {config.model}")
        rows[side.name], counts[side.name] = BENCHMARKS.get(config.task, policy)(side)
    is_paired = config.task == "reward_model" or config.task not in BENCHMARKS
    if len(sides) == 2 and config.judge_model and is_paired:
        field = "reply" if config.task == "reward_model" else "response"
        old, new = (column(rows[side.name], field) for side in sides)
        counts["after"] |= ask_wins(sides[1], rows["after"], new, old, field)  # Fig. 3, Tab. 1
    for side in sides:
        write_rows(out / f"{side.name}.jsonl", rows[side.name])
        write_rows(out / f"{side.name}_counts.json", [counts[side.name]])
    lines = table_lines(counts, UNITS)
    write_rows(out / "result.json", [{"config": asdict(config), "figures": lines}])
    print(report.table(*cells(lines)) if lines else "no metrics")
    print(f"↑ higher is better, ↓ lower is better; in brackets: 95 % bootstrap intervals\n"
          f"{out}/ contains result.json, and the rows and counts of each side")


if __name__ == "__main__":
    run_script(main, "eval", SafetensorError)
