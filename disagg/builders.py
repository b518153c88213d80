"""Draft state between tensors and records, per algorithm.

EAGLE and EAGLE3 ship the hidden row and the top-k that the first draft step reads. DFlash and DSpark ship
the first block, drafted by prefill after its last chunk, and its confidences: decode's first step verifies
it instead of drafting. A request without a usable record starts from zeros, never from what an earlier
owner of its slot left behind. Every verify stays exact whatever the record says; ids outside the vocabulary
are refused because they would index outside the embedding.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sglang_spec_ext.disagg.record import DraftRecord, RecordError

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, NDArray[Any]]


class UnusableValueError(RecordError):
    """An intact record holds values that this server cannot use."""

    reason = "unusable"


def to_numpy(tensor: "torch.Tensor") -> NDArray[Any]:
    """Return the values as an array on the host; bfloat16 as its uint16 bit patterns."""
    import torch

    host = tensor.detach().to("cpu").contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    array: NDArray[Any] = host.numpy()
    return array


def to_tensor(array: NDArray[Any], dtype: "torch.dtype") -> "torch.Tensor":
    """Return a host tensor of `dtype`; uint16 patterns become bfloat16."""
    import torch

    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(dtype)
    return torch.from_numpy(array.copy()).to(dtype)


def eagle_arrays(req: Any) -> Arrays | None:
    """Return hidden row and top-k of a finished prefill request, None if SGLang attached none.

    `req.hidden_states_tensor` is [hidden_width], `output_topk_p` and `output_topk_index` are [n].
    """
    if req.hidden_states_tensor is None:
        return None
    return {
        "hidden": to_numpy(req.hidden_states_tensor).reshape(1, -1),
        "topk_p": to_numpy(req.output_topk_p).astype(np.float32, copy=False),
        "topk_index": to_numpy(req.output_topk_index).astype(np.int64, copy=False),
    }


def check_values(record: DraftRecord, *, vocab_size: int) -> None:
    """Raise UnusableValueError for ids outside the vocabulary and for non-finite numbers.

    Confidences may be NaN: the planner then verifies only the anchor of that row.
    """
    for name in ("topk_index", "block_ids"):
        ids = getattr(record, name)
        if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
            raise UnusableValueError(name, [int(ids.min()), int(ids.max())], f"0 to {vocab_size - 1}")
    if not 0 <= record.anchor_token < vocab_size:
        raise UnusableValueError("anchor_token", record.anchor_token, f"0 to {vocab_size - 1}")
    for name in ("topk_p", "accept_prior"):
        values = getattr(record, name)
        if values.size and not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise UnusableValueError(name, values.tolist(), "probabilities")
    hidden = record.hidden
    # bfloat16 patterns: an exponent of ones is inf or NaN
    finite = (hidden & 0x7F80) != 0x7F80 if hidden.dtype == np.uint16 else np.isfinite(hidden)
    if not finite.all():
        raise UnusableValueError("hidden", "inf or NaN", "finite values")


def check_eagle(record: DraftRecord, *, num_topk: int) -> None:
    """Raise UnusableValueError unless the record holds one hidden row and exactly `num_topk` entries."""
    if record.hidden.shape[0] != 1:
        raise UnusableValueError("num_hidden_rows", record.hidden.shape[0], 1)
    if record.topk_p.size != num_topk:
        raise UnusableValueError("num_topk", record.topk_p.size, num_topk)


def warm_eagle(req: Any, record: DraftRecord) -> None:
    """Give the request the record's draft state in the form that SGLang's builder reads.

    `req.hidden_states_tensor` holds SGLang's own row of the same width and dtype, which ours replaces.
    """
    import torch

    req.hidden_states_tensor = to_tensor(record.hidden[0], req.hidden_states_tensor.dtype)
    req.output_topk_p = to_tensor(record.topk_p, torch.float32)
    req.output_topk_index = to_tensor(record.topk_index, torch.int64)


def cold_eagle(req: Any, *, num_topk: int) -> None:
    """Give the request a draft state that depends on nothing: zeros, token 0 with probability 0."""
    import torch

    req.hidden_states_tensor = torch.zeros_like(req.hidden_states_tensor)
    req.output_topk_p = torch.zeros(num_topk, dtype=torch.float32)
    req.output_topk_index = torch.zeros(num_topk, dtype=torch.int64)


class ShippedBlock(NamedTuple):
    """A first block as it came: its row [row_bytes] uint8, and whether the row holds confidences too."""

    row: NDArray[np.uint8]
    has_confidence: bool


class FirstBlocks:
    """First blocks that wait for their request's first decode step.

    A block is good for one step at one position: `take` gives it out only at the sequence length it was
    drafted for, once, and forgets it either way.
    """

    ATTRIBUTE = "spec_ext_first_block"

    @classmethod
    def put(cls, req: Any, record: DraftRecord) -> None:
        """Attach the block of a decoded record to the request."""
        block = ShippedBlock(record.row, record.block_confidence.size == record.block_ids.size)
        setattr(req, cls.ATTRIBUTE, (record.seq_len, record.block_ids.size, block))

    @classmethod
    def take(cls, reqs: Sequence[Any], seq_lens: Sequence[int], *, num_draft_tokens: int) -> dict[int, ShippedBlock]:
        """Return {batch row: block} for the rows whose first step this is.

        `seq_lens` are the committed lengths before the step, on the host. Of a longer block than the step's K the
        first K tokens count; a shorter one is dropped.
        """
        taken = {}
        for row, (req, seq_len) in enumerate(zip(reqs, seq_lens, strict=True)):
            waiting = req.__dict__.pop(cls.ATTRIBUTE, None)
            if waiting is None:
                continue
            drafted_at, tokens, block = waiting
            if drafted_at == seq_len and tokens >= num_draft_tokens:
                taken[row] = block
        return taken
