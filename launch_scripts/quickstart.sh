#!/usr/bin/env bash
# The demo: real prompts, streamed from a real server, with and without speculation. Knobs: those of env.sh, and
#
#   SPEC_EXT_MAX_TOKENS       tokens in each answer               [default: 96]
#   SPEC_EXT_MODE             as in env.sh                        [default: adaptive]
set -euo pipefail
export SPEC_EXT_MODE=${SPEC_EXT_MODE:-adaptive}
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python -m sglang_spec_ext.cli demo --target "$SPEC_EXT_TARGET" --algorithm "$SPEC_EXT_ALGORITHM" \
    --draft "$SPEC_EXT_DRAFT" --mode "$SPEC_EXT_MODE" --dtype "$SPEC_EXT_DTYPE" \
    --max-tokens "${SPEC_EXT_MAX_TOKENS:-96}" "$@"
