#!/usr/bin/env bash
# Runs a decode server; the knobs are those of pd_env.sh, and every further argument goes to SGLang.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/pd_env.sh"
pd_serve decode "$SPEC_EXT_PD_DECODE" "$@"
