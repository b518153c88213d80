# Source this first: `. launch_scripts/env.sh`. Sets what every launch script needs and prints it.
#
#   SGLANG_PLATFORM           spec_ext_cpu: serve on the CPU     [default: spec_ext_cpu without a CUDA device]
#   SPEC_EXT_HOME             environments and checkpoints        [default: ~/.cache/sglang-spec-ext]
#   SPEC_EXT_TARGET           the model to serve                  [default: the prepared SmolLM2-135M-Instruct]
#   SPEC_EXT_ALGORITHM        NONE, EAGLE, EAGLE3, DFLASH, DSPARK, NGRAM        [default: DSPARK]
#   SPEC_EXT_DRAFT            the draft folder                    [default: the shipped draft of the algorithm]
#   SPEC_EXT_MODE             off, shadow, adaptive               [default: shadow]
#   SPEC_EXT_DTYPE            float32, bfloat16  [default: bfloat16; float32 on a CPU without bfloat16 units]
#   SPEC_EXT_HOST, SPEC_EXT_PORT                                  [default: 127.0.0.1 and 30000]

spec_ext_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export SPEC_EXT_HOME=${SPEC_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-spec-ext}
spec_ext_env=$("$spec_ext_root/launch_scripts/create_env.sh")
export PATH="$spec_ext_env/bin:$PATH"
# the installed copy runs wherever this is called from, and PyPI's `kernels` is never shadowed
export PYTHONSAFEPATH=1
if [ -z "${SGLANG_PLATFORM+set}" ] && ! nvidia-smi -L >/dev/null 2>&1; then
    export SGLANG_PLATFORM=spec_ext_cpu
fi
export SPEC_EXT_TARGET=${SPEC_EXT_TARGET:-$SPEC_EXT_HOME/models/smollm2}
export SPEC_EXT_ALGORITHM=${SPEC_EXT_ALGORITHM:-DSPARK}
export SPEC_EXT_DRAFT=${SPEC_EXT_DRAFT:-$spec_ext_root/models/smollm2-135m-${SPEC_EXT_ALGORITHM,,}}
export SPEC_EXT_MODE=${SPEC_EXT_MODE:-shadow}
spec_ext_dtype=bfloat16
# without such units every weight is converted each time it is read
if [ "${SGLANG_PLATFORM:-}" = spec_ext_cpu ] && ! grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then
    spec_ext_dtype=float32
fi
export SPEC_EXT_DTYPE=${SPEC_EXT_DTYPE:-$spec_ext_dtype}
export SPEC_EXT_HOST=${SPEC_EXT_HOST:-127.0.0.1}
export SPEC_EXT_PORT=${SPEC_EXT_PORT:-30000}
echo "platform ${SGLANG_PLATFORM:-detected by SGLang}, target $SPEC_EXT_TARGET, $SPEC_EXT_ALGORITHM, mode $SPEC_EXT_MODE" >&2
