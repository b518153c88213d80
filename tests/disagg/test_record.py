"""The record: one layout, exact round trips, and a typed refusal for every way a row can be wrong."""

import dataclasses
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.disagg import record as rec
from sglang_spec_ext.disagg import schema as sch

EAGLE = sch.RecordShape(hidden_width=96, hidden_dtype="bfloat16", max_hidden_rows=1, max_topk=20, max_prior=8)
DSPARK = sch.RecordShape(max_block=16, max_prior=16)
EVERYTHING = sch.RecordShape(33, "float32", 3, 7, 5, 4)
SHAPES = [EAGLE, DSPARK, EVERYTHING, sch.RecordShape(), sch.RecordShape(4096, "float16", 1, 8, 16, 8)]


def make_record(schema, rng, *, fill=1.0, **overrides):
    """A record with random values that fills about `fill` of each field's capacity."""
    counts, arrays = {}, {}
    for f in schema.placed_fields:
        spec, dtype = f.spec, rec.NUMPY_DTYPES[f.dtype]
        counts.setdefault(spec.count, round(f.shape[0] * fill))
        shape = (counts[spec.count], *f.shape[1:])
        if dtype.kind == "f":
            arrays[spec.name] = rng.random(shape).astype(dtype)
        else:
            arrays[spec.name] = rng.integers(0, 60000, shape).astype(dtype)
    values = {"bootstrap_room": 2**63 + 5, "generation": 7, "seq_len": 421, "prompt_crc": 0xDEADBEEF}
    values |= {"anchor_token": 17, "active_k": 3}
    return rec.DraftRecord(**(values | arrays | overrides))


def expectation_of(record, **overrides):
    names = ("bootstrap_room", "seq_len", "prompt_crc", "anchor_token")
    return rec.Expectation(**({name: getattr(record, name) for name in names} | overrides))


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def reseal(row):
    """Recompute the checksum, as a writer with the same bug would."""
    crc = zlib.crc32(row[64:], zlib.crc32(row[: sch.CRC_OFFSET]))
    row[sch.CRC_OFFSET : 64] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)


def set_header(row, name, value, *, resealed=True):
    index = [f.name for f in sch.HEADER_FIELDS].index(name)
    header = list(sch.HEADER.unpack_from(row))
    header[index] = value
    sch.HEADER.pack_into(row, 0, *header)
    if resealed:
        reseal(row)


def test_header_is_64_bytes_and_ends_with_the_checksum():
    assert sch.HEADER.size == 64
    assert sch.HEADER_FIELDS[-1].name == "crc32"
    assert sch.CRC_OFFSET == 60


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fields_are_aligned_disjoint_and_inside_the_row(shape):
    schema = sch.Schema(shape)
    end = sch.HEADER.size
    for field in schema.placed_fields:
        assert field.offset % sch.ALIGN_BYTES == 0
        assert field.offset >= end
        end = field.offset + field.nbytes
    assert end <= schema.row_bytes
    assert schema.row_bytes - end < sch.ALIGN_BYTES
    assert schema.row_bytes % sch.ALIGN_BYTES == 0


def test_fingerprint_depends_on_every_dimension_the_identity_and_the_version():
    base = sch.Schema(EVERYTHING, "draft-a")
    others = [sch.Schema(EVERYTHING, "draft-b"), sch.Schema(EVERYTHING, "draft-a", version=2)]
    changes = [{"hidden_dtype": "float16"}, {"hidden_width": 34}, {"max_hidden_rows": 2}, {"max_topk": 8}]
    changes += [{"max_block": 6}, {"max_prior": 5}]
    others += [sch.Schema(dataclasses.replace(EVERYTHING, **change), "draft-a") for change in changes]
    prints = {base.fingerprint, *(o.fingerprint for o in others)}
    assert len(prints) == 1 + len(others)
    assert base.fingerprint == sch.Schema(dataclasses.replace(EVERYTHING), "draft-a").fingerprint


