#!/usr/bin/env bash
# The envelope: the controller against no speculation, every fixed K and stock SGLang, at every load. Knobs: those of
# env.sh (SPEC_EXT_MODE is not one here), and
#
#   OUT_DIR                   where envelope.json, envelope.md and plots go    [default: bench_results/envelope]
#
# Every argument goes to `spec-ext bench envelope`, as --quick, --rounds 3 or --draft EAGLE3=FOLDER.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python -m sglang_spec_ext.cli bench envelope --target "$SPEC_EXT_TARGET" --dtype "$SPEC_EXT_DTYPE" \
    --draft "$SPEC_EXT_ALGORITHM=$SPEC_EXT_DRAFT" --out "${OUT_DIR:-bench_results/envelope}" "$@"
