"""Rows, tasks and flags: the parts of the pipeline that need no model.

    rows = read_rows("slf5k.jsonl", get_task("slf5k").needs)
    prompt = get_task("slf5k").policy_prompt(rows[0])                # x

To add a task, define a `Task` in a module and pass it as `--task my_task:HEADLINES`.

Paper: Appendix B for the annotator's prompt, §4.1 for the data sets, §3.4 for the input of
R_φ. The wording of all prompts is ours. Nothing here imports torch.
"""

import argparse
import fcntl
import gzip
import hashlib
import importlib
import json
import os
import re
import shlex
import sys
import zlib
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Callable, Iterable, Iterator, get_args


class InputError(ValueError):
    """An input cannot be used. The message is one line with the file, the row and a remedy."""


class ModelError(InputError):
    """A model, adapter, checkpoint or prompt cannot be used. The message adds a remedy."""


def hide_key(text: str) -> str:
    """The text without the API key. A key of letters only stays: "none" is a usual word."""
    key = os.environ.get("OPENAI_API_KEY", "")
    return text if key.isalpha() or len(key) < 8 else text.replace(key, "…")


def printable(text: str) -> str:
    """The text with spaces for the characters that a terminal obeys (ESC, CR, …)."""
    return re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", " ", text)


def public(text: str) -> str:
    """The printable text without the API key, and without users, passwords and queries in
    URLs."""
    # The limits bound the time for texts of any length.
    text = re.sub(r"(\w{1,20}://|\b\w{1,20}:)\S{,300}@", r"\1…@", hide_key(text))
    return printable(re.sub(r"(://[^\s?#]{,200}+)[?#]\S+", r"\1?…", text))


# ── Tasks: how a row becomes a prompt

@dataclass(frozen=True)
class Task:
    """A data set: its prompts, fields and annotator texts; the first two have no default."""
    name: str
    policy_prompt: Callable[[dict], str | list[dict]]        # row → x, a text or chat messages
    # Fields that each row needs. A tuple among them holds alternatives, one of which is needed.
    needs: tuple[str | tuple[str, ...], ...] = ()
    responses: Callable[[dict], list[dict]] = lambda row: []    # responses stored in a row
    # For the annotator: its role, its criteria and the number of spans to quote.
    judge: str = "You are a careful expert who reviews answers."
    criteria: str = "whether the answer is correct, helpful and does what was asked"
    quotes: str = "Quote as many spans as the critique supports."
    temperature: float = 0.3                                 # of the annotator
    max_tokens: int = 1200                                   # of the annotator's reply
    # A worked example for the annotator: a request, a response and the correct reply.
    example: dict = field(default_factory=dict)
    # Settings of text2grad.py and reward_model.py that differ from the paper's common ones.
    policy: dict = field(default_factory=dict)
    reward: dict = field(default_factory=dict)
    # Metrics from ground truth: name → (row, response) → number. No critic sees them.
    truth: dict[str, Callable[[dict, str], float]] = field(default_factory=dict)
    # In phase 3, a good quote that occurs several times is good only at its first place. The
    # others are poor, so that the policy does not repeat what was praised.
    repeats_are_poor: bool = False
    # row → program that tests its response; its output is stored in the row as `outcome`.
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
                             f"({type(error).__name__}: {error}); fix or drop it: "
                             f"{json.dumps(row):.300}") from error


