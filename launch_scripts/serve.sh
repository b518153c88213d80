#!/usr/bin/env bash
# Serves one model with one draft; the knobs are those of env.sh, and every further argument goes to SGLang:
#
#   SPEC_EXT_ALGORITHM=EAGLE3 launch_scripts/serve.sh --max-running-requests 16
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

arguments=(--model-path "$SPEC_EXT_TARGET" --dtype "$SPEC_EXT_DTYPE" --host "$SPEC_EXT_HOST" --port "$SPEC_EXT_PORT")
[ "${SGLANG_PLATFORM:-}" = spec_ext_cpu ] && arguments+=(--device cpu --sleep-on-idle)
case $SPEC_EXT_ALGORITHM in
    NONE) ;;
    NGRAM) arguments+=(--speculative-algorithm NGRAM) ;;
    EAGLE | EAGLE3)
        arguments+=(--speculative-algorithm "$SPEC_EXT_ALGORITHM" --speculative-draft-model-path "$SPEC_EXT_DRAFT")
        arguments+=(--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4)
        ;;
    *) arguments+=(--speculative-algorithm "$SPEC_EXT_ALGORITHM" --speculative-draft-model-path "$SPEC_EXT_DRAFT") ;;
esac
case $SPEC_EXT_ALGORITHM in NONE | NGRAM) ;; *) arguments+=(--spec-ext-mode "$SPEC_EXT_MODE") ;; esac
exec python -m sglang.launch_server "${arguments[@]}" "$@"
