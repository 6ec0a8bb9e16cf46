"""Algorithm 1: from prompts to a policy that was trained with natural-language feedback.

    python text2grad.py                              # all three phases on the toy world
    torchrun --nproc_per_node 8 text2grad.py --task slf5k --data slf5k.jsonl \\
             --model meta-llama/Llama-3.1-8B-Instruct --batch_size 96 --minibatch_size 96

Text2Grad (arXiv 2505.22338) has four algorithms, and each has one file, to read in this order:

    annotate.py       Alg. 2   critique of y → its quotes → spans → δ_t ∈ {−1, 0, +1}
    reward_model.py   Alg. 3   R_φ learns to write the critiques z: −E[log p_φ(z | x, y)]
    policy.py         Alg. 4   y ~ π_θ, z' ~ R_φ, δ'_t, r_t = δ'_t + r_t^KL, GAE, PPO
    text2grad.py      Alg. 1   the whole run:

        y ~ π_ref(·|x) for each prompt x                write_responses      l.5–6    phase 1
        z = (critique, spans) of each (x, y)            annotate             l.7–11   phase 1
        φ ← R_φ trained on all (x, y, z)                fit                  l.13–14  phase 2
        θ ← π_θ trained with the critiques of R_φ       train_and_evaluate   l.16–19  phase 3

`main`, at the end, makes these four calls. Departures: a row of --data that already has a
response is not sampled again. Held-out prompts are judged before and after phase 3. The same
command continues a stopped run.
"""

import random
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from annotate import annotate, annotation_settings, check_annotator
from data import (InputError, check_values, chunks, examples, flag, get_task, parse_flags,
                  preset, read_rows, run_script, write_rows)
from model import (add_lora, drop_long_rows, eos_ids, fingerprint, gathered, load_base,
                   load_lora, lora_parameters, target_layers)
from policy import (PolicyConfig, Rollouts, add_advantages, add_feedback, derive_settings,
                    forward, quote_shares, response_scores, reward_model_critic,
                    sample_rollouts, sample_row, train)
from report import print_result
from reward_model import (RewardConfig, check_reward_model, fit, judge_by_annotator,
                          reward_settings, split_rows, summary)
from runtime import (RANK, WORLD_SIZE, all_sum, check_ranks, forecast_minutes, gather_rows,
                     lock_directory, on_rank0, print_rank0, result_exists, reward_model_hint,
                     run_collective, run_phase, run_settings, save_settings, start_ranks)
from sampling import head_weight, token_logprobs


@dataclass
class Config(PolicyConfig):
    """Run: rows, the phases before the policy, and evaluation."""
    data: str | None = flag(None, "training rows as JSON lines; none: the task makes them")
    output_dir: str = flag("runs/toy", "run directory: adapters, metrics, samples, report")
    annotator_function: str | None = flag(
        "toy:critique", "local annotator as module:function; none: a server")
    reward_model: str | None = flag(None, "adapter of R_φ; none: phases 1 and 2 train it")
    critic: str = flag("reward_model", "judge of the rollouts: R_φ (paper), or the annotator",
                       ("reward_model", "annotator"))
    max_prompt_tokens: int | None = flag(
        None, "longest prompt in tokens; rows with a longer one are dropped", least=1)
    annotated_rows: int = flag(3000, "rows for phases 1 and 2 (paper: 5000, 10000)", least=1)
    annotated_responses_per_prompt: int = flag(
        1, "responses sampled for each annotated row that has none", least=1)
    reward_learning_rate: float | None = flag(
        None, "peak rate of R_φ; none: the task's, or by the size of the model", most=10)
    reward_epochs: int | None = flag(
        None, "epochs of R_φ over its rows; none: the task's, or about 200 steps", least=1)
    reward_lora_targets: str | None = flag(
        None, "layers of R_φ with an adapter; none: the task's")
    allow_weak_reward_model: bool = flag(False, "phase 3 also with an R_φ that is no use")
    eval_rows: int = flag(200, "held-out prompts for the table before and after", least=1)
    rank_timeout: float = flag(30.0, "timeout of collective operations in minutes", least=0.01)


# ── Algorithm 1: annotate, train R_φ, optimise the policy

