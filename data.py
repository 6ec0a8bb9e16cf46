"""Rows, tasks and their prompts. This part of the pipeline needs no model.

    rows = read_rows("slf5k.jsonl", get_task("slf5k").needs)
    prompt = get_task("slf5k").policy_prompt(rows[0])                # x

To add a task, define a `Task`, such as HEADLINES in my_task.py. Then pass
`--task my_task:HEADLINES`.

Paper: Appendix B for the annotator's prompt, §4.1 for the data sets, §3.4 for the input of
R_φ. The words that prompts add to the texts of a data set are ours. This file does not import
torch.
"""

import gzip
import hashlib
import inspect
import json
import os
import pkgutil
import random
import re
import shlex
import subprocess
import sys
import traceback
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Callable, Iterable, Iterator

try:
    import fcntl
except ImportError:                                      # Windows
    import msvcrt
    fcntl = None


class InputError(ValueError):
    """An error that a user can mend. The message says what is wrong, and often what to do."""


# ── Tasks: how a row becomes a prompt

@dataclass(frozen=True)
class Task:
    """A data set: its prompts, fields and texts for the annotator.

    Only `name` and `policy_prompt` have no default.
    """
    name: str
    policy_prompt: Callable[[dict], str | list[dict]]        # row → x, a text or chat messages
    # Fields that each row needs. Of the names in a tuple, a row needs at least one.
    needs: tuple[str | tuple[str, ...], ...] = ()
    responses: Callable[[dict], list[dict]] = lambda row: []    # responses stored in a row
    # For the annotator: its role, its criteria and the number of spans to quote.
    annotator_role: str = "You are a careful expert who reviews answers."
    criteria: str = "whether the answer is correct, helpful and does what was asked"
    quotes: str = "Quote as many spans as the critique supports."
    temperature: float = 0.3                                 # of the annotator
    max_tokens: int = 1200                                   # of the annotator's reply
    # A worked example for the annotator: a request, a response and the correct reply.
    example: dict = field(default_factory=dict)
    # Flags of settings.py that have another default for this task.
    settings: dict = field(default_factory=dict)
    # Metrics from ground truth: name → function (row, response) → number. No reward uses them.
    truth: dict[str, Callable[[dict, str], float]] = field(default_factory=dict)
    # In phase 3, a good quote may occur at more places than it was quoted. Its first places are
    # good. Its further places are poor, so that the policy does not repeat what was praised.
    repeats_are_poor: bool = False
    # row → program that tests its response. The row then gets the result as `outcome`.
    tests: Callable[[dict], str] | None = None
    # (split, n, seed) → rows, for a task that generates them; splits: "train" and "eval".
    rows: Callable[[str, int, int], list[dict]] | None = None

    def all_responses(self, row: dict) -> list[dict]:
        """The field `response` of a row; its stored responses if that is missing or null."""
        response = row.get("response")
        return self.responses(row) if response is None else [{"response": response}]

    def check(self, row: dict, place: str):
        """Raise InputError where a row does not fit the task. place: its file and line."""
        try:
            if not is_prompt(self.policy_prompt(row)):
                raise TypeError("the prompt is not a text or a list of chat messages")
            for response in self.all_responses(row):
                if not isinstance(response["response"], str):
                    raise TypeError("the response is not a text")
        except Exception as error:                  # functions of a task may raise anything
            raise InputError(f"{place}: the row does not fit the task {self.name} "
                             f"({error_text(error)}); fix or drop it: "
                             f"{json.dumps(row):.300}") from error


def _slf5k_prompt(row: dict) -> str:
    if not row.get("post"):
        return row["summary_prompt"].strip()
    title = "Title: " + row["title"] + "\n\n" if row.get("title") else ""
    return ("Summarise this Reddit post in one or two sentences, in the third person.\n\n"
            + title + "Post: " + row["post"])               # + raises TypeError without a text


def _ultrafeedback_responses(row: dict) -> list[dict]:
    return [{"response": row[side][-1]["content"]} for side in ("chosen", "rejected")
            if row.get(side)]


