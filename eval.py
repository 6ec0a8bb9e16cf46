"""Evaluate a base model, an adapter, or both side by side, on a task or a benchmark of §4.

    python eval.py                   # the toy world: its base against runs/toy/policy
    python eval.py --adapter runs/headlines/policy
    python eval.py --task slf5k --data test.jsonl --model MODEL --adapter runs/slf5k/policy \\
        --encoder roberta-large
    python eval.py --task reward_model --data feedback.jsonl --model MODEL \\
        --adapter runs/slf5k/reward/adapter
    python eval.py --task code --data HumanEvalPlus.jsonl.gz --model MODEL --adapter … \\
        --allow_code_execution
    python eval.py --task alpaca_eval --data alpaca_eval.json --model MODEL --adapter … \\
        --judge_model gpt-4o

A policy's --adapter is compared with --before, or else with the base without adapter. Both
flags also take a file with another model's answers: rows with `id` and `response`. The run that
trained --adapter gives defaults (config.json beside it): task, data, base, R_φ, dtype,
temperature and limits of lengths. With another --task, except toy, it gives only the base.

Every metric has a 95 % bootstrap interval over rows. So does every difference between the two
sides, for which the same rows are resampled on both. Answers and the judge's replies are saved
during the run, so that the same command resumes an interrupted run.

Metrics of a task: its own (`truth`), perplexity, δ (with --reward_model) and wins (with a judge
and two sides). A row with a `reference` (or another of data.REFERENCES) also gets ROUGE, BLEU
and, with --encoder, BERTScore. If held_out.jsonl beside the adapter has prompts of --data, only
these are used.

--output_dir receives the answers and the rows of each side, and result.json. To see R_φ's spans
on a page, run measures.spans on the rows of --task reward_model.

Paper: §4, Tables 1 to 8 and 16 (of Table 4 only AlpacaEval; Table 5 with another --model).

Departures: the paper reports no intervals. Perplexity (Table 8) is conditioned on the prompt
and computed by the base without adapter. An answer takes at most half of the context. If a
critique or program cannot be read, it counts as wrong. A task leaves out prompts that are too
long for the context. A row without a verdict from the judge is excluded from the judge's
metrics, and the number of such rows is printed.
"""

import functools
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Callable

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from ask import question_key
from data import (InputError, append_row, checksum, chunks, critique_prompt, examples,
                  get_task, read_rows, row_id, run_script, read_log, write_rows)
from measures import benchmarks, judge as judges
from measures.metrics import (bleu_of, cells, perplexity, perplexity_of, ratio,
                              reference_scores, share, table_lines)
from measures.spans import read_spans, response_tokens, score_critiques, tables_text
from model import (ADAPTER_FILES, drop_long_rows, encode_prompt, eos_ids, find_model,
                   load_lora, load_model, use_lora)
from policy import Rollouts, answer_row, reward_model_critic
from runtime import WORLD_SIZE, lock_directory
from sampling import context_length, generate
from settings import Config, flag, parse_flags
from report import review_metrics, table

PRESETS = {"toy": {"adapter": "runs/toy/policy"}, "alpaca_eval": {"max_new_tokens": 2048}}


@dataclass
class EvalConfig(judges.JudgeConfig):
    """Settings of an evaluation. Some defaults depend on --task."""
    task: str = flag("toy", "a task of text2grad.py (toy, slf5k, ultrafeedback, kodcode or "
                            "module:NAME), or reward_model, code, alpaca_eval")
    model: str = flag("toy/base", "base model: a directory or hub id")
    adapter: str | None = flag(None, "adapter of a policy or of R_φ to evaluate, or a file of "
                                     "answers; None evaluates only the base")
    before: str | None = flag(None, "adapter or file of answers to compare with; None is the "
                                    "base without adapter")
    data: str | None = flag(None, "rows of the task; the toy task generates its rows")
    reward_model: str | None = flag(None, "adapter of R_φ that judges the answers to a task")
    limit: int | None = flag(None, "maximum number of rows; None is all, or 200 of a task that "
                                   "generates its rows", least=1)
    output_dir: str | None = flag(None, "directory for answers, rows and result; None is "
                                        "ADAPTER-eval-TASK")
    seed: int = flag(0, "random seed of the answers")
    dtype: str | None = flag(None, "dtype of the base; None is bfloat16 on CUDA and "
                                   "float32 on CPU", ("bfloat16", "float16", "float32", None))
    decode_batch_size: int = flag(64, "number of texts in a batch", least=1)
    temperature: float = flag(0.0, "that of --adapter's run; 0 is greedy")
    max_new_tokens: int = flag(1024, "maximum tokens of an answer, and at most half of the "
                                     "context", least=1)
    max_critique_tokens: int = flag(768, "maximum tokens of R_φ's critique", least=1)
    encoder: str | None = flag(None, "BERTScore encoder for summaries, such as roberta-large, "
                                     "or NAME:LAYER; None computes no BERTScore")
    allow_code_execution: bool = flag(False, "run the programs of --task code in a sandbox")
    unsafe_sandbox: bool = flag(False, "run programs even if a sandbox layer is missing")

    max_prompt_tokens = None                 # no flag: only the context limits the prompts

    @property
    def adapters(self) -> list[str]:
        """Adapter directories in --before and --adapter; files of answers are left out."""
        return [path for path in (self.before, self.adapter) if os.path.isdir(path or "")]