def test_layout_of_version_1_never_changes():
    """Peers of one version must agree: a change here needs the next version number, not a new constant."""
    assert sch.SCHEMA_VERSION == 1
    assert sch.Schema(EVERYTHING, "pinned").fingerprint == 0x0D9E28E4BB1D942B


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_dtype": "float8"}, "hidden_dtype"),
        ({"max_topk": -1}, "max_topk"),
        ({"max_block": 1 << 16}, "max_block"),
        ({"max_topk": True}, "max_topk"),
        ({"hidden_width": 0}, "max_hidden_rows"),
        ({"max_prior": 2.0}, "max_prior"),
    ],
)
def test_shape_refuses_out_of_range_values_by_name(overrides, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(EVERYTHING, **overrides)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_round_trip_is_exact_for_any_shape_and_fill(data):
    count = st.integers(0, 40)
    rows = data.draw(st.integers(0, 3))
    shape = sch.RecordShape(
        data.draw(st.integers(1, 300)) if rows else 0,
        data.draw(st.sampled_from(sch.HIDDEN_DTYPES)),
        rows,
        data.draw(count),
        data.draw(count),
        data.draw(count),
    )
    schema = sch.Schema(shape, data.draw(st.text(max_size=8)))
    u32 = st.integers(0, 2**32 - 1)
    record = make_record(
        schema,
        np.random.default_rng(data.draw(u32)),
        fill=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        bootstrap_room=data.draw(st.integers(0, 2**64 - 1)),
        generation=data.draw(st.integers(1, 2**32 - 1)),
        seq_len=data.draw(u32),
        prompt_crc=data.draw(u32),
        active_k=data.draw(st.integers(0, 0xFFFF)),
        anchor_token=data.draw(st.integers(-(2**31), 2**31 - 1)),
    )
    codec = rec.RecordCodec(schema)
    row = np.full(codec.row_bytes, 0xAA, np.uint8)  # what an earlier owner of the slot left
    codec.encode_into(record, row)
    back = codec.decode(row, expectation_of(record, generation=record.generation))
    assert back == record
    assert np.array_equal(row, codec.encode(record)), "no byte of the earlier owner survives"
    row[:] = 0
    assert back == record, "the record is detached from the slot"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**31), st.data())
def test_any_flipped_bit_is_refused(seed, data):
    schema = sch.Schema(EVERYTHING)
    codec = rec.RecordCodec(schema)
    record = make_record(schema, np.random.default_rng(seed), fill=0.6)
    row = codec.encode(record)
    bit = data.draw(st.integers(0, row.size * 8 - 1))
    row[bit // 8] ^= 1 << bit % 8
    with pytest.raises(rec.RecordError):
        codec.decode(row, expectation_of(record))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.binary(max_size=2000))
def test_truncated_torn_and_random_rows_are_refused(cut, noise):
    schema = sch.Schema(EAGLE)
    codec = rec.RecordCodec(schema)
    record = make_record(schema, np.random.default_rng(1))
    row, expected = codec.encode(record), expectation_of(record)
    with pytest.raises(rec.TruncatedRecordError):
        codec.decode(row[: min(cut, row.size - 1)], expected)
    torn = row.copy()
    torn[min(cut, row.size - 64) :] = 0  # the tail, which is not all zero, has not arrived
    with pytest.raises(rec.RecordError):
        codec.decode(torn, expected)
    garbage = np.zeros(row.size, np.uint8)
    garbage[: min(len(noise), row.size)] = np.frombuffer(noise, np.uint8)[: row.size]
    with pytest.raises(rec.RecordError):
        codec.decode(garbage, expected)


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_other_versions_are_refused_before_decoding(version, rng):
    schema = sch.Schema(EVERYTHING)
    codec = rec.RecordCodec(schema)
    record = make_record(schema, rng)
    row = codec.encode(record)
    set_header(row, "version", version)
    with pytest.raises(rec.VersionMismatchError) as caught:
        codec.decode(row, expectation_of(record))
    assert caught.value.field == "version"
    assert (caught.value.got, caught.value.expected) == (version or "missing", 1)
    newer = rec.RecordCodec(sch.Schema(EVERYTHING, version=2))
    with pytest.raises(rec.VersionMismatchError, match="version is 1, expected 2"):
        newer.decode(codec.encode(record), expectation_of(record))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("fingerprint", 1, rec.SchemaMismatchError),
        ("dtype", 2, rec.SchemaMismatchError),
        ("hidden_width", 34, rec.SchemaMismatchError),
        ("row_bytes", 64, rec.SchemaMismatchError),
        ("magic", b"SSXQ", rec.ForeignRecordError),
        ("num_topk", 8, rec.CorruptRecordError),
        ("num_confidence", 6, rec.CorruptRecordError),
        ("generation", 0, rec.CorruptRecordError),
        ("bootstrap_room", 6, rec.StaleRecordError),
        ("seq_len", 422, rec.StaleRecordError),
        ("prompt_crc", 0, rec.StaleRecordError),
        ("anchor_token", 18, rec.StaleRecordError),
    ],
)
def test_a_well_sealed_row_with_one_wrong_field_is_refused_by_that_name(field, value, error, rng):
    schema = sch.Schema(EVERYTHING)
    codec = rec.RecordCodec(schema)
    record = make_record(schema, rng)
    row = codec.encode(record)
    set_header(row, field, value)
    with pytest.raises(error, match=field) as caught:
        codec.decode(row, expectation_of(record))
    assert caught.value.field == field
    assert caught.value.got != caught.value.expected


