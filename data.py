"""Rows, tasks and flags: what the phases know of a data set before any model is loaded.

    rows = read_rows("slf5k.jsonl", get_task("slf5k").needs)
    prompt = get_task("slf5k").policy_prompt(rows[0])                # x

A task of your own is a `Task` in a module of your own: `--task my_task:HEADLINES`.

Paper: Appendix B for what the annotator is told, §4.1 for the data sets, §3.4 for what R_φ
reads. Every sentence of the prompts is our own. Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import codecs
import gzip
import importlib
import json
import os
import re
import sys
import typing
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Callable, Iterable, Iterator


class InputError(ValueError):
    """What the user gave cannot be used; one line with the file, the row and the remedy."""


class ModelError(InputError):
    """A model, adapter, checkpoint or prompt that cannot be used; names it and the remedy."""


def public(text: str) -> str:
    """The text without the user, password and query of any address in it."""
    return re.sub(r"(://[^\s?#]*)[?#]\S+", r"\1?…", re.sub(r"://\S*@", "://…@", text))


# ── Tasks: how a row becomes a prompt

@dataclass(frozen=True)
class Task:
    """What the pipeline must know of a data set; all but the first two have a default."""
    name: str
    policy_prompt: Callable[[dict], str]                     # row → x
    needs: tuple[tuple[str, ...], ...] = ()                  # a row has one of each group
    responses: Callable[[dict], list[dict]] = lambda row: []    # the answers that a row brings
    # What the annotator is told: who it is, what it looks for, how many spans it quotes.
    judge: str = "You are a careful expert who reviews answers."
    criteria: str = "whether the answer is correct, helpful and does what was asked"
    quotes: str = "Quote as many spans as the critique supports."
    temperature: float = 0.3                                 # of the annotator
    max_tokens: int = 1200                                   # of its reply
    # A request and a response of its kind, and what to reply: it is shown to the annotator.
    example: dict[str, str | list[str]] = field(default_factory=dict)
    # Settings of text2grad.py and of reward_model.py that are not the paper's common ones.
    policy: dict = field(default_factory=dict)
    reward: dict = field(default_factory=dict)
    # Where the truth is known: name → (row, response) → number; no critic looks at it.
    truth: dict[str, Callable[[dict, str], float]] = field(default_factory=dict)
    # row → the program that tests its response; what it says is the row's field `outcome`.
    tests: Callable[[dict], str] | None = None
    # (split, n, seed) → rows, for a world that makes its own; splits are "train" and "eval".
    rows: Callable[[str, int, int], list[dict]] | None = None


def _slf5k_prompt(row: dict) -> str:
    if not row.get("post"):
        return row["summary_prompt"].strip()
    title = f"Title: {row['title']}\n\n" if row.get("title") else ""
    return ("Summarise this Reddit post in one or two sentences, in the third person.\n\n"
            f"{title}Post: {row['post']}")


def _ultrafeedback_responses(row: dict) -> list[dict]:
    sides = [row[side] for side in ("chosen", "rejected") if row.get(side)]
    return [{"response": turns[-1]["content"]} for turns in sides]


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
        lambda row: [{"response": text}] if (text := row.get(SLF5K_RESPONSE)) else [],
        "You are an experienced editor who reviews summaries of Reddit posts.",
        "whether the summary keeps what matters in the post, invents nothing, and is clear "
        "and short",
        "Quote at most two good and at most two poor spans, each a few words long.",
        example=_SLF5K_EXAMPLE),
    "ultrafeedback": Task(
        "ultrafeedback", lambda row: row["prompt"], (("prompt",),), _ultrafeedback_responses,
        "You are a careful expert who reviews answers to people's questions.",
        "whether the answer is correct, helpful, complete, follows the instructions and is "
        "honest about doubt",
        temperature=0.6, example=_ULTRAFEEDBACK_EXAMPLE),
    "kodcode": Task(
        "kodcode", lambda row: f"{row['question'].strip()}\n\nAnswer with Python code only.",
        (("question",), ("test", "test_code")), _kodcode_responses,
        "You are a senior Python engineer who reviews solutions to programming problems.",
        "whether the code solves the problem for every input, where it fails, where it is "
        "needlessly slow or unclear",
        "Quote lines or expressions: good spans are code that must stay, poor spans code that "
        "should change.", temperature=0.1, max_tokens=968, example=_KODCODE_EXAMPLE,
        tests=lambda row: row.get("test_code") or row["test"]),
}


def get_task(name: str) -> Task:
    """A task by its name, or as "module:NAME"; "toy" is toy:TASK, made just so."""
    if name in TASKS:
        return TASKS[name]
    if name != "toy" and ":" not in name:
        raise InputError(f"--task {name}: there are toy, {', '.join(TASKS)}, and module:NAME "
                         f"for a Task of your own")
    return load_object("--task", "toy:TASK" if name == "toy" else name, Task)


def reward_prompt(prompt: str, response: str) -> str:
    """The instruction to R_φ: judge the response to this prompt (§3.4)."""
    return f"{prompt}\n\nResponse: {response}\n\nJudge the response."


def examples(task: Task, rows: Iterable[dict]) -> Iterator[dict]:
    """{id, prompt, response, row, …} for every response of the rows; their own `response` wins.

    outcome: what its tests said; critique: what a person said of it; reference: a good answer;
    each where the row has it. Raises InputError for a row of another form or an empty response.
    """
    for number, row in enumerate(rows, 1):
        name = str(row.get("id") or row.get("prompt_id") or row.get("question_id") or number)
        try:
            own = [{"response": row["response"]}] if "response" in row else None
            found = task.responses(row) if own is None else own
            prompt = task.policy_prompt(row)
        except (AttributeError, LookupError, TypeError) as error:
            raise InputError(f"row {number} ({name}) is not of the form of {task.name} "
                             f"({type(error).__name__}: {error}); mend or drop it") from error
        keys = {"critique": ("critique", "feedback"), "outcome": ("outcome",),
                "reference": ("reference", "ideal_human_summary", "solution")}
        said = {name: next(filter(None, map(row.get, names)), None)
                for name, names in keys.items()}
        said = {name: x for name, x in said.items() if isinstance(x, str) and x.strip()}
        for k, answer in enumerate(found):
            if not isinstance(answer["response"], str) or not answer["response"].strip():
                raise InputError(f"row {number} ({name}): the response is empty; drop the row")
            yield {"id": name if len(found) == 1 else f"{name}/{k}", "prompt": prompt,
                   **said, **answer, "row": row}


# ── Rows: JSON lines or a JSON array, plain or gzipped

def iter_rows(path, needs=()) -> Iterator[dict]:
    """The rows of a file, one at a time; each must have one field of every group in `needs`.

    Raises InputError with file, line and field.
    """
    path, n = Path(path), 0
    if not path.is_file():
        raise InputError(f"{path}: no such file (rows are read as JSON lines)")
    for n, (where, row) in enumerate(_objects(path), 1):
        if not isinstance(row, dict):
            raise InputError(f"{where}: expected a JSON object, found a {type(row).__name__}")
        for group in needs:
            if all(row.get(name) in (None, "", [], {}) for name in group):
                names = " or ".join(map(repr, group))
                raise InputError(f"{where}: field {names} is missing or empty")
        yield row
    if n == 0:
        raise InputError(f"{path}: the file holds no rows; bring them back, or remove it")


def _objects(path: Path) -> Iterator[tuple[str, object]]:
    """(place in the file, JSON value) of every line, or of every item of an array."""
    def parse(text: bytes, where: str):
        try:
            return json.loads(text.decode("utf-8-sig"))       # with a byte order mark or not
        except (ValueError, RecursionError) as error:     # not UTF-8, not JSON, or far too deep
            raise InputError(f"{where}: not JSON in UTF-8 ({error}); mend it, or remove "
                             f"it") from error

    with open(path, "rb") as raw:
        opened = gzip.open if raw.read(2) == b"\x1f\x8b" else open
    try:
        with opened(path, "rb") as file:
            array = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
            file.seek(0)
            if array:
                for number, row in enumerate(parse(file.read(), str(path)), 1):
                    yield f"{path}, row {number}", row
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield (where := f"{path}, line {number}"), parse(line, where)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: the gzipped file is damaged ({error})") from error


def read_rows(path, needs=()) -> list[dict]:
    """All rows at once; see `iter_rows`."""
    return list(iter_rows(path, needs))


def write_rows(path, rows: Iterable[dict]):
    """Write JSON lines, whole or not at all: where `rows` raises, nothing is written."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_row(path, row: dict):
    """Append one JSON line that stays, also where the machine stops."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def whole_rows(path: Path) -> list[dict]:
    """The rows of a file to which lines are appended, less those that a kill has torn."""
    rows = []
    lines = path.read_bytes().splitlines(True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            # One without its end is torn.
            rows.append(dict(json.loads(line[:-1].decode("utf-8-sig"))))
        except (ValueError, TypeError) as error:
            print(f"{path}, line {number}: left out, it is damaged ({error})")
    return rows


def chunks(rows, size: int) -> list:
    """Consecutive parts of at most `size` rows."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


