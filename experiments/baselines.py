"""Baselines of Text2Grad (§4.3, Tables 2 and 3, Appendix N), with LoRA on the same base model.

    python -m experiments.baselines --help               # every name, with one line
    python -m experiments.baselines dpo                  # on the toy world
    python -m experiments.baselines sft --task slf5k --data rows.jsonl --model MODEL
    python -m experiments.baselines ppo grpo --responses_per_prompt 4
    python -m experiments.baselines late definition_1 --critic annotator
    python -m experiments.baselines best_tenth --rounds 4

Names stand in front of the flags of text2grad.py: a method, reward designs (designs.py), and
an advantage function (advantages.py). Designs and advantage functions change only text2grad
and ppo. SFT needs one of the fields data.REFERENCES in each row. ILF, DPO and PPO annotate
responses as in phase 1; rejection sampling asks the annotator in each round. For preferences,
two responses to each prompt are annotated. The chosen one has the larger sum of labels.

The paper gives no settings for these methods. Each uses those of Text2Grad: the same adapter
shape and number of responses, and about as many optimizer steps. The base model of the toy
world cannot follow instructions outside its training data. With --task toy, the function `mend`
therefore rewrites a response from the critique alone, without the post. In other tasks, the
base model is prompted to rewrite the response.

B pairs or rows, T tokens of a response, N tokens of a batch without padding, H hidden size.
"""

import math
import re
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import text2grad
import toy
from annotate import Review, annotate
from data import (REFERENCES, InputError, Task, chunks, get_task, prompt_text, read_rows,
                  run_script, write_rows)
from experiments.advantages import ADVANTAGES
from experiments.designs import CHANGES, pay_scores, replace_delta, response_scores
from measures.metrics import answer_logprobs
from model import (encode_answer, encode_prompt, load_lora, lora_parameters, save_lora,
                   use_lora)
from policy import CRITICS, add_advantages, annotator_critic, sample_rollouts
from report import print_result
from reward_model import fit_adapter, write_critiques
from runtime import WORLD_SIZE, run_phase
from settings import Config, parse_flags
from text2grad import evaluate, prepare, train_and_evaluate, write_responses


# ── The losses

def dpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor,
             ref_rejected: Tensor, beta: float) -> Tensor:
    """−log σ(β [(log π(y_w) − log π_ref(y_w)) − (log π(y_l) − log π_ref(y_l))])

    Rafailov et al. 2023 and Appendix N. Log-probs of full responses in nats, [B] each → [B].
    """
    margin = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    return -F.logsigmoid(beta * margin)


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """−log σ(r(x, y_w) − r(x, y_l)) for rewards of preference pairs (Appendix N). [B] → [B]"""
    return -F.logsigmoid(chosen - rejected)


def sequence_logprobs(model, pairs: list[tuple]) -> Tensor:
    """log π(y|x) = Σ_t log π(y_t | x, y_<t) with the active adapter → [B]

    pairs: [(x, y)] as token ids.
    """
    return torch.stack([logprobs.sum() for logprobs in answer_logprobs(model, pairs)])


def split_pairs(pairs: list[tuple]) -> list[tuple]:
    """Turn B pairs (x, y_w, y_l) into 2B sequences: all (x, y_w), followed by all (x, y_l)."""
    return [(x, y_w) for x, y_w, _ in pairs] + [(x, y_l) for x, _, y_l in pairs]


def preference_loss(model, pairs, reference: str | None, beta: float) -> Tensor:
    """Sum of `dpo_loss` over preference pairs → scalar.

    pairs: [(x, y_w, y_l)] as token ids. reference: adapter of π_ref; None means the base model
    without an adapter. beta: β, the strength of the KL penalty against π_ref.
    """
    sequences = split_pairs(pairs)
    with torch.no_grad(), use_lora(model, reference):
        ref_logprobs = sequence_logprobs(model, sequences)                              # [2B]
    logprobs = sequence_logprobs(model, sequences)
    return dpo_loss(*logprobs.chunk(2), *ref_logprobs.chunk(2), beta).sum()


def pair_losses(model, tokenizer, pairs: list[tuple]) -> Tensor:
    """`bradley_terry_loss` of preference pairs [(x, y_w, y_l)] as token ids → [B]

    A loss above log 2 means that the rejected response y_l has the higher score.
    """
    scores = response_scores(model, tokenizer, split_pairs(pairs))                  # [2B]
    return bradley_terry_loss(*scores.chunk(2))


