"""HumanEval, MBPP and their + versions (Table 3), and ARC-Challenge (Table 4).

    problems = read_problems("HumanEvalPlus.jsonl.gz")       # unchanged published files
    programs = [extract_code(write(code_prompt(problem)), problem) for problem in problems]
    code_scores(execute(problems, programs))   # {"id", "pass@1", "plus pass@1"} of each task

Paper: §4.4 and §4.5, Tables 3 and 4. It does not say how code is extracted from answers and
run. Code is scored by running tests, ARC by log-likelihoods.

The + files of evalplus contain inputs, but no outputs. For each input, the sandbox first runs
the program and then the reference solution. It compares their outputs as evalplus 0.3 does,
with the same exceptions for some tasks.

Departures: a single time limit covers all inputs of a task and the reference solution, while
evalplus limits each input. An answer may omit the imports and helpers of HumanEval's prompt.
ARC follows lm-evaluation-harness, zero-shot and without a chat template, except that the prompt
begins with the tokenizer's BOS.
"""

import ast
import inspect
import marshal
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tqdm import tqdm

from data import InputError, read_rows
from measures.metrics import answer_logprobs, pass_at_k
from measures.sandbox import NO_PYTHON, code_blocks, run_python
from model import encode_text
from sampling import context_length

# ── Reading the published files

@dataclass(frozen=True)
class Problem:
    """A programming task (Table 3).

    prompt: description of the task for the model. head: beginning of the program, which an
    answer may omit; "" in MBPP. solution: the reference program. tests: statements that test a
    program, or "" if there are inputs. inputs: (base, plus); on these, the outputs of program
    and solution are compared with tolerance atol.
    """
    task_id: str
    prompt: str
    entry_point: str
    head: str
    solution: str
    tests: str
    inputs: tuple[list, list] | None = None
    atol: float = 0.0


def read_problems(path) -> list[Problem]:
    """Problems of HumanEval, MBPP (full or sanitized) or a + file of evalplus.

    The fields of a row identify the benchmark. The field `test` of HumanEvalPlus repeats the
    inputs and is not used. Raises InputError if a row has another format, or if only some rows
    have + tests.
    """
    problems = []
    for number, row in enumerate(read_rows(path, [("task_id",)]), 1):
        try:
            problems.append(_mbpp(row) if "code" in row else _humaneval(row))
            if (problems[0].inputs is None) != (problems[-1].inputs is None):
                raise ValueError("only some of the rows have a 'plus_input'")
        except (SyntaxError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path}, row {number}: this is not a task of HumanEval, MBPP or "
                             f"evalplus ({error!r}); use a published file") from error
    return problems


def _humaneval(row: dict) -> Problem:
    """A row of HumanEval or evalplus. MBPP+ has no head, because its prompt is a docstring."""
    task = row["task_id"]
    prompt = row["prompt"]
    name = row["entry_point"]
    has_head = re.search(rf"^def {name}\b", prompt, re.M)
    head = prompt.rstrip() + "\n" if has_head else ""
    description = head or prompt.strip().strip('"').strip()
    solution = prompt + row["canonical_solution"]
    if "plus_input" not in row:
        tests = f"{row['test']}\ncheck({name})\n"
        return Problem(task, description, name, head, solution, tests)
    base = [_restored(task, args) for args in row["base_input"]]
    plus = [_restored(task, args) for args in row["plus_input"]]       # {} if there are none
    if not base:
        raise ValueError("its 'base_input' is empty, which every program would pass")
    return Problem(task, description, name, head, solution, "", (base, plus), row["atol"])


def _mbpp(row: dict) -> Problem:
    """A row of MBPP. The entry point is the first function that the assertions use."""
    if row.keys() & {"plus_input", "test"}:
        raise ValueError("its + tests would not be run; a row of MBPP+ has no 'code'")
    code = row["code"]
    tests = "\n".join(row["test_list"])
    test_names = _names(ast.parse(tests))
    name = [node.name for node in ast.parse(code).body
            if isinstance(node, ast.FunctionDef) and node.name in test_names][0]
    setup = "\n".join([*row.get("test_imports", []), row.get("test_setup_code", "")])
    prompt = f"{row.get('text') or row['prompt']}\nIt must pass these tests:\n{tests}"
    return Problem(f"Mbpp/{row['task_id']}", prompt, name, "", code, f"{setup}\n{tests}")


