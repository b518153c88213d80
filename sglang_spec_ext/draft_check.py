"""The start-up check of a draft: its folder is complete and fits the target.

Hook after `arg_groups/speculative_hook.py: handle_speculative_decoding`, which has settled the draft's path.
"""

from pathlib import Path
from typing import Any

from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.models.check import check_draft

CHECKED_ALGORITHMS = ("EAGLE", "EAGLE3", "DFLASH", "DSPARK")


class UnfitDraft(SpecExtError):
    """The draft cannot serve this target; the message names folder, field or tensor, and both values."""


def check_resolved_draft(result: None, server_args: Any) -> None:
    """Raise `UnfitDraft` for a local draft folder with a problem; a hub name is left to SGLang's loader."""
    from sglang.srt.arg_groups.overrides import resolving_view

    config = resolving_view(server_args)
    if config.speculative_algorithm not in CHECKED_ALGORITHMS or config.speculative_draft_model_path is None:
        return
    folder = Path(config.speculative_draft_model_path)
    target = Path(config.model_path)
    if not folder.is_dir() or folder == target:
        return
    problems = check_draft(folder, target if target.is_dir() else None)
    if problems:
        raise UnfitDraft(f"--speculative-draft-model-path {folder}: " + "; ".join(problems))