# ── Rows: refinements and preference pairs

def annotate_rows(model, tokenizer, rows, config: Config, out: Path) -> list[dict]:
    """Sample responses and annotate them as in phase 1 → the rows of feedback.jsonl."""
    responses = out / "responses.jsonl"
    feedback = out / "feedback.jsonl"
    if not responses.exists():
        write_responses(model, tokenizer, rows, config, out)
    if not feedback.exists():
        annotate(config, responses, feedback)
    return read_rows(feedback)


def encode_texts(tokenizer, texts) -> list[tuple]:
    """Token ids of texts: [(prompt, answer, …)] → [(x, y, …)]; each y ends with EOS."""
    return [(encode_prompt(tokenizer, prompt),
             *(encode_answer(tokenizer, answer) for answer in answers))
            for prompt, *answers in texts]


def preferences(model, tokenizer, rows, config: Config, out: Path) -> list[tuple]:
    """Preference pairs (x, y_w, y_l) as texts, from two responses to each row.

    The first --annotated_rows / 2 rows get two responses each, so as many responses are
    annotated as for the other methods, if there are enough rows. A row with a stored response
    has it twice, which is a tie. y_w is the response with the larger sum of labels. Ties are
    left out.
    """
    half = rows[: config.annotated_rows // 2]
    doubled = [row for row in half for _ in range(2)]
    responses = defaultdict(list)                        # prompt → (sum of labels, response)
    for row in annotate_rows(model, tokenizer, doubled, config, out):
        merit = sum(span["label"] for span in row["spans"])
        responses[row["prompt"]].append((merit, row["response"]))
    texts = []
    for prompt, candidates in responses.items():
        high, better = max(candidates)
        low, worse = min(candidates)
        if high > low:
            texts.append((prompt, better, worse))
    return texts


def policy_prompts(rows, config: Config) -> dict:
    """{x as one text: x}: feedback.jsonl has the text, the policy may read chat messages."""
    prompts = map(get_task(config.task).policy_prompt, rows)
    return {prompt_text(prompt): prompt for prompt in prompts}


def rewrite_prompt(prompt: str, response: str, critique: str) -> str:
    """The prompt that asks for a better response. It omits the JSON of the critique."""
    prose = critique.rpartition("\n{")[0].strip() or critique.strip()
    return (f"{prompt}\n\nResponse: {response}\n\nCritique: {prose}\n\n"
            f"Write the response anew, mended as the critique asks.")


def mend(response: str, critique: str) -> str:
    """Correct a response of the toy world as its critique says.

    Removes repeated clauses, replaces the first person and corrects wrong facts. A fault is
    corrected only if the critique has one of the annotator's sentences about it.
    """
    critique = critique.lower()
    for _, quote in toy.faults(response):
        forms, new = toy.FIRST_PERSON, f"the{quote[2:]}"
        if quote[0] == ",":
            forms, new = toy.TWICE, ""
        words = quote.removeprefix(", ")
        if any(form.format(words).lower() in critique for form in forms):
            response = response.replace(quote, new, 1)
    for _, slot, phrase in toy.said_facts(response):
        for fact in toy.SLOTS[slot]:
            if any(words.lower() in critique for words in toy.verdicts(slot, phrase, fact)):
                response = re.sub(rf"\b{re.escape(phrase)}(?!\w)", fact, response)
    return response


REWRITING = Task("rewriting", str)                      # each row of this task is a prompt


def rewrite(model, tokenizer, triples, config: Config) -> list[str]:
    """y⁺: each response, rewritten as its critique asks.

    triples: [(prompt, response, critique)]. In the toy world `mend` computes y⁺. In other tasks
    y⁺ is sampled from π_ref.
    """
    if config.task == "toy":
        return [mend(response, critique) for _, response, critique in triples]
    prompts = [rewrite_prompt(*triple) for triple in triples]
    config = replace(config, task="experiments.baselines:REWRITING")
    generator = torch.Generator().manual_seed(config.seed)
    return sample_rollouts(model, tokenizer, prompts, config, config.reference, generator).texts


# ── The methods: each trains the adapter "policy", which main() has created

def fit_policy(model, tokenizer, texts, config: Config, out: Path, **loss):
    """Train the policy on texts, by default on (x, y) with the loss −E log π(y|x).

    The number of epochs is chosen so that the number of optimizer steps is close to that of
    Algorithm 4, also if all texts fit into one minibatch. loss: the arguments `loss_of` and
    `count_of` of `fit_adapter`. Raises InputError if there are no texts.
    """
    if not texts:
        raise InputError("no training examples: all sampled responses are empty, or all pairs "
                         "are tied; give more rows with --data, or more --iterations")
    steps = (config.iterations * math.ceil(config.batch_size / config.minibatch_size)
             * config.ppo_epochs)
    steps_per_epoch = math.ceil(len(texts) / config.minibatch_size)
    settings = replace(
        config, reward_lora_r=config.lora_r, reward_lora_alpha=config.lora_alpha,
        reward_lora_targets=config.lora_targets, reward_lora_dropout=0.0,
        reward_learning_rate=config.learning_rate, reward_weight_decay=0.0,
        reward_batch_size=config.minibatch_size,
        reward_epochs=max(1, round(steps / steps_per_epoch)))
    fit_adapter(model, encode_texts(tokenizer, texts), "policy", settings,
                out=out / "fit-policy", **loss)


def sft(model, tokenizer, rows, config: Config, out: Path):
    """Supervised fine-tuning: −E log π(y*|x); y* is the first of data.REFERENCES in a row.

    It uses as many rows as Algorithm 4 samples responses, and --annotated_rows at most. Raises
    InputError if a row has none of these fields.
    """
    prompt_of = get_task(config.task).policy_prompt
    texts = []
    count = min(config.annotated_rows, config.iterations * config.batch_size)
    for row in rows[:count]:
        references = [row[name] for name in REFERENCES if row.get(name)]
        if not references:
            raise InputError(f"a row of --data has none of the fields {', '.join(REFERENCES)}: "
                             f"SFT needs one in every row")
        texts.append((prompt_of(row), references[0]))
    fit_policy(model, tokenizer, texts, config, out)


def ilf(model, tokenizer, rows, config: Config, out: Path):
    """Imitation learning from language feedback (Scheurer et al. 2023): −E log π(y⁺|x).

    Empty y⁺ are left out.
    """
    prompts = policy_prompts(rows, config)
    rows = annotate_rows(model, tokenizer, rows[: config.annotated_rows], config, out)
    triples = [(row["prompt"], row["response"], row["critique"]) for row in rows]
    refinements = rewrite(model, tokenizer, triples, config)
    texts = [(prompts[row["prompt"]], y) for row, y in zip(rows, refinements) if y.strip()]
    fit_policy(model, tokenizer, texts, config, out)


def rejection(model, tokenizer, rows, config: Config, out: Path, share: float | None = None):
    """Rejection sampling: −E log π(y|x) on the policy's own responses that `keep_best` chooses.

    share: see `keep_best`. In round 1, the policy is not trained yet. Each of the --rounds has
    an equal part of the --annotated_rows and of the optimizer steps. From the second round on,
    the responses are those of the policy that the round before has trained. Raises InputError
    if a round keeps none.
    """
    rows = rows[: config.annotated_rows]
    part_size = max(1, len(rows) // config.rounds)
    settings = replace(config, iterations=max(1, config.iterations // config.rounds))
    generator = torch.Generator().manual_seed(config.seed)
    for i, part in enumerate(chunks(rows, part_size)[: config.rounds]):
        batch = sample_rollouts(model, tokenizer, part, config, "policy", generator)
        reviews = annotator_critic(batch, model, tokenizer, config)
        best = keep_best(reviews, share)
        print(f"round {i + 1}: {len(best)} of {len(part)} annotated responses are kept")
        if not best:
            raise InputError("rejection: no response is without blame, so nothing is trained; "
                             "the name best_tenth keeps the best tenth of the responses")
        texts = [(batch.task.policy_prompt(part[k]), batch.texts[k]) for k in best]
        fit_policy(model, tokenizer, texts, settings, out / f"round_{i + 1}")


def keep_best(reviews: list[Review], share: float | None) -> list[int]:
    """The indices of the responses with the most good spans minus poor spans, best first.

    share: the part of all responses that is kept, at least one; ties keep their order. If it is
    None, a response is kept if it has no poor span, and if no other response has more good
    spans. It needs at least one good span. A response without usable feedback is not kept.
    """
    merits = {i: sum(span.label for span in review.spans)
              for i, review in enumerate(reviews) if not review.reason}
    best = sorted(merits, key=merits.get, reverse=True)      # stable: keeps the order of ties
    if share:
        return best[: max(1, round(share * len(reviews)))]
    most = max([sum(span.label > 0 for span in reviews[i].spans) for i in best], default=0)
    return [i for i in best if merits[i] == most > 0]


def dpo(model, tokenizer, rows, config: Config, out: Path):
    """Direct preference optimisation (Appendix N) on two responses per row; β is --kl_coef."""
    prompts = policy_prompts(rows, config)
    texts = [(prompts[prompt], *answers)
             for prompt, *answers in preferences(model, tokenizer, rows, config, out)]
    loss_of = partial(preference_loss, reference=config.reference, beta=config.kl_coef)
    fit_policy(model, tokenizer, texts, config, out, loss_of=loss_of, count_of=_count_pair)


def _count_pair(_) -> int:
    """One loss term for each preference pair."""
    return 1


def fit_scores(model, tokenizer, rows, config: Config, out: Path):
    """Train the adapter "reward" as the scalar reward model of PPO (Appendix N).

    One tenth of the pairs is held out; the share of them that the reward model orders as
    labelled is printed and written to metrics.json. The learning rate is a fifth of R_φ's, and
    there are twice as many epochs. Raises InputError if there are fewer than two pairs.
    """
    texts = preferences(model, tokenizer, rows, config, out)
    pairs = encode_texts(tokenizer, texts)
    if len(pairs) < 2:
        raise InputError(f"ppo needs two preference pairs, and there are {len(pairs)}: the "
                         f"others are ties; add rows")
    settings = replace(config, reward_learning_rate=config.reward_learning_rate / 5,
                       reward_epochs=2 * config.reward_epochs)
    n_heldout = max(1, len(pairs) // 10)

    def loss_of(model, part):
        return pair_losses(model, tokenizer, part).sum()

    fit_adapter(model, pairs[n_heldout:], "reward", settings, loss_of, _count_pair, out)
    with torch.no_grad(), use_lora(model, "reward"):
        parts = chunks(pairs[:n_heldout], 64)
        heldout_losses = torch.cat([pair_losses(model, tokenizer, part) for part in parts])
    right = (heldout_losses < math.log(2)).float().mean().item()
    save_lora(model, "reward", out / "adapter")
    write_rows(out / "metrics.json", [{"right": right}])
    return f"right on {right:.3f} of {len(heldout_losses)} held-out comparisons"


# ── Evaluation without a critic

def no_reward(rollouts, model, tokenizer, config) -> list[Review]:  # noqa: ARG001
    """A critic that gives no reward: the evaluation then measures task.truth alone."""
    return [Review("", [0.0] * len(offsets)) for offsets in rollouts.offsets]


def reflect(rollouts, model, tokenizer, config) -> list[Review]:
    """No reward, but each response y is replaced by y', rewritten with z' ~ R_φ(·|x, y)."""
    critiques = write_critiques(model, tokenizer, rollouts.prompts, rollouts.texts,
                                config.max_critique_tokens)
    triples = zip(rollouts.prompts, rollouts.texts, critiques)
    rollouts.texts = rewrite(model, tokenizer, [*triples], config)
    # A sample shows the rewritten text as one token, because its own tokens are not kept.
    rollouts.offsets = [[(0, len(text))] + [(len(text), len(text))] * (len(offsets) - 1)
                        for text, offsets in zip(rollouts.texts, rollouts.offsets)]
    return no_reward(rollouts, model, tokenizer, config)


# ── The command line

FITTED = {"sft": sft, "ilf": ilf, "reflection": sft, "dpo": dpo, "rejection": rejection,
          "best_tenth": partial(rejection, share=0.1)}
METHODS = {
    "text2grad": "Algorithm 4 with critiques of R_φ, or of the annotator: --critic annotator",
    "ppo": "Algorithm 4 with a scalar reward at the last token, −log σ(r_w − r_l)",
    "sft": "supervised fine-tuning on references, −E log π(y*|x)",
    "ilf": "supervised fine-tuning on responses that were rewritten as a critique asks",
    "reflection": "sft; each answer is rewritten as R_φ's critique asks (--reward_model)",
    "dpo": "−log σ(β(Δ_w − Δ_l)) on preference pairs; β is --kl_coef",
    "rejection": "supervised fine-tuning on own responses without blame, in --rounds",
    "best_tenth": "rejection that keeps the tenth with the most good minus poor spans"}
NAMES = METHODS | {name: function.__doc__.partition("\n")[0]
                   for name, function in (CHANGES | ADVANTAGES).items()}


def split_names(words: list[str], choices) -> tuple[list[str], list[str]]:
    """The names in front of the flags, and the flags. Raises InputError for a wrong name."""
    names = [*takewhile(lambda word: not word.startswith("-"), words)]
    for name in names:
        if name not in choices:
            raise InputError(f"unknown name {name!r}: in front of the flags stand names out of "
                             f"{', '.join(choices)}")
    return names, words[len(names) :]


def main(argv=None):
    """Train a policy as the names say, evaluate it, and save its adapter for eval.py."""
    names, flags = split_names(argv or sys.argv[1:], NAMES)
    if {"-h", "--help"} & {*flags}:
        print("Names in front of the flags:")
        for name, line in NAMES.items():
            print(f"  {name:<14}{line}")
    elif not names:
        raise InputError(f"no name was given: choose from {', '.join(NAMES)}")
    # Later flags override earlier ones.
    config = parse_flags(Config, __doc__, ["--output_dir", f"runs/{'_'.join(names)}", *flags])
    method, *more_methods = [name for name in names if name in METHODS] or ["text2grad"]
    functions = [ADVANTAGES[name] for name in names if name in ADVANTAGES]
    changes = [CHANGES[name] for name in names if name in CHANGES]
    if more_methods or len(functions) > 1 or (method in FITTED and functions + changes):
        raise InputError(f"{' '.join(names)}: these names exclude each other; choose one of "
                         f"{', '.join(METHODS)}, and at most one of {', '.join(ADVANTAGES)}; "
                         f"{', '.join(FITTED)} stand alone")
    if "grpo" in names and config.responses_per_prompt < 2:
        raise InputError("grpo compares responses to a prompt: set --responses_per_prompt to 4")
    critic = pay_scores if method == "ppo" else CRITICS[config.critic]
    for change in changes:
        critic = replace_delta(critic, change)
    advantages, = functions or [add_advantages]
    if method in {*FITTED, "ppo"}:
        train_baseline(method, config, critic, advantages)
    else:
        text2grad.main(config, critic, advantages)


def train_baseline(method: str, config: Config, critic, advantages):
    """Train a policy by a method of FITTED, or by PPO with a scalar reward model."""
    if method == "reflection" and not config.reward_model:
        raise InputError("reflection needs --reward_model: R_φ criticises its first answers")
    if WORLD_SIZE > 1:
        raise InputError(f"{method} runs in one process only: start it without torchrun")
    needs_annotator = method not in ("sft", "reflection")
    model, tokenizer, rows, held_out, config, _lock = prepare(config, needs_annotator,
                                                              method=method)
    out = Path(config.output_dir)
    adapter = config.reward_model
    if method == "ppo" and not adapter:
        run_phase("reward model", "reward/metrics.json", out, lambda: fit_scores(
            model, tokenizer, rows, config, out / "reward"))
        adapter = out / "reward" / "adapter"
    if adapter and not lora_parameters(model, "reward"):
        load_lora(model, "reward", adapter)
    arguments = model, tokenizer, rows, held_out, config, out
    if method == "ppo":
        run_phase("phase 3, policy", "result.json", out,
                  lambda: train_and_evaluate(*arguments, critic, advantages))
    else:
        run_phase(method, "result.json", out, lambda: fit_and_evaluate(method, *arguments))
    print_result(out, "")


def fit_and_evaluate(method, model, tokenizer, rows, held_out, config: Config, out: Path):
    """Train by a method of FITTED, evaluate before and after; write policy/ and result.json."""
    before, samples = evaluate(model, tokenizer, held_out, config, config.reference, no_reward)
    write_rows(out / "held_out.jsonl", held_out)
    write_rows(out / "before_samples.jsonl", samples)
    FITTED[method](model, tokenizer, rows, config, out)
    save_lora(model, "policy", out / "policy")
    critic = reflect if method == "reflection" else no_reward
    after, samples = evaluate(model, tokenizer, held_out, config, "policy", critic)
    write_rows(out / "after_samples.jsonl", samples)
    write_rows(out / "result.json", [{"before": before, "after": after}])
    return f"{len(held_out)} held-out prompts"


if __name__ == "__main__":
    run_script(main, "baselines")
