//! Event counts and durations of one region, noted where the event happens and read by people: no code
//! of the pager decides by them.
//!
//! [`for_region_stats!`](crate::for_region_stats) is the one table of statistics. From it follow
//! [`Counters`], [`Stats`](crate::region::Stats) with its documentation, difference and `Display`, and
//! `farheap_stats` in C. A new counter is a row here, and the line that counts.

use crate::base::counter::{Counter, Gauge};
use crate::base::error::Result;
use crate::paging::latency::Recorder;

/// Passes the table of a region's statistics to a macro, behind what else is for it; `statistics!` of
/// `base` says what a row is.
///
/// The order is that of the C structure.
#[doc(hidden)]
#[macro_export]
macro_rules! for_region_stats {
    ($callback:ident $($head:tt)*) => {
        $callback! {
            $($head)*
            "memory" {
                /// Bytes resident now: mapped pages, staging frames, and the tables that describe
                /// them.
                resident_bytes: bytes "resident";
                /// The maximum number of bytes that may be resident now. With the option `limit` this is what the
                /// rest of the process leaves, and changes with it.
                limit_bytes: bytes "their limit now";
                /// Bytes charged against the limit now: resident, the untouched rest of open
                /// chunks, and one page that is kept for copies.
                charged_bytes: bytes "charged";
                /// Largest number of charged bytes there ever was; resident bytes never exceeded
                /// it.
                resident_bytes_max: bytes "the most ever charged";
                /// Of the resident bytes, those of tables: page words, the policy's lists, slot
                /// hashes, page tables. In proportion to the pages and slots in use; what is left
                /// of others is given back within a second or when memory is short.
                metadata_bytes: bytes "of tables";
            }
            "in use" {
                /// Bytes of the pages that hold live data, resident or not.
                committed_bytes: bytes "of far memory";
                /// Bytes of device space in use.
                stored_bytes: bytes "of the device";
            }
            "faults" {
                /// Faults answered with zeros, without I/O.
                faults_zero: count "zero";
                /// Faults answered by reading the device.
                faults_read: count "read";
                /// Faults on pages on their way out that came back without reading the device.
                faults_cooling: count "cooling";
                /// First writes to pages installed write-protected.
                faults_protect: count "first write";
                /// Faults that another thread's fault had answered already.
                faults_racing: count "raced";
                /// Faults that waited because the limit left no frame.
                faults_starved: count "starved";
            }
            "device reads" {
                /// Pages read from the device.
                pages_in: count "pages";
                /// Bytes read from the device.
                bytes_read: total "read";
                /// Read requests at the device now.
                reads_in_flight: gauge "in flight";
                /// The maximum number of read requests that were at the device at once.
                reads_in_flight_max: most "at most at once";
            }
            "would save" {
                /// Pages read that an eighth more of the limit would have kept, by how many others left meanwhile: an
                /// estimate.
                reads_saved_by_eighth: count "reads with 1/8 more memory";
                /// The same of a quarter more.
                reads_saved_by_quarter: count "with 1/4 more";
            }
            "device writes" {
                /// Pages written to the device.
                pages_out: count "pages";
                /// Bytes written to the device.
                bytes_written: total "written";
                /// Write requests at the device now.
                writes_in_flight: gauge "in flight";
                /// The maximum number of write requests that were at the device at once.
                writes_in_flight_max: most "at most at once";
            }
            "not written" {
                /// Pages evicted without a write because the device had their content.
                evicted_clean: count "clean";
                /// Pages evicted without a write because they were all zero.
                evicted_zero: count "zero";
                /// Pages freed while they were mapped and the device had no copy of them: their
                /// data never cost a write.
                discarded_dirty: count "freed while resident";
                /// Pages freed on their way out, before a write was started; of some the device had
                /// a copy.
                died_before_write: count "freed on the way out";
                /// Pages freed while they were being written: a write in vain, counted in
                /// `pages_out` too.
                died_during_write: count "written in vain";
            }
            "read ahead" {
                /// Pages read because the program asked for them.
                pages_prefetched: count "pages asked for";
                /// Ranges that `prefetch` asked for and that were dropped, because 1,024 waited.
                prefetches_dropped: count "ranges dropped";
                /// Pages read because a stream of faults led to them.
                pages_read_ahead: count "pages by streams";
                /// Pages read ahead that were then seen to be used: touched while still being read,
                /// written, or touched on their way out. A page that is only read while it is
                /// mapped leaves no trace, so this is a lower bound of the useful ones.
                prefetch_hits: count "seen used";
                /// Pages read ahead and evicted without a trace of use: an upper bound of the
                /// useless ones. What is neither here nor in `prefetch_hits` is still resident, or
                /// was freed.
                prefetch_unused: count "left unseen";
            }
            "polling" {
                /// Times a handler looked for the device's answer instead of sleeping at once.
                polls: count "polls";
                /// Of the polls, those that had something to do before the handler gave up.
                poll_hits: count "had something to do";
                /// Times that handlers offered their processor to other threads between two looks.
                poll_yields: count "yields";
            }
            "chunks" {
                /// Chunks of 2 MiB handed to the kernel to fill.
                chunks_opened: count "opened";
                /// Chunks taken back under pressure.
                chunks_closed: count "closed";
                /// Of the chunks closed, those that left memory whole.
                chunks_evicted: count "left whole";
                /// Of the chunks opened, those that took memory which the evictor had ready.
                chunks_reused: count "took ready memory";
                /// Chunks of 2 MiB that were read ahead and mapped as one.
                chunks_read: count "read whole";
            }
            "trouble" {
                /// Evictions refused because the kernel was using the page.
                evict_busy: count "evictions refused by the kernel";
                /// Installs that fell back to a copy because the kernel was using the frame.
                install_busy: count "installs by copy after all";
                /// Device reads that failed or came too late.
                read_errors: count "failed reads";
                /// Device writes that failed or came too late.
                write_errors: count "failed writes";
                /// Pages whose content was not what had been written.
                checksum_errors: count "checksum errors";
                /// Pages lost: touching them is SIGBUS.
                poisoned: count "pages lost";
                /// Panics that a handler thread survived.
                panics: count "handler panics";
            }
        }
    };
}