# ── Flags and scripts

DTYPES = ("bfloat16", "float16", "float32", None)


def flag(default, text: str, choices=None, least=0, most=10**6):
    """A dataclass field that is a command-line flag: its help, its choices or its range."""
    return field(default=default, metadata={"help": text, "choices": choices,
                                            "range": (least, most)})


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, as for everything else a user can mend."""
        raise InputError(f"{message} (--help lists the flags)")


def _reader(kind: type, least, most, optional: bool) -> Callable[[str], object]:
    """Text → value of a flag; argparse names the flag where it raises."""
    def read(text: str):
        if optional and text.lower() == "none":
            return None
        value = kind(text)
        if kind is not str and not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least:g} and at "
                                             f"most {most:g}")
        return value
    read.__name__ = kind.__name__
    return read


def parse_flags(config_class, argv: list[str], description: str, preset=lambda task: {}):
    """Command line → config. preset(task): the defaults that --task brings; flags override.

    GROUPS of the config class, {field: title}, starts a group in --help before that field.
    """
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--task", default=getattr(config_class, "task", ""))
    task = first.parse_known_args(argv)[0].task
    defaults = preset(task)
    if unknown := defaults.keys() - {one.name for one in fields(config_class)}:
        raise InputError(f"--task {task}: its settings name {min(unknown)}, which is no flag")
    group = parser = _Parser(description=description.split("\n")[0], allow_abbrev=False,
                             usage="%(prog)s [--flag value ...]",
                             formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    types = typing.get_type_hints(config_class)
    for one in fields(config_class):
        if title := getattr(config_class, "GROUPS", {}).get(one.name):
            group = parser.add_argument_group(title)
        kinds = typing.get_args(types[one.name]) or (types[one.name],)
        how = {"action": "store_true"} if kinds == (bool,) else {
            "type": _reader(kinds[0], *one.metadata["range"], type(None) in kinds),
            "choices": one.metadata["choices"], "metavar": kinds[0].__name__}
        group.add_argument(f"--{one.name}", help=one.metadata["help"],
                           default=defaults.get(one.name, one.default), **how)
    return config_class(**vars(parser.parse_args(argv)))


def load_object(flag_name: str, name: str, kind=object):
    """What a flag names as "module:NAME", of a kind. Raises InputError where it is none."""
    module, _, attribute = name.partition(":")
    sys.path[:0] = [] if os.getcwd() in sys.path else [os.getcwd()]
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError,
            NameError) as error:
        raise InputError(f"{flag_name} {name}: cannot import it ({error}); it is written "
                         f"module:NAME, of a file here or on PYTHONPATH") from error
    if not isinstance(found, kind):
        raise InputError(f"{flag_name} {name}: that is a {type(found).__name__}, not a "
                         f"{kind.__name__}")
    return found


def run_script(main: Callable, program: str, *errors: type[Exception]):
    """Run a main; what the user can mend (InputError, OSError, `errors`) ends as one line."""
    try:
        main()
    except (InputError, OSError, *errors) as error:
        sys.exit(f"{program}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(f"{program}: stopped; the same command goes on from what is done")
