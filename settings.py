"""The flags of a run: their names, defaults and help, and the presets of the release.

    config = parse_flags(Config, __doc__)                       # from the command line
    config = parse_flags(Config, argv=["--task", "toy"])        # in a notebook

annotate.py, reward_model.py and text2grad.py share these flags. Other scripts, such as eval.py,
add their own. A default suits a task of your own. --task changes defaults: RELEASE holds those
of the paper's three tasks, and `Task.settings` those of any other task, such as toy.TASK. A
preset is parsed as if its flags had been typed before yours, so your flags have priority. If
the number of iterations or a learning rate is None, `derive_settings` computes it from the
number of rows or the size of the model.

Paper: Appendix D, Tables 9 and 10. "Release" is the code that the authors published.
"""

import argparse
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import get_args

from data import InputError, get_task


def flag(default, text: str, choices=None, least=0, most=10**6):
    """A dataclass field that is a command-line flag, with its help, choices or limits."""
    return field(default=default, metadata={
        "help": text, "choices": choices, "limits": (least, most)})


# ── The flags

@dataclass
class BaseConfig:
    """Base model."""
    task: str = flag("toy", "toy, slf5k, ultrafeedback, kodcode, or module:NAME of your own")
    model: str = flag("meta-llama/Llama-3.1-8B-Instruct", "base model: directory or hub id")
    seed: int = flag(0, "random seed", most=10**9)
    max_critique_tokens: int = flag(256, "tokens of a critique by R_φ", least=1)
    dtype: str | None = flag(None, "data type of the base; none: bfloat16, on a CPU float32",
                             ("bfloat16", "float16", "float32", None))
    micro_batch_tokens: int = flag(
        4096, "tokens of a training pass, with padding", least=1)
    activation_checkpointing: bool = flag(False, "recompute activations to save memory")
    shard: bool = flag(False, "shard the base over the ranks (FSDP2)")


@dataclass
class ServerConfig:
    """Server of the annotator or of the judge."""
    base_url: str | None = flag(None, "OpenAI-compatible server; config.json stores the URL")
    price_in: float | None = flag(None, "USD per million prompt tokens")
    price_out: float | None = flag(None, "USD per million reply tokens")
    max_usd: float | None = flag(None, "budget in USD over all runs")
    concurrency: int = flag(8, "number of parallel requests", least=1)
    timeout: float = flag(120.0, "seconds without a byte of a reply", least=0.01)

    @property
    def prices(self) -> tuple:
        """(price_in, price_out, max_usd): the last three arguments of `Journal`."""
        return self.price_in, self.price_out, self.max_usd


@dataclass
class AnnotatorConfig(ServerConfig):
    """Annotator."""
    annotator_model: str = flag("gpt-4o", "model name on the server")
    annotator_function: str | None = flag(None, "module:function in place of a server")
    mode: str = flag("cot", "cot, no_cot (Table 1), align (Alg. 2 l.10), or module:NAME")
    skip_failed: bool = flag(False, "leave out responses without feedback")

    @property
    def annotator(self) -> str:
        """The annotator's name: a field of annotated rows, and a part of the journal's keys."""
        mode = "" if self.mode == "cot" else f" ({self.mode})"
        return self.annotator_function or self.annotator_model + mode


@dataclass
class AnnotateConfig(AnnotatorConfig):
    """Files of annotate.py."""
    task: str = flag("slf5k", "toy, slf5k, ultrafeedback, kodcode, or module:NAME")
    data: str = flag("rows.jsonl", "rows with responses, as JSON lines")
    output: str = flag("feedback.jsonl", "annotated rows; OUTPUT.journal stores the replies")
    dry_run: bool = flag(False, "only forecast tokens and cost")


