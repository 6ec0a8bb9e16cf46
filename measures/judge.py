"""Evaluation by a language model as judge: pairs of answers, and AlpacaEval.

    config = JudgeConfig(judge_model="gpt-4o", price_in=2.5, price_out=10, max_usd=5)
    questions = pairwise_questions(rows, after, before, config)     # rows {id, prompt}, texts
    print(forecast_cost(questions, config, "judge.journal"))             # sends no request
    scores = pairwise_scores(ask_judge(questions, config, "judge.journal"))
    print(win_tie_loss(scores))

Paper: §4.2–4.5, Table 4, Figure 3, Appendix E.

Departures: Appendix E shuffles the two answers. Here the judge sees them in both orders, and
two verdicts that disagree count as a tie. If a reply does not end with a verdict, or has
several different ones, the row is counted as unjudged, and the next run asks the judge again.
FastChat takes the first verdict.
AlpacaEval's leaderboard has its own prompt and controls for length. For its win rate, run the
command that `write_alpaca` returns.
"""

import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from annotate import fenced
from ask import Journal, Question, Server, ask, check_asking, forecast, question_key
from data import InputError, chunks, read_rows
from settings import ServerConfig, flag


TEMPERATURE = 0.0                                            # sampling temperature of the judge


@dataclass
class JudgeConfig(ServerConfig):
    """A judge on an OpenAI-compatible server, with its prices and the budget."""
    judge_model: str | None = flag(None, "model name of the judge (paper: gpt-4o); None asks "
                                         "no judge")
    judge_prompts: str | None = flag(None, "FastChat's judge_prompts.jsonl; None uses the "
                                           "prompts in measures/judge.py")
    judge_tokens: int = flag(2048, "maximum length of a judge's reply in tokens", least=1)
    dry_run: bool = flag(False, "write the answers and print the judge's cost; send no request")

    @cached_property
    def prompts(self) -> dict[str, dict]:
        """The judge's prompts: FastChat's name → {system_prompt, prompt_template}.

        This project's own prompts have no template.
        """
        if self.judge_prompts is None:
            return {name: {"system_prompt": text} for name, text in PROMPTS.items()}
        rows = read_rows(self.judge_prompts, ("name", "system_prompt", "prompt_template"))
        return {row["name"]: row for row in rows}


def check_judge(config: JudgeConfig):
    """Raise InputError if the settings would make the requests fail; sends no request."""
    if config.judge_model and not config.dry_run:
        check_asking(config)
    config.prompts                                   # reads and checks the file of prompts


# ── The judge's prompts (Appendix E)

_WEIGH = ("Weigh how correct, helpful and complete an answer is, and whether it does what the "
          "question asks.")
_FAIR = ("Neither length nor the order of the two speaks for one of them. Explain, then end "
         "with the verdict alone: [[A]], [[B]], or [[C]] for a tie.")
PROMPTS = {
    "pair-v2": f"You compare answer_a and answer_b to a question. {_WEIGH} {_FAIR}",
    "feedback": "You compare feedback_a and feedback_b on an answer to a question. Weigh if "
                "what they say is true and specific, if the parts that they quote as good and "
                f"poor stand in the answer and deserve it, and what they overlook. {_FAIR}",
}


def _server(config: JudgeConfig) -> Server:
    return Server(config.judge_model, config.base_url, TEMPERATURE, config.timeout)