def check_config(config: Config, out: Path, needs_reward_model: bool):
    """Check flags, annotator, key and directory before anything is sampled or paid."""
    task = get_task(config.task)
    check_values(RewardConfig, preset(config.task, "reward"),
                 f"--task {config.task}: its setting ")
    if any((size or 0) % WORLD_SIZE for size in (config.batch_size, config.minibatch_size)):
        raise InputError(f"{WORLD_SIZE} ranks share each batch equally: set --batch_size and "
                         f"--minibatch_size to multiples of {WORLD_SIZE}")
    if (config.batch_size or 0) % config.responses_per_prompt:
        raise InputError(f"--batch_size {config.batch_size} is not a multiple of "
                         f"--responses_per_prompt {config.responses_per_prompt}")
    if config.data is None and task.rows is None:
        raise InputError(f"--task {config.task} needs --data rows.jsonl")
    if config.wandb and not find_spec("wandb"):
        raise InputError("--wandb needs the package wandb: pip install wandb")
    asks_in_phase_3 = config.probe_rows or config.critic == "annotator"
    if asks_in_phase_3 and config.mode == "align":
        raise InputError("--mode align needs feedback that people wrote, and there is none for "
                         "the policy's new responses: use --critic reward_model and set "
                         "--probe_rows 0")
    is_free = config.annotator_function or config.max_usd is not None
    if config.critic == "annotator" and not is_free:
        raise InputError("--critic annotator asks the server about every rollout: set "
                         "--max_usd with --price_in and --price_out, or --annotator_function")
    has_feedback = config.reward_model or result_exists(out / "feedback.jsonl")
    if asks_in_phase_3 or (needs_reward_model and not has_feedback):
        check_annotator(annotation_settings(config, out))


def check_outcomes(rows: list[dict], has_responses: bool, config: Config):
    """Check that a server will know whether the responses to these rows pass their tests.

    A probe needs the outcomes of new responses. If programs will run, one runs here, so that a
    sandbox that does not work is reported before anything is sampled.
    """
    task = get_task(config.task)
    if not task.tests or config.annotator_function:
        return
    missing = [] if has_responses else [
        row for row in rows
        if not any("outcome" in example for example in examples(task, [row]))]
    if not missing and not config.probe_rows and config.critic == "reward_model":
        return
    if not config.allow_code_execution:
        raise InputError(f"{len(missing)} of {len(rows)} rows have no test outcome, and "
                         f"{config.probe_rows} responses are probed: set "
                         f"--allow_code_execution to run their tests in the sandbox, or "
                         f"--probe_rows 0")
    from measures.sandbox import add_outcomes
    add_outcomes([rows[0] | {"response": "pass", "outcome": None}], task)