def test_stale_generation_is_refused_whether_announced_or_remembered(rng):
    schema = sch.Schema(EVERYTHING)
    codec = rec.RecordCodec(schema)
    record = make_record(schema, rng)
    row = codec.encode(record)
    with pytest.raises(rec.StaleRecordError, match="generation is 7, expected 8"):
        codec.decode(row, expectation_of(record, generation=8))
    with pytest.raises(rec.StaleRecordError, match="generation"):
        codec.decode(row, expectation_of(record, prior_generation=7))
    assert codec.decode(row, expectation_of(record, generation=7, prior_generation=6)) == record


def test_a_record_that_does_not_fit_is_refused_by_name_and_nothing_is_written(rng):
    schema = sch.Schema(EVERYTHING)
    codec = rec.RecordCodec(schema)
    record = make_record(schema, rng)
    bad = {
        "hidden.shape": {"hidden": np.zeros((1, 99), np.float32)},  # three tapped layers where one row fits
        "hidden.dtype": {"hidden": np.zeros((1, 33), np.float16)},
        "topk_p.shape": {"topk_p": np.zeros(8, np.float32), "topk_index": np.zeros(8, np.int64)},
        r"len\(topk_index\)": {"topk_index": np.zeros(2, np.int64)},
        "block_ids.dtype": {"block_ids": np.zeros(5, np.int64)},
        "generation": {"generation": 0},
        "bootstrap_room": {"bootstrap_room": -1},
        "anchor_token": {"anchor_token": 2**31},
        "active_k": {"active_k": 1 << 16},
    }
    for named, overrides in bad.items():
        row = np.full(codec.row_bytes, 0xAA, np.uint8)
        with pytest.raises(rec.UnencodableRecordError, match=named):
            codec.encode_into(dataclasses.replace(record, **overrides), row)
        assert (row == 0xAA).all(), named
    with pytest.raises(rec.UnencodableRecordError, match="row length"):
        codec.encode_into(record, np.zeros(64, np.uint8))


def test_prompt_crc_reads_only_the_tail_and_tells_prompts_apart():
    long_prompt = list(range(5000))
    assert rec.prompt_crc(long_prompt) == rec.prompt_crc([9, *long_prompt[-64:]])
    assert rec.prompt_crc([1, 2, 3]) != rec.prompt_crc([1, 2, 4])
    assert rec.prompt_crc([]) == 0


def test_a_cleared_row_is_blank_and_a_written_one_is_not(rng):
    codec = rec.RecordCodec(sch.Schema(DSPARK))
    row = np.zeros(codec.row_bytes, np.uint8)
    assert rec.is_blank(row)
    codec.encode_into(make_record(codec.schema, rng), row)
    assert not rec.is_blank(row)
