//! [`Builder`] collects options and checks them; [`Config`] is what things are made of.

use super::options::{Options, invalid, stored};
use super::text;
use super::value::{CAPACITY_MAX, DEADLINE_MAX, DEADLINE_MIN, ENV, Limit, POLL_MAX};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::for_options;
use crate::limit::manager::MemoryManager;
use crate::paging::region::{FaultMode, Install, RegionConfig};
use crate::store::{IoEngine, Store, Wipe};
use crate::sys::{environment, probe};
use std::cell::LazyCell;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Why nothing follows from the memory that there is.
const UNKNOWN_MEMORY: &str = "/proc/meminfo does not say how much memory there is; give bytes";

/// Collects options for a heap, which [`start`](Builder::start) starts, or for parts of one. Nothing is checked
/// before.
///
/// # Examples
/// ```
/// use farheap::config::Builder;
/// use farheap::ByteCount;
/// let options = Builder::default().limit(ByteCount::mib(512)).handlers(4);
/// assert_eq!(options.limits()?.0, Some(ByteCount::mib(512)));
/// assert_eq!(Builder::default().parse("limit:512MiB,handlers:4")?, options);
/// # Ok::<(), farheap::Error>(())
/// ```
#[must_use = "a builder does nothing until `start` is called"]
#[derive(Clone, Debug, Default)]
pub struct Builder {
    options: Options,
    store: Option<Arc<dyn Store>>,
    manager: Option<Arc<MemoryManager>>,
}

/// A checked set of options, with its limits as bytes on this machine.
#[derive(Debug)]
pub(crate) struct Config {
    asked: Builder,
    /// `options.limit` in bytes on this machine; `None` for no limit.
    limit: Option<ByteCount>,
    /// `options.far_limit` in bytes on this machine, at most `limit`.
    far_limit: ByteCount,
}

