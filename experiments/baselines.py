"""Baselines of Text2Grad (§4.3, Tables 2 and 3, Appendix N), with LoRA on the same base model.

    python -m experiments.baselines dpo                  # on the toy world; sft, ilf, …
    python -m experiments.baselines sft --task slf5k --data rows.jsonl --model MODEL
    python -m experiments.baselines end                  # a reward design: see designs.py
    python -m experiments.baselines score --annotator_function toy:fact_accuracy

    sft           SFT on references: −E log π(y*|x)
    ilf           SFT on refinements: responses that were rewritten with the help of a critique
    reflection    SFT; at test time y ~ π, z' ~ R_φ(x, y), and the answer is y' ~ π'(x, y, z').
                  It needs --reward_model and writes its answers to held-out rows for eval.py
    dpo           −log σ(β(Δ_w − Δ_l)), Δ = log π(y|x) − log π_ref(y|x), on preference pairs
    ppo           Algorithm 4 with a scalar reward at the last token, −log σ(r_w − r_l)
    prm_ppo       Algorithm 4 with a reward for every step, −log σ(±ℓ) on labelled steps
    grpo, rloo    Algorithm 4 with PPO's scalar reward and the advantages of groups
    score         Algorithm 4 with your own numbers: --annotator_function (row, response)
                  returns a reward for the response, or a list with one for each token

The names in advantages.py, such as reward_to_go, run Text2Grad with other advantages.
The flags after the name are those of text2grad.py. SFT needs one of the fields data.REFERENCES
in each row. Critiques and step labels come from phase 1. Preferences are those of the rows (see
`recorded_pair`). If the rows have none, phase 1 annotates two responses to each prompt, and the
chosen one has the larger sum of labels.

The paper gives no settings for these methods. Each uses those of Text2Grad: the same adapter
shape, number of responses and number of optimizer steps. The base model of the toy world cannot
follow instructions outside its training data. In the toy world, the function `mend` therefore
computes refinements from the critique alone, without the post. For reflection, an adapter is
trained on these refinements so that it can rewrite. With another base, the base is prompted to
rewrite its response.

B pairs or rows, T tokens of a response, N tokens of a batch without padding, H hidden size.
"""

import math
import re
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import text2grad
from annotate import Span, annotate, token_offsets
from data import (REFERENCES, InputError, Task, chunks, get_task, next_command, prompt_text,
                  read_rows, run_script, write_rows)
from experiments.advantages import ADVANTAGES, GROUPED
from experiments.designs import (ANNOTATORS, LEARNT, SCORED, TRUE, mark_ends, token_scores)
from model import (encode_answer, encode_prompt, load_lora, load_model,
                   lora_parameters, response_hidden, save_lora, use_lora)
from policy import Rollouts, add_advantages, sample_rollouts, train
from reward_model import fit_adapter, write_critiques
from runtime import WORLD_SIZE, lock_directory, save_settings
from sampling import head_weight, pad_batch, token_logprobs
from settings import Config, derive_settings, parse_flags
from text2grad import check_config, drop_long_rows, load_rows, start_policy, write_responses


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


def step_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """−log σ(label · ℓ) at the end of every step, for a process reward model (Appendix N).

    scores: ℓ, [B, T]. labels: [B, T]; +1 at the last token of a correct step, −1 at the last
    token of an incorrect step, 0 elsewhere. Returns one loss per step.
    """
    return -F.logsigmoid((labels * scores)[labels != 0])


def sequence_logprobs(model, pairs: list[tuple]) -> Tensor:
    """log π(y|x) = Σ_t log π(y_t | x, y_<t) with the active adapter → [B]

    pairs: [(x, y)] as token ids.
    """
    prompts, responses = zip(*pairs)
    batch = pad_batch(prompts, responses, model.device)
    _, _, tokens, mask = batch                                                          # [B, T]
    is_token = mask.bool()
    hidden = response_hidden(model, *batch)[is_token]                                   # [N, H]
    logprobs = token_logprobs(hidden, head_weight(model), tokens[is_token])             # [N]
    lengths = mask.sum(1).tolist()
    return torch.stack([part.sum() for part in logprobs.split(lengths)])


