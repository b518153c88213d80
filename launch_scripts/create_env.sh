#!/usr/bin/env bash
# Creates (once per machine) the environment that `make` uses, and prints its folder.
#
#   SPEC_EXT_HOME    where environments and models are kept   [default: ~/.cache/sglang-spec-ext]
#   PYTHON           the interpreter, 3.11 or newer            [default: python3]
#
# Two layers: the pinned requirements (SGLang with its torch, about 11 GB) are installed once under a name
# that is the hash of the requirement files; each checkout adds a small overlay, .venv, which holds only this
# project (editable) and the console scripts. A changed pin makes a new base; an interrupted build is redone.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=${SPEC_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-spec-ext}
python=${PYTHON:-python3}
overlay=$root/.venv

tag=$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
hash=$(cat "$root"/requirements/*.txt | sha256sum | cut -c1-12)
base=$home/env-$tag-$hash
if [ "${1:-}" = --print ]; then echo "$overlay"; exit 0; fi

mkdir -p "$home"
exec 9>"$base.lock"
flock 9
if [ ! -f "$base/.complete" ]; then
    echo "creating $base (SGLang and torch: about 11 GB and 5 minutes)" >&2
    rm -rf "$base"
    "$python" -m venv "$base"
    "$base/bin/pip" install -q --disable-pip-version-check -r "$root/requirements/engine.txt" >&2
    "$base/bin/pip" install -q --disable-pip-version-check --no-deps -r "$root/requirements/no-deps.txt" >&2
    touch "$base/.complete"
fi
# Mooncake links libibverbs even for TCP. Where the system has none, Debian's own files go beside the wheel, where it
# looks first; that takes no root. Without them Mooncake's tests are skipped.
beside=$(echo "$base"/lib/python*/site-packages/mooncake)
if [ ! -e "$beside/libibverbs.so.1" ] && ! "$base/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then
    parts=$(mktemp -d)
    (cd "$parts" && apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200 &&
        for package in *.deb; do dpkg-deb -x "$package" .; done &&
        cp -L usr/lib/*/libibverbs.so.1 usr/lib/*/libnl-route-3.so.200 "$(find . -name libnl-3.so.200)" "$beside") \
        >/dev/null 2>&1 || echo "note: no libibverbs.so.1, so Mooncake cannot run (Debian: apt-get install libibverbs1)" >&2
    rm -rf "$parts"
fi
flock -u 9

# the overlay is rebuilt when the base, the packaging files or the place of the checkout changed
stamp=$(cat "$root/setup.py" "$root/pyproject.toml" <(echo "$base $root") | sha256sum | cut -c1-12)
if [ "$(cat "$overlay/.stamp" 2>/dev/null || true)" != "$stamp" ]; then
    rm -rf "$overlay"
    "$python" -m venv --without-pip "$overlay"
    site=$("$overlay/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    base_site=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$base_site')" >"$site/spec_ext_base.pth"
    "$base/bin/pip" --python "$overlay/bin/python" install -q --disable-pip-version-check --no-deps \
        --no-build-isolation -e "$root" >&2
    "$base/bin/python" "$root/launch_scripts/link_scripts.py" "$overlay"
    echo "$stamp" >"$overlay/.stamp"
fi
echo "$overlay"
