# The knobs of prefill and decode on separate servers, the same file on both sides: `. launch_scripts/pd_env.sh`.
# Those of env.sh (model, draft, algorithm, mode, dtype) hold here too, and must be equal on all servers.
#
#   SPEC_EXT_PD_BACKEND       nixl, mooncake, mooncake_tcp, ...           [default: nixl]
#   SPEC_EXT_PD_TRANSPORT     aux, sidecar, off: how records travel       [default: aux]
#   SPEC_EXT_PD_MISMATCH      degrade, refuse                             [default: degrade]
#   SPEC_EXT_PD_KEY_FILE      key of the sidecar, mode 0600               [default: none]
#   SPEC_EXT_PD_PREFILL       host:port of the prefill server             [default: 127.0.0.1:31000]
#   SPEC_EXT_PD_DECODE        host:port of the decode server              [default: 127.0.0.1:31001]
#   SPEC_EXT_PD_ROUTER        host:port of the router                     [default: 127.0.0.1:31100]
#   SPEC_EXT_PD_BOOTSTRAP     port on which decode finds prefill          [default: 31998]
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

export SPEC_EXT_PD_BACKEND=${SPEC_EXT_PD_BACKEND:-nixl}
export SPEC_EXT_PD_TRANSPORT=${SPEC_EXT_PD_TRANSPORT:-aux}
export SPEC_EXT_PD_MISMATCH=${SPEC_EXT_PD_MISMATCH:-degrade}
export SPEC_EXT_PD_KEY_FILE=${SPEC_EXT_PD_KEY_FILE:-none}
export SPEC_EXT_PD_PREFILL=${SPEC_EXT_PD_PREFILL:-127.0.0.1:31000}
export SPEC_EXT_PD_DECODE=${SPEC_EXT_PD_DECODE:-127.0.0.1:31001}
export SPEC_EXT_PD_ROUTER=${SPEC_EXT_PD_ROUTER:-127.0.0.1:31100}
export SPEC_EXT_PD_BOOTSTRAP=${SPEC_EXT_PD_BOOTSTRAP:-31998}
case $SPEC_EXT_PD_PREFILL,$SPEC_EXT_PD_DECODE in
    127.0.0.1:*,127.0.0.1:*) # one machine: nothing leaves it
        export SGLANG_HOST_IP=${SGLANG_HOST_IP:-127.0.0.1} UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo}
        export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} MC_TCP_BIND_ADDRESS=${MC_TCP_BIND_ADDRESS:-127.0.0.1}
        if [ "${SGLANG_PLATFORM:-}" = spec_ext_cpu ]; then
            # each side keeps a core busy while a transfer is on its way, and compute threads that share a core with
            # that make all the others wait: on two cores an answer took minutes with two threads, seconds with one
            half=$(($(nproc) / 2 - 1))
            export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((half > 1 ? half : 1))}
        fi
        ;;
esac

# pd_serve ROLE HOST:PORT [arguments of SGLang]
pd_serve() {
    local role=$1 address=$2
    shift 2
    local arguments=(--disaggregation-mode "$role" --disaggregation-transfer-backend "$SPEC_EXT_PD_BACKEND")
    arguments+=(--disaggregation-bootstrap-port "$SPEC_EXT_PD_BOOTSTRAP")
    if [ "$SPEC_EXT_MODE" != off ]; then
        arguments+=(--spec-ext-pd-transport "$SPEC_EXT_PD_TRANSPORT" --spec-ext-pd-mismatch "$SPEC_EXT_PD_MISMATCH")
        arguments+=(--spec-ext-pd-key-file "$SPEC_EXT_PD_KEY_FILE")
    fi
    SPEC_EXT_HOST=${address%:*} SPEC_EXT_PORT=${address##*:} \
        exec "$spec_ext_root/launch_scripts/serve.sh" "${arguments[@]}" "$@"
}