def split_pairs(pairs: list[tuple]) -> list[tuple]:
    """Turn B pairs (x, y_w, y_l) into 2B sequences: all (x, y_w), followed by all (x, y_l)."""
    chosen = [(x, y_w) for x, y_w, _ in pairs]
    rejected = [(x, y_l) for x, _, y_l in pairs]
    return chosen + rejected


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
    scores, mask = token_scores(model, tokenizer, split_pairs(pairs))
    last = mask.sum(1, keepdim=True) - 1                                            # [2B, 1]
    rewards = scores.gather(1, last).squeeze(1)                                     # ℓ_T, [2B]
    return bradley_terry_loss(*rewards.chunk(2))


def labelled_losses(model, tokenizer, rows: list[tuple]) -> Tensor:
    """`step_loss` of rows [(x, y, labels)], with one label for each token of y.

    A loss above log 2 means that the score of the step has the wrong sign.
    """
    sequences = [(x, y) for x, y, _ in rows]
    scores, _ = token_scores(model, tokenizer, sequences)                               # [B, T]
    labels = torch.zeros_like(scores)
    for i, (_, y, row_labels) in enumerate(rows):
        labels[i, : len(y)] = torch.tensor(row_labels)
    return step_loss(scores, labels)


# ── Rows: refinements, preference pairs, step labels

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


def recorded_pair(row: dict) -> tuple[str, str] | None:
    """The preference (y_w, y_l) in a row of the paper's data sets; None: a tie or no texts.

    UltraFeedback has chosen and rejected answers, SLF5K has two compared summaries, and KodCode
    has solutions that passed or failed the tests. Raises KeyError if there are none of these.
    """
    if "chosen" in row:
        is_tie = "score_chosen" in row and row["score_chosen"] == row["score_rejected"]
        pair = tuple(row[side][-1]["content"] for side in ("chosen", "rejected"))
        return None if is_tie else pair
    if "comparison_preference" in row:
        order = {"Summary A": "AB", "Summary B": "BA"}.get(row["comparison_preference"], "")
        pair = tuple(row.get(f"generated_summary_for_comparison_{side}") for side in order)
        return pair if pair and all(pair) else None
    programs = {trial["test_result"]: trial["solution_code"]
                for trial in row["trials"].values()}
    return (programs["Pass"], programs["Fail"]) if len(programs) == 2 else None


def preferences(model, tokenizer, rows, config: Config, out: Path) -> list[tuple]:
    """Preference pairs (x, y_w, y_l) as texts: recorded ones, or from two responses per row.

    For the latter, half of --annotated_rows rows get two responses, so that as many responses
    are annotated as for the other methods. y_w is the response with the larger sum of labels.
    Ties are left out.
    """
    rows = rows[: config.annotated_rows]
    if all({"chosen", "comparison_preference", "trials"} & row.keys() for row in rows):
        prompt_of = get_task(config.task).policy_prompt
        texts = []
        for row in rows:
            pair = recorded_pair(row)
            if pair:
                texts.append((prompt_text(prompt_of(row)), *pair))
        print(f"{len(texts)} recorded preferences; {len(rows) - len(texts)} rows without one "
              f"are left out")
        return texts
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


def labelled_steps(row: dict, tokenizer) -> tuple[list[int], list[int], list[int]]:  # Table 17
    """Encode a row → (x, y, labels); a label is ±1 at the last token of a step, else 0."""
    y = encode_answer(tokenizer, row["response"])
    text, offsets = token_offsets(tokenizer, y)
    steps = [Span(**span) for span in row["spans"]]
    return encode_prompt(tokenizer, row["prompt"]), y, mark_ends(text, offsets, steps)


