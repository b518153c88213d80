#!/usr/bin/env bash
# Runs a prefill server; the knobs are those of pd_env.sh, and every further argument goes to SGLang.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/pd_env.sh"
pd_serve prefill "$SPEC_EXT_PD_PREFILL" "$@"
