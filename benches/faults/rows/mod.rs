//! The rows, by group.

mod faults;
mod memory;
mod prefetch;
mod resident;
mod scan;
mod writes;

pub(crate) use prefetch::prefetched;

use crate::report::Row;
use crate::{Plan, Result};

/// Rows that share a set-up.
pub(crate) struct Group {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Adds rows as they are measured, so that those before a failure are kept.
    pub(crate) run: fn(&Plan, &mut Vec<Row>) -> Result<()>,
}

pub(crate) const ALL: &[Group] = &[
    Group {
        name: "resident",
        about: "reading and writing resident far memory; plain memory",
        run: resident::speed,
    },
    Group {
        name: "fresh",
        about: "first touch of far memory; of plain memory",
        run: resident::first_touch,
    },
    Group {
        name: "faults-file",
        about: "random 4 KiB faults, temporary file; raw reads, mmap, swap",
        run: faults::on_file,
    },
    Group {
        name: "faults-loop",
        about: "random 4 KiB faults, loop device over tmpfs; raw reads, mmap, swap",
        run: faults::on_loop,
    },
    Group {
        name: "mixed",
        about: "random 50 % writes, 4 KiB; raw reads and writes, UMap, mmap, swap",
        run: faults::mixed,
    },
    Group {
        name: "scan-file",
        about: "sequential reads by 64 KiB, temporary file; raw reads, mmap",
        run: scan::on_file,
    },
    Group { name: "scan-loop", about: "the same on a loop device over tmpfs", run: scan::on_loop },
    Group {
        name: "memory",
        about: "random 4 KiB faults, store without latency; bare ioctls, UMap",
        run: memory::random,
    },
    Group {
        name: "memory-scan",
        about: "sequential reads by 64 KiB to 2 MiB, store without latency; memcpy",
        run: memory::scan,
    },
    Group {
        name: "prefetch",
        about: "scattered pages asked for in batches; raw io_uring, mmap",
        run: prefetch::batches,
    },
    Group {
        name: "first-write",
        about: "first write to a resident clean page; UMap",
        run: writes::first,
    },
    Group {
        name: "short-lived",
        about: "allocate, write, free below the limit: bytes written",
        run: writes::short_lived,
    },
    Group {
        name: "spill",
        about: "data twice the cache, written once; raw writes, bytes written",
        run: writes::spill,
    },
];
