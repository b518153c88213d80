"""The handshake: every field is compared, every answer of any peer gets a verdict, no answer raises."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.disagg import handshake as hs
from sglang_spec_ext.disagg.schema import SCHEMA_VERSION

ROWS = hs.StockRows(row_bytes=(64, 64, 64, 64, 512, 512, 64, 128, 8192, 64), hidden_index=8)
OURS = hs.Capability(
    algorithm="EAGLE3",
    draft_digest="abc",
    num_draft_tokens=4,
    topk_entries=1,
    hidden_width=4096,
    hidden_dtype="bfloat16",
    tap_layers=(2, 16, 29),
    vocab_size=32000,
    transport="aux",
)
OTHER_VALUES = {
    "algorithm": "DSPARK",
    "draft_digest": "abd",
    "num_draft_tokens": 8,
    "topk_entries": 4,
    "hidden_width": 2048,
    "hidden_dtype": "float16",
    "tap_layers": (1, 16, 29),
    "vocab_size": 32001,
    "transport": "sidecar",
}
DEGRADE, REFUSE = hs.MismatchPolicy.DEGRADE, hs.MismatchPolicy.REFUSE


def judge(payload, policy=DEGRADE, rows=ROWS):
    return hs.judge(payload, decode=OURS, stock_rows=rows, policy=policy, peer="10.0.0.1:8998", spare_row_bytes=4096)


def test_equal_servers_are_warm_wherever_their_sidecar_listens():
    theirs = msgspec.structs.replace(OURS, sidecar_endpoint="tcp://10.0.0.1:9999")
    verdict = judge(hs.encode_answer(theirs, ROWS), REFUSE)
    assert verdict.standing is hs.Standing.WARM
    assert verdict.prefill.sidecar_endpoint == "tcp://10.0.0.1:9999"
    assert theirs.schema().fingerprint == OURS.schema().fingerprint


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_each_field_alone_is_a_mismatch_named_with_both_values_and_the_cure(field):
    theirs = msgspec.structs.replace(OURS, **{field: OTHER_VALUES[field]})
    payload = hs.encode_answer(theirs, ROWS)
    cold, refused = judge(payload), judge(payload, REFUSE)
    assert (cold.standing, refused.standing) == (hs.Standing.COLD, hs.Standing.REFUSED)
    assert cold.reasons == refused.reasons == (field,)
    for part in (
        "10.0.0.1:8998",
        repr(OTHER_VALUES[field]),
        repr(getattr(OURS, field)),
        hs.COMPARED_FIELDS[field],
    ):
        assert part in cold.message
    assert "refusing its requests" in refused.message
    assert "without draft records" in cold.message


def test_every_field_of_a_capability_is_compared_or_is_an_address():
    assert {*OTHER_VALUES, "sidecar_endpoint"} == set(hs.Capability.__struct_fields__)
    assert set(hs.COMPARED_FIELDS) == set(OTHER_VALUES)


def test_records_of_unequal_servers_have_unequal_fingerprints():
    """The second lock: even a row that arrives without a handshake is refused by its header."""
    prints = {OURS.schema().fingerprint}
    fields = [name for name in OTHER_VALUES if name != "transport"]
    prints |= {msgspec.structs.replace(OURS, **{f: OTHER_VALUES[f]}).schema().fingerprint for f in fields}
    assert len(prints) == 1 + len(fields)


def test_several_mismatches_are_reported_together():
    theirs = msgspec.structs.replace(OURS, num_draft_tokens=8, hidden_dtype="float16")
    verdict = judge(hs.encode_answer(theirs, ROWS))
    assert verdict.reasons == ("num_draft_tokens", "hidden_dtype")
    assert verdict.as_info()["standing"] == "cold"


def test_a_stock_peer_is_cold_and_never_refused():
    for policy in (DEGRADE, REFUSE):
        verdict = judge(None, policy)
        assert verdict.standing is hs.Standing.COLD
        assert verdict.reasons == ("no_extension",)
        assert "does not run spec-ext" in verdict.message


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, 99])
def test_another_schema_version_is_named_even_with_fields_that_we_do_not_know(version):
    answer = json.loads(hs.encode_answer(OURS, ROWS, schema_version=version))
    answer["capability"] = {"something": "else", **answer["capability"]}
    answer["new_outer_field"] = 1
    verdict = judge(json.dumps(answer).encode())
    assert verdict.standing is hs.Standing.COLD
    assert verdict.reasons == ("schema_version",)
    assert f"schema_version is {version}, expected {SCHEMA_VERSION}" in verdict.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda answer: answer.pop("schema_version"), "schema_version"),
        (lambda answer: answer.pop("stock_rows"), "schema_version"),
        (lambda answer: answer["capability"].pop("draft_digest"), "capability"),
        (lambda answer: answer["capability"].update(surprise=1), "capability"),
        (lambda answer: answer["capability"].update(num_draft_tokens="4"), "capability"),
        (lambda answer: answer["capability"].update(num_draft_tokens=-4), "capability"),
        (lambda answer: answer["capability"].update(hidden_dtype="float8"), "capability"),
    ],
)
def test_missing_unknown_and_mistyped_fields_are_refused_by_name(change, reason):
    answer = json.loads(hs.encode_answer(OURS, ROWS))
    change(answer)
    payload = json.dumps(answer).encode()
    assert judge(payload).reasons == (reason,)
    assert judge(payload).standing is hs.Standing.COLD
    assert judge(payload, REFUSE).standing is hs.Standing.REFUSED


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda v: json.dumps(v).encode(),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=4),
                lambda inner: st.dictionaries(
                    st.sampled_from(["schema_version", "capability", "stock_rows", "x"]), inner
                ),
                max_leaves=6,
            ),
        ),
    )
)
def test_no_answer_of_a_peer_raises(payload):
    assert judge(payload, REFUSE).standing is hs.Standing.REFUSED
    assert judge(payload).standing is hs.Standing.COLD


def test_an_oversized_answer_is_not_parsed():
    verdict = judge(b" " * (hs.MAX_PAYLOAD_BYTES + 1))
    assert verdict.reasons == ("payload bytes",)


def replace_row(index, value):
    row_bytes = list(ROWS.row_bytes)
    row_bytes[index] = value
    return msgspec.structs.replace(ROWS, row_bytes=tuple(row_bytes))


@pytest.mark.parametrize(
    "theirs",
    [
        replace_row(9, 128),
        replace_row(0, 32),
        msgspec.structs.replace(ROWS, row_bytes=(*ROWS.row_bytes, 64)),
        msgspec.structs.replace(ROWS, hidden_index=7),
    ],
    ids=["room", "output_ids", "one-more", "hidden-elsewhere"],
)
@pytest.mark.parametrize("version", [SCHEMA_VERSION, SCHEMA_VERSION + 1])
def test_buffers_that_would_overwrite_ours_are_refused_under_both_policies(theirs, version):
    payload = hs.encode_answer(OURS, theirs, schema_version=version)
    for policy in (DEGRADE, REFUSE):
        verdict = judge(payload, policy)
        assert verdict.standing is hs.Standing.REFUSED
        assert any(reason.startswith("stock_rows") for reason in verdict.reasons)


def test_a_hidden_row_of_another_length_is_redirected_when_degraded():
    theirs = msgspec.structs.replace(OURS, hidden_width=2048)
    payload = hs.encode_answer(theirs, replace_row(8, 4096))
    cold = judge(payload)
    assert (cold.standing, cold.redirect_hidden_bytes) == (hs.Standing.COLD, 4096)
    assert cold.reasons == ("hidden_width", "stock_rows[8]")
    assert judge(payload, REFUSE).redirect_hidden_bytes == 0
    too_long = judge(hs.encode_answer(theirs, replace_row(8, 4160)))
    assert (too_long.standing, too_long.redirect_hidden_bytes) == (hs.Standing.REFUSED, 0)
