//! The one table of options.
//!
//! [`for_options!`](crate::for_options) has a row for each option; from it follow [`Options`], the
//! methods of [`Builder`](super::Builder) and [`Config`](super::Config), the keys of the text form,
//! the table in `book/src/reference/options.md`, and the structure `farheap_config` in C. A new option is a row here, and
//! the line that uses it.

use super::value::{Limit, Value, suggest};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::paging::region::{FaultMode, Install};
use crate::store::{IoEngine, Wipe};
use std::path::PathBuf;
use std::time::Duration;

/// Passes the table of options to a macro.
///
/// The order is that in which options print, and that of the C structure. A row is
/// `name: kind(type) or "none" = default, "brief", { .. }`:
/// - The kind decides about the methods: `value` is set and read as its type; `maybe` is an
///   `Option`; `path` is set from anything that is a path; `limit` has methods of its own.
/// - `none` is the word in text for an option that is unset.
/// - The brief continues "Sets" and "Returns"; what stands above the row follows it in the
///   documentation of the builder's method.
/// - The part is what the option says something about. A `region` takes its options by themselves,
///   by the methods of [`RegionConfig`](crate::region::RegionConfig) of the same names.
/// - Then the type and the name of the field in C, and what the page says: the values (empty: the
///   words there are), the default (empty: the default's text), and when to change it.
#[doc(hidden)]
#[macro_export]
macro_rules! for_options {
    ($callback:ident) => { $callback! {
        /// It holds for all that the process has resident. Far memory gives way to what is not far: code,
        /// stacks, local memory, and what the program maps itself. These cannot be evicted: where they leave
        /// less than 8 MiB, the process is above this limit, and a message gives the limit
        /// that would do. Resident memory is read a hundred times a second.
        ///
        /// Default: [`Limit::Auto`], what the fullest of its control groups has free at the moment, less a
        /// margin; processes of a group that have this default share it. Without a limit of a control group,
        /// half of what the machine has available at the start. Set it where others share the machine. A share in
        /// percent is one of the control group's limit or the machine's memory. [`Limit::Off`]: only
        /// [`far_limit`](Builder::far_limit) bounds anything. Under a memory manager, whose limit
        /// counts local memory, start-up fails where this is set.
        limit: limit(Limit) or "off" = Limit::Auto,
            "the maximum resident memory of the process, in bytes",
            { heap c bytes limit, "size, `25%` of memory, `auto`, or `off`", "",
              "others share the machine" };

        /// It is at least 8 MiB, and has no effect above
        /// [`limit`](Builder::limit). Pages, staging frames and tables of far memory count.
        ///
        /// Default: [`Limit::Auto`], as much as the limit of the process, and on a [`node`](Builder::node) at most
        /// half of its memory; where the limit is off, half of the memory that the machine has available. Set it for a further tier, or to keep memory for what is not far.
        far_limit: limit(Limit) = Limit::Auto,
            "the maximum far memory that may be resident, in bytes",
            { far c bytes far_limit, "size, `25%` of memory, or `auto`", "",
              "far memory alone is to be bounded, or a further tier" };

        /// **Its contents are overwritten**, so it must begin with zeros or with what an earlier
        /// run left, unless [`overwrite`](Builder::overwrite) is set.
        ///
        /// Default: an unlinked temporary file in [`dir`](Builder::dir). Name a raw device when
        /// there is one: it spares the file system's work and has a fixed size. With the feature `network` it may be
        /// the memory of other machines, `nbd://HOST/EXPORT` (`book/src/how_to/network.md`).
        device: path(PathBuf) = None,
            "the block device or regular file that keeps evicted pages",
            { store c text device, "block device, file, or `nbd://HOST/EXPORT`; **its contents are lost**",
              "a temporary file", "there is a raw device" };

        /// A device holds data if it begins neither with zeros nor with the mark of an earlier run.
        ///
        /// Default: `false`, such a device is refused with what it holds. Set it for a device whose
        /// contents nobody needs, instead of erasing it by hand.
        overwrite: value(bool) = false,
            "whether a device that holds data is overwritten",
            { store c switch overwrite, "", "", "the device holds data that nobody needs: `off` refuses it" };

        /// Conflicts with [`device`](Builder::device).
        ///
        /// Default: `$TMPDIR`, `/tmp`, or `/var/tmp` where `/tmp` is in memory. Set it when that one is small. A directory in
        /// memory (tmpfs) is accepted with a warning: evicting to it frees no memory.
        dir: path(PathBuf) = None,
            "the directory of the temporary file",
            { store c text dir, "directory",
              "`$TMPDIR`, `/tmp`, or `/var/tmp` where `/tmp` is in memory", "the default is too small" };

        /// Default: all of a device or file; a temporary file grows as far as its file system lets
        /// it. Set it to leave room for others.
        capacity: maybe(ByteCount) = None,
            "how many bytes of the device may be used",
            { store c bytes capacity, "size", "all of the device", "to leave room for others" };

        /// That is the temporary file, which then needs a [`capacity`](Builder::capacity), or the
        /// regular file named as [`device`](Builder::device).
        ///
        /// Default: off, the file takes space as pages are written and gives it back as they are
        /// freed. When others fill the file system, far allocations are refused, but memory that
        /// was granted before may find no room either: touching it is `SIGBUS` then. Set it where
        /// that must not happen, for the price that nobody else can use the space meanwhile.
        reserve: value(bool) = false,
            "whether the space of a file is taken from its file system at start-up",
            { store c switch reserve, "", "",
              "others may fill the file system: take the space at start-up" };

        /// With `None` (`off` in text) no size does, only explicit requests and thread scopes. With 0
        /// every allocation does, small objects as well. What
        /// farheap and jemalloc keep about memory stays local, as does all that was allocated before
        /// the heap started.
        ///
        /// Default: 64 KiB. Lower it, or set it to 0, when much of the data is small objects, for which pages of
        /// 4 to 16 KiB are best; `off` when the program chooses itself what goes far.
        threshold: maybe(ByteCount) or "off" = Some(ByteCount::kib(64)),
            "the size in bytes from which the global allocator places allocations in far memory",
            { heap c bytes threshold, "size, `0` for all, or `off`", "",
              "smaller objects are to go far, or no object by its size" };

        /// From 1 to 64.
        ///
        /// Default: `None`, chosen by the runtime. Set it when faults wait for a handler while
        /// processors idle, or to bound the threads.
        handlers: maybe(u16) or "auto" = None,
            "the number of handler threads",
            { heap c count handlers, "`auto` or 1 to 64", "", "faults wait while processors idle" };

        /// Up to 7 TiB. It costs no memory.
        ///
        /// Default: 1 TiB. Lower it where the address space is limited (`ulimit -v`), raise it when
        /// more data than that is alive at once.
        span: value(ByteCount) = ByteCount::gib(1 << 10),
            "how much address space is reserved for far memory, in bytes",
            { region c bytes span, "size", "", "the address space is limited (`ulimit -v`)" };

        /// Default: on. Off only where the device checks end to end and every nanosecond counts.
        checksum: value(bool) = true,
            "whether every page read from the store is checked against its checksum",
            { region c switch checksum, "", "", "the device checks end to end" };

        /// From 1 ms to a day. A read that fails is repeated for as long
        /// before its page counts as lost. Time in which the process is stopped does not count.
        ///
        /// Default: 30 s. Raise it for network devices that recover slowly, lower it where failing
        /// early is better than waiting.
        deadline: value(Duration) = Duration::from_secs(30),
            "how long one device request may take before it counts as failed",
            { region c millis deadline_ms, "`1ms` to `1day`", "", "a network device recovers slowly" };

        /// At most 500 us; `None` (`off` in text): not at all. It
        /// looks only while no other thread wants its processor and while the device usually
        /// answers within that time.
        ///
        /// Default: 200 us, with which a fault is answered a quarter sooner. Off where processors
        /// that do not halt cost money or power.
        poll: maybe(Duration) or "off" = Some(Duration::from_micros(200)),
            "how long a thread that serves faults looks for the device's answer before it sleeps",
            { region c micros poll_us, "`off`, up to `500us`", "",
              "a busy processor costs money" };

        /// Default: on. Off for purely random access, or to count faults exactly.
        readahead: value(bool) = true,
            "whether sequential and strided faults read the pages to come",
            { region c switch readahead, "", "", "access is random" };

        /// Default: [`FaultMode::Auto`], with which a program works as it does on the system's allocator wherever it runs.
        /// [`FaultMode::User`] when its large allocations never reach a system call, [`FaultMode::Kernel`] when a program
        /// without far memory is worse than one that does not start. [`FaultMode::InThread`] has the lowest latency
        /// where far pointers never reach a system call.
        mode: value(FaultMode) = FaultMode::Auto,
            "which threads resolve faults, and what happens where only faults from user mode are permitted",
            { region c text mode, "", "", "`user`, `in_thread`: your system calls never use far memory (Limits, *Privileges*)" };

        /// The cipher is AES-256-GCM. The key is made at start-up and lives only in this process; a
        /// page that was changed or exchanged on the device counts as lost, like one whose checksum
        /// is wrong.
        ///
        /// Default: off. Set it when others can read the device, now or later: it costs a core
        /// about 7 us for 64 KiB each way, and 24 bytes of memory for each page on the device. Without
        /// the crate's feature `encrypt` start-up then fails.
        encrypt: value(bool) = false,
            "whether pages are encrypted before they reach the device",
            { region c switch encrypt, "", "", "the device is not trusted (feature `encrypt`)" };

        /// Default: [`Wipe::Off`]. Change it when a device or a named file is used by others
        /// afterwards. A process that is killed wipes nothing: [`encrypt`](Builder::encrypt) then.
        wipe: value(Wipe) = Wipe::Off,
            "what happens at an orderly shutdown to the pages on the device",
            { region c text wipe, "", "", "what is left on the device at the end matters" };

        /// That is what it knows about far memory: extents, slabs, locks; some 0.1 to 3 % of the data, more for smaller
        /// blocks. Far, it is under the limit, comes and goes like all far memory, and an allocation or a free that needs
        /// a part which has left waits for the device with jemalloc's locks held. A lock may be passed to a system call,
        /// so it conflicts with `mode:in_thread`, and a process whose kernel serves no faults of system calls does not
        /// start. A forked child does not inherit the tier, and ends with SIGSEGV as soon as `fork` returns or before;
        /// programs started without a copy of the process, as by [`std::process::Command`], are not concerned.
        ///
        /// Default: off, it is in RAM, outside of the limit. Set it to measure what the difference is (`cargo bench -p
        /// farheap-lab --bench metadata`), or where even 1 % of the data is more RAM than there is.
        far_metadata: value(bool) = false,
            "whether jemalloc keeps its metadata of far memory in the tier itself",
            { heap c switch far_metadata, "", "", "jemalloc's metadata (some 1 % of the data) does not fit into memory" };

        /// Such as memory that has no processors of its own: that of another socket, or CXL memory, which
        /// Linux shows as a node. All of a tier's resident pages are there; a limit that holds all of its
        /// data makes it a tier without a device, for nothing is written then. A limit in percent is a share
        /// of the node's memory, and none may be larger than that.
        ///
        /// Default: `None` (`any` in text), as the kernel chooses, mostly near the processor that touches a
        /// page first. Set it for a tier, by [`Heap::add_tier`](crate::Heap::add_tier). On a machine with
        /// one node it changes nothing, and start-up says so.
        node: maybe(u32) or "any" = None,
            "the NUMA node whose memory holds the far memory that is resident",
            { region c text node, "`any` or its number", "",
              "a tier is to be in certain memory, such as CXL memory" };

        /// The process then ends with a message that names the address and the cause when a block is freed or resized twice,
        /// in its middle, with another size, or when it is no block of farheap. What was written behind a block's end is found
        /// when it is freed, what was written to a freed block when its memory is given back. This is so for local and far memory,
        /// from the first heap with this option to the end of the process. Blocks of a `Bump` and of
        /// sub-allocators are not looked at.
        ///
        /// Default: off. Set it to look for the program's errors. Every block takes at least 16 bytes more and 1/16 of its size in
        /// a table, 8 MiB of freed blocks are kept back, and threads keep none for their next allocations, each of which takes
        /// the allocator's locks.
        check: value(bool) = false,
            "whether wrong frees, and writes outside of blocks, end the process",
            { heap c switch check, "", "", "errors of the program are looked for" };
    } };
}

