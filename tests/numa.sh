#!/bin/sh
# Runs tests/global/node.rs on an emulated machine with two NUMA nodes, of which the second has no processors.
#
#   tests/numa.sh BINARY [KERNEL]
#
# BINARY is the test's (cargo test --test global --no-run says where), KERNEL a kernel image, else the newest
# of /boot. Needs qemu-system-x86_64 and busybox; without them it says so and succeeds. The processors are
# emulated, which takes minutes; ACCELERATOR=kvm takes seconds where virtual machines can be nested.
set -eu

skip() {
    echo "skipped: $1"
    exit 0
}

binary=${1:?the test binary}
kernel=${2:-$(ls -t /boot/vmlinuz-* 2>/dev/null | head -n 1)}
command -v qemu-system-x86_64 >/dev/null || skip "there is no qemu-system-x86_64"
busybox=${BUSYBOX:-$(command -v busybox || true)}
[ -n "$busybox" ] || skip "there is no busybox"
[ -n "$kernel" ] && [ -r "$kernel" ] || skip "there is no kernel image that can be read"

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
root=$dir/root
mkdir -p "$root/bin" "$root/proc" "$root/sys" "$root/dev" "$root/tmp" "$root/var/tmp"
cp "$busybox" "$root/bin/busybox"
cp "$binary" "$root/bin/heap_node"
# The test's libraries, the loader among them, where it looks for them.
for library in $(ldd "$busybox" "$binary" 2>/dev/null | grep -o '/[^ ]*' | grep -v ':$' | sort -u); do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done
cat >"$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
nodes=$(/bin/busybox cat /sys/devices/system/node/has_memory)
echo "numa: nodes $nodes"
cd /tmp
/bin/heap_node node:: --nocapture --test-threads 1 && [ "$nodes" = 0-1 ] && echo "numa: passed"
/bin/busybox poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | "$busybox" cpio -o -H newc 2>/dev/null) | gzip -1 >"$dir/initrd"

timeout "${SECONDS_MAX:-600}" qemu-system-x86_64 -machine q35,accel="${ACCELERATOR:-tcg}" -cpu max -smp 2 -m 2G \
    -object memory-backend-ram,id=near,size=1G -object memory-backend-ram,id=apart,size=1G \
    -numa node,nodeid=0,memdev=near,cpus=0-1 -numa node,nodeid=1,memdev=apart \
    -kernel "$kernel" -initrd "$dir/initrd" -append "console=ttyS0 panic=-1 quiet" \
    -nographic -no-reboot | tr -d '\r' | tee "$dir/said"
grep -q '^numa: passed' "$dir/said"
