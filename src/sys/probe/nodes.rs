//! NUMA nodes that have memory, read from `/sys`. The parsers take text, as in `host`.

use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::statm::mem_info;
use std::fs;

/// A NUMA node with memory: RAM beside processors, or memory without any, as CXL memory shows up.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub number: u32,
    /// `MemTotal`: the memory that it has.
    pub total: ByteCount,
    /// `MemFree`: the memory of it that nobody uses.
    pub free: ByteCount,
    /// True if processors belong to it.
    pub has_processors: bool,
}

impl NumaNode {
    /// All nodes with memory, by their numbers; none where `/sys` does not say.
    #[must_use]
    pub fn all() -> Vec<NumaNode> {
        const NODES: &str = "/sys/devices/system/node";
        let read = |path: String| fs::read_to_string(path).unwrap_or_default();
        let found =
            numbers(&read(format!("{NODES}/has_memory"))).into_iter().filter_map(|number| {
                let text = read(format!("{NODES}/node{number}/meminfo"));
                let processors = read(format!("{NODES}/node{number}/cpulist"));
                Some(NumaNode {
                    number,
                    total: mem_info(&text, "MemTotal:")?,
                    free: mem_info(&text, "MemFree:")?,
                    has_processors: !processors.trim().is_empty(),
                })
            });
        found.collect()
    }

    /// The node of this number.
    ///
    /// # Errors
    /// [`Error::Config`] when there is none, or it has no memory.
    pub(crate) fn find(number: u32) -> Result<NumaNode> {
        let all = NumaNode::all();
        all.iter().find(|node| node.number == number).copied().ok_or_else(|| {
            let there: Vec<_> = all.iter().map(|node| node.number.to_string()).collect();
            let reason = format!(
                "there is no node {number} with memory; those with memory: {}",
                if there.is_empty() { "unknown".to_owned() } else { there.join(", ") }
            );
            Error::config("node", reason)
        })
    }
}

/// The numbers of a list such as `0-1,4`.
fn numbers(list: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read() {
        assert_eq!(numbers("0\n"), [0]);
        assert_eq!(numbers("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(numbers("\n"), [0_u32; 0]);
    }

    #[test]
    fn the_memory_of_a_node_is_read() {
        let text = "Node 1 MemTotal:       16384 kB\nNode 1 MemFree:         4096 kB\n";
        assert_eq!(mem_info(text, "MemTotal:"), Some(ByteCount::mib(16)));
        assert_eq!(mem_info(text, "MemFree:"), Some(ByteCount::mib(4)));
        assert_eq!(mem_info("", "MemFree:"), None);
    }
}
