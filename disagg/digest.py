"""A digest that tells draft checkpoints apart without reading gigabytes.

It covers the configuration in full, and name, size and sampled blocks of every weight file. Two directories
with the same digest hold the same draft for the purpose of the handshake; the same weights in other files
are another digest.
"""

import hashlib
from pathlib import Path

SAMPLE_BYTES = 65536
SAMPLES_PER_FILE = 8
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")


def checkpoint_digest(path: str | Path) -> str:
    """Return 32 hex digits for the checkpoint directory; raises ValueError if it has no config.json."""
    path = Path(path)
    config = path / "config.json"
    if not config.is_file():
        raise ValueError(f"draft checkpoint must be a directory with config.json, got {path}")
    digest = hashlib.blake2b(config.read_bytes(), digest_size=16)
    for file in sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as weights:
            for offset in _sample_offsets(size):
                weights.seek(offset)
                digest.update(weights.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(size: int) -> list[int]:
    """Return evenly spaced block offsets, the first and the last block included."""
    last = max(0, size - SAMPLE_BYTES)
    return sorted({last * i // (SAMPLES_PER_FILE - 1) for i in range(SAMPLES_PER_FILE)})