/// Counter of a figure, by its kind; `()` for what is looked up when a snapshot is taken.
macro_rules! counter {
    (count) => {
        Counter
    };
    (gauge) => {
        Gauge
    };
    ($kind:ident) => {
        ()
    };
}

macro_rules! counters {
    ($($label:literal { $($(#[$doc:meta])* $name:ident: $kind:ident $words:literal;)* })*) => {
        /// All counts and durations of one region.
        #[derive(Debug)]
        #[allow(dead_code, reason = "what is looked up has an empty place here")]
        pub(crate) struct Counters {
            $($($(#[$doc])* pub(crate) $name: counter!($kind),)*)*
            /// Per handler.
            pub(crate) fault_times: Box<[Recorder]>,
            /// Per handler.
            pub(crate) read_times: Box<[Recorder]>,
            pub(crate) write_times: Recorder,
            pub(crate) evict_times: Recorder,
        }

        impl Counters {
            /// Bytes of the durations of a region with this number of handlers.
            pub(in crate::paging) fn bytes(handlers: usize) -> usize {
                (2 * handlers + 2) * Recorder::BYTES
            }

            pub(in crate::paging) fn new(handlers: usize) -> Result<Counters> {
                let recorders = || (0..handlers).map(|_| Recorder::new()).collect::<Result<_>>();
                Ok(Counters {
                    $($($name: Default::default(),)*)*
                    fault_times: recorders()?,
                    read_times: recorders()?,
                    write_times: Recorder::new()?,
                    evict_times: Recorder::new()?,
                })
            }
        }
    };
}

for_region_stats!(counters);
