"""The task of smollm2.md: the toy world for real language models.

    python text2grad.py --task notebooks.prose:TASK

A post states the facts of the toy's first sentence in two sentences, so that no sentence of
the post is already a summary. The annotator also looks for words that a real language model
makes up.
"""

import re
from dataclasses import replace
from functools import partial

import toy

POSTS = [
    ['In {month} my {person} opened my mail. When I asked about it, I was told "{reply}"',
     'Somebody opened my mail in {month}. It was my {person}, who only told me "{reply}"',
     '"{reply}" That is all my {person} told me. My mail had been opened in {month}.',
     'I found my mail open in {month}. My {person} did it and only told me "{reply}"']]
SUMMARIES = [
    ['The writer\'s {person} opened the mail in {month} and only said "{reply}"',
     'In {month}, the writer\'s {person} opened the mail and answered "{reply}"',
     'The writer\'s mail was opened in {month} by the {person}, who only said "{reply}"',
     'The writer was told "{reply}" after the {person} opened the mail in {month}.']]
# Further words that any summary may use, besides the words of the toy's summaries.
TELLING = "author post tell says ask reply respond claim mention describe complain hear find"


# ── Content that a real language model makes up

_FUNCTION = re.compile(rf"(?:{'|'.join(toy.FUNCTION_WORDS)})(?:['’]\w*)?|\w+n['’]t", re.I)


def content_words(text: str) -> list[re.Match]:
    """The words that are not function words (articles, pronouns, auxiliaries, …)."""
    words = re.finditer(r"\w[\w'’]*", text)
    return [word for word in words if not _FUNCTION.fullmatch(word[0])]


def stems(text: str) -> set[str]:
    """The first four letters of each content word."""
    return {word[0][:4].lower() for word in content_words(text)}


SUMMARY_STEMS = stems(" ".join([TELLING, *sum(toy.SUMMARIES, [])]))


def unsupported(row: dict, text: str) -> list[re.Match]:
    """The content words of a text that the post does not support.

    A word is supported if some word in the post or in the toy's summaries begins with the same
    four letters.
    """
    known = SUMMARY_STEMS | stems(row["post"])
    return [word for word in content_words(text) if word[0][:4].lower() not in known]


def supported_words(row: dict, response: str) -> float:
    """Share of the content words that the post supports; 1 if there are no content words."""
    return 1 - len(unsupported(row, response)) / max(1, len(content_words(response)))


def repeated_facts(_, response: str) -> int:
    """Number of fact phrases that the summary states again."""
    phrases = [phrase for _, _, phrase in toy.said_facts(response)]
    return len(phrases) - len(set(phrases))


def invented(row: dict, response: str) -> list[str]:
    """Runs of `unsupported` words, without duplicates.

    Words in fact phrases are left out, because the annotator judges facts separately.
    """
    facts = [range(start, start + len(phrase))
             for start, _, phrase in toy.said_facts(response)]
    runs = []
    for word in unsupported(row, response):
        if any(word.start() in fact for fact in facts):
            continue
        if runs and not response[runs[-1][1] : word.start()].strip(" -"):
            runs[-1][1] = word.end()
        else:
            runs.append([word.start(), word.end()])
    return list(dict.fromkeys(response[start:end] for start, end in runs))


def critique(row: dict, response: str) -> str:
    """The annotator's reply to a summary that a real language model wrote.

    Words that the model made up are poor. The first person is not a fault here, because real
    summaries of such posts use it.
    """
    inventions = [(f"The post has no {words}.", words) for words in invented(row, response)]
    return toy.critique(row, response, inventions + toy.said_twice(response))


# The learning rates are ten times those of full fine-tuning, because a step changes less with
# LoRA. Adam's first step at rate η changes W by a norm of η √(in · out). With B = 0 and random
# A, it changes (α/r) B A by only η (α/r) √(r · out / 3), for a 576 × 576 matrix a fifth.
TASK = replace(
    toy.TASK, name="prose", repeats_are_poor=True,
    rows=partial(toy.rows, posts=POSTS, summaries=SUMMARIES),
    truth=toy.TASK.truth | {"supported words": supported_words,
                            "repeated facts": repeated_facts},
    settings={
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "annotator_function": "notebooks.prose:critique", "annotated_rows": 800,
        "max_critique_tokens": 160, "reward_epochs": 2, "reward_learning_rate": 1e-3,
        "reward_max_tokens": 400, "reward_held_out": 80, "iterations": 40,
        "temperature": 1.0, "schedule": "linear", "max_new_tokens": 48, "kl_target": 4.0,
        "kl_horizon": 32, "learning_rate": 3e-4, "entropy_coef": 0.01})


def unseen_rows(split, n, seed):
    """The rows of TASK, but in the split "eval" only posts with which no setting was chosen.

    The settings were chosen with the first 64 held-out posts of TASK. These posts have other
    combinations of facts, each a different one; there are 171.
    """
    if split != "eval":
        return TASK.rows(split, n, seed)
    rows = TASK.rows(split, 1000, seed)
    unseen = {str(row["facts"]): row for row in rows[64:]}
    seen = {str(row["facts"]) for row in rows[:64]}
    return [row for facts, row in unseen.items() if facts not in seen][:n]


UNSEEN = replace(TASK, rows=unseen_rows)