def _same(value):
    return value


def _tuples(value: list) -> list[tuple]:
    return [*map(tuple, value)]


def _deep_tuple(value):
    return tuple(map(_deep_tuple, value)) if isinstance(value, list) else value


# MBPP+ tasks whose arguments have types that JSON lacks: (tasks, conversion of the first
# argument, conversion of the other arguments).
_RESTORE = [
    ("2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809",
     tuple, tuple),
    ("63 64 70 94 120 237 272 299 400 409 417 438 473 614 780", _tuples, _tuples),
    ("75 413 444 753", _tuples, _same), ("250 307 405 446 617 720 763 808", tuple, _same),
    ("106 750", _same, tuple), ("259 278 401 445 580 615 791", _deep_tuple, _deep_tuple),
    ("124", float, complex), ("252", complex, complex),
    ("115", lambda value: [set(item) if item else {} for item in value], _same),
    ("722", lambda value: {key: tuple(item) for key, item in value.items()}, _same)]


def _restored(task: str, args: list) -> list:
    """The arguments of one call with their Python types."""
    for tasks, convert_first, convert_other in _RESTORE:
        if task.removeprefix("Mbpp/") in tasks.split():            # false for HumanEval/…
            return [convert_first(args[0]), *map(convert_other, args[1:])]
    return args


# ── Prompt and answer

def code_prompt(problem: Problem) -> str:
    """The prompt for a chat model: to complete HumanEval's function, or to write MBPP's.

    The wording is ours.
    """
    task = (f"Complete this Python function.\n\n```python\n{problem.prompt}```" if problem.head
            else f"Write a Python function for this task.\n\n{problem.prompt}")
    return f"{task}\n\nAnswer with the whole program in one code block: imports, helpers and " \
           f"the function."


def _statements(text: str) -> list[ast.stmt]:
    """The statements in the longest valid Python program that the text begins with."""
    lines = text.split("\n")
    while lines:
        try:
            tree = ast.parse("\n".join(lines))
            ast.unparse(tree)                                # fails if the tree is too deep
            return tree.body
        except SyntaxError as error:
            del lines[min(error.lineno or 1, len(lines)) - 1:]
        except NO_PYTHON:                                    # a null byte, or nested too deeply
            break
    return []


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _binds(tree: ast.AST) -> set[str]:
    """The names that a statement assigns or defines, such as `table` in `table[i] = 1`."""
    is_definition = hasattr(tree, "name")                    # then local names are left out
    nodes = [tree] if is_definition else list(ast.walk(tree))
    targets = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {getattr(node, "name", None) for node in nodes} - {None}
    return names.union(*map(_names, targets))


def _program(nodes: list[ast.stmt], problem: Problem) -> str:
    """The source of all imports and of the statements that the function and tests depend on."""
    tests = ast.parse(problem.tests)
    needed = {problem.entry_point} | _names(tests) - _binds(tests)
    size = 0
    while len(needed) > size:
        program = [node for node in nodes
                   if isinstance(node, (ast.Import, ast.ImportFrom)) or _binds(node) & needed]
        size = len(needed)
        needed = needed.union(*map(_names, program))
    program.sort(key=lambda node: getattr(node, "module", None) != "__future__")
    return ast.unparse(ast.Module(program, [])) + "\n"


def extract_code(response: str, problem: Problem) -> str:
    """The program in a chat model's answer; "" if the answer does not define the function.

    The program is the first fenced block that defines the function. An answer without fences is
    searched for code between prose. As in evalplus, imports and the definitions that the
    function needs are kept, and calls, prints and assertions are removed. Needed definitions
    may also come from other blocks or from the prompt's head. No code is executed here.
    """
    text = response.rpartition("</think>")[2]
    blocks = code_blocks(text)
    starts = re.finditer(r"^(?:import|from|def|async|class|@|\w+ *=)", text, re.M)
    for candidate in blocks or [text[start.start():] for start in starts]:
        main = _statements(candidate)
        bound = set().union(*map(_binds, main))
        if problem.entry_point in bound:
            helpers = sum(map(_statements, [problem.head + "    pass", *blocks]), [])
            helpers = [node for node in helpers if not _binds(node) & bound]
            return _program(helpers + main, problem)
    return ""