def load_rows(config: Config) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) (§4.1). No held-out prompt is trained on or annotated.

    The seed shuffles the training rows. One row is kept per held-out prompt. Raises InputError
    where all rows have the same prompt.
    """
    task = get_task(config.task)
    if config.data is None:
        training = task.rows("train", config.annotated_rows, config.seed)
        evaluation = task.rows("eval", config.eval_rows, 0)
        for number, row in enumerate([*training, *evaluation], 1):
            task.check(row, f"--task {config.task}: row {number} of its `rows`")
        return training, evaluation
    rows = read_rows(config.data, task=task)
    shuffled = random.Random(config.seed).sample(rows, len(rows))
    training, evaluation = split_rows(shuffled, config.eval_rows, config.seed,
                                      task.policy_prompt, least=1)
    if not training:
        raise InputError(f"{config.data}: all rows have the same prompt; add rows with another "
                         f"prompt, because one prompt is held out for evaluation")
    one_per_prompt = {str(task.policy_prompt(row)): row for row in evaluation}
    return training, list(one_per_prompt.values())


def write_responses(model, tokenizer, rows: list[dict], config: Config, out: Path) -> str:
    """Alg. 1 l.6: π_ref answers the rows that have no response → responses.jsonl."""
    task = get_task(config.task)
    generator = torch.Generator().manual_seed(config.seed)
    with_response = [row for row in rows if task.all_responses(row)]
    without_response = [row for row in rows if not task.all_responses(row)
                        for _ in range(config.annotated_responses_per_prompt)]
    parts = chunks(without_response, 256)
    bar = tqdm(parts, "respond", disable=not without_response or RANK > 0)
    for part in forecast_minutes(bar, "respond"):
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, part, config, config.reference, generator)
        with_response += [row | {"response": y} for row, y in zip(part, batch.texts)]    # l.6
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        with_response = gather_rows(add_outcomes(with_response[RANK::WORLD_SIZE], task))
    if RANK == 0:
        write_rows(out / "responses.jsonl", with_response)
    return f"{len(with_response)} responses, {len(without_response)} of them sampled"


@torch.no_grad()
def base_nats(rollouts: Rollouts, model, tokenizer, config: Config) -> Tensor:
    """−Σ_t log p(y_t | x, y_<t) under the base, in nats, and the number of tokens: [2].

    The EOS token does not count.
    """
    eos = torch.tensor([*eos_ids(tokenizer, model)], device=model.device)
    sums = torch.zeros(2, device=model.device)
    for index in chunks(range(RANK, len(rollouts.rows), WORLD_SIZE), config.micro_batch_size):
        hidden, targets = forward(model, rollouts, [*index], None)
        logprobs = token_logprobs(hidden, head_weight(model), targets)
        is_text = ~torch.isin(targets, eos)
        sums += torch.stack([-logprobs[is_text].sum(), is_text.sum()])
    return all_sum(sums)


def evaluate(model, tokenizer, rows, config: Config, adapter, critic=reward_model_critic):
    """Sample a response to each held-out row and let the critic judge it.

    Returns (the means of all metrics, the samples).
    """
    nats = torch.zeros(2, device=model.device)
    generator = torch.Generator().manual_seed(config.seed)
    task = get_task(config.task)
    samples = []
    judgements = []
    for part in tqdm(chunks(rows, config.batch_size), desc="evaluate", disable=RANK > 0):
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, part, config, adapter, generator)
            add_feedback(batch, critic(batch, model, tokenizer, config))
            nats += base_nats(batch, model, tokenizer, config)
        judgements += batch.feedback
        for i, scores in enumerate(response_scores(batch, task)):
            samples.append({"id": part[i].get("id"), **sample_row(batch, i), "scores": scores})
    means = {key: sum(sample["scores"][key] for sample in samples) / len(samples)
             for key in samples[0]["scores"]} | quote_shares(judgements)
    means["perplexity under the base"] = (nats[0] / nats[1].clamp(min=1)).exp().item()
    return means, samples


WARN_UNREADABLE = 0.2                     # share of critiques; a warning above it
MOST_UNREADABLE = 0.5                     # phase 3 does not start above it
ALL_TOKENS = 0.9                          # share of good or of poor tokens; a warning above it


def train_and_evaluate(model, tokenizer, rows, held_out, config: Config, out: Path,
                       critic=reward_model_critic, advantages=add_advantages) -> str:
    """Phase 3 (Alg. 1 l.16–19), with an evaluation before and after → policy/, result.json."""
    before, samples = evaluate(model, tokenizer, held_out, config, config.reference, critic)
    if RANK == 0:
        write_rows(out / "before_samples.jsonl", samples)
    unreadable = before["unparseable"]
    if unreadable > WARN_UNREADABLE:
        reason = next(sample["unreadable"] for sample in samples if sample["unreadable"])
        problem = (f"{unreadable:.0%} of the critiques cannot be read and give no reward (the "
                   f"first: {reason}); train R_φ again with a higher --reward_learning_rate, "
                   f"more --reward_epochs or more rows (remove {out / 'reward'} first), or "
                   f"raise --max_critique_tokens; python report.py {out} shows them")
        if unreadable > MOST_UNREADABLE:
            raise InputError(problem)
        print_rank0(f"warning: {problem}")
    shares = before["good"], before["poor"]
    if not 0 < max(shares) < ALL_TOKENS:
        print_rank0(f"warning: δ is nearly the same for every token of the {len(samples)} "
                    f"held-out responses ({shares[0]:.0%} good, {shares[1]:.0%} poor), so the "
                    f"policy learns nothing; python report.py {out} shows the critiques")
    train(model, tokenizer, rows, config, out, critic, advantages)                      # l.18
    after, samples = evaluate(model, tokenizer, held_out, config, "policy", critic)
    if RANK == 0:
        write_rows(out / "after_samples.jsonl", samples)
        write_rows(out / "result.json", [{"before": before, "after": after}])
    return f"{config.iterations} iterations"


def start_policy(model, config: Config):
    """Create the adapter "policy", or load it and π_ref from --adapter (Alg. 1 l.17)."""
    if config.adapter:
        load_lora(model, "reference", config.adapter)
        load_lora(model, "policy", config.adapter)
    else:
        torch.manual_seed(config.seed)
        add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0,
                 config.lora_targets.split(","))


def annotator_critic(rollouts: Rollouts, model, tokenizer, config: Config):  # noqa: ARG001
    """The annotator in the place of R_φ (--critic annotator): judgements of this rank's rows.

    Rank 0 asks about all rows, because the journal has one writer.
    """
    judgements = judge_by_annotator(rollouts, config) if RANK == 0 else None
    return gather_rows([judgements])[0][RANK::WORLD_SIZE]


def main(argv=None, critic=None, needs_reward_model=True, advantages=add_advantages):
    """Algorithm 1. The last three arguments serve experiments/, which have other critics.

    critic, advantages: see `train`; None is the critic of --critic. needs_reward_model: whether
    the critic uses R_φ, so that phases 1 and 2 must train it.
    """
    config = parse_flags(Config, __doc__, preset, argv)
    out = Path(config.output_dir)
    if config.critic == "annotator":
        config.probe_rows = 0                             # they would compare it with itself
        needs_reward_model = False
    critic = critic or (reward_model_critic if needs_reward_model else annotator_critic)
    check_config(config, out, needs_reward_model)
    device = start_ranks(config.rank_timeout)
    _lock = lock_directory(out)                               # held until the process ends
    rows, held_out = load_rows(config)
    model, tokenizer = load_base(config, device)
    rows = drop_long_rows(rows, model, tokenizer, config)
    held_out = drop_long_rows(held_out, model, tokenizer, config)
    config = derive_settings(config, len(rows), model)
    annotation_rows = rows[: config.annotated_rows]
    trains_reward_model = needs_reward_model and config.reward_model is None
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    start_policy(model, config)
    check_ranks([run_settings(config), rows, held_out, fingerprint(model)])
    if trains_reward_model:
        target_layers(model, reward_settings(config, out).lora_targets.split(","),
                      "--reward_lora_targets")
    has_responses = not trains_reward_model or result_exists(out / "responses.jsonl")
    check_outcomes(annotation_rows, has_responses, config)
    annotator = config.annotator_function or config.annotator_model
    save_settings(config, out, "R_φ" if needs_reward_model else annotator)
    print_rank0(f"Text2Grad on {config.task}: {config.model}, {len(rows)} training prompts, "
                f"{config.iterations} iterations of {config.batch_size} rollouts, learning "
                f"rate {config.learning_rate:.2g}, {device}; files in {out}/")
    if trains_reward_model:
        run_phase("phase 1, respond", "responses.jsonl", out,
                  lambda: write_responses(model, tokenizer, annotation_rows, config,
                                          out))                                        # l.4–6
        run_phase("phase 1, annotate", "feedback.jsonl", out,
                  lambda: on_rank0(annotate, annotation_settings(config, out)))      # l.7–11
        run_phase("phase 2, reward model", "reward/metrics.json", out,
                  lambda: summary(fit(model, tokenizer, reward_settings(config, out))),
                  out / "reward")                                                    # l.13–14
        if not lora_parameters(model, "reward"):                # trained in an earlier run
            load_lora(model, "reward", out / "reward" / "adapter")
    if needs_reward_model:
        adapter = Path(config.reward_model or out / "reward/adapter")
        check_reward_model(adapter.parent / "metrics.json", config.allow_weak_reward_model)
    run_phase("phase 3, policy", "result.json", out,
              lambda: train_and_evaluate(model, tokenizer, rows, held_out, config, out,
                                         critic, advantages), out)                   # l.16–19
    if RANK == 0:
        hint = reward_model_hint(config, out)
        print_result(out, hint)
    run_collective(dist.destroy_process_group)


if __name__ == "__main__":
    run_script(main, "text2grad")