def _slf5k_prompt(row: dict) -> str:
    if not row.get("post"):
        return row["summary_prompt"].strip()
    title = f"Title: {row['title']}\n\n" if row.get("title") else ""
    return ("Summarise this Reddit post in one or two sentences, in the third person.\n\n"
            f"{title}Post: {row['post']}")


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
# policy and reward: the release's settings that differ between its tasks (for Tables 9 and 10).
# max_prompt_tokens: the longest prompts of the released R_φ, which also had to fit y.
TASKS = {
    "slf5k": Task(
        "slf5k", _slf5k_prompt, (("summary_prompt", "post"),),
        lambda row: [{"response": row[SLF5K_RESPONSE]}] if row.get(SLF5K_RESPONSE) else [],
        "You are an experienced editor who reviews summaries of Reddit posts.",
        "whether the summary keeps what matters in the post, invents nothing, and is clear "
        "and short",
        "Quote at most two good and at most two poor spans, each a few words long.",
        example=_SLF5K_EXAMPLE,
        policy={"batch_size": 12, "minibatch_size": 12, "schedule": "linear", "kl_coef": 0.2,
                "kl_target": 6.0, "max_new_tokens": 89, "max_critique_tokens": 500,
                "annotated_rows": 5000, "max_prompt_tokens": 811},
        reward={"lora_dropout": 0.05, "max_tokens": 1400, "max_critique_tokens": 500}),
    "ultrafeedback": Task(
        "ultrafeedback", lambda row: row["prompt"], ("prompt",), _ultrafeedback_responses,
        "You are a careful expert who reviews answers to people's questions.",
        "whether the answer is correct, helpful, complete, follows the instructions and is "
        "honest about doubt",
        temperature=0.6, example=_ULTRAFEEDBACK_EXAMPLE, policy={"max_prompt_tokens": 438}),
    "kodcode": Task(
        "kodcode", lambda row: f"{row['question'].strip()}\n\nAnswer with Python code only.",
        ("question", ("test", "test_code")), _kodcode_responses,
        "You are a senior Python engineer who reviews solutions to programming problems.",
        "whether the code solves the problem for every input, where it fails, where it is "
        "needlessly slow or unclear",
        "Quote lines or expressions: good spans are code that must stay, poor spans code that "
        "should change.", temperature=0.1, max_tokens=968, example=_KODCODE_EXAMPLE,
        policy={"max_new_tokens": 256, "learning_rate": 5e-7, "kl_coef": 0.07,
                "kl_target": 1.0, "max_prompt_tokens": 644},
        reward={"learning_rate": 2e-5, "weight_decay": 0.01,
                "lora_targets": "q_proj,k_proj,v_proj,o_proj"},
        tests=lambda row: row.get("test_code") or row["test"]),
}