def rewrite_prompt(prompt: str, response: str, critique: str) -> str:
    """The prompt that asks for a better response. It omits the JSON of the critique."""
    prose = critique.rpartition("\n{")[0].strip() or critique.strip()
    return (f"{prompt}\n\nResponse: {response}\n\nCritique: {prose}\n\n"
            f"Write the response anew, mended as the critique asks.")


def mend(response: str, critique: str) -> str:
    """Correct a response of the toy world as its critique says.

    Removes repeated clauses, replaces the first person and corrects wrong facts.
    """
    for clause in re.findall(r"It says ([^.]+) twice\.", critique):
        response = response.replace(f", {clause}", "", 1)
    for words in re.findall(r"It speaks of ([^.]+) as the writer\.", critique):
        response = response.replace(words, f"the{words[2:]}")
    for phrase, fact in re.findall(r"The \w+ ([^.,]+) was ([^.,]+), wrong\.", critique):
        response = re.sub(rf"\b{re.escape(phrase)}(?!\w)", fact, response)
    return response


REWRITING = Task("rewriting", str)                      # each row of this task is a prompt


def rewrite(model, tokenizer, prompts, config: Config, adapter, generator) -> list[str]:
    """Sample rewritten texts y' ~ π'(· | x, y, c). The prompts come from `rewrite_prompt`."""
    config = replace(config, task="experiments.baselines:REWRITING")
    return sample_rollouts(model, tokenizer, prompts, config, adapter, generator).texts


def refinements(model, tokenizer, rows, config: Config, out: Path,
                with_critique=False) -> list[tuple]:
    """Pairs (x, y⁺) of texts, where y⁺ is a response y of phase 1 rewritten as z asks.

    In the toy world `mend` computes y⁺. In other tasks y⁺ is sampled from π_ref. Empty y⁺ are
    left out. with_critique: return `rewrite_prompt` of x, y and z in place of x.
    """
    rows = annotate_rows(model, tokenizer, rows[: config.annotated_rows], config, out)
    prompts = [row["prompt"] for row in rows]
    rewrite_prompts = [rewrite_prompt(row["prompt"], row["response"], row["critique"])
                       for row in rows]
    if config.task == "toy":
        texts = [mend(row["response"], row["critique"]) for row in rows]
    else:
        generator = torch.Generator().manual_seed(config.seed)
        texts = rewrite(model, tokenizer, rewrite_prompts, config, config.reference, generator)
    if with_critique:
        prompts = rewrite_prompts
    pairs = zip(prompts, texts)
    return [(prompt, text) for prompt, text in pairs if text.strip()]


# ── The methods: each trains the adapter "policy", which main() has created

def fit_policy(model, tokenizer, texts, config: Config, out: Path, name="policy", **loss):
    """Train the adapter `name` on texts, by default on (x, y) with the loss −E log π(y|x).

    The number of epochs is chosen so that the number of optimizer steps is close to that of
    Algorithm 4. loss: the arguments `loss_of` and `count_of` of `fit_adapter`. Raises
    InputError if there are no texts.
    """
    if not texts:
        raise InputError("no training examples: all sampled responses are empty, or all pairs "
                         "are tied; give more rows with --data, or more --iterations")
    responses = config.iterations * config.batch_size * config.ppo_epochs
    settings = replace(
        config, reward_lora_r=config.lora_r, reward_lora_alpha=config.lora_alpha,
        reward_lora_targets=config.lora_targets, reward_lora_dropout=0.0,
        reward_learning_rate=config.learning_rate, reward_weight_decay=0.0,
        reward_batch_size=config.minibatch_size,
        reward_epochs=max(1, round(responses / len(texts))))
    fit_adapter(model, encode_texts(tokenizer, texts), name, settings,
                out=out / f"fit-{name}", **loss)


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
    """Imitation learning from language feedback (Scheurer et al. 2023): −E log π(y⁺|x)."""
    texts = refinements(model, tokenizer, rows, config, out)
    fit_policy(model, tokenizer, texts, config, out)


