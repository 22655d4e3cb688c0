#!/bin/sh
# Writes what the directory `share` of an installation has of the command: man pages and completions, by the command.
#
#   share.sh farheap share
set -eu
command=$1 share=$2
man=$share/man/man1 bash=$share/bash-completion/completions fish=$share/fish/vendor_completions.d
# zsh of Debian looks here for packages; others have it in their $fpath where they look for those of /usr/local.
zsh=$share/zsh/vendor-completions
rm -rf "$share"
mkdir -p "$man" "$bash" "$fish" "$zsh"
"$command" man "$man"
gzip -9n "$man"/*
"$command" completions bash >"$bash/farheap"
"$command" completions fish >"$fish/farheap.fish"
"$command" completions zsh >"$zsh/_farheap"
