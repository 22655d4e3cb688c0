#!/bin/sh
# Makes of the static library that cargo builds one that holds a single object: only what the interface needs, without
# debug information, and with the interface as its only global symbols, so that a program may have another Rust library
# or another jemalloc beside it.
#
#   one_object.sh built.a built.so result.a     (tools: NM, LD, OBJCOPY, AR)
#
# 114 MB become 7: standard library and jemalloc come with debug information and whole, the former also as bitcode.
set -eu
built=$1 shared=$2 result=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# What the shared library exports is what the header declares.
"${NM:-nm}" -D --defined-only "$shared" | awk '{ print $3 }' | grep -v '^$' >"$scratch/names"
"${OBJCOPY:-objcopy}" --strip-debug -R .llvmbc -R .llvmcmd "$built" "$scratch/plain.a"
sed 's/^/-u /' "$scratch/names" >"$scratch/roots"
"${LD:-ld}" -r --gc-sections "@$scratch/roots" -o "$scratch/all.o" "$scratch/plain.a"
"${OBJCOPY:-objcopy}" --keep-global-symbols="$scratch/names" --strip-unneeded "$scratch/all.o" "$scratch/farheap.o"
rm -f "$result"
"${AR:-ar}" rcs "$result" "$scratch/farheap.o"