def _question(config: JudgeConfig, kind: str, values: dict[str, str], name) -> Question:
    """A question to the judge.

    kind: FastChat's name of the prompt. values: texts for the {fields} of the prompt's
    template; if it has no template, they are enclosed in tags. name: id of the row. Raises
    InputError if there is no such prompt, or if its template has other fields.
    """
    if kind not in config.prompts:
        raise InputError(f"{config.judge_prompts}: there is no prompt named {kind!r}; add the "
                         f"prompt, or omit --judge_prompts")
    prompt = config.prompts[kind]
    system = prompt["system_prompt"]
    if "prompt_template" in prompt:
        try:
            user = prompt["prompt_template"].format(**values)
        except (LookupError, ValueError) as error:
            raise InputError(f"judge prompt {kind!r}: cannot fill in {error}; use "
                             f"only the fields {', '.join(values)}") from error
    else:
        instruction, user = fenced(values)
        system += f"\n{instruction}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    parts = "judge", config.judge_model, TEMPERATURE, messages
    key = question_key(*parts, _server(config).source)
    return Question(key, str(name), messages, {"id": name}, config.judge_tokens,
                    old_key=question_key(*parts))


# ── The judge's verdicts

WINS = {"a": 1.0, "b": 0.0, "c": 0.5, "tie": 0.5}
# A verdict as it may stand in [[ ]], for example "winner: a". The text is in lower case.
WINNER = r"(?:(?:assistant|answer|verdict|winner)\s*[:=]?\s*)?([abc]|tie)"
# Brackets after a name, a ) or a ] are code, such as x[[0]], so they do not match.
BRACKETS = r"(?<![\w)\]])\[\[\s*([^\[\]]*?)\s*\]\]"
# What the judge only quotes: a code fence, a line after ">", and words in quotation marks.
QUOTED = (r"(?s:```.*?(?:```|\Z))|(?m:^\s*>.*)|[\"“”„«»].*?[\"“”„«»]"
          r"|['‘’`]\[\[.*?\]\]['‘’`]")
# FastChat's prompt shows the verdict in quotation marks, and some judges copy these marks to
# their last line. Besides the verdict, this line may have only the words of LABEL. It follows a
# sentence or an empty line.
LABEL = r"(?:(?:my|the|is|final|overall|verdict|rating|score|winner|judge?ment)\W+)*"
LAST_LINE = (r"((?:\A|[.!?)][*_]*\s*\n|[^:,*_\s][*_]*\s*\n\s*\n)\W*" + LABEL
             + r")[\"“”„«»'‘’`](" + LABEL + r"\[\[[^\[\]]*\]\])\W*\Z")
WORD_OR_QUOTE = r"[\w\"“”„«»'‘’`]"                              # must not follow the verdict


def read_verdict(_context: dict, text: str) -> float:
    """The verdict that ends a reply. Raises ValueError if none does, or if verdicts differ.

    A verdict stands in double brackets, such as [[A]], [[B]] or [[C]]. Verdicts that the judge
    quotes, for example from the answer, are not read; but its last line may be a verdict in
    quotation marks. The result is 1 if A is better, 0.5 for a tie, and 0 if B is better.
    """
    # Remove the model's reasoning, also if its end tag is missing.
    text = re.split("</think(?:ing)?>", text.lower())[-1]
    text = re.sub(r"(?ms)^\s*<think.*", "", text)
    text = re.sub(LAST_LINE, r"\1\2", text)
    verdicts = set()
    rest = text                                                # the text after the last verdict
    for match in re.finditer(f"{QUOTED}|{BRACKETS}", text):
        verdict = re.fullmatch(WINNER, match[1] or "")         # match[1]: None in a quotation
        if verdict:
            verdicts.add(WINS[verdict[1]])
            rest = text[match.end() :]
    if len(verdicts) > 1:
        raise ValueError("verdicts that differ")
    if not verdicts or re.search(WORD_OR_QUOTE, rest):
        raise ValueError("no verdict in [[ ]] at the end of the reply")
    return verdicts.pop()


def forecast_cost(questions: list[Question], config: JudgeConfig, path) -> str:
    """A line: the number of questions, and the most that those without a reply can cost."""
    with Journal(path, *config.prices) as journal:
        return f"{len(questions)} questions, {forecast(questions, journal, read_verdict)}"