/// The builder's method for an option: what it takes and how that is kept, by the option's kind.
macro_rules! setter {
    ($(#[$doc:meta])* $name:ident: limit $type:ty) => {
        setter! { @ $(#[$doc])* $name: impl Into<$type>, Into::into }
    };
    ($(#[$doc:meta])* $name:ident: path $type:ty) => {
        setter! { @ $(#[$doc])* $name: impl Into<$type>, |path| Some(Into::into(path)) }
    };
    ($(#[$doc:meta])* $name:ident: maybe $type:ty) => {
        setter! { @ $(#[$doc])* $name: impl Into<Option<$type>>, Into::into }
    };
    ($(#[$doc:meta])* $name:ident: value $type:ty) => {
        setter! { @ $(#[$doc])* $name: $type, std::convert::identity }
    };
    (@ $(#[$doc:meta])* $name:ident: $taken:ty, $kept:expr) => {
        $(#[$doc])*
        pub fn $name(mut self, value: $taken) -> Builder {
            self.options.$name = ($kept)(value);
            self
        }
    };
}

/// The configuration's method for an option, by its kind.
macro_rules! getter {
    // Resolved when the configuration was built: `Config::limit`, `Config::far_limit`.
    ($(#[$doc:meta])* $name:ident: limit $type:ty) => {};
    ($(#[$doc:meta])* $name:ident: path $type:ty) => {
        $(#[$doc])*
        pub(crate) fn $name(&self) -> Option<&Path> {
            self.asked.options.$name.as_deref()
        }
    };
    ($(#[$doc:meta])* $name:ident: $kind:ident $type:ty) => {
        $(#[$doc])*
        pub(crate) fn $name(&self) -> stored!($kind $type) {
            self.asked.options.$name
        }
    };
}

macro_rules! methods {
    ($(
        $(#[$doc:meta])*
        $name:ident: $kind:ident($type:ty) $(or $none:literal)? = $default:expr, $brief:literal,
        { $part:ident $($rest:tt)* };
    )*) => {
        impl Builder { $(setter! {
            #[doc = concat!("Sets ", $brief, ".")]
            #[doc = ""]
            $(#[$doc])*
            $name: $kind $type
        })* }

        impl Config { $(getter! {
            #[doc = concat!("Returns ", $brief, ".")]
            $name: $kind $type
        })* }

        /// The settings of a region that are options.
        fn region_settings(config: &Config) -> RegionConfig {
            let region = RegionConfig::new();
            $(let region = setting!($part region, $name, config);)*
            region
        }
    };
}

/// Passes an option on to a region, if it says something about one.
macro_rules! setting {
    (region $region:ident, $name:ident, $config:ident) => {
        $region.$name($config.$name())
    };
    (far $region:ident, $name:ident, $config:ident) => {
        $region.limit($config.$name())
    };
    ($part:ident $region:ident, $name:ident, $config:ident) => {
        $region
    };
}

for_options!(methods);

/// Equal are builders with the same options, whatever store and manager they have.
impl PartialEq for Builder {
    fn eq(&self, other: &Builder) -> bool {
        self.options == other.options
    }
}

impl Eq for Builder {}

impl Config {
    /// How the store is read and written: see [`Builder::force`].
    pub(crate) fn io(&self) -> IoEngine {
        self.asked.options.io
    }

    /// Returns what these options say about a region.
    pub(crate) fn region(&self) -> RegionConfig {
        let mode = if self.far_metadata() { FaultMode::Kernel } else { self.mode() };
        let region = region_settings(self)
            .install(self.asked.options.install)
            .inherit(!self.far_metadata())
            .mode(mode);
        match self.handlers() {
            Some(threads) => region.handlers(threads.into()),
            None => region,
        }
    }

    /// Returns the maximum resident memory of the process, in bytes; `None` for no limit.
    pub(crate) fn limit(&self) -> Option<ByteCount> {
        self.limit
    }

    /// Returns the maximum far memory that may be resident, in bytes.
    pub(crate) fn far_limit(&self) -> ByteCount {
        self.far_limit
    }

    /// True if far memory may have all that the limit of the process leaves.
    pub(crate) fn far_is_auto(&self) -> bool {
        matches!(self.asked.options.far_limit, Limit::Auto)
    }

    /// True if the limit on the process is one that somebody asked for.
    pub(crate) fn asks_for_limit(&self) -> bool {
        !matches!(self.asked.options.limit, Limit::Auto | Limit::Off)
    }

    /// The program's own store and memory manager: see [`Builder::store`] and [`Builder::manager`].
    pub(crate) fn parts(&self) -> (Option<&Arc<dyn Store>>, Option<&Arc<MemoryManager>>) {
        (self.asked.store.as_ref(), self.asked.manager.as_ref())
    }

    /// Refuses what the global allocator places far, and what holds for the process, for a tier that only gets
    /// what is asked for by its name.
    pub(crate) fn check_places_nothing(&self) -> Result<()> {
        let reason = "is said of the default tier: what is in another one is asked for by its name";
        self.asked.options.refuse(&["threshold", "check"], reason)?;
        let reason = "holds for the process: a tier has a `far_limit`";
        self.asked.options.refuse(&["limit"], reason)?;
        match self.asked.manager {
            Some(_) => Err(invalid("a memory manager", "is the heap's, for all of its tiers")),
            None => Ok(()),
        }
    }
}

/// Prints the text form, which reads back as an equal builder.
impl fmt::Display for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::print(&self.options, f)
    }
}

impl Builder {
    /// The environment variable that [`from_env`](Builder::from_env) reads.
    pub const ENV: &str = ENV;

    /// Returns the text of an option, as [`set`](Builder::set) takes it; `None` where it is unset.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<String> {
        self.options.texts().find(|(name, _)| *name == key).map(|(_, text)| text)
    }

    /// Returns the maximum resident memory of the process (`None`: no limit) and of far memory, in bytes, as they are
    /// on this machine now.
    ///
    /// # Errors
    /// [`Error::Config`] names the first option whose value is out of range or conflicts with
    /// another, or that names a NUMA node which this machine lacks; [`Error::LimitTooSmall`] when the limit is below 8 MiB.
    pub fn limits(&self) -> Result<(Option<ByteCount>, ByteCount)> {
        self.clone().build().map(|config| (config.limit, config.far_limit))
    }

    /// Returns what these options say about a region, for a program that makes one without a heap,
    /// as for a `Collective` of `farheap-collections`.
    ///
    /// # Errors
    /// As [`limits`](Builder::limits).
    pub fn region(&self) -> Result<RegionConfig> {
        self.clone().build().map(|config| config.region())
    }

    /// Sets one option from its text, which is not quoted.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key, when it is unknown or the value malformed.
    pub fn set(mut self, key: &str, value: &str) -> Result<Builder> {
        self.options.set(key, value)?;
        Ok(self)
    }

    /// Overlays the entries of a text on the options: each key it names replaces what was set
    /// before, and a `device` replaces a `dir` set before, and the other way round.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key, when it is unknown, malformed or given twice.
    pub fn parse(mut self, text: &str) -> Result<Builder> {
        text::overlay(&mut self.options, text)?;
        Ok(self)
    }

    /// Overlays the environment variable [`ENV`](Builder::ENV), if it is present, as
    /// [`parse`](Builder::parse) does. Called last, it lets the user of a program have the last word.
    ///
    /// A program that has rights which its caller has not (set-user-ID, set-group-ID, file capabilities) ignores the
    /// variable, and says so on standard error. A service that passes variables of others on to such programs of its own, as
    /// by `sudo` or over a network, is to leave this one out: it names devices and files that are overwritten.
    ///
    /// # Errors
    /// As [`parse`](Builder::parse); also when the variable is not UTF-8.
    pub fn from_env(self) -> Result<Builder> {
        match environment::variable(ENV).map(OsString::into_string) {
            Some(Ok(text)) => self.parse(&text),
            None => Ok(self),
            Some(Err(_)) => Err(invalid(ENV, "is not UTF-8")),
        }
    }

    /// Sets a store of the program's own, in place of the device or file that the options would open.
    /// `examples/own_store.rs` is a program that does it.
    ///
    /// # Examples
    /// ```
    /// # #[cfg(feature = "heap")] {
    /// use farheap::store::MemStore;
    /// use farheap::{ByteCount, Heap};
    /// use std::sync::Arc;
    ///
    /// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
    /// match Heap::builder().far_limit(ByteCount::mib(16)).store(store).start() {
    ///     Ok(heap) => heap.shutdown()?,
    ///     Err(error) => println!("{error}"), // It tells how to allow userfaultfd.
    /// }
    /// # }
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub fn store(mut self, store: Arc<dyn Store>) -> Builder {
        self.store = Some(store);
        self
    }

    /// Sets a memory manager: one limit holds for far memory and all other consumers of the manager together,
    /// and `far_limit` is the far heap's ceiling within it. Temporary memory of the manager that does not fit
    /// spills to this heap.
    ///
    /// # Examples
    /// ```
    /// # #[cfg(feature = "heap")] {
    /// use farheap::manager::MemoryManager;
    /// use farheap::{ByteCount, Heap};
    ///
    /// let manager = MemoryManager::start(ByteCount::mib(32))?;
    /// match Heap::builder().manager(&manager).start() {
    ///     Ok(heap) => {
    ///         let sorted = manager.allocate_temporary(ByteCount::mib(64))?; // Twice the limit.
    ///         assert!(sorted.is_spilled());
    ///         drop(sorted);
    ///         heap.shutdown()?;
    ///     }
    ///     Err(error) => println!("{error}"), // It tells how to allow userfaultfd.
    /// }
    /// # }
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub fn manager(mut self, manager: &Arc<MemoryManager>) -> Builder {
        self.manager = Some(Arc::clone(manager));
        self
    }

    /// Forces how pages are installed, and how the store is read and written, which the kernel and the device
    /// decide else: tests run the ways of other kernels by it.
    #[doc(hidden)]
    pub fn force(mut self, install: Install, io: IoEngine) -> Builder {
        (self.options.install, self.options.io) = (install, io);
        self
    }

    /// Checks the options and resolves the limits on this machine.
    pub(crate) fn build(self) -> Result<Config> {
        let node = self.options.node.map(probe::NumaNode::find).transpose()?;
        self.build_on(probe::Memory::detect, node)
    }

    /// [`build`](Builder::build) on a machine with the memory that `detect` finds.
    fn build_on(
        self,
        detect: impl FnOnce() -> probe::Memory,
        node: Option<probe::NumaNode>,
    ) -> Result<Config> {
        self.options.check()?;
        if self.store.is_some() {
            let about_it = ["device", "overwrite", "dir", "capacity", "reserve"];
            self.options.refuse(&about_it, "conflicts with the program's own store")?;
        }
        let (limit, far_limit) =
            LimitBasis { memory: LazyCell::new(detect), node }.resolve(&self.options)?;
        let config = Config { asked: self, limit, far_limit };
        if config.asked.manager.is_some() && config.asks_for_limit() {
            let reason = "conflicts with a memory manager, whose limit counts local memory";
            return Err(invalid("limit", reason));
        }
        Ok(config)
    }
}

impl Options {
    /// Checks all options but the limits.
    fn check(&self) -> Result<()> {
        self.check_sizes()?;
        self.check_paths()?;
        if !(DEADLINE_MIN..=DEADLINE_MAX).contains(&self.deadline) {
            return Err(invalid("deadline", "must be from 1ms to 1day"));
        }
        if self.poll > Some(POLL_MAX) {
            return Err(invalid("poll", "must be `off` or at most 500us"));
        }
        if self.far_metadata && self.mode == FaultMode::InThread {
            let reason = "conflicts with `mode:in_thread`: jemalloc's locks are in it, and system \
                          calls on them would fail";
            return Err(invalid("far_metadata", reason));
        }
        Ok(())
    }

    /// Refuses the options of these names, unless they have their defaults.
    fn refuse(&self, names: &[&str], reason: &str) -> Result<()> {
        let defaults: Vec<_> = Options::default().texts().collect();
        match self.texts().find(|option| names.contains(&option.0) && !defaults.contains(option)) {
            Some((name, _)) => Err(invalid(name, reason)),
            None => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<()> {
        let region = RegionConfig::new().span(self.span);
        region.handlers(self.handlers.map_or(1, usize::from)).check_settings()?;
        if let Some(capacity) = self.capacity {
            if capacity > CAPACITY_MAX {
                return Err(invalid("capacity", format!("must be at most {CAPACITY_MAX}")));
            }
            if capacity < ByteCount::kib(4) {
                return Err(invalid("capacity", "must be at least one page"));
            }
        }
        Ok(())
    }

    fn check_paths(&self) -> Result<()> {
        let paths = [("device", &self.device), ("dir", &self.dir)];
        for (key, path) in paths {
            let Some(path) = path else { continue };
            if path.as_os_str().is_empty() {
                return Err(invalid(key, "the path is empty"));
            }
            if path.as_os_str().as_encoded_bytes().contains(&0) {
                return Err(invalid(key, "the path contains a NUL byte"));
            }
        }
        if self.reserve && self.device.is_none() && self.capacity.is_none() {
            let reason =
                "needs `capacity`: without it the temporary file may take all of its file system";
            return Err(invalid("reserve", reason));
        }
        if self.device.is_some() && self.dir.is_some() {
            let reason = "conflicts with `device`: a temporary file or a device, not both";
            return Err(invalid("dir", reason));
        }
        Ok(())
    }
}

/// The memory that limits are resolved on, looked up when one needs it.
struct LimitBasis<F> {
    memory: LazyCell<probe::Memory, F>,
    node: Option<probe::NumaNode>,
}

impl<F: FnOnce() -> probe::Memory> LimitBasis<F> {
    /// Returns the limit of the process, if there is one, and that of far memory.
    fn resolve(self, options: &Options) -> Result<(Option<ByteCount>, ByteCount)> {
        let limit = match options.limit {
            Limit::Off => None,
            Limit::Auto => Some(self.auto("limit")?),
            asked => Some(self.bytes("limit", asked)?),
        };
        let node = self.node_total().map(|total| ByteCount(total.0 / 2));
        let minimum = RegionConfig::LIMIT_MIN;
        let far = match (options.far_limit, limit) {
            (Limit::Auto | Limit::Off, Some(limit)) => {
                // What others have of the group they may give back.
                let room = Some(&self.memory).filter(|_| matches!(options.limit, Limit::Auto));
                let room = room.and_then(|memory| memory.room()).map(|room| room.max(minimum));
                let bounds = [room, node, Some(options.span)];
                bounds.into_iter().flatten().fold(limit, ByteCount::min)
            }
            (Limit::Auto | Limit::Off, None) => self.bytes("far_limit", Limit::Percent(50))?,
            (asked, _) => self.bytes("far_limit", asked)?,
        };
        if let Some(node) = self.node.as_ref().filter(|node| far > node.total) {
            let reason = format!("{far} is more than the {} of node {}", node.total, node.number);
            return Err(invalid("far_limit", reason));
        }
        let far = limit.map_or(far, |limit| far.min(limit));
        if far < minimum {
            return Err(Error::LimitTooSmall { limit: far, minimum });
        }
        if options.span < far {
            let reason = format!("{} is less than the limit of {far}", options.span);
            return Err(invalid("span", reason));
        }
        Ok((limit, far))
    }

    /// The limit of a process that nobody has named one for.
    fn auto(&self, key: &str) -> Result<ByteCount> {
        self.memory.auto_limit().ok_or_else(|| invalid(key, UNKNOWN_MEMORY))
    }

    /// The bytes of what was asked for.
    fn bytes(&self, key: &str, asked: Limit) -> Result<ByteCount> {
        match asked {
            Limit::Bytes(ByteCount::ZERO) => Err(invalid(key, "must not be zero")),
            Limit::Bytes(bytes) => Ok(bytes),
            Limit::Percent(percent) if (1..=100).contains(&percent) => {
                let node = self.node_total();
                let available = self.memory.available().into_iter().chain(node).min();
                let available = available.ok_or_else(|| invalid(key, UNKNOWN_MEMORY))?;
                // Divided first, so that nothing overflows; loses less than 100 bytes.
                Ok(ByteCount(available.get() / 100 * u64::from(percent)))
            }
            Limit::Percent(percent) => {
                Err(invalid(key, format!("{percent}% is not from 1% to 100%")))
            }
            Limit::Auto | Limit::Off => self.auto(key),
        }
    }

    fn node_total(&self) -> Option<ByteCount> {
        self.node.as_ref().map(|node| node.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(total: ByteCount) -> probe::Memory {
        probe::Memory { total: Some(total), left: Some(total), ..probe::Memory::default() }
    }

    fn build(builder: Builder, memory: probe::Memory) -> Result<Config> {
        builder.build_on(|| memory, None)
    }

    #[test]
    fn a_percentage_is_taken_of_the_memory_available() {
        let builder = Builder::default().limit(Limit::Percent(70));
        let config = build(builder, machine(ByteCount::gib(10))).expect("7 GiB is a fine limit");
        assert_eq!(config.limit(), Some(ByteCount((10 << 30) / 100 * 70)));
        assert_eq!(Some(config.far_limit()), config.limit());
    }

    #[test]
    fn the_default_limit_is_half_of_what_the_machine_has_left() {
        let memory = probe::Memory { left: Some(ByteCount::gib(2)), ..machine(ByteCount::gib(4)) };
        let config = build(Builder::default(), memory).expect("defaults");
        assert_eq!(config.limit(), Some(ByteCount::gib(1)));
    }

    #[test]
    fn the_default_limit_in_a_control_group_is_nearly_all_of_it() {
        let fullest = probe::CgroupLimit {
            bytes: ByteCount::mib(128),
            file: PathBuf::from("memory.max"),
            used: ByteCount::mib(48),
        };
        let resident = ByteCount::mib(40);
        let cgroup = Some(fullest.clone());
        let group = probe::Memory {
            cgroup,
            fullest: Some(fullest),
            resident,
            ..machine(ByteCount::gib(4))
        };
        let config = build(Builder::default(), group.clone()).expect("defaults");
        let limits = (config.limit(), config.far_limit());
        assert_eq!(limits, (Some(ByteCount::mib(128 - 8 - 1)), ByteCount::mib(40 + 80 - 5 - 1)));
        let config = build(Builder::default().limit(ByteCount::mib(96)), group).expect("a limit");
        assert_eq!(
            (config.limit(), config.far_limit()),
            (Some(ByteCount::mib(96)), ByteCount::mib(96))
        );
    }

    #[test]
    fn far_memory_is_bounded_alone_where_the_limit_of_the_process_is_off() {
        let builder = Builder::default().limit(Limit::Off);
        let config = build(builder, machine(ByteCount::gib(4))).expect("no limit");
        assert_eq!((config.limit(), config.far_limit()), (None, ByteCount((4 << 30) / 100 * 50)));
    }

    #[test]
    fn a_percentage_of_too_little_memory_is_a_limit_too_small() {
        let error = build(Builder::default(), machine(ByteCount::mib(10))).expect_err("5 MiB");
        let minimum = ByteCount::mib(8);
        assert!(
            matches!(error, Error::LimitTooSmall { minimum: m, .. } if m == minimum),
            "{error}"
        );
    }

    #[test]
    fn a_percentage_of_unknown_memory_is_an_error_and_bytes_are_not() {
        let unknown = probe::Memory::default();
        let error = build(Builder::default(), unknown.clone()).expect_err("unknown memory");
        assert!(error.to_string().contains("give bytes"), "{error}");
        let config = build(Builder::default().limit(ByteCount::mib(64)), unknown);
        assert_eq!(config.expect("bytes need no machine").far_limit(), ByteCount::mib(64));
    }
}
