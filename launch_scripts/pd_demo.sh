#!/usr/bin/env bash
# The demo of prefill and decode on separate servers of one machine: both, and the router, answer real prompts; one
# server answers the same prompts; the answers are compared and the first decode steps are counted. Knobs: those of
# pd_env.sh but for the addresses, which are free loopback ports, and
#
#   SPEC_EXT_MAX_TOKENS       tokens in each answer               [default: 48]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/pd_env.sh"
export SPEC_EXT_DTYPE=float32 # the order of additions must not decide between two tokens
exec python -m sglang_spec_ext.cli demo-pd --scripts "$spec_ext_root/launch_scripts" \
    --max-tokens "${SPEC_EXT_MAX_TOKENS:-48}" "$@"
