#!/bin/sh
# Writes the licences of what libraries and command have in them of others, as these ask for: of crates, where cargo has
# their sources, and of the C in them. Texts that are the same are written once; the Apache License is known.
#
#   notices.sh result     (tool: CARGO)
set -eu
result=$1
cd "$(dirname "$0")/.."
sources=${CARGO_HOME:-$HOME/.cargo}/registry/src
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"${CARGO:-cargo}" tree --locked --no-default-features --package farheap-ffi --package farheap-preload --package farheap-cli \
    --edges normal,no-proc-macro --prefix none --no-dedupe --format '{p}|{l}' | grep -v '(/' | sort -u >"$scratch/crates"
mkdir -p "$(dirname "$result")"
while IFS='|' read -r crate licence; do
    [ -n "$crate" ] || continue
    echo "== $crate: $licence"
    for file in "$sources"/*/"${crate% v*}-${crate##* v}"/LICEN[CS]E* "$sources"/*/"${crate% v*}-${crate##* v}"/*/COPYING; do
        case $file in *APACHE*) continue ;; esac
        [ -f "$file" ] || continue
        sum=$(cksum <"$file")
        grep -qxF "$sum" "$scratch/seen" 2>/dev/null || cat "$file"
        echo "$sum" >>"$scratch/seen"
    done
done <"$scratch/crates" >"$result"
grep -q Evans "$result" || echo "$result: sources of crates are not in $sources, names alone are written" >&2
