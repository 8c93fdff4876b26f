"""A training run's state in a folder: safetensors and JSON alone, nothing that runs code when it is read."""

from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend.base.errors import InputError
from cacheblend.eval.world.question import QuestionClass

from .curriculum import STAGES, Stage
from .network import NetworkConfig, make_network
from .trainer import TrainConfig, Trainer

_WEIGHTS, _OPTIMIZERS, _STATE = "weights.safetensors", "optimizers.safetensors", "state.json"


def save_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Writes the whole state of a run; a folder of that name is replaced only once the new one is complete."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    weights = {name: weight.detach().contiguous() for name, weight in trainer.network.named_parameters()}
    save_file(weights, new / _WEIGHTS)
    save_file(_optimizer_tensors(trainer), new / _OPTIMIZERS)
    state = {
        "config": asdict(trainer.config),
        "network": asdict(trainer.network_config),
        "step": trainer.step,
        "stage": trainer.stages[trainer.stage].name,
        "grown_at": trainer.grown_at,
        "recent": {str(each): accuracy for each, accuracy in trainer.recent.items()},
    }
    (new / _STATE).write_text(json.dumps(state, indent=2) + "\n")
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(folder.with_name(folder.name + ".old"), ignore_errors=True)


def load_checkpoint(folder: Path, device: torch.device, stages: tuple[Stage, ...] = STAGES, **changes: float) -> Trainer:
    """The trainer of a saved run, ready for its next step; it goes on bit for bit on the same machine and thread count.

    Args:
        folder: what `save_checkpoint` wrote.
        device: where to train.
        stages: the curriculum that the run follows.
        changes: fields of `TrainConfig` to change, such as a larger `steps`.

    Raises:
        InputError: the folder is not a checkpoint.
    """
    try:
        state = json.loads((folder / _STATE).read_text())
        weights = load_file(folder / _WEIGHTS)
        moments = load_file(folder / _OPTIMIZERS)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not a training checkpoint ({error}); give a folder that train_reader wrote") from error
    trainer = Trainer(TrainConfig(**{**state["config"], **changes}), NetworkConfig(**state["network"]), device, stages)
    names = [stage.name for stage in stages]
    if state["stage"] not in names:
        raise InputError(f"the run in {folder} stands at stage {state['stage']!r}, which this curriculum has not: {names}")
    trainer.step, trainer.stage, trainer.grown_at = state["step"], names.index(state["stage"]), state["grown_at"]
    if trainer.is_grown:
        trainer.use(make_network(trainer.network_config, trainer.tokenizer, trainer.config.seed))
    trainer.recent = {QuestionClass(each): accuracy for each, accuracy in state["recent"].items()}
    with torch.no_grad():
        for name, weight in trainer.network.named_parameters():
            weight.copy_(weights[name])
    for index, optimizer in enumerate(trainer.optimizers):
        _restore(optimizer, f"{index}.", moments)
    return trainer


def _optimizer_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every tensor of the optimizers' states as `optimizer.parameter.name`."""
    return {
        f"{index}.{parameter}.{name}": tensor.detach().contiguous()
        for index, optimizer in enumerate(trainer.optimizers)
        for parameter, entries in optimizer.state_dict()["state"].items()
        for name, tensor in entries.items()
    }


def _restore(optimizer: torch.optim.Optimizer, prefix: str, moments: dict[str, torch.Tensor]) -> None:
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in moments.items():
        if key.startswith(prefix):
            parameter, name = key.removeprefix(prefix).split(".")
            entries.setdefault(int(parameter), {})[name] = tensor
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


def export_reader(
    network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes model and tokenizer; weights in `dtype`, safetensors, tied embeddings once."""
    shipped = copy.deepcopy(network)
    torch.nn.Module.to(shipped, device="cpu", dtype=dtype)  # transformers wraps .to in a way that mypy cannot follow
    shipped.config._attn_implementation = "sdpa"
    shipped.generation_config.eos_token_id = tokenizer.eos_token_id
    shipped.generation_config.pad_token_id = tokenizer.pad_token_id
    shipped.generation_config.do_sample = False
    shipped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_reader(folder: Path) -> LlamaForCausalLM:
    """The network of a folder that `export_reader` wrote, in float32.

    Raises:
        InputError: there is none.
    """
    try:
        network = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} holds no reader ({error}); give a folder that train_reader wrote") from error
    if not isinstance(network, LlamaForCausalLM):
        raise InputError(f"{folder} holds a {type(network).__name__}, not a reader")
    return network
