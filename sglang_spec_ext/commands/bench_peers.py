"""SGLang 0.5.23's own kernels as implementations of our ops, where it has one. Inputs as in bench_cases.

Each function returns {} when SGLang is not installed; the benchmark then says so in its environment block.
"""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

# binds one set of inputs (buffers that upstream keeps are built here), returns what is timed
Peer = Callable[[dict[str, Any]], Callable[[], dict[str, torch.Tensor]]]


def installed() -> bool:
    """Say whether there is a SGLang to compare with."""
    return find_spec("sglang") is not None


def survival_plan(gamma: int) -> dict[str, Peer]:
    """DSpark's schedule and the layout's offsets: four launches and one."""
    if not installed():
        return {}

    config = SimpleNamespace(min_verify_len=1, survival_eps=1e-6, resolved_max_verify_len=lambda: gamma + 1)

    def call(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        from sglang.kernels.ops.speculative.dspark.dspark_schedule import ScheduleVerifyLensTopk
        from sglang.kernels.ops.speculative.ragged_verify_kernels import BuildQoIndptr

        lens = ScheduleVerifyLensTopk.execute(
            confidence=inputs["confidences"], budget=inputs["budget"], cfg=config
        )
        return {"verify_lens": lens, "offsets": BuildQoIndptr.execute(verify_lens=lens).qo_indptr}

    return {"sglang": lambda inputs: lambda: call(inputs)}


def markov_step() -> dict[str, Peer]:
    """The bias as a matrix product, then the sampler: it gives the token and no statistics."""
    if not installed():
        return {}

    def call(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep

        base, gumbel = inputs["base_logits"], inputs["gumbel"]
        temperatures = inputs["temperatures"]
        bias = torch.nn.functional.linear(inputs["w1"][inputs["prev_tokens"]], inputs["w2"])
        tokens = MarkovSampleStep.execute(
            base_logits=base,
            bias=bias,
            temperatures=torch.zeros(len(base), device=base.device) if temperatures is None else temperatures,
            key=0 if gumbel is None else gumbel.key,
            offset=torch.zeros(1, dtype=torch.int64, device=base.device) if gumbel is None else gumbel.offset,
            step=0 if gumbel is None else gumbel.step,
            step_dtype=torch.float32,
            has_sampled_rows=temperatures is not None,
        )
        return {"tokens": tokens}

    return {"sglang": lambda inputs: lambda: call(inputs)}


def chain_accept(mode: str) -> dict[str, Peer]:
    """DFlash's greedy rule, the target-only tree kernel on a chain, and the chain rejection kernel."""
    if not installed():
        return {}
    return {"sglang": _greedy if mode == "greedy" else _tree if mode == "target_only" else _chain}


def _greedy(inputs: dict[str, Any]) -> Callable[[], dict[str, torch.Tensor]]:
    from sglang.kernels.ops.speculative.dflash import compute_dflash_correct_drafts_and_bonus

    candidates = torch.nn.functional.pad(inputs["drafts"], (1, 0))  # slot 0, the anchor, is not compared
    predicted = inputs["target_ids"].view(candidates.shape)

    def call() -> dict[str, torch.Tensor]:
        accepted, bonus = compute_dflash_correct_drafts_and_bonus(
            candidates=candidates, target_predict=predicted
        )
        return {"num_accepted": accepted, "bonus": bonus}

    return call


def _sampled(
    kernel: Callable[..., None], inputs: dict[str, Any], draft_probs: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], dict[str, torch.Tensor]]:
    drafts = inputs["drafts"]
    num_requests, num_drafts = drafts.shape
    width, device = num_drafts + 1, drafts.device
    following = torch.arange(1, width + 1, device=device).expand(num_requests, -1).clone()
    following[:, -1] = -1
    target_probs = inputs["target_probs"].view(num_requests, width, -1)
    predicts = torch.zeros(num_requests * width, dtype=torch.int32, device=device)
    accept_index = torch.zeros((num_requests, width), dtype=torch.int32, device=device)
    accepted = torch.zeros(num_requests, dtype=torch.int32, device=device)
    arguments = {
        "candidates": torch.nn.functional.pad(drafts, (1, 0)),
        "retrive_index": torch.arange(num_requests * width, device=device).view(num_requests, width),
        "retrive_next_token": following,
        "retrive_next_sibling": torch.full_like(following, -1),
        "uniform_samples": torch.nn.functional.pad(inputs["uniforms"], (0, 1)),
        "uniform_samples_for_final_sampling": inputs["final_uniforms"],
        "target_probs": target_probs,
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "deterministic": True,
    }

    def call() -> dict[str, torch.Tensor]:
        kernel(
            predicts=predicts,
            accept_index=accept_index,
            accept_token_num=accepted,
            draft_probs=draft_probs(target_probs),
            **arguments,
        )
        place = accept_index.gather(1, accepted[:, None].long()).squeeze(1)
        return {"num_accepted": accepted, "bonus": predicts[place.long()].long()}

    return call


def _tree(inputs: dict[str, Any]) -> Callable[[], dict[str, torch.Tensor]]:
    from sglang.kernels.ops.speculative.sampling import tree_speculative_sampling_target_only

    # upstream zeroes a tensor of p's size in every step, and the kernel writes into it
    return _sampled(tree_speculative_sampling_target_only, inputs, torch.zeros_like)


def _chain(inputs: dict[str, Any]) -> Callable[[], dict[str, torch.Tensor]]:
    from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

    return _sampled(chain_speculative_sampling_triton, inputs, lambda _: inputs["draft_probs"])