# ── Execution

def _compare(task: str, solve, reference, inputs: list, fresh: list, atol: float):
    """Assert that `solve` gives the same outputs as the reference, by the rules of evalplus.

    The source of this function is run in the sandbox. task: name of the tested function. fresh:
    a copy of the inputs for the reference, because `solve` may modify its arguments.
    """
    def close(out, expected):                                      # numpy.allclose, rtol=1e-7
        if isinstance(expected, (list, tuple)):
            return len(out) == len(expected) and all(map(close, out, expected))
        room = atol + 1e-7 * abs(expected)
        near = room < float("inf") and expected - room <= out <= expected + room
        return near or out == expected

    def also_right(out, args):             # tasks whose description has a second reading
        if task == "surface_Area":
            base, height = args
            slant = ((base / 2) ** 2 + height ** 2) ** 0.5
            return out == round(base ** 2 + 2 * base * slant)
        if task == "digit_distance_nums":
            width = max(len(str(number)) for number in args)
            digits = zip(*(str(number).zfill(width) for number in args))
            return out == sum(abs(int(a) - int(b)) for a, b in digits)
        return task == "are_equivalent" or task == "sum_div" and out == 0

    as_sets = ["similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly",
               "larg_nnum", "intersection_array", "find_dissimilar", "Diff"]
    for number, (args, fresh_args) in enumerate(zip(inputs, fresh)):
        out = solve(*args)
        if task == "find_zero":                                # any root of the polynomial
            zero = sum(x * float(out) ** power for power, x in enumerate(fresh_args[0]))
            assert abs(zero) <= atol, f"input {number}: at {out} the polynomial is {zero}"
            continue
        expected = reference(*fresh_args)
        if task in ("check_str", "text_match_three", "text_starta_endb"):    # match or None
            out = out if isinstance(out, bool) else out is not None
            expected = expected is not None
        right = set(out) == set(expected) if task in as_sets else out == expected
        items = expected if isinstance(expected, (list, tuple)) else [expected]
        if atol == 0 and set(map(type, items)) == {float}:
            atol = 1e-6                                        # also for the next inputs
        right = right or also_right(out, fresh_args)
        if not right and atol != 0:
            right = type(out) is type(expected) and close(out, expected)
        assert right, f"input {number}: {repr(out)[:200]} instead of {repr(expected)[:200]}"


def test_program(problem: Problem, plus: bool = False) -> str:
    """The test program for `run_python`. plus: whether to test the inputs added by evalplus."""
    if problem.inputs is None:
        return problem.tests
    name = problem.entry_point
    values = marshal.dumps(problem.inputs[plus])
    # marshal is imported first, so that the program cannot replace it. Unlike repr, it keeps
    # tuples, sets and infinities.
    return f"""from marshal import loads
import solution
{inspect.getsource(_compare)}
def test_outputs():
    right = {{}}
    exec({problem.solution!r}, right)
    inputs, fresh = map(loads, [{values!r}] * 2)
    _compare({name!r}, solution.{name}, right[{name!r}], inputs, fresh, {problem.atol})
"""