def _kodcode_responses(row: dict) -> list[dict]:
    return [{"response": trial["solution_code"],
             "outcome": f"Recorded test result: {trial['test_result']}."}
            for trial in (row.get("trials") or {}).values()]


SLF5K_RESPONSE = "generated_summary_for_feedback"
_SLF5K_EXAMPLE = {
    "request": "Summarise: My sister borrowed my car in May, dented the door and hid it until "
               "June. I want her to pay, our parents say to let it go.",
    "response": "A woman dented her own car. Her sister should pay, but the parents disagree.",
    "reasoning": "The sister made the dent, in a borrowed car, so the first sentence has it "
                 "wrong. The second holds what is fought about. That she hid it is missing.",
    "textual_feedback": "The conflict is well put in a few words. But the sister dented the "
                        "car, which she had borrowed, and that she hid it is left out.",
    "good_spans": ["Her sister should pay"], "poor_spans": ["dented her own car"]}
_ULTRAFEEDBACK_EXAMPLE = {
    "request": "Name two planets larger than Earth, and say how you know.",
    "response": "Jupiter and Mars are larger. Their radii were measured by telescope.",
    "reasoning": "Jupiter has eleven times Earth's radius. Mars has about half of it. How it "
                 "is known is said, if briefly.",
    "textual_feedback": "Jupiter is right, and the method is named. Mars is smaller than "
                        "Earth.",
    "good_spans": ["measured by telescope"], "poor_spans": ["Mars"]}
_KODCODE_EXAMPLE = {
    "request": "Write mean(xs), the mean of a list, or 0 where it is empty.",
    "response": "def mean(xs):\n    total = sum(xs)\n    return total / len(xs)",
    "reasoning": "The sum is right. For an empty list the last line divides by zero.",
    "textual_feedback": "The total is computed well; the empty list is not looked at.",
    "good_spans": ["total = sum(xs)"], "poor_spans": ["return total / len(xs)"]}
TASKS = {
    "slf5k": Task(
        "slf5k", _slf5k_prompt, (("summary_prompt", "post"),),
        lambda row: [{"response": row[SLF5K_RESPONSE]}] if row.get(SLF5K_RESPONSE) else [],
        "You are an experienced editor who reviews summaries of Reddit posts.",
        "whether the summary keeps what matters in the post, invents nothing, and is clear "
        "and short",
        "Quote at most two good and at most two poor spans, each a few words long.",
        example=_SLF5K_EXAMPLE),
    "ultrafeedback": Task(
        "ultrafeedback", lambda row: row["prompt"], ("prompt",), _ultrafeedback_responses,
        "You are a careful expert who reviews answers to people's questions.",
        "whether the answer is correct, helpful, complete, follows the instructions and is "
        "honest about doubt",
        temperature=0.6, example=_ULTRAFEEDBACK_EXAMPLE),
    "kodcode": Task(
        "kodcode", lambda row: f"{row['question'].strip()}\n\nAnswer with Python code only.",
        ("question", ("test", "test_code")), _kodcode_responses,
        "You are a senior Python engineer who reviews solutions to programming problems.",
        "whether the code solves the problem for every input, where it fails, where it is "
        "needlessly slow or unclear",
        "Quote lines or expressions: good spans are code that must stay, poor spans code that "
        "should change.", temperature=0.1, max_tokens=968, example=_KODCODE_EXAMPLE,
        tests=lambda row: row.get("test_code") or row["test"]),
}


def _feedback_prompt(row: dict) -> str:
    """x of a row of feedback.jsonl. Raises TypeError if a field has anything but text."""
    "".join(row["good_spans"] + row["poor_spans"] + [row["critique"], row["prompt"]])
    return row["prompt"]


# The rows of feedback.jsonl; their lists of spans may be empty.
FEEDBACK = Task("feedback", _feedback_prompt,
                ("id", "prompt", "response", "critique", "good_spans", "poor_spans"))