/// Value of an option, by its kind.
macro_rules! stored {
    (maybe $type:ty) => { Option<$type> };
    (path $type:ty) => { Option<$type> };
    ($kind:ident $type:ty) => { $type };
}
pub(super) use stored;

macro_rules! structure {
    ($(
        $(#[$doc:meta])*
        $name:ident: $kind:ident($type:ty) $(or $none:literal)? = $default:expr, $brief:literal,
        { $part:ident c $c_type:ident $c_name:ident, $values:literal, $shown:literal, $when:literal };
    )*) => {
        /// The value of every option. Nothing is checked.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(super) struct Options {
            $(pub(super) $name: stored!($kind $type),)*
            /// No option: see [`Builder::force`](super::Builder::force).
            pub(super) install: Install,
            /// As `install`.
            pub(super) io: IoEngine,
        }

        impl Default for Options {
            fn default() -> Options {
                let (install, io) = Default::default();
                Options { $($name: $default,)* install, io }
            }
        }

        impl Options {
            /// The names of all options.
            pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Sets an option from its text.
            pub(super) fn set(&mut self, name: &str, text: &str) -> Result<()> {
                let result = match name {
                    $(stringify!($name) => Value::read(text, [$($none)?].first().copied())
                        .map(|value| self.$name = value),)*
                    _ => return Err(unknown(name)),
                };
                result.map_err(|reason| invalid(name, reason))
            }

            /// The names and texts of all options that have a text.
            pub(super) fn texts(&self) -> impl Iterator<Item = (&'static str, String)> {
                let texts = [$((
                    stringify!($name),
                    self.$name.print([$($none)?].first().copied()),
                )),*];
                texts.into_iter().filter_map(|(name, text)| Some((name, text?)))
            }
        }

        /// A row of the page for each option: name, values, default, when to change it.
        #[doc(hidden)]
        #[must_use]
        pub fn documentation() -> Vec<[String; 4]> {
            let defaults = Options::default();
            vec![$([
                stringify!($name).to_owned(),
                match $values {
                    "" => coded(<stored!($kind $type)>::words()),
                    values => values.to_owned(),
                },
                match $shown {
                    "" => coded(defaults.$name.print([$($none)?].first().copied())),
                    shown => shown.to_owned(),
                },
                $when.to_owned(),
            ]),*]
        }
    };
}

