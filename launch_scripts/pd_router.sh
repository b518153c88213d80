#!/usr/bin/env bash
# Runs SGLang's router in front of one prefill and one decode server; the knobs are those of pd_env.sh, and every
# further argument goes to the router. It lives in an environment of its own, created on first use: beside SGLang
# it would import all of it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/pd_env.sh"

release=sglang-router==0.3.2
environment=$SPEC_EXT_HOME/router-${release##*=}
if [ ! -f "$environment/.complete" ]; then
    echo "creating $environment ($release)" >&2
    rm -rf "$environment"
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install -q --disable-pip-version-check "$release" >&2
    touch "$environment/.complete"
fi
exec "$environment/bin/python" -m sglang_router.launch_router --pd-disaggregation \
    --prefill "http://$SPEC_EXT_PD_PREFILL" "$SPEC_EXT_PD_BOOTSTRAP" --decode "http://$SPEC_EXT_PD_DECODE" \
    --host "${SPEC_EXT_PD_ROUTER%:*}" --port "${SPEC_EXT_PD_ROUTER##*:}" --policy round_robin "$@"
