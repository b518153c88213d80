"""Cost tables as files: our own JSON with its fingerprint, and both forms of SGLang's SPS table.

SGLang's step form looks up the probe at or below a token count and keeps the last speed beyond the end; its
additive form draws clamped lines. Both time the whole step of a block drafter, so importing one needs the
draft's share. Source: `sglang/srt/speculative/dspark_components/dspark_sps.py` (0.5.23).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import CostTableError, Curve, check_points, isotonic

FORMAT = "sglang-spec-ext/cost-table"
VERSION = 1  # 1: first form


class _CurveFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    points: list[int]
    seconds: list[float]
    captured_max: int


class _DraftFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    k: int
    points: list[int]
    seconds: list[float]
    captured_max: int


class _BucketFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    context_len: int
    tokens: _CurveFile
    batch: _CurveFile | None
    draft: list[_DraftFile]


class _TableFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    fingerprint: dict[str, str]
    fixed_s: float
    buckets: list[_BucketFile]


class _SpsSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sample_batch_tokens: list[int]
    sample_steps_per_sec: list[float]
    max_batch_tokens: int


class _SpsAdditive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bias_seconds: float
    bs_probes: list[int]
    alpha_seconds: list[float]
    m_probes: list[int]
    theta_seconds: list[float]


def save_cost_table(table: CostTable, path: Path) -> None:
    """Write the table; a reader sees the old file or the whole new one."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **table.as_dict()}, indent=1, allow_nan=False)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text + "\n")
    partial.replace(path)


def load_cost_table(path: Path, fingerprint: Mapping[str, str] | None = None) -> CostTable:
    """Read a table; CostTableError if it is broken or, with `fingerprint`, was measured elsewhere."""
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=_TableFile)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CostTableError(f"{path}: not a cost table ({error}); profile again") from error
    if (raw.format, raw.version) != (FORMAT, VERSION):
        raise CostTableError(
            f"{path}: format {raw.format!r} version {raw.version}, needs {FORMAT!r} version {VERSION}; "
            "profile again"
        )
    if fingerprint is not None and raw.fingerprint != dict(fingerprint):
        names = sorted(raw.fingerprint.keys() | fingerprint.keys())
        parts = [
            f"{name}: file {raw.fingerprint.get(name)!r}, here {fingerprint.get(name)!r}"
            for name in names
            if raw.fingerprint.get(name) != fingerprint.get(name)
        ]
        raise CostTableError(f"{path}: measured for another set-up ({'; '.join(parts)}); profile again")
    return _table(raw)


def cost_table_from(plain: Mapping[str, Any]) -> CostTable:
    """Return the table whose `CostTable.as_dict` form this is, as a server's state shows it."""
    try:
        raw = msgspec.convert({"format": FORMAT, "version": VERSION, **plain}, type=_TableFile)
    except msgspec.ValidationError as error:
        raise CostTableError(f"cost_table: {error}; take it from the state of a server of this version") from error
    return _table(raw)


def _table(raw: _TableFile) -> CostTable:
    return CostTable(tuple(_bucket(bucket) for bucket in raw.buckets), raw.fixed_s, raw.fingerprint)


def _bucket(raw: _BucketFile) -> ContextBucket:
    label = f"context_len={raw.context_len}"
    return ContextBucket(
        raw.context_len,
        _curve(raw.tokens, f"{label} tokens"),
        None if raw.batch is None else _curve(raw.batch, f"{label} batch", zero_ok=True),
        tuple((d.k, _curve(d, f"{label} draft K={d.k}", zero_ok=d.k == 0)) for d in raw.draft),
    )


def _curve(raw: _CurveFile | _DraftFile, label: str, *, zero_ok: bool = False) -> Curve:
    check_points(label, raw.points, raw.seconds, zero_ok=zero_ok)
    return Curve(tuple(raw.points), tuple(raw.seconds), raw.captured_max)


def import_sps(text: str | bytes, *, gamma: int, draft_s: float) -> CostTable:
    """Return a cost table from SGLang's SPS JSON, either form; times that fall with size are smoothed.

    The form is told by the keys that are present, all of them. `draft_s` is the draft's share of the measured
    step. Speeds and times must be positive, and the step form must be measured up to `max_batch_tokens`.
    """
    try:
        keys = msgspec.json.decode(text, type=dict[str, Any]).keys()
        if "bias_seconds" in keys:
            return _import_additive(msgspec.json.decode(text, type=_SpsAdditive), gamma, draft_s)
        return _import_steps(msgspec.json.decode(text, type=_SpsSteps), gamma, draft_s)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CostTableError(f"SPS table: {error}; it must be one of SGLang's two forms, whole") from error


