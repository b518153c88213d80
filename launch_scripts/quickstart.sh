#!/usr/bin/env bash
# The demo: real prompts, streamed from a real server, with and without speculation. Knobs: those of env.sh, and
#
#   SPEC_EXT_MAX_TOKENS       tokens in each answer               [default: 96]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python -m sglang_spec_ext.cli demo --target "$SPEC_EXT_TARGET" --algorithm "$SPEC_EXT_ALGORITHM" \
    --draft "$SPEC_EXT_DRAFT" --mode "$SPEC_EXT_MODE" --dtype "$SPEC_EXT_DTYPE" \
    --max-tokens "${SPEC_EXT_MAX_TOKENS:-96}" "$@"