def reflection(model, tokenizer, rows, config: Config, out: Path):
    """SFT of the policy, and in the toy world of an adapter "rewriter" on y⁺ given x, y and c.

    In other tasks the base follows the instruction to rewrite, see `reflect`.
    """
    sft(model, tokenizer, rows, config, out)
    if config.task == "toy":
        texts = refinements(model, tokenizer, rows, config, out, with_critique=True)
        fit_policy(model, tokenizer, texts, config, out, "rewriter")


def dpo(model, tokenizer, rows, config: Config, out: Path):
    """Direct preference optimisation (Appendix N) on two responses per row; β is --kl_coef."""
    texts = preferences(model, tokenizer, rows, config, out)
    loss_of = partial(preference_loss, reference=config.reference, beta=config.kl_coef)
    fit_policy(model, tokenizer, texts, config, out, loss_of=loss_of, count_of=_count_pair)


def _count_pair(_) -> int:
    """One loss term for each preference pair."""
    return 1


def _count_labels(example: tuple) -> int:
    """One loss term for each labelled step of (x, y, labels)."""
    return sum(map(abs, example[2]))


def fit_scores(model, tokenizer, rows, config: Config, out: Path, reward_type: str,
               **changes) -> float:
    """Train the adapter "reward" as a "scalar" or "steps" reward model → held-out accuracy.

    One tenth of the examples is held out. The learning rate is a fifth of R_φ's, and there are
    twice as many epochs. changes: fields of the config with other values.
    """
    rows = rows[: config.annotated_rows]
    if reward_type == "steps":
        losses = labelled_losses
        count_of = _count_labels
        function, mode = ANNOTATORS["steps"]
        if config.task != "toy":
            function = config.annotator_function
        step_config = replace(config, mode=mode, annotator_function=function)
        rows = annotate_rows(model, tokenizer, rows, step_config, out)
        examples = [labelled_steps(row, tokenizer) for row in rows if row["spans"]]
    else:
        losses = pair_losses
        count_of = _count_pair
        texts = preferences(model, tokenizer, rows, config, out)
        examples = encode_texts(tokenizer, texts)
    if len(examples) < 2:
        raise InputError(f"{reward_type} rewards need two labelled examples, and there are "
                         f"{len(examples)}: the others are ties or have no label; add rows")
    settings = replace(config, **{"reward_learning_rate": config.reward_learning_rate / 5,
                                  "reward_epochs": 2 * config.reward_epochs} | changes)
    n_heldout = max(1, len(examples) // 10)

    def loss_of(model, part):
        return losses(model, tokenizer, part).sum()

    fit_adapter(model, examples[n_heldout:], "reward", settings, loss_of, count_of)
    save_lora(model, "reward", out / "reward" / "adapter")
    with torch.no_grad(), use_lora(model, "reward"):
        parts = chunks(examples[:n_heldout], 64)
        heldout_losses = torch.cat([losses(model, tokenizer, part) for part in parts])
    return (heldout_losses < math.log(2)).float().mean().item()


def ppo(model, tokenizer, rows, config: Config, out: Path, reward_type="scalar",
        advantages=add_advantages):
    """PPO of Tables 2 and 3: Algorithm 4 with r(x, y) at the last token.

    reward_type="steps" is PRM-PPO (Appendix N), with a score at the end of every step. The
    reward model is trained first, unless --reward_model names one of an earlier run.
    """
    if not lora_parameters(model, "reward"):
        fit_scores(model, tokenizer, rows, config, out, reward_type)
    train(model, tokenizer, rows, config, out, SCORED[reward_type], advantages)


METHODS = {
    "sft": sft,
    "ilf": ilf,
    "reflection": reflection,
    "dpo": dpo,
    "ppo": ppo,
    "prm_ppo": partial(ppo, reward_type="steps"),
    "grpo": partial(ppo, advantages=ADVANTAGES["grpo"]),
    "rloo": partial(ppo, advantages=ADVANTAGES["rloo"])}


# ── Reflection at test time, and the command line

def reflect(rollouts: Rollouts, model, tokenizer, config: Config, generator) -> list[str]:
    """Rewrite the responses y: sample texts y' ~ π'(· | x, y, z') with critiques z' of R_φ.

    π' is the adapter "rewriter" in the toy world, and π_ref in other tasks.
    """
    critiques = write_critiques(model, tokenizer, rollouts.prompts, rollouts.texts,
                                config.max_critique_tokens)
    prompts = [*map(rewrite_prompt, rollouts.prompts, rollouts.texts, critiques)]
    adapter = "rewriter" if config.task == "toy" else config.reference
    return rewrite(model, tokenizer, prompts, config, adapter, generator)


def write_reflections(model, tokenizer, rows, config: Config, path: Path):
    """Answer held-out rows in two passes, y and then y', and write rows with the final y'."""
    generator = torch.Generator().manual_seed(config.seed)
    rollouts = sample_rollouts(model, tokenizer, rows, config, "policy", generator)
    texts = reflect(rollouts, model, tokenizer, config, generator)
    write_rows(path, [{"id": str(i), **row, "response": text}
                      for i, (row, text) in enumerate(zip(rows, texts))])


def main(argv=None):
    """Train a policy by one reward design or baseline and save its adapter for eval.py."""
    name, *flags = argv or sys.argv[1:] or [""]
    designs = LEARNT | TRUE
    choices = METHODS | designs | ADVANTAGES
    if name not in choices:
        problem = f"unknown method {name!r}" if name else "no method was given"
        raise InputError(f"{problem}: choose one of {', '.join(choices)}, followed by flags of "
                         f"text2grad.py")
    # Later flags override earlier ones.
    flags = ["--output_dir", f"runs/{name}", *flags]
    config = parse_flags(Config, __doc__, flags)
    if name in TRUE and not config.annotator_function:
        raise InputError(f"{name} needs --annotator_function: set it to module:function")
    if name in GROUPED and config.responses_per_prompt < 2:
        raise InputError(f"{name} compares responses to one prompt: set "
                         f"--responses_per_prompt to 2 or more, such as 4")
    if name in METHODS:
        train_baseline(name, config)
    elif name in designs:
        critic_name = "reward_model" if name in LEARNT else "annotator"
        text2grad.main(replace(config, critic=critic_name), designs[name])
    else:
        text2grad.main(config, advantages=ADVANTAGES[name])


def train_baseline(name: str, config: Config):
    """Train a policy by one of METHODS, save it, and print the command that evaluates it."""
    if name == "reflection" and not config.reward_model:
        raise InputError("reflection needs --reward_model: R_φ criticises its first answers")
    if WORLD_SIZE > 1:
        raise InputError(f"{name} runs in one process only: start it without torchrun")
    out = Path(config.output_dir)
    if name != "sft":
        check_config(config, out)
    _lock = lock_directory(out)                                # held until the process exits
    model, tokenizer = load_model(config.model, config.dtype)
    rows, heldout_rows = (drop_long_rows(part, model, tokenizer, config)
                          for part in load_rows(config))
    config = derive_settings(config, len(rows), model)
    save_settings(config, out)
    start_policy(model, config)
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    METHODS[name](model, tokenizer, rows, config, out)
    save_lora(model, "policy", out / "policy")
    flags = {"adapter": out / "policy"}
    if name == "reflection":
        answers = out / "answers.jsonl"
        write_reflections(model, tokenizer, heldout_rows, config, answers)
        flags = {"adapter": answers, "data": answers}
    print(next_command("eval.py", **flags))


if __name__ == "__main__":
    run_script(main, "baselines")
