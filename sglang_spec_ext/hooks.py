"""Every symbol of SGLang that this project touches, as one table.

`when` says in which case a row is installed:
- `flags`: the command line may hold `--spec-ext-*` flags;
- `active`: shadow or adaptive mode was asked for;
- `cpu`: the CPU reference platform was selected;
- `draft`: either of the last two;
- `launcher`: the same, in a server's command-line process.

`kind` is SGLang's own (before, after, around, replace: `sglang/srt/plugins/hook_registry.py`) or one of two more:
`assign` sets a module attribute in that module only, for names that upstream leaves None on an unknown device;
`module` puts a module of ours in the place of one that cannot be imported without CUDA.
`params` are the parameter names that our side relies on; `spec-ext doctor` and a test check each row.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Kind = Literal["before", "after", "around", "replace", "assign", "module"]
When = Literal["flags", "active", "cpu", "draft", "launcher"]


@dataclass(frozen=True)
class Hook:
    """One touched symbol: where, how, with what, and until when."""

    target: str  # dotted path of the symbol in SGLang
    kind: Kind
    hook: str  # "module:attribute" of ours (a module for kind `module`), imported only where it is installed
    when: When
    why: str
    remove_when: str
    params: tuple[str, ...] = ()
    upstream: str = ""  # link to the upstream discussion, where there is one

    def load(self) -> Any:
        """Import and return our side of the hook."""
        module, _, attribute = self.hook.partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found


@cache
def split_target(target: str) -> tuple[str, tuple[str, ...]]:
    """Split a dotted path into the module and the attributes within it.

    Modules of SGLang are lower case and its classes are not, so no import is needed to tell them apart.
    """
    parts = target.split(".")
    for i, part in enumerate(parts):
        if part[0].isupper():  # a class; module-level names are the last part
            return ".".join(parts[:i]), tuple(parts[i:])
    return ".".join(parts[:-1]), (parts[-1],)


_ARGS = "sglang.srt.server_args.ServerArgs"
_SPEC = "sglang.srt.speculative"
_OPS = "sglang.kernels.ops.speculative"
_NO_EXTRA_FLAGS = "SGLang lets a plugin add command-line flags"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_NO_STATE = "SGLang lets a plugin contribute to the internal state"
_NO_PROOF = "SGLang stops when a plugin that was asked for fails"
_TORCH_FORM = "SGLang ships a torch form of this kernel for platforms without Triton"

FLAG_HOOKS = (
    Hook(
        f"{_ARGS}.add_cli_args",
        "after",
        "sglang_spec_ext.launch:add_flags",
        "flags",
        "adds the --spec-ext-* flags to SGLang's parser",
        _NO_EXTRA_FLAGS,
        ("parser",),
    ),
    Hook(
        f"{_ARGS}.from_cli_args",
        "around",
        "sglang_spec_ext.launch:take_flags",
        "flags",
        "takes our values out of the namespace and exports them to child processes",
        _NO_EXTRA_FLAGS,
        ("cls", "args"),
    ),
)

DRAFT_HOOKS = (
    Hook(
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        "after",
        "sglang_spec_ext.draft_check:check_resolved_draft",
        "draft",
        "loads a draft with missing tensors silently, and finds a draft of another size only while building it",
        "SGLang's draft loaders check what they loaded",
        ("server_args",),
    ),
)

LAUNCHER_HOOKS = (
    Hook(
        "sglang.srt.server_args.PortArgs.init_new",
        "after",
        "sglang_spec_ext.scratch:forget_load_file",
        "launcher",
        "names a shared-memory file that nobody removes",
        "SGLang removes its load files when it ends",
    ),
)

ACTIVE_HOOKS = (
    Hook(
        "sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
        "after",
        "sglang_spec_ext.launch:require_proof",
        "active",
        "stops the server unless every scheduler proves that it runs the extension",
        _NO_PROOF,
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "after",
        "sglang_spec_ext.workers.selection:add_proof",
        "active",
        "sends the proof to the launching process, and from there to /server_info",
        _NO_PROOF,
        ("self",),
    ),
    Hook(
        f"{_SPEC}.spec_info.SpeculativeAlgorithm.create_worker",
        "around",
        "sglang_spec_ext.workers.selection:create_worker",
        "active",
        "returns our subclass of the built-in worker, under the built-in algorithm name: 58 places in SGLang "
        "compare that name",
        "SGLang lets a plugin subclass a built-in worker",
        ("self", "server_args"),
        "https://github.com/sgl-project/sglang/pull/23991",
    ),
    Hook(
        f"{_STATE}.get_internal_state",
        "after",
        "sglang_spec_ext.workers.runtime_control:add_state",
        "active",
        "shows the controller's state in /server_info",
        _NO_STATE,
        ("self", "recv_req"),
    ),
    Hook(
        f"{_STATE}._update_handlers",
        "after",
        "sglang_spec_ext.workers.runtime_control:add_handlers",
        "active",
        "accepts mode, pin, unpin and reset through /set_internal_state",
        _NO_STATE,
        ("self",),
    ),
    Hook(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state",
        "around",
        "sglang_spec_ext.workers.runtime_control:answer_with_reason",
        "active",
        "answers a rejected update of ours with the rule and status 400; SGLang answers [false]",
        _NO_STATE,
        ("self", "obj"),
    ),
)

CPU_HOOKS = (
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        "replace",
        "sglang_spec_ext.cpu.memory:skip_kv_copy_warmup",
        "cpu",
        "compiles a Triton copy at start",
        _TORCH_FORM,
        ("self",),
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._move_kv_cache_impl",
        "replace",
        "sglang_spec_ext.cpu.memory:move_kv_cache",
        "cpu",
        "launches the Triton copy",
        _TORCH_FORM,
        ("self", "tgt_loc", "src_loc"),
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "replace",
        "sglang_spec_ext.cpu.cache_locs:assign_req_to_token",
        "cpu",
        "launches a Triton scatter",
        _TORCH_FORM,
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
    ),
    Hook(
        f"{_OPS}.cache_locs.assign_draft_cache_locs_contiguous_func",
        "replace",
        "sglang_spec_ext.cpu.cache_locs:draft_cache_locs",
        "cpu",
        "launches a Triton gather",
        _TORCH_FORM,
        ("req_pool_indices", "req_to_token", "seq_lens", "out_cache_loc", "topk", "num_cols", "positions", "mrope"),
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        "around",
        "sglang_spec_ext.cpu.memory:keep_embedding_dtype",
        "cpu",
        "casts the draft's input embeddings to bfloat16 whatever the model's dtype",
        "the cast follows the model's dtype",
        ("self", "forward_batch"),
    ),
    Hook(
        "sglang.srt.arg_groups.platform_hook.handle_cpu_backends",
        "around",
        "sglang_spec_ext.cpu.arguments:choose_attention_backend",
        "cpu",
        "chooses a back end that needs kernels built for the CPU",
        "SGLang asks an out-of-tree CPU platform for its default back end",
        ("server_args",),
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_dspark",
        "around",
        "sglang_spec_ext.cpu.arguments:allow_dspark",
        "cpu",
        "compares the device string instead of asking the platform, as DFLASH does",
        "DSPARK asks the platform",
        ("server_args",),
    ),
    Hook(
        f"{_SPEC}.draft_utils.DraftBackendFactory._create_backend",
        "around",
        "sglang_spec_ext.cpu.arguments:add_draft_backend",
        "cpu",
        "knows a fixed map of draft attention back ends",
        "SGLang asks the attention registry for draft back ends",
        ("self", "backend_name", "backend_map", "error_template", "stamps_children"),
    ),
    Hook(
        "sglang.kernels.ops.attention.table_qk_norm_rope.table_qk_norm_rope_",
        "replace",
        "sglang_spec_ext.cpu.drafts:table_qk_norm_rope",
        "cpu",
        "is launched for bfloat16 drafts on every device (DFLASH, DSPARK)",
        _TORCH_FORM,
        ("qkv", "positions", "q_weight", "k_weight", "cos_sin_cache", "num_q_heads", "num_k_heads", "head_dim", "eps"),
    ),
    Hook(
        "sglang.srt.models.dspark.DSparkDraftMixin._fused_kv_write_bundle",
        "replace",
        "sglang_spec_ext.cpu.drafts:no_fused_kv_write",
        "cpu",
        "chooses a Triton kernel for bfloat16 drafts on every device; without a bundle the torch form runs",
        _TORCH_FORM,
        ("self", "pool"),
    ),
    Hook(
        f"{_OPS}.spec_tree.build_tree_kernel_efficient_func",
        "replace",
        "sglang_spec_ext.cpu.trees:build_tree",
        "cpu",
        "refuses an out-of-tree platform",
        _TORCH_FORM,
        ("parent_list", "top_scores_index", "seq_lens", "tree_mask", "positions", "retrieve_index",
         "retrieve_next_token", "retrieve_next_sibling", "topk", "spec_steps", "num_verify_tokens", "tree_mask_mode"),
    ),
    Hook(
        f"{_OPS}.spec_tree.verify_tree_greedy_func",
        "replace",
        "sglang_spec_ext.cpu.trees:verify_tree_greedy",
        "cpu",
        "refuses an out-of-tree platform",
        _TORCH_FORM,
        ("predicts", "accept_index", "accept_token_num", "candidates", "retrieve_index", "retrieve_next_token",
         "retrieve_next_sibling", "target_predict", "topk"),
    ),
    Hook(
        f"{_OPS}.eagle.fill_bonus_tokens_func",
        "replace",
        "sglang_spec_ext.cpu.trees:fill_bonus_tokens",
        "cpu",
        "launches a Triton gather",
        _TORCH_FORM,
        ("accept_tokens", "accept_lens", "bonus_tokens", "accept_stride", "batch_size"),
    ),
    Hook(
        f"{_OPS}.eagle.fill_accept_out_cache_loc_func",
        "replace",
        "sglang_spec_ext.cpu.cache_locs:accepted_slots",
        "cpu",
        "launches a Triton gather (NGRAM)",
        _TORCH_FORM,
        ("accept_index", "out_cache_loc", "accept_out_cache_loc", "size"),
    ),
    Hook(
        f"{_OPS}.cache_locs.fill_front_out_cache_loc_func",
        "replace",
        "sglang_spec_ext.cpu.cache_locs:front_slots",
        "cpu",
        "launches a Triton gather (NGRAM)",
        _TORCH_FORM,
        ("num_front", "out_cache_loc", "front_out_cache_loc"),
    ),
    Hook(
        f"{_OPS}.reconstruct_tree",
        "module",
        "sglang_spec_ext.cpu.reconstruct_tree",
        "cpu",
        "imports a kernel library that needs libcuda",
        _TORCH_FORM,
    ),
    Hook(
        f"{_SPEC}.eagle_utils.eagle_sample",
        "around",
        "sglang_spec_ext.cpu.sampling:with_sampling_info",
        "cpu",
        "its target probabilities leave out min-p and filter in another order than plain decoding here",
        "verification samples from the distribution of the plain sampler",
        ("verify_input", "batch", "logits_output"),
    ),
    Hook(
        f"{_SPEC}.eagle_utils.sampling_softmax",
        "assign",
        "sglang_spec_ext.cpu.sampling:verify_softmax",
        "cpu",
        "gives the probabilities that plain decoding samples from, filters included",
        _TORCH_FORM,
    ),
    Hook(
        f"{_SPEC}.eagle_utils.top_k_renorm_prob",
        "assign",
        "sglang_spec_ext.cpu.sampling:already_filtered",
        "cpu",
        "None on an unknown device; the softmax above has applied it",
        _TORCH_FORM,
    ),
    Hook(
        f"{_SPEC}.eagle_utils.top_p_renorm_prob",
        "assign",
        "sglang_spec_ext.cpu.sampling:already_filtered",
        "cpu",
        "None on an unknown device; the softmax above has applied it",
        _TORCH_FORM,
    ),
    Hook(
        f"{_SPEC}.eagle_utils.tree_speculative_sampling_target_only",
        "assign",
        "sglang_spec_ext.cpu.sampling:tree_target_only",
        "cpu",
        "None on an unknown device",
        _TORCH_FORM,
    ),
    Hook(
        f"{_SPEC}.dflash_utils.tree_speculative_sampling_target_only",
        "assign",
        "sglang_spec_ext.cpu.sampling:tree_target_only",
        "cpu",
        "None on an unknown device: DFLASH would then verify greedily with one warning, which is wrong output",
        _TORCH_FORM,
    ),
    Hook(
        f"{_SPEC}.dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE",
        "assign",
        "sglang_spec_ext.cpu.sampling:SAMPLING_VERIFY_AVAILABLE",
        "cpu",
        "switches on the sampled verification of DFLASH",
        _TORCH_FORM,
    ),
    Hook(
        f"{_SPEC}.dflash_utils.build_speculative_verify_target_probs",
        "replace",
        "sglang_spec_ext.cpu.sampling:verify_target_probs",
        "cpu",
        "leaves out min-p and filters in another order than plain decoding here",
        "verification samples from the distribution of the plain sampler",
        ("next_token_logits", "sampling_info", "draft_token_num", "bs", "max_top_k", "uniform_top_k_value",
         "use_sparse_topk"),
    ),
    Hook(
        f"{_OPS}.dspark.dspark_accept._accept_sampling_core",
        "around",
        "sglang_spec_ext.cpu.sampling:with_min_p",
        "cpu",
        "skips the filters when only min-p is asked for",
        "verification samples from the distribution of the plain sampler",
        ("sampling_info",),
    ),
    Hook(
        f"{_OPS}.dspark.dspark_accept.chain_speculative_sampling_triton",
        "assign",
        "sglang_spec_ext.cpu.sampling:chain_rejection",
        "cpu",
        "launches a Triton sampler",
        _TORCH_FORM,
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.reg_all_gather_into_tensor",
        "replace",
        "sglang_spec_ext.cpu.ranks:all_gather_into_tensor",
        "cpu",
        "is a custom op without a CPU registration (DFLASH with --tp 2)",
        "the op is registered for CPU tensors",
        ("output", "input", "group_name"),
    ),
    Hook(
        "sglang.srt.model_executor.forward_batch_info._is_cpu",
        "assign",
        "sglang_spec_ext.cpu.ranks:IS_CPU",
        "cpu",
        "pins memory of the data-parallel sync rows unless it knows that it is on a CPU",
        "it asks the platform whether memory can be pinned",
    ),
)

HOOKS: tuple[Hook, ...] = (*FLAG_HOOKS, *DRAFT_HOOKS, *LAUNCHER_HOOKS, *ACTIVE_HOOKS, *CPU_HOOKS)
