//! Numbers of the running kernel: `proc_sys_vm(5)`, `proc_sys_kernel(5)`.

/// How many mappings a process may have: `vm.max_map_count`.
pub(crate) fn mappings_max() -> u64 {
    const DEFAULT: u64 = 65_530;
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim().parse().unwrap_or(DEFAULT)
}

/// True if the kernel frees the page table of a range of 2 MiB whose pages are dropped: from Linux
/// 6.14 on, on x86-64 (`CONFIG_PT_RECLAIM`).
pub(crate) fn frees_page_tables() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let version = (numbers.next(), numbers.next());
    let (Some(Ok(major)), Some(Ok(minor))) = version else { return false };
    cfg!(target_arch = "x86_64") && (major, minor) >= (6, 14)
}
