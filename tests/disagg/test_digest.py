"""The draft digest: equal for a copy, different for any change that makes another draft."""

import shutil

import pytest
from sglang_spec_ext.disagg.digest import SAMPLE_BYTES, checkpoint_digest


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (40 * SAMPLE_BYTES // 256))
    (folder / "README.md").write_text("notes")
    return folder


def test_a_copy_and_its_notes_do_not_matter(checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "README.md").write_text("other notes")
    assert checkpoint_digest(copy) == checkpoint_digest(checkpoint)


@pytest.mark.parametrize("change", ["config", "first", "last", "size", "name"])
def test_another_draft_has_another_digest(checkpoint, change):
    before = checkpoint_digest(checkpoint)
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if change == "config":
        (checkpoint / "config.json").write_text('{"hidden_size": 16}')
    elif change == "name":
        weights.rename(checkpoint / "other.safetensors")
    else:
        if change == "size":
            content += b"\0"
        else:
            content[0 if change == "first" else -1] ^= 1
        weights.write_bytes(content)
    assert checkpoint_digest(checkpoint) != before


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        checkpoint_digest(tmp_path)