def execute(problems: list[Problem], programs: list[str], workers: int = 2,
            timeout: float = 10.0, unsafe: bool = False) -> list[dict]:
    """Rows {id, base, plus, status, stderr}, one for each pair of problem and program.

    A problem is repeated for each of its programs. timeout: CPU seconds for the base tests of a
    program, and again for its + tests. base, plus: whether these tests passed. plus is False if
    the base tests failed, and None if the file has no + tests.
    """
    def run(problem: Problem, program: str) -> dict:
        tests = test_program(problem)
        result = base = run_python(program, tests, timeout, unsafe=unsafe)
        has_plus = problem.inputs is not None
        if base.passed and has_plus:
            tests = test_program(problem, plus=True)
            result = run_python(program, tests, timeout, unsafe=unsafe)
        return {"id": problem.task_id, "base": base.passed,
                "plus": result.passed if has_plus else None,
                "status": result.status, "stderr": result.stderr[-1000:]}

    with ThreadPoolExecutor(workers) as pool:
        return list(tqdm(pool.map(run, problems, programs), "run the tests", len(problems)))


def code_scores(rows: list[dict], ks=(1,)) -> list[dict]:  # Table 3
    """{id, "pass@k", "plus pass@k"} of each task, computed from the rows of `execute`.

    Raises InputError if a task has fewer than k samples.
    """
    scores = []
    for task in dict.fromkeys(row["id"] for row in rows):
        score = {"id": task}
        for key, name in (("base", "pass"), ("plus", "plus pass")):
            passed = [row[key] for row in rows if row["id"] == task]
            if None not in passed:
                score |= {f"{name}@{k}": pass_at_k(len(passed), sum(passed), k) for k in ks}
        scores.append(score)
    return scores


# ── ARC-Challenge

def read_arc(path) -> list[dict]:
    """Rows {id, question, choices: list of texts, answer: index} from a file of AI2.

    A question has any number of choices, labelled A–E or 1–5. Raises InputError if a row has
    another format.
    """
    rows = []
    for number, row in enumerate(read_rows(path, [("id",), ("question",), ("answerKey",)]), 1):
        try:
            question = row["question"]["stem"]
            choices = row["question"]["choices"]
            labels = [choice["label"] for choice in choices]
            texts = [choice["text"] for choice in choices]
            answer = labels.index(row["answerKey"])
            if not all(texts):
                raise ValueError("a choice without a text")
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(f"{path}, row {number}: not a question of ARC ({error!r}); it "
                             f"needs a stem, choices with a label and a text, and an "
                             f"answerKey that is one of the labels") from error
        rows.append({"id": row["id"], "question": question, "choices": texts, "answer": answer})
    return rows


def choice_logprobs(model, tokenizer, rows: list[dict], adapter: str | None = None,
                    batch_size: int = 16) -> list[list[float]]:
    """log p(" " + choice | "Question: …\\nAnswer:") in nats of each choice; a list per row.

    If a question exceeds the model's context, its beginning is cut off, as in the harness.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def encode(text):
        return bos + encode_text(tokenizer, text)

    pairs = []
    for row in rows:
        context = f"Question: {row['question']}\nAnswer:"
        start = len(encode(context))
        for choice in row["choices"]:
            ids = encode(f"{context} {choice}")
            x = ids[:start]                                        # split as the harness splits
            y = ids[start:]
            pairs.append((x[-max(context_length(model) - len(y), 1):], y))
    logprobs = iter(answer_logprobs(model, pairs, adapter, batch_size))
    return [[sum(next(logprobs)) for _ in row["choices"]] for row in rows]


def arc_scores(rows: list[dict], logprobs: list[list[float]]) -> list[dict]:  # Table 4
    """{id, accuracy, accuracy_norm} of every row, from the result of `choice_logprobs`.

    accuracy: 1.0 if the most likely choice is right, else 0.0; in a tie, the first choice
    counts. accuracy_norm: the same after division of each log-likelihood by the choice's length
    in characters. The harness calls them acc and acc_norm. Raises InputError if a
    log-likelihood is not finite.
    """
    scores = []
    for row, plain in zip(rows, logprobs):
        if not all(map(math.isfinite, plain)):
            raise InputError(f"ARC row {row['id']}: log-likelihoods {plain} are not finite; "
                             f"check the model's weights")
        normed = [logprob / len(choice) for logprob, choice in zip(plain, row["choices"])]
        scores.append({"id": row["id"],
                       "accuracy": float(plain.index(max(plain)) == row["answer"]),
                       "accuracy_norm": float(normed.index(max(normed)) == row["answer"])})
    return scores