# Settings of text2grad.py ("policy") and reward_model.py ("reward") that replace the defaults,
# which suit the toy world. RELEASE: common values of the release's command lines (Tables 9 and
# 10). Its DeepSpeed file replaces some of them, see PAPER.md.
RELEASE = {  # Table 9, Table 10
    "policy": dict(
        model="meta-llama/Llama-3.1-8B-Instruct", annotator_function=None, annotated_rows=10000,
        iterations=None, learning_rate=1e-6, schedule="cosine", value_learning_rate=None,
        value_clip=0.2, temperature=0.6, max_new_tokens=512, max_critique_tokens=768,
        kl_coef=0.05, kl_target=3.0, kl_horizon=10_000, micro_batch_size=1,
        rollout_batch_size=64, eval_rows=64, probe_rows=0),
    "reward": dict(
        model="meta-llama/Llama-3.1-8B-Instruct", epochs=3, learning_rate=1e-5,
        weight_decay=3e-7, lora_r=16, lora_alpha=32, lora_dropout=0.1,
        lora_targets="q_proj,v_proj", batch_size=8, micro_batch_size=1, max_tokens=1250,
        max_critique_tokens=768),
}
# OWN: what a task of your own has instead, because those values suit only an 8B model and
# thousands of rows. A None is chosen later, from the number of rows and the size of the model.
OWN = {
    "policy": dict(
        batch_size=None, minibatch_size=None, learning_rate=None, ppo_epochs=2,
        lora_targets="q_proj,k_proj,v_proj,o_proj", value_clip=5.0, kl_coef=0.2, kl_target=8.0,
        kl_horizon=128, temperature=0.7, micro_batch_size=4, max_new_tokens=64,
        max_critique_tokens=256),
    "reward": dict(
        learning_rate=None, epochs=None, batch_size=4, lora_dropout=0.0, weight_decay=0.0,
        lora_targets="q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        micro_batch_size=4),
}


def preset(task_name: str, part: str = "policy") -> dict:
    """The settings that --task changes. part: "policy" or "reward"."""
    if task_name == "toy":
        return {}                                                # the defaults of the flags
    task = get_task(task_name)
    common = RELEASE[part] | ({} if task_name in TASKS else OWN[part])
    if part == "policy":
        return common | {"output_dir": f"runs/{task.name}"} | task.policy
    return common | task.reward


def fill(config, **values):
    """A copy of the config in which these values replace the settings that are None."""
    return replace(config, **{name: value for name, value in values.items()
                              if getattr(config, name) is None})


def get_task(name: str) -> Task:
    """A task by its name, or by "module:NAME"; "toy" stands for toy:TASK."""
    return load_object("--task", "toy:TASK" if name == "toy" else name, Task,
                       TASKS | {"toy": None})


def reward_prompt(prompt: str, response: str) -> str:
    """The instruction to R_φ: judge the response to this prompt (§3.4)."""
    return f"{prompt}\n\nResponse: {response}\n\nJudge the response."


REFERENCES = "reference", "ideal_human_summary", "solution", "4o_solution"
# Optional field of an example → the fields of a row that may hold it; the first text counts.
OPTIONAL = {"critique": ("critique", "feedback"), "outcome": ("outcome",),
            "reference": REFERENCES}


def examples(task: Task, rows: Iterable[dict]) -> Iterator[dict]:
    """{id, prompt, response, row, …} for every response of the rows.

    Optional fields: outcome (of the tests), critique (by a person), reference (a good
    response). The rows must fit the task, see `Task.check`.
    """
    for number, row in enumerate(rows, 1):
        row_id = str(row.get("id") or row.get("prompt_id") or row.get("question_id") or number)
        responses = task.all_responses(row)
        texts = {key: row[name] for key, names in OPTIONAL.items() for name in reversed(names)
                 if isinstance(row.get(name), str) and row[name].strip()}
        for k, response in enumerate(responses):
            yield {"id": row_id if len(responses) == 1 else f"{row_id}/{k}",
                   "prompt": prompt_text(task.policy_prompt(row)), **texts, **response,
                   "row": row}


# ── Rows: JSON lines or a JSON array, plain or gzipped

TABLES = ("; CSV, Parquet and folders of save_to_disk become JSON lines with the package "
          "datasets: load_dataset or load_from_disk, then .to_json")

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


# Types of the fields that Task.check does not see or cannot judge. The lists hold texts.
FIELDS = {"good_spans": list, "poor_spans": list} | dict.fromkeys(
    ("critique", "feedback", "title", "post", "summary_prompt", "test", "test_code",
     SLF5K_RESPONSE), str)


def check_fields(row: dict, place: str):
    """Raise InputError if a field has the wrong type, or if UTF-8 cannot encode a text."""
    for name, value in row.items():
        if re.search(r"[\ud800-\udfff]", json.dumps({name: value}, ensure_ascii=False)):
            raise InputError(f"{place}: field {name!r} contains half of a surrogate pair; "
                             f"remove it")
        expected = FIELDS.get(name)
        is_valid = value is None or type(value) is expected and all(
            isinstance(item, str) for item in value)
        if expected and not is_valid:
            raise InputError(f"{place}: field {name!r} must be a "
                             f"{'text' if expected is str else 'list of texts'}, not "
                             f"{json.dumps(value)[:40]}")


def read_rows(path, needs=(), task: Task | None = None) -> list[dict]:
    """The rows of a file, with valid fields that fit the task.

    needs: see `Task.needs`; a field that is None or "" is missing. Raises InputError with file,
    line and field.
    """
    path = Path(path)
    rows = []
    if not path.is_file():
        raise InputError(f"{path}: no such file; check the path{TABLES * path.is_dir()}")
    for place, row in _objects(path):
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected a JSON object, found a {type(row).__name__}")
        for needed in (*needs, *(task.needs if task else ())):
            names = [needed] if isinstance(needed, str) else needed
            if all(row.get(name) in (None, "") for name in names):
                fields_text = " or ".join(map(repr, names))
                raise InputError(f"{place}: field {fields_text} is missing or empty")
        check_fields(row, place)
        if task:
            task.check(row, place)
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: the file has no rows; restore it or remove it")
    return rows


def _parse_json(text: bytes, place: str):
    try:
        return json.loads(text)                           # it also removes a byte order mark
    except (ValueError, RecursionError) as error:         # not UTF-8, not JSON, or too deep
        raise InputError(f"{place}: not JSON in UTF-8 ({error}); fix it or remove "
                         f"it{TABLES}") from error


def _objects(path: Path) -> Iterator[tuple[str, object]]:
    """(place in the file, JSON value) of every line, or of every item of an array."""
    data = path.read_bytes()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: the gzip file is corrupt ({error}); download it "
                         f"again") from error
    if re.match(rb"(\xef\xbb\xbf)?\s*\[", data):          # a byte order mark may come first
        for number, row in enumerate(_parse_json(data, str(path)), 1):
            yield f"{path}, row {number}", row
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _parse_json(line, place)