# ── The sides of the table: the base, the base with an adapter, or a file of answers

ANSWERS = "output", "solution", "response"      # fields with an answer; the last found is used


def name_rows(rows: list[dict]) -> list[dict]:
    """Add the `row_id` to each row; the numbers begin at 0."""
    return [row | {"id": row_id(row, number)} for number, row in enumerate(rows)]


def column(rows: list[dict], name: str) -> list:
    """The value of one field in each row."""
    return [row[name] for row in rows]


@dataclass
class Side:
    """One side of the table: the base, the base with an adapter, or a file of answers.

    source: path of the adapter or file; None is the base without adapter. load() returns the
    (model, tokenizer) that both sides share.
    """
    name: str
    source: str | None
    config: EvalConfig
    load: Callable

    @property
    def lora(self) -> str | None:
        """Name of the adapter for use_lora; None if this side has no adapter."""
        return self.name if os.path.isdir(self.source or "") else None

    @functools.cached_property
    def model(self):
        """(model, tokenizer), with the adapter of this side loaded."""
        model, tokenizer = self.load()
        if self.lora:
            load_lora(model, self.lora, self.source)
        return model, tokenizer

    def _answers_path(self) -> Path:
        """The file of answers with this base, adapter, dtype, temperature and length limit."""
        config = self.config
        base = Path(find_model(config.model)).glob("*.safetensors")
        lora = sorted(Path(self.source).glob("adapter_*")) if self.lora else []
        digest = checksum(*lora, state=[
            config.model, sorted(file.stat().st_mtime_ns for file in base), config.dtype,
            config.max_new_tokens, config.temperature])
        return Path(config.output_dir, f"answers-{digest[:12]}.jsonl")

    def _write(self, prompts: list) -> list[str]:
        """The model's answer to each prompt. Saved answers are reused.

        The random numbers of an answer depend only on the seed and the prompt. So they do not
        depend on the batch, and they are the same for both sides.
        """
        config = self.config
        path = self._answers_path()
        rows = read_log(path)
        write_rows(path, rows)                           # removes a line that a crash cut off
        answers = {row["key"]: row["response"] for row in rows}
        model, tokenizer = self.model
        limit = min(config.max_new_tokens, context_length(model) // 2)
        keys = [question_key(config.seed, prompt) for prompt in prompts]
        prompt_ids = {key: encode_prompt(tokenizer, prompt)
                      for key, prompt in zip(keys, prompts) if key not in answers}
        # The longest prompts come first. If one is too long, the error comes at the start.
        order = sorted(prompt_ids, key=lambda key: -len(prompt_ids[key]))
        for batch in tqdm(chunks(order, config.decode_batch_size), self.name):
            seeds = [torch.Generator().manual_seed(int(key[:15], 16)) for key in batch]
            uniforms = torch.stack([torch.rand(limit, generator=seed) for seed in seeds])
            with use_lora(model, self.lora, merge=True):
                ids = generate(model, [prompt_ids[key] for key in batch], limit,
                               config.temperature, eos_ids(tokenizer, model),
                               uniforms=uniforms)
            for key, y in zip(batch, ids):
                answers[key] = tokenizer.decode(y, skip_special_tokens=True).strip()
                append_row(path, {"key": key, "response": answers[key]})
        return [answers[key] for key in keys]

    def _file_answers(self, rows: list[dict]) -> list[str]:
        """The answer of each row, looked up by id in the file of answers."""
        file_rows = name_rows(read_rows(self.source))
        ids = column(file_rows, "id")
        if len(ids) > len({*ids}):
            raise InputError(f"{self.source}: two rows have the same id; remove one of them")
        texts = {row["id"]: row[key] for row in file_rows for key in ANSWERS if key in row}
        for row in rows:
            if not isinstance(texts.get(row["id"]), str):
                raise InputError(f"{self.source}: row {row['id']} has no 'response'; add "
                                 f"one, or \"\" to count the row as wrong")
        return [texts[row["id"]] for row in rows]

    def answer(self, rows: list[dict]) -> list[dict]:
        """Add a `response` to each row {id, prompt}, generated or read from the file.

        A prompt is a text, or a list of chat messages.
        """
        if self.lora or not self.source:
            texts = self._write(column(rows, "prompt"))
        else:
            texts = self._file_answers(rows)
        return [row | {"response": text} for row, text in zip(rows, texts)]


def sides_of(config: EvalConfig, load: Callable) -> list[Side]:
    """[before, after], or the only side to evaluate.

    If a policy's adapter has no --before, the base without adapter is the side "before".
    Without --before and --adapter, the base is the only side.
    """
    sides = [Side("before", config.before, config, load),
             Side("after", config.adapter, config, load)]
    needs_base = sides[1].lora and config.task != "reward_model"
    return ([side for side in sides if side.source or needs_base]
            or [Side("base", None, config, load)])


# ── A function per benchmark: side → (rows {id, prompt, response}, counts of each row)

def held_out(config: EvalConfig, rows: list[dict], name: str, key: Callable) -> list[dict]:
    """The rows that are held out from the training of each adapter, as far as this is known.

    name: the file beside each adapter that lists its held-out rows. If it lists none of the
    rows, all rows are kept, and a note is printed. key: function from a row to what identifies
    it. Raises InputError if some rows are held out from one adapter, but none from both.
    """
    count = len(rows)
    for source in config.adapters:
        path = Path(source).parent / name
        keys = [key(row) for row in read_log(path)]
        held_rows = [row for row in rows if key(row) in keys]
        if held_rows:
            print(f"{len(held_rows)} of {len(rows)} rows are held out from {source}; the "
                  f"others are left out")
            rows = held_rows
        elif len(rows) < count:
            raise InputError(f"{config.data}: no row is held out from both adapters; evaluate "
                             f"them on rows that neither was trained on")
        else:
            print(f"{source} may have been trained on these rows: {path} does not list them")
    return rows


def task_rows(config: EvalConfig, load: Callable) -> list[dict]:
    """At most --limit rows of a task, without prompts that are too long for the context."""
    task = get_task(config.task)
    if config.data is None:
        rows = name_rows(task.rows("eval", config.limit or 200, 0))
    else:
        rows = name_rows(read_rows(config.data, task=task))
        rows = held_out(config, rows, "held_out.jsonl", task.policy_prompt)
    return drop_long_rows(rows, task, *load(), config)[: config.limit]


def policy(side: Side, rows: list[dict]) -> tuple:  # Table 2
    """The task's own metrics (`truth`), δ by R_φ, perplexity, and scores against references.

    No score against a reference is computed for a row without one.
    """
    config = side.config
    task = get_task(config.task)
    prompts = [*map(task.policy_prompt, rows)]
    answers = side.answer([row | {"prompt": prompt} for row, prompt in zip(rows, prompts)])
    texts = column(answers, "response")
    counts = {name: [*map(truth, rows, texts)] for name, truth in task.truth.items()}
    pairs = [*examples(task, map(answer_row, rows, texts))]
    model, tokenizer = side.load()
    if config.reward_model:
        # As in training, EOS is the last token of a response.
        offsets = [[*response_tokens(tokenizer, text), (len(text), len(text))]
                   for text in texts]
        batch = Rollouts(rows, column(pairs, "prompt"), texts, offsets, *[None] * 4,
                         task=task)
        reviews = reward_model_critic(batch, model, tokenizer, config)
        scores = [review_metrics(review, is_truncated=False) for review in reviews]
        counts |= {name: column(scores, name)
                   for name in ("delta", "good", "poor", "unparseable")}
        for pair, review in zip(pairs, reviews):
            pair["review"] = asdict(review)
    references = [pair.get("reference", "") for pair in pairs]
    counts |= reference_scores(texts, references, config.encoder)
    counts["perplexity"] = perplexity(model, tokenizer, prompts, texts)
    if any(references):
        counts["perplexity of references"] = perplexity(model, tokenizer, prompts, references)
    counts["tokens"] = [tokens for _, tokens in counts["perplexity"]]
    return pairs, counts


def reward_model(side: Side) -> tuple:  # Tables 1, 6, 7, 16
    """The spans of R_φ's critiques, scored against the spans of the rows in --data.

    The rows come from annotate.py, or from people (Table 16).
    """
    config = side.config
    rows = name_rows(read_rows(config.data, ("prompt", "response", "spans")))
    for row in rows:
        read_spans(row)                                  # an invalid row is reported now
    rows = held_out(config, rows, "samples.jsonl",
                    lambda row: (str(row["id"]), row["response"]))[: config.limit]
    # The function from a text to the offsets of its tokens; None counts words.
    tokens = functools.partial(response_tokens, side.load()[1]) if config.adapters else None
    answers = side.answer([row | {"prompt": critique_prompt(row["prompt"], row["response"])}
                           for row in rows])
    scored, counts, tables = score_critiques(rows, column(answers, "response"), tokens,
                                             side.name)
    print(f"in {'tokens' if tokens else 'words'} of the response\n{tables_text(tables)}")
    return scored, counts


def code(side: Side) -> tuple:  # Table 3
    """pass@1 on HumanEval, MBPP and their + versions.

    All programs are generated first. With --allow_code_execution, they are then run. The rows
    have the fields that evalplus reads.
    """
    config = side.config
    problems = benchmarks.read_problems(config.data)[: config.limit]
    rows = side.answer([{"id": problem.task_id, "task_id": problem.task_id,
                         "prompt": benchmarks.code_prompt(problem)} for problem in problems])
    for row, problem in zip(rows, problems):
        row["solution"] = benchmarks.extract_code(row["response"], problem)
    if not config.allow_code_execution:
        print("nothing was run; to run the programs, add --allow_code_execution")
        return rows, {}
    results = benchmarks.execute(problems, column(rows, "solution"), os.cpu_count(),
                                 unsafe=config.unsafe_sandbox)
    return ([row | result for row, result in zip(rows, results)],
            benchmarks.code_scores(results))


def alpaca_eval(side: Side) -> tuple:  # Table 4
    """Win rate against the reference outputs in --data.

    Also writes the outputs for the package alpaca_eval, and prints its command for the
    length-controlled win rate.
    """
    config = side.config
    rows = name_rows(judges.read_alpaca(config.data))[: config.limit]
    answered_rows = side.answer(rows)
    texts = column(answered_rows, "response")
    command = judges.write_alpaca(Path(config.output_dir, f"{side.name}_outputs.json"), rows,
                                  texts, side.source or config.model)
    print(f"for the length-controlled win rate, run: {command}")
    return answered_rows, ask_wins(side, rows, texts, column(rows, "response"))


# ── The judge (Figure 3, Appendix E)

def request_verdicts(side: Side, questions: list) -> list[dict]:
    """The judge's verdicts. Without a judge or with --dry_run: [], and the cost is printed."""
    config = side.config
    journal = Path(config.output_dir, "judge.journal")
    if config.judge_model is None or config.dry_run:
        print(f"nothing was judged: {judges.forecast_cost(questions, config, journal)}; name a "
              f"judge with --judge_model, and leave out --dry_run")
        return []
    verdicts = judges.ask_judge(questions, config, journal)
    failed = [verdict for verdict in verdicts if verdict["reason"]]
    if failed:
        print(f"{len(failed)} of {len(verdicts)} questions have no verdict (the first: "
              f"{failed[0]['reason']}); run the same command again to repeat them")
    return verdicts


def ask_wins(side: Side, rows: list[dict], texts: list[str], other_texts: list[str],
             field: str = "response") -> dict[str, list]:  # Figure 3
    """{"win rate": [whether this side's text wins, for each row]}; prints the counts."""
    questions = judges.pairwise_questions(rows, texts, other_texts, side.config, field)
    wins = judges.pairwise_scores(request_verdicts(side, questions))
    if wins:
        print(f"Figure 3, by the judge: {judges.win_tie_loss(wins)}")
    return {"win rate": column(wins, "win")}


# ── The table

UNITS = {"fact accuracy": ("↑", share), "repeated facts": ("a row ↓", share),
         "BLEU": ("↑", bleu_of), "perplexity": ("≥ 1 ↓", perplexity_of),
         "perplexity of references": ("≥ 1 ↓", perplexity_of), "tokens": ("a row", ratio),
         "delta": ("−1–1 ↑", ratio),
         **dict.fromkeys(("poor", "unparseable", "unmatched", "ambiguous"), ("↓", share))}


# ── The script

# Every other --task is a data.Task.
BENCHMARKS = {"reward_model": reward_model, "code": code, "alpaca_eval": alpaca_eval}


def settings_of(task: str) -> dict:
    """Defaults of the flags for --task. A data.Task has the settings of its training."""
    if task in BENCHMARKS:
        return PRESETS.get(task, {})
    return vars(parse_flags(Config, argv=["--task", task])) | PRESETS.get(task, {})


def run_flags(config: EvalConfig) -> list[str]:
    """The settings of the run that trained --adapter as flags, from config.json beside it.

    If --task is not the task of the run (nor toy, the default), only the base is taken.
    """
    if config.adapter is None:
        return []
    out = Path(config.adapter).parent
    flags = []
    for run in read_log(out / "config.json", lambda row: row["task"]):     # at most one row
        names = ["model"]
        if config.task in (run["task"], EvalConfig.task):
            names += ["task", "data", "reward_model", "dtype", "temperature",
                      "max_new_tokens", "max_critique_tokens"]
        reward_model = out / "reward" / "adapter"
        if reward_model.exists():
            run["reward_model"] = reward_model
        flags += [f"--{name}={run[name]}" for name in names if run.get(name) is not None]
    return flags


def check_flags(config: EvalConfig):
    """Check the flags and the paths that they name, before anything is written or paid for.

    Raises InputError if a flag is missing or wrong, if a path has no adapter and is no file of
    answers, or if torchrun started several processes.
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
        has_adapter = Path(path, ADAPTER_FILES[0]).exists()
        is_file = path != config.reward_model and os.path.isfile(path)
        if not (has_adapter or is_file):
            raise InputError(f"{path}: there is no adapter here; name the directory that holds "
                             f"{ADAPTER_FILES[0]}, or set --adapter none to evaluate the base")


def main():
    """Evaluate each side, print the table and write the results."""
    config = parse_flags(EvalConfig, __doc__, preset=settings_of)
    flags = run_flags(config) + sys.argv[1:]             # a later flag replaces an earlier one
    config = parse_flags(EvalConfig, __doc__, flags, settings_of)
    check_flags(config)
    task = config.task
    source = Path(config.adapter or config.before or "runs/base")
    out = Path(config.output_dir or f"{source}-eval-{task.rpartition(':')[2]}")
    config = replace(config, output_dir=str(out))
    _lock = lock_directory(out)                                         # until main returns

    @functools.cache
    def load():
        """The (model, tokenizer), with R_φ as adapter "reward"."""
        model, tokenizer = load_model(config.model, config.dtype)
        if config.reward_model:
            load_lora(model, "reward", config.reward_model)
        return model, tokenizer

    measure = BENCHMARKS.get(task) or functools.partial(policy, rows=task_rows(config, load))
    sides = sides_of(config, load)
    rows = {}
    counts = {}
    for side in sides:
        print(f"{side.name}: {side.source or 'no adapter'}, the base {config.model}")
        rows[side.name], counts[side.name] = measure(side)
    field = "reply" if task == "reward_model" else "response"
    if len(sides) == 2 and config.judge_model and (field == "reply" or task not in BENCHMARKS):
        old, new = (column(rows[side.name], field) for side in sides)
        counts["after"] |= ask_wins(sides[1], rows["after"], new, old, field)  # Fig. 3, Tab. 1
    for side in sides:
        write_rows(out / f"{side.name}.jsonl", rows[side.name])
    # A task does not say whether more or less is better in its own measures: no arrow.
    truth = {} if task in BENCHMARKS else get_task(task).truth
    lines = table_lines(counts, dict.fromkeys(truth, ("", share)) | UNITS)
    result = {"config": asdict(config), "figures": lines, "counts": counts}
    write_rows(out / "result.json", [result])
    print(table(*cells(lines)) if lines else "no metrics")
    print(f"↑ higher is better, ↓ lower is better; in brackets: 95 % bootstrap intervals\n"
          f"{out}/ has result.json, with the counts of each row, and the rows of each side")


if __name__ == "__main__":
    run_script(main, "eval", SafetensorError)
