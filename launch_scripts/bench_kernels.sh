#!/usr/bin/env bash
# Check and time the kernels on one GPU (under 6 minutes), or check them on a CPU with --dry-run.
#   launch_scripts/bench_kernels.sh [--dry-run] [--op NAME ...]
# OUT_DIR   where kernels.json and kernels.md go   (default: bench_results)
# PYTHON    interpreter with sglang_spec_ext        (default: python)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python}" -m sglang_spec_ext.cli bench kernels --out "${OUT_DIR:-bench_results}" "$@"