def ask_judge(questions: list[Question], config: JudgeConfig, path) -> list[dict]:
    """{id, verdict, reason} of each question; only those without a usable reply are asked.

    path: the journal, a file of all replies. verdict: as in `read_verdict`. It is None if the
    reply has none; then the next run asks again. Raises InputError in the cases of `ask.ask`.
    """
    with Journal(path, *config.prices) as journal:
        replies = ask(questions, journal, _server(config), read_verdict, config.concurrency)
    return [{**question.context, "verdict": replies[question.key].value,
             "reason": replies[question.key].reason} for question in questions]


# ── Win rates of pairs

# Compared field → (name of the prompt, name of each text in the prompt).
PAIRS = {"response": ("pair-v2", "answer"), "reply": ("feedback", "feedback")}


def pairwise_questions(rows: list[dict], texts_a: list[str], texts_b: list[str],
                       config: JudgeConfig, field: str = "response") -> list[Question]:
    """Two questions for each row {id, prompt}, with its texts a and b in both orders.

    field: "response" compares responses (Figure 3); "reply" compares critiques of the row's
    response (the win rate in Table 1, Appendix E).
    """
    kind, side = PAIRS[field]
    questions = []
    for row, a, b in zip(rows, texts_a, texts_b, strict=True):
        answer = {"answer": row["response"]} if field == "reply" else {}
        for first, second in ((a, b), (b, a)):
            values = {"question": row["prompt"], **answer,
                      f"{side}_a": first, f"{side}_b": second}
            questions.append(_question(config, kind, values, row["id"]))
    return questions


def pairwise_scores(verdicts: list[dict]) -> list[dict]:
    """A row {id, win, inconsistent} for each pair, from the verdicts on its two orders.

    win: 1 if both verdicts prefer text a, 0 if both prefer text b, and 0.5 for a tie. If the
    verdicts disagree, the pair is a tie and inconsistent is True. If a verdict is missing, win
    is None.
    """
    scores = []
    for verdict, swapped in chunks(verdicts, 2):
        assert verdict["id"] == swapped["id"], "both orders of a pair follow each other"
        win = verdict["verdict"]
        loss = swapped["verdict"]                       # here text b comes first
        is_judged = None not in (win, loss)
        inconsistent = is_judged and win != 1 - loss
        if inconsistent:
            win = 0.5
        scores.append({"id": verdict["id"], "win": win if is_judged else None,
                       "inconsistent": inconsistent})
    return scores


def win_tie_loss(scores: list[dict]) -> dict[str, int]:  # Figure 3
    """Numbers of wins, ties, losses, inconsistent (also counted as ties) and unjudged rows."""
    counts = Counter(row["win"] for row in scores)
    return {"win": counts[1.0], "tie": counts[0.5], "loss": counts[0.0],
            "inconsistent": sum(row["inconsistent"] for row in scores),
            "unjudged": counts[None]}


# ── AlpacaEval (Dubois et al., 2024)

def read_alpaca(path) -> list[dict]:
    """Rows {prompt, response} of AlpacaEval's instructions and reference outputs."""
    return [{"prompt": row["instruction"], "response": row["output"]}
            for row in read_rows(path, ("instruction", "output"))]


def write_alpaca(path, rows: list[dict], texts: list[str], generator: str) -> str:  # Table 4
    """Write a policy's outputs for alpaca_eval; return the command that judges them.

    The command prints AlpacaEval 2's length-controlled win rate. It needs alpaca_eval 0.6,
    OPENAI_API_KEY, and outputs for all 805 instructions. Without the last flag, alpaca_eval
    skips a generator that it has already judged.
    """
    outputs = [{"instruction": row["prompt"], "output": text, "generator": generator}
               for row, text in zip(rows, texts, strict=True)]
    Path(path).write_text(json.dumps(outputs))
    return shlex.join(["alpaca_eval", "--model_outputs", str(path),
                       "--is_overwrite_leaderboard"])