def get_task(name: str) -> Task:
    """A task by its name, or by "module:NAME"; "toy" stands for toy:TASK."""
    return load_object("--task", "toy:TASK" if name == "toy" else name, Task,
                       TASKS | {"toy": None})


def critique_prompt(prompt: str, response: str) -> str:
    """The instruction to R_φ: write a critique of the response to this prompt (§3.4)."""
    return f"{prompt}\n\nResponse: {response}\n\nJudge the response."


def is_prompt(value) -> bool:
    """Whether a value is a prompt: a text, or chat messages with `role` and `content`."""
    if isinstance(value, str):
        return True
    return bool(value) and all(message["role"] in ("system", "user", "assistant")
                               and isinstance(message["content"], str) for message in value)


def prompt_text(prompt: str | list[dict]) -> str:
    """A prompt as one text, for the annotator, R_φ and people."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


REFERENCES = "reference", "ideal_human_summary", "solution", "4o_solution"
# Optional field of an example → the fields of a row that may hold it. The first text is taken.
OPTIONAL = {"critique": ("critique", "feedback"), "outcome": ("outcome",),
            "reference": REFERENCES}
IDS = "id", "task_id", "question_id", "prompt_id"             # fields that may hold a row's id


def row_id(row: dict, number: int) -> str:
    """The id of a row: its first field out of IDS, or else its number."""
    return str(next((row[name] for name in IDS if row.get(name) is not None), number))


def examples(task: Task, rows: Iterable[dict]) -> Iterator[dict]:
    """Yield an example {id, prompt, response, row, …} for each response of each row.

    Optional fields: outcome (of the tests), critique (by a person), reference (a good
    response). The rows must fit the task, see `Task.check`.
    """
    for number, row in enumerate(rows, 1):
        name = row_id(row, number)
        responses = task.all_responses(row)
        texts = {key: row[field] for key, names in OPTIONAL.items()
                 for field in reversed(names)
                 if isinstance(row.get(field), str) and row[field].strip()}
        for k, response in enumerate(responses):
            yield {"id": name if len(responses) == 1 else f"{name}/{k}",
                   "prompt": prompt_text(task.policy_prompt(row)), **texts, **response,
                   "row": row}


# ── Rows: JSON lines or a JSON array; gzipped if the name ends with .gz

def read_rows(path, needs=(), task: Task | None = None) -> list[dict]:
    """The rows of a file, checked to fit the task.

    needs: see `Task.needs`. A field that is None or "" counts as missing. Raises InputError,
    with the file and, if known, the line, if the rows cannot be used.
    """
    path = Path(path)
    place = str(path)
    rows = []                                            # (place in the file, row)
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        with open_text(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
        if text.lstrip().startswith("["):
            rows = [(f"{path}, row {number}", row)
                    for number, row in enumerate(json.loads(text), 1)]
        else:
            for number, line in enumerate(text.split("\n"), 1):
                place = f"{path}, line {number}"
                if line.strip():
                    rows.append((place, json.loads(line)))
        for place, row in rows:
            json.dumps(row, ensure_ascii=False).encode()       # refuses half surrogate pairs
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing; check the path") from error
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise InputError(f"{place}: not rows of JSON in UTF-8 ({error}); check the path, or "
                         f"fix the row. The package datasets converts other formats: "
                         f"load_dataset or load_from_disk, then .to_json") from error
    for place, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected a JSON object, found a {type(row).__name__}")
        for needed in (*needs, *(task.needs if task else ())):
            names = [needed] if isinstance(needed, str) else needed
            if all(row.get(name) in (None, "") for name in names):
                raise InputError(f"{place}: field {' or '.join(map(repr, names))} is missing "
                                 f"or empty")
        if task:
            task.check(row, place)
    if not rows:
        raise InputError(f"{path}: the file has no rows; restore it or remove it")
    return [row for _, row in rows]


def load_rows(task: Task, config) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) (§4.1). --data is split so that they share no prompt.

    config: a settings.Config. The seed shuffles the rows of --data. Without --data, the task
    makes both parts. Raises InputError if a row does not fit the task, or if no rows are given.
    """
    if config.data:
        rows = read_rows(config.data, task=task)
        shuffled = random.Random(config.seed).sample(rows, len(rows))
        return split_rows(shuffled, config.eval_rows, config.seed, task.policy_prompt)
    if task.rows is None:
        raise InputError(f"--task {config.task} needs --data rows.jsonl")
    training = task.rows("train", config.annotated_rows, config.seed)
    return training, task.rows("eval", config.eval_rows, 0)