@dataclass
class RewardConfig(BaseConfig):
    """Reward model R_φ (Algorithm 3, Table 9)."""
    reward_epochs: int = flag(5, "passes over the annotated rows", least=1)
    reward_batch_size: int = flag(4, "rows per optimizer step", least=1)
    reward_learning_rate: float | None = flag(
        None, "peak rate; none: by the size of the model")
    reward_weight_decay: float = flag(0.0, "weight decay")
    reward_lora_r: int = flag(16, "rank of the adapter", least=1)
    reward_lora_alpha: float = flag(32, "the update is scaled by alpha / r")
    reward_lora_dropout: float = flag(0.0, "dropout", most=0.99)
    reward_lora_targets: str = flag(
        "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "layers with an adapter")
    reward_max_tokens: int = flag(1250, "longest row in tokens: x + y + z", least=1)
    reward_held_out: int = flag(200, "prompts held out, at most a tenth")


@dataclass
class FitConfig(RewardConfig):
    """Files of reward_model.py."""
    data: str = flag("feedback.jsonl", "rows written by annotate.py")
    output_dir: str = flag("runs/reward", "directory for adapter and metrics")


@dataclass
class PolicyConfig(BaseConfig):
    """Policy: rollouts, rewards and the update (Algorithm 4, Table 10)."""
    adapter: str | None = flag(None, "SFT adapter of π_θ and π_ref; none: base")
    iterations: int | None = flag(
        None, "iterations of Algorithm 4; none: epochs over the rows, at least 16", least=1)
    epochs: int = flag(1, "passes over the rows, see iterations", least=1)
    batch_size: int = flag(16, "rollouts per iteration, all ranks", least=1)
    responses_per_prompt: int = flag(1, "rollouts per prompt", least=1)
    decode_batch_size: int = flag(64, "texts that a rank decodes together", least=1)
    temperature: float = flag(0.7, "sampling temperature of π", least=0.01)
    max_new_tokens: int = flag(64, "tokens of a response", least=1)
    kl_coef: float = flag(0.2, "initial KL coefficient β")
    kl_target: float = flag(8.0, "KL per response in nats; 0: fixed β")
    kl_horizon: int = flag(128, "rollouts in which β adapts", least=1)
    gamma: float = flag(1.0, "discount γ", most=1)
    lam: float = flag(0.95, "GAE λ", most=1)
    ppo_epochs: int = flag(2, "passes over each batch", least=1)
    minibatch_size: int = flag(8, "rollouts per optimizer step, all ranks", least=1)
    learning_rate: float | None = flag(
        None, "peak rate; none: by the size of the model")
    value_rate_factor: float = flag(10.0, "rate of the value head / of the policy")
    schedule: str = flag("cosine", "learning rate decay", ("linear", "cosine"))
    clip: float = flag(0.2, "PPO clip range ε")
    value_clip: float = flag(5.0, "clip range of the value loss")
    value_coef: float = flag(0.1, "weight of the value loss")
    value_target: str = flag("gae", "target of V: A + V, or Alg. 4 l.24", ("gae", "return"))
    entropy_coef: float = flag(0.0, "weight β_H of the entropy bonus")
    lora_r: int = flag(16, "rank of the adapter", least=1)
    lora_alpha: float = flag(32, "the update is scaled by alpha / r")
    lora_targets: str = flag("q_proj,k_proj,v_proj,o_proj", "layers with an adapter")
    allow_code_execution: bool = flag(False, "kodcode: run tests of responses")
    wandb: str | None = flag(None, "Weights & Biases project")

    @property
    def reference(self) -> str | None:
        """The name of π_ref's adapter, a frozen SFT adapter; None: π_ref is the base alone."""
        return "reference" if self.adapter else None


@dataclass
class Config(PolicyConfig, RewardConfig, AnnotatorConfig):
    """Run."""
    data: str | None = flag(None, "training rows; none: the task makes them")
    output_dir: str | None = flag(None, "run directory; none: runs/TASK")
    reward_model: str | None = flag(None, "adapter of R_φ; none: train it")
    critic: str = flag("reward_model", "judge of the rollouts in phase 3",
                       ("reward_model", "annotator"))
    max_prompt_tokens: int | None = flag(None, "longest prompt in tokens", least=1)
    annotated_rows: int = flag(10_000, "rows for phases 1 and 2", least=1)
    preview: int | None = flag(
        None, "only show the critiques of so many responses", least=1)
    rounds: int = flag(1, "rounds of rejection sampling", least=1)
    eval_rows: int = flag(64, "held-out prompts, judged before and after", least=1)


# ── Presets

# The release's values for UltraFeedback (Tables 9 and 10; R_φ's batch is ours, see PAPER.md).
# SLF5K and KodCode have the same values, except for those that RELEASE replaces.
_COMMON = dict(
    reward_epochs=3, reward_batch_size=8, reward_learning_rate=1e-5, reward_weight_decay=3e-7,
    reward_lora_dropout=0.1, reward_lora_targets="q_proj,v_proj",
    epochs=4, batch_size=64, minibatch_size=64, ppo_epochs=4, learning_rate=1e-6,
    value_rate_factor=1, value_clip=0.2, temperature=0.6, max_new_tokens=512,
    max_critique_tokens=768, kl_coef=0.05, kl_target=3.0, kl_horizon=10_000,
    lora_targets="q_proj,v_proj")
# max_prompt_tokens: what the release allows for x and y in R_φ's input, less max_new_tokens.
RELEASE = {
    "slf5k": _COMMON | dict(
        reward_lora_dropout=0.05, reward_max_tokens=1400, annotated_rows=5000,
        max_prompt_tokens=811, batch_size=12, minibatch_size=12, schedule="linear",
        kl_coef=0.2, kl_target=6.0, max_new_tokens=89, max_critique_tokens=500),
    "kodcode": _COMMON | dict(
        reward_learning_rate=2e-5, reward_weight_decay=0.01,
        reward_lora_targets="q_proj,k_proj,v_proj,o_proj", max_prompt_tokens=644,
        learning_rate=5e-7, kl_coef=0.07, kl_target=1.0, max_new_tokens=256),
    "ultrafeedback": _COMMON | dict(max_prompt_tokens=438),
}


def preset(task_name: str) -> dict:
    """{flag: value} of the defaults that --task changes."""
    return RELEASE.get(task_name) or get_task(task_name).settings


def derive_settings(config, count: int, model):
    """A copy of the config with numbers for the iterations and learning rates that are None.

    count: number of the policy's training rows. The derived number of iterations is from 16 to
    6000. A derived learning rate is 1.3e-3 for the policy and 5e-3 for R_φ. If the model has n
    million frozen parameters and n is above 1, the rate is divided by the cube root of n. Above
    a billion, where we have not tuned the rates, they are those of the release for
    Llama-3.1-8B.
    """
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    scale = max(1.0, frozen / 1e6) ** (1 / 3)
    derived = {"learning_rate": 1.3e-3 / scale, "reward_learning_rate": 5e-3 / scale}
    if frozen > 1e9:
        derived = dict(_COMMON)                 # below, it only replaces what is None
    if hasattr(config, "epochs"):
        iterations = config.epochs * count // config.batch_size
        derived["iterations"] = min(6000, max(16, iterations))
    return replace(config, **{name: value for name, value in derived.items()
                              if getattr(config, name, value) is None})


# ── The parser

class _Parser(argparse.ArgumentParser):
    source = ""                             # first words of a message: where the flags are from

    def error(self, message):
        """Raise InputError: a wrong flag is reported in one line, with similar flags if any."""
        flags = self._option_string_actions
        similar = [flag for word in re.findall(r"--[\w-]+", message) if word not in flags
                   for flag in get_close_matches(word, flags)]
        hint = f"; similar: {', '.join(similar)}" if similar else ""
        raise InputError(f"{self.source}{message}{hint} (--help lists the flags)")


def _read_value(text: str, kind: type, is_optional: bool, limits: tuple[float, float]):
    """The value of a flag, checked for type and limits; "none" gives None if it is optional."""
    least, most = limits
    if is_optional and text.lower() == "none":
        return None
    with suppress(ValueError):
        value = kind(text)
        if text.strip() if kind is str else least <= value <= most:
            return value
    words = "that is not empty" if kind is str else f"from {least:g} to {most:g}"
    raise argparse.ArgumentTypeError(f"expected {kind.__name__} {words}, found {text!r}")


def parse_flags(config_class, description: str = "", argv=None, preset=preset):
    """Read a config from argv, by default from the command line.

    description: its first line is the title of the --help text. There, the flags of
    config_class and of each parent class form a group. preset(task): the defaults that --task
    changes. Raises InputError if a flag or a
    setting of the task is wrong.
    """
    parser = _Parser(description=description.split("\n")[0], allow_abbrev=False,
                     usage="%(prog)s [--flag value ...]", add_help=False,
                     formatter_class=partial(argparse.HelpFormatter, max_help_position=33,
                                             width=96))
    for part in config_class.__mro__[:-1]:
        group = parser.add_argument_group(part.__doc__.split(".")[0])
        for name in part.__annotations__:
            setting = config_class.__dataclass_fields__[name]
            kind, *others = get_args(setting.type) or (setting.type,)
            options = {"action": "store_true"} if kind is bool else {
                "metavar": kind.__name__, "choices": setting.metadata["choices"],
                "type": partial(_read_value, kind=kind, is_optional=bool(others),
                                limits=setting.metadata["limits"])}
            group.add_argument(f"--{name}", default=setting.default,
                               help=setting.metadata["help"] + " [%(default)s]", **options)
    task = vars(parser.parse_known_args(argv)[0]).get("task")
    other_flags = Config.__dataclass_fields__.keys() - config_class.__dataclass_fields__.keys()
    words = []
    for name, value in (preset(task) if task else {}).items():
        if name not in other_flags and value is not False:
            words.append(f"--{name}" if value is True else f"--{name}={value}")
    parser.source = f"the settings of --task {task}: "
    parser.set_defaults(**vars(parser.parse_args(words)))
    parser.source = ""
    # --help prints the defaults of the task, so it is added after them.
    parser.add_argument("-h", "--help", action="help", help="show this text")
    return config_class(**vars(parser.parse_args(argv)))
