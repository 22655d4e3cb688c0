//! What the kernel says of memory, without asking the library.

use farheap::ByteCount;
use std::fs;
use std::path::Path;

/// Bytes that this process may still make resident: what the machine and each control group
/// around the process leave. `None` when neither says.
pub(crate) fn available() -> Option<ByteCount> {
    let machine = fs::read("/proc/meminfo").ok();
    let machine = machine.and_then(|text| kilobytes_of(b"MemAvailable:", &text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let groups = Path::new(group).ancestors().filter_map(|group| {
        let group = Path::new("/sys/fs/cgroup").join(group);
        let read = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        Some(ByteCount(read("memory.max")?.saturating_sub(read("memory.current")?)))
    });
    groups.chain(machine).min()
}

/// The number after `key` at the start of a line of `text`, which counts kilobytes.
pub(crate) fn kilobytes_of(key: &[u8], text: &[u8]) -> Option<ByteCount> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key))?;
    let number = line.trim_ascii().strip_suffix(b"kB")?.trim_ascii();
    let number = std::str::from_utf8(number).ok()?.parse().ok()?;
    Some(ByteCount::kib(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_from_whole_keys_only() {
        let text = b"VmHWM:\t 9 kB\nVmRSS:\t    2004 kB\nThreads:\t1\n";
        assert_eq!(kilobytes_of(b"VmRSS:", text), Some(ByteCount::kib(2_004)));
        assert_eq!(kilobytes_of(b"RSS:", text), None);
        assert_eq!(kilobytes_of(b"Threads:", text), None);
    }
}