def split_rows(rows: list[dict], held_out: int, seed: int, prompt_of
               ) -> tuple[list[dict], list[dict]]:
    """Split rows into (training rows, held-out rows) by their prompts (§4.1).

    All rows of a prompt are in the same part, and both parts keep the order of `rows`.
    held_out: number of held-out prompts. It is reduced to a tenth of all prompts, or to one if
    there are fewer than ten. A single prompt is not held out. prompt_of(row): the prompt.
    """
    prompts = sorted({str(prompt_of(row)) for row in rows})
    random.Random(seed).shuffle(prompts)
    count = min(held_out, max(1, len(prompts) // 10), len(prompts) - 1)
    held_out_prompts = set(prompts[:count])
    parts = [], []
    for row in rows:
        is_held_out = str(prompt_of(row)) in held_out_prompts
        parts[is_held_out].append(row)
    return parts


@contextmanager
def atomic_file(path):
    """Yield a temporary path. After the block, its file is flushed to disk and becomes `path`.

    If the block raises, `path` stays as it was. If `path` is a symbolic link, the link stays,
    and the file that it names is replaced. Raises InputError if the path exists and is no
    regular file, such as /dev/null.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file; name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    try:
        yield temporary
        with open(temporary, "r+b") as file:     # Windows refuses fsync of a read-only file
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:              # it has no file name if the disk is full
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_rows(path, rows: Iterable[dict]):
    """Write JSON lines atomically: if `rows` raises, the file stays as it was."""
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_row(path, row: dict):
    """Append one JSON line and flush it to the disk, so that it survives a crash."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def iterate_log(path: Path, check) -> Iterator[dict]:
    """Yield the valid rows of a file of JSON lines, such as `append_row` writes.

    A line is skipped with a message if a crash cut it off, if it is no JSON object, or if
    check(row) raises ValueError, TypeError or LookupError.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                # [:-1] removes the newline. A line without one was cut off: it loses its last
                # character, so that it is no JSON object.
                row = json.loads(line[:-1])
                if not isinstance(row, dict):
                    raise TypeError("no JSON object")
                check(row)
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                print(f"{path}, line {number}: skipping corrupt line ({error!r})")
            else:
                yield row


def read_log(path: Path, check=bool) -> list[dict]:
    """The rows of a file, see `iterate_log`; [] if the file does not exist."""
    return list(iterate_log(path, check)) if path.exists() else []


def checksum(*paths: Path, state=None) -> str:
    """The sha256 of files and of a JSON value."""
    digest = hashlib.sha256(json.dumps(state).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def lock(file, place: Path):
    """Lock an open file until it is closed, so that only one process writes to `place`.

    place: the path that an error message shows. Raises InputError if another process has the
    lock.
    """
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:               # far behind the end, as others cannot read a locked byte
            file.seek(1 << 30)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError) as error:
        raise InputError(f"{place}: another process is writing to it; wait for it to end, or "
                         f"choose another output") from error


def chunks(rows, size: int) -> list:
    """Consecutive parts of at most `size` rows."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


# ── Scripts

def load_object(flag_name: str, name: str, expected_type=object, choices=()):
    """The object that a flag names: an entry of `choices`, or the object NAME of "module:NAME".

    Raises InputError if it is missing or has another type.
    """
    if name in choices:
        return choices[name]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())         # last, so that no file there replaces a package
    try:
        value = pkgutil.resolve_name(name)
    except Exception as error:                           # the module may raise anything
        module, _, attribute = name.partition(":")
        known = [*choices, *vars(sys.modules.get(module, pkgutil))]
        near = get_close_matches(attribute or name, known) or ["nothing"]
        names = ", ".join([*choices, "a module in this directory or on PYTHONPATH"])
        raise InputError(f"{flag_name} {name}: cannot import it ({error_text(error)}); "
                         f"similar: {near[0]}; use module:NAME, or one of: {names}") from error
    if not isinstance(value, expected_type):
        raise InputError(f"{flag_name} {name}: expected a {expected_type.__name__}, found a "
                         f"{type(value).__name__}")
    return value


# The scripts of this project. They are no part of a user's function, even if the function
# imports them: config.json records their version as `commit`.
SCRIPTS = {Path(__file__).with_name(f"{name}.py") for name in (
    "annotate ask data eval model policy report reward_model runtime sample sampling settings "
    "text2grad tiny").split()}


def one_line(text: str) -> str:
    """The text as a part of a message: one line of at most 500 characters."""
    return " ".join(text.split())[:500]


def error_text(error: BaseException) -> str:
    """The error in one line, with the last file and line of the user's code that it passed.

    Frames of this project's scripts, of the standard library and of packages do not count.
    """
    places = [f" ({frame.filename}, line {frame.lineno})"
              for frame in traceback.extract_tb(error.__traceback__)
              if Path(frame.filename) not in SCRIPTS
              and "-packages" not in frame.filename
              and not frame.filename.startswith(("<frozen", os.path.dirname(os.__file__)))]
    return one_line(f"{type(error).__name__}: {error}") + "".join(places[-1:])


@cache
def imported_files(path: str) -> list[str]:
    """A Python file, and the files in its directory that it imports, but not SCRIPTS.

    Imports of imported files count, too.
    """
    finder = ModuleFinder([os.path.dirname(path)])
    finder.run_script(path)
    files = {module.__file__ for module in finder.modules.values() if module.__file__}
    return [path, *sorted(files - {path, *map(str, SCRIPTS)})]


def source_hashes(name: str, function: Callable) -> dict[str, str]:
    """{file: `checksum`} of the source of the function "module:NAME".

    The first file is that of the module. The others are its `imported_files`. A module without
    a file, such as a notebook, has one entry: the checksum of the function's own source.
    """
    path = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    if not path:
        return {name: checksum(state=inspect.getsource(function))}
    return {os.path.relpath(file, os.path.dirname(path)): checksum(file)
            for file in imported_files(path)}


def next_command(script: str, **flags) -> str:
    """A line with the command that runs another script. A flag that is None is left out."""
    path = Path(__file__).with_name(script)
    words = ["python", script if path.parent == Path.cwd() else str(path)]
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    return f"next: {subprocess.list2cmdline(words) if os.name == 'nt' else shlex.join(words)}"


def git(*words: str) -> str:
    """The output of a git command on this project; "" without git or without a repository."""
    with suppress(OSError):                              # there is no git
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, text=True,
                              capture_output=True).stdout.strip()
    return ""


def run_script(main: Callable, program: str, *errors: type[Exception]):
    """Run `main`; report the errors that a user can mend in one line, without a traceback.

    These are InputError, `errors`, OSError, a lack of memory, and Ctrl-C. The line goes to
    stderr. The output is UTF-8, because old locales lack φ and the lines of tables.
    """
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        main()
    except (InputError, OSError, MemoryError, RuntimeError, *errors) as error:
        message = str(error)
        if re.search("(?i)out of memory|allocate memory|^MemoryError", repr(error)):
            message = (f"out of memory ({message}): lower --micro_batch_tokens (training) or "
                       f"--decode_batch_size (texts), or set --activation_checkpointing or "
                       f"--shard, and run the same command to continue")
        elif isinstance(error, OSError):
            message += "; check the path, your permissions, and the disk's free space and locks"
        elif not isinstance(error, (InputError, *errors)):
            raise
        sys.exit(f"{program}: {' '.join(message.split())}")
    except KeyboardInterrupt:
        sys.exit(f"{program}: interrupted; run the same command again to resume")