def write_rows(path, rows: Iterable[dict]):
    """Write JSON lines atomically: where `rows` raises, the file stays as it was.

    A symbolic link stays, and the file that it names is written. Raises InputError where the
    path is no regular file, such as /dev/null.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file; name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    try:
        _write_lines(temporary, "w", rows)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_row(path, row: dict):
    """Append one JSON line."""
    _write_lines(path, "a", [row])


def _write_lines(path, mode: str, rows: Iterable[dict]):
    """Write JSON lines and flush them to disk, so that they survive a crash."""
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:              # without a file name where the disk is full
        error.filename = error.filename or str(path)
        raise


def whole_rows(path: Path) -> list[dict]:
    """The rows of a file that `append_row` writes, without lines that a crash cut off."""
    rows = []
    lines = path.read_bytes().splitlines(True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            # [:-1] makes a line without its newline invalid: it was cut off.
            rows.append(dict(json.loads(line[:-1])))
        except (ValueError, TypeError) as error:
            print(f"{path}, line {number}: skipping corrupt line ({error})")
    return rows


def checksum(*paths: Path, state=None) -> str:
    """The sha256 of files and of a JSON value."""
    digest = hashlib.sha256(json.dumps(state).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def lock(file, place: Path):
    """Lock an open file until it is closed, so that `place` has one writer.

    Raises InputError where another process has the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{place}: another process is writing to it; wait for it to end, or "
                         f"choose another output") from error


def changed_files(run: Path, result=None) -> list[str]:
    """The files that a phase wrote, and that are missing or have changed since it ended.

    result: the result of the phase; None: of all phases in phases.jsonl.
    """
    phases = {row.get("result"): row.get("sha256", {})       # a repeated phase comes later
              for row in whole_rows(run / "phases.jsonl")}
    return [file for name, hashes in phases.items() if result in (None, name)
            for file, digest in hashes.items()
            if not (run / file).is_file() or checksum(run / file) != digest]