for_options!(structure);

/// Words as code in Markdown.
fn coded<T: AsRef<str>>(words: impl IntoIterator<Item = T>) -> String {
    let words: Vec<_> = words.into_iter().map(|word| format!("`{}`", word.as_ref())).collect();
    words.join(", ")
}

/// The error of an option or a variable.
pub(super) fn invalid(key: &str, reason: impl Into<String>) -> Error {
    Error::config(key, reason)
}

/// The error of a name that no option has.
pub(super) fn unknown(name: &str) -> Error {
    invalid(name, format!("is not a key{}", suggest(Options::NAMES, name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// `FARHEAP_WRITE=1 cargo test --lib config` writes the table into book/src/reference/options.md.
    #[test]
    fn the_page_has_the_table_of_options() {
        // Not read at run time: another user may run the test, without access to the sources.
        let page = include_str!("../../book/src/reference/options.md");
        let begin = page.find("| key | value |").expect("the page has the table");
        let len = page[begin..].find("\n\n").map_or(page.len() - begin, |end| end + 1);
        let mut table =
            "| key | value | default | when to change it |\n|---|---|---|---|\n".to_owned();
        for [name, values, default, when] in documentation() {
            table += &format!("| `{name}` | {values} | {default} | {when} |\n");
        }
        if std::env::var_os("FARHEAP_WRITE").is_some() {
            let new = [&page[..begin], &table, &page[begin + len..]].concat();
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/book/src/reference/options.md");
            fs::write(path, new).expect("the page can be written");
        } else {
            let found = &page[begin..begin + len];
            assert_eq!(found, table, "the table should be:\n{table}");
        }
    }

    #[test]
    fn every_option_has_a_default_that_reads_back() {
        let mut options = Options::default();
        for (name, text) in Options::default().texts() {
            options.set(name, &text).expect(name);
        }
        assert_eq!(options, Options::default());
    }
}