def _import_steps(raw: _SpsSteps, gamma: int, draft_s: float) -> CostTable:
    speeds = raw.sample_steps_per_sec
    if any(not speed > 0 for speed in speeds):
        raise CostTableError(f"sample_steps_per_sec: every speed must be > 0, got {speeds}; measure again")
    _check_sorted("sample_batch_tokens", raw.sample_batch_tokens, len(speeds))
    if raw.max_batch_tokens > raw.sample_batch_tokens[-1]:
        raise CostTableError(
            f"sample_batch_tokens: truncated at {raw.sample_batch_tokens[-1]}, but max_batch_tokens is "
            f"{raw.max_batch_tokens}; beyond the last probe tokens would look free, measure up to it"
        )
    seconds = isotonic([1.0 / speed for speed in speeds])
    return _imported(raw.sample_batch_tokens, seconds, None, gamma, draft_s)


def _import_additive(raw: _SpsAdditive, gamma: int, draft_s: float) -> CostTable:
    _check_sorted("bs_probes", raw.bs_probes, len(raw.alpha_seconds))
    _check_sorted("m_probes", raw.m_probes, len(raw.theta_seconds))
    if not raw.bias_seconds > 0:
        raise CostTableError(f"bias_seconds: must be > 0, got {raw.bias_seconds}; measure again")
    alpha = isotonic(raw.alpha_seconds)
    theta = isotonic(raw.theta_seconds)
    tokens = [raw.bias_seconds + alpha[0] + value for value in theta]
    batch = Curve(tuple(raw.bs_probes), tuple(value - alpha[0] for value in alpha))
    return _imported(raw.m_probes, tokens, batch, gamma, draft_s)


def _imported(
    points: list[int], step_s: list[float], batch: Curve | None, gamma: int, draft_s: float
) -> CostTable:
    if not 0 < draft_s < step_s[0]:
        raise CostTableError(
            f"draft_s: must be > 0 and below the shortest step {step_s[0]}, got {draft_s}; time the draft"
        )
    tokens = Curve(tuple(points), tuple(value - draft_s for value in step_s))
    draft = ((gamma, Curve((1, points[-1] + 1), (draft_s, draft_s))),)
    return CostTable((ContextBucket(0, tokens, batch, draft),))


def _check_sorted(label: str, points: list[int], values: int) -> None:
    if len(points) != values:
        raise CostTableError(f"{label}: {len(points)} probes but {values} values; the table is truncated")
    if len(points) < 2 and label != "bs_probes":
        raise CostTableError(f"{label}: {len(points)} probes; one speed has no slope, measure at least two")
    if not points or points[0] < 1 or points != sorted(set(points)):
        raise CostTableError(f"{label}: must be >= 1 and strictly increasing, got {points}")


def export_sps_steps(table: CostTable, *, gamma: int, context_len: int = 0) -> str:
    """Return SGLang's step form; its lookup at or below a probe then gives our time at or above a size."""
    starts, seconds = _stairs(table.bucket(context_len).tokens)
    drafts = [table.draft_s(gamma, max(1, start // (gamma + 1)), context_len) for start in starts]
    speeds = [1.0 / (s + d + table.fixed_s) for s, d in zip(seconds, drafts, strict=True)]
    last = table.bucket(context_len).tokens.largest
    return json.dumps(
        {"sample_batch_tokens": starts, "sample_steps_per_sec": speeds, "max_batch_tokens": last}
    )


def export_sps_additive(table: CostTable, *, gamma: int, context_len: int = 0) -> str:
    """Return SGLang's additive form; each stair becomes a level line, so interpolation keeps it."""
    bucket = table.bucket(context_len)
    starts, seconds = _stairs(bucket.tokens)
    levels = dict(zip(starts, seconds, strict=True)) | dict(
        zip(bucket.tokens.points, bucket.tokens.seconds, strict=True)
    )
    sizes = sorted(levels)
    batches = (1,) if bucket.batch is None else bucket.batch.points
    drafts = [table.draft_s(gamma, batch, context_len) for batch in batches]
    extra = [0.0] * len(batches) if bucket.batch is None else list(bucket.batch.seconds)
    return json.dumps(
        {
            "bias_seconds": bucket.tokens.seconds[0] + drafts[0] + table.fixed_s,
            "bs_probes": list(batches),
            "alpha_seconds": [e + d - drafts[0] for e, d in zip(extra, drafts, strict=True)],
            "m_probes": sizes,
            "theta_seconds": [levels[size] - bucket.tokens.seconds[0] for size in sizes],
        }
    )


def _stairs(curve: Curve) -> tuple[list[int], list[float]]:
    """First size and seconds of every stair: size p[i-1] + 1 already costs what p[i] costs."""
    return [1, *(point + 1 for point in curve.points[:-1])], list(curve.seconds)