def chunks(rows, size: int) -> list:
    """Consecutive parts of at most `size` rows."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


# ── Flags and scripts

DTYPES = ("bfloat16", "float16", "float32", None)


def flag(default, text: str, choices=None, least=0, most=10**6):
    """A dataclass field that is a command-line flag, with its help, choices or range."""
    return field(default=default, metadata={"help": text, "choices": choices,
                                            "range": (least, most)})


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """Raise InputError: a wrong flag is reported in one line, with similar flags."""
        similar = []
        for word in re.findall(r" --([\w-]+)", message):
            word = word.replace("-", "_")
            names = [name[2:] for name in self._option_string_actions]
            similar += [f"--{name}" for name in names
                        if word in (*name.split("_"), re.sub("([a-z])[a-z]*_?", r"\1", name))
                        ] or get_close_matches(f"--{word}", self._option_string_actions)
        hint = f"; similar: {', '.join(similar[:4])}" if similar else ""
        raise InputError(f"{message}{hint} (--help lists the flags)")


def setting_types(setting) -> tuple[type, ...]:
    """The types of a dataclass field, such as (float, NoneType) for `float | None`."""
    return get_args(setting.type) or (setting.type,)


def check_values(config_class, values: dict, place: str):
    """Raise InputError where a value has no flag or the wrong type, or is out of range."""
    unknown = values.keys() - {setting.name for setting in fields(config_class)}
    if unknown:
        raise InputError(f"{place}{', '.join(sorted(unknown))}: there is no such flag")
    for setting in fields(config_class):
        value = values.get(setting.name, setting.default)
        types = setting_types(setting)
        choices = setting.metadata["choices"]
        least, most = setting.metadata["range"]
        problem = ""
        if type(value) not in types and not (type(value) is int and float in types):
            problem = f"{value!r:.40} is not of type {types[0].__name__}"
        elif choices and value not in choices:
            problem = f"{value} must be one of {', '.join(map(str, choices))}"
        elif type(value) is str and re.search(r"^\s*$|[\ud800-\udfff]", value):
            problem = "the value is empty or is not UTF-8"
        elif type(value) in (int, float) and not least <= value <= most:
            problem = f"{value} must be at least {least:g} and at most {most:g}"
        if problem:
            raise InputError(f"{place}--{setting.name}: {problem}")


def _read_value(value_type: type, text: str):
    """The value of a flag. `check_values` refuses a text that is not of the type."""
    if text.lower() == "none":
        return None
    try:
        return value_type(text)
    except ValueError:
        return text


def parse_flags(config_class, description: str, preset=lambda task: {}, argv=None):
    """Read a config from argv, by default from the command line.

    preset(task): settings that replace the defaults of the flags when --task is this task.
    In --help, the flags of each class are one group. The first sentence of its docstring is the
    title. The script's own flags come first.
    """
    parser = _Parser(description=description.split("\n")[0], allow_abbrev=False,
                     usage="%(prog)s [--flag value ...]", add_help=False,
                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    groups = {}                                          # name of a setting → its group
    for part in config_class.__mro__[:-1]:
        group = parser.add_argument_group(part.__doc__.split(".")[0])
        groups = dict.fromkeys(part.__annotations__, group) | groups
    for setting in fields(config_class):
        value_type = setting_types(setting)[0]
        options = {"action": "store_true"} if value_type is bool else {
            "type": partial(_read_value, value_type), "metavar": value_type.__name__}
        groups[setting.name].add_argument(
            f"--{setting.name}", help=setting.metadata["help"], default=setting.default,
            **options)
    task = vars(parser.parse_known_args(argv)[0]).get("task")
    settings = preset(task)
    check_values(config_class, settings, f"--task {task}: its setting ")
    parser.set_defaults(**settings)
    # --help prints the defaults of the task, so it is added after them.
    parser.add_argument("-h", "--help", action="help", help="show this text")
    values = vars(parser.parse_args(argv))
    check_values(config_class, values, "")
    return config_class(**values)


def load_object(flag_name: str, name: str, expected_type=object, choices=()):
    """The choice with this name, or the object "module:NAME" of a flag.

    Raises InputError where it is missing or of another type.
    """
    if name in choices:
        return choices[name]
    module, _, attribute = name.partition(":")
    if choices and not attribute:
        raise InputError(f"{flag_name} {name}: no such name; use {', '.join(choices)}, or "
                         f"module:NAME for your own")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = getattr(importlib.import_module(module), attribute)
    except Exception as error:                           # the module may raise anything
        raise InputError(f"{flag_name} {name}: cannot import it ({type(error).__name__}: "
                         f"{error}); write module:NAME, with the module in this directory or "
                         f"on PYTHONPATH") from error
    if not isinstance(value, expected_type):
        raise InputError(f"{flag_name} {name}: expected a {expected_type.__name__}, found a "
                         f"{type(value).__name__}")
    return value


def next_command(script: str, **flags) -> str:
    """A line with the command that runs another script. A flag that is None is left out."""
    words = ["python", os.path.relpath(Path(__file__).with_name(script))]
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    return f"next: {shlex.join(words)}"


def run_script(main: Callable, program: str, *errors: type[Exception]):
    """Run `main` without tracebacks: report InputError, `errors`, and errors of the system.

    The report is one line on stderr. Errors of the system are OSError and a lack of memory.
    """
    try:
        main()
    except (InputError, OSError, MemoryError, RuntimeError, *errors) as error:
        message = str(error)
        if re.search("(?i)out of memory|allocate memory|^MemoryError", repr(error)):
            message = (f"out of memory ({message}): lower --micro_batch_size (training) or "
                       f"--rollout_batch_size (texts), or set --activation_checkpointing or "
                       f"--shard, and run the same command to continue")
        elif isinstance(error, OSError):
            message += "; check the path, your permissions, and the disk's free space and locks"
        elif not isinstance(error, (InputError, *errors)):
            raise
        sys.exit(f"{program}: {public(' '.join(message.split()))}")
    except KeyboardInterrupt:
        sys.exit(f"{program}: interrupted; run the same command again to resume")
