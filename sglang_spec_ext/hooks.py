"""Every symbol of SGLang that this project touches, as one table.

`when` says in which case a row is installed:
- `flags`: the command line may hold `--spec-ext-*` flags;
- `active`: shadow or adaptive mode was asked for;
- `pd`: the same, on a prefill or decode server whose records travel;
- `cpu`: the CPU reference platform was selected;
- `draft`: `active` or `cpu`;
- `launcher`: the same, in a server's command-line process.

`kind` is SGLang's own (before, after, around, replace: `sglang/srt/plugins/hook_registry.py`) or one of two more:
`assign` sets a module attribute in that module only, for names that upstream leaves None on an unknown device;
`module` puts a module of ours in the place of one that cannot be imported without CUDA.
`params` are the parameter names that our side relies on; `spec-ext doctor` and a test check each row.
"""

from sglang_spec_ext.disagg.seams import CPU_SEAMS, SEAMS
from sglang_spec_ext.hook import Hook
from sglang_spec_ext.hooks_cpu import CPU_HOOKS

_ARGS = "sglang.srt.server_args.ServerArgs"
_SPEC = "sglang.srt.speculative"
_NO_EXTRA_FLAGS = "SGLang lets a plugin add command-line flags"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_NO_STATE = "SGLang lets a plugin contribute to the internal state"
_NO_PROOF = "SGLang stops when a plugin that was asked for fails"

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
        "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        "after",
        "sglang_spec_ext.launch:forward_proof",
        "active",
        "hands on the proofs of the schedulers behind a data-parallel controller",
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
        "sglang.srt.managers.min_free_slots_delayer.resolve_min_free_slots",
        "around",
        "sglang_spec_ext.workers.admission:admit_at_once",
        "active",
        "keeps slots empty with DFLASH and DSPARK, at K = 0 too; in adaptive mode free ones are filled at once",
        "SGLang admits at once unless asked to wait",
        ("user_value", "max_running_requests", "is_dflash_family"),
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

PD_HOOKS = SEAMS

HOOKS: tuple[Hook, ...] = (
    *FLAG_HOOKS, *DRAFT_HOOKS, *LAUNCHER_HOOKS, *ACTIVE_HOOKS, *PD_HOOKS, *CPU_HOOKS, *CPU_SEAMS
)  # fmt: skip
