//! The checks of `farheap doctor`: what was found, what it means for farheap, what repairs it.
//!
//! A check judges a piece of the command's [`Probe`]; [`kernel`] and [`storage`] hold them. Judging
//! is apart from probing, so that tests judge other machines.

mod kernel;
mod servers;
mod storage;

use crate::probe::Probe;
use farheap::config::Builder;
use farheap::region::RegionConfig;
use farheap::{ByteCount, Heap};
use std::path::PathBuf;

/// How a check ended, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// As it should be.
    Pass,
    /// Works, but slower or with a limitation.
    Warn,
    /// farheap will not start, or not work.
    Fail,
}

/// A command that repairs what a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repair {
    /// Purpose of the command: `repair:`, `in a container:`.
    pub(crate) when: String,
    /// The command, to be copied.
    pub(crate) command: String,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) verdict: Verdict,
    /// The finding.
    pub(crate) found: String,
    /// Its meaning for farheap, where that is not plain; one line each.
    pub(crate) meaning: Vec<String>,
    /// Ways to repair it; any one of them is enough.
    pub(crate) repairs: Vec<Repair>,
}

impl Check {
    fn new(name: &'static str, verdict: Verdict, found: impl Into<String>) -> Check {
        Check { name, verdict, found: found.into(), meaning: Vec::new(), repairs: Vec::new() }
    }

    fn meaning(mut self, meaning: impl Into<String>) -> Check {
        self.meaning.push(meaning.into());
        self
    }

    fn repair(self, command: impl Into<String>) -> Check {
        self.repair_when("repair:", command)
    }

    fn repair_when(mut self, when: &str, command: impl Into<String>) -> Check {
        self.repairs.push(Repair { when: when.to_owned(), command: command.into() });
        self
    }
}

/// Wishes of the user.
#[derive(Clone, Debug, Default)]
pub(crate) struct Subject {
    pub(crate) device: Option<PathBuf>,
    pub(crate) dir: Option<PathBuf>,
    pub(crate) config: Option<String>,
}

/// Runs every check.
pub(crate) fn run(subject: &Subject) -> Vec<Check> {
    let (configured, config) = configuration(subject);
    let probe = Probe::run();
    let mut checks = vec![kernel::release(&probe)];
    checks.push(kernel::userfaultfd(&probe, config.as_ref()));
    checks.extend(kernel::features(&probe.userfaultfd, config.as_ref()));
    checks.push(kernel::uring(&probe.uring));
    checks.push(kernel::memory(&probe.memory, config.as_ref()));
    checks.push(kernel::nodes(&probe.nodes, config.as_ref()));
    checks.push(kernel::swap(&probe.memory));
    checks.push(kernel::huge_pages(&probe.limits));
    checks.push(kernel::address_space(&probe.limits, config.as_ref()));
    checks.push(kernel::map_count(&probe.limits));
    checks.push(kernel::locked_memory(&probe.limits));
    checks.push(configured);
    checks.extend(config.as_ref().map(kernel::tables));
    checks.extend(storage::checks(subject, config.as_ref()));
    checks
}

/// A configuration that farheap would start with.
pub(crate) struct Configuration {
    options: Builder,
    region: RegionConfig,
}

impl Configuration {
    fn new(options: Builder) -> farheap::Result<Configuration> {
        Ok(Configuration { region: options.region()?, options })
    }

    /// An option that is a size, if it is set.
    fn size(&self, key: &str) -> Option<ByteCount> {
        self.options.get(key)?.parse().ok()
    }
}

#[cfg(test)]
impl Configuration {
    fn parse(text: &str) -> farheap::Result<Configuration> {
        Heap::builder().parse(text).and_then(Configuration::new)
    }
}

/// Reads the configuration.
fn configuration(subject: &Subject) -> (Check, Option<Configuration>) {
    const NAME: &str = "configuration";
    let (source, read) = match &subject.config {
        Some(text) => ("--config", Heap::builder().parse(text)),
        None => (Builder::ENV, Heap::builder().from_env()),
    };
    match read.and_then(Configuration::new) {
        Ok(config) => {
            let found = format!("limit {}", config.region.limit);
            (Check::new(NAME, Verdict::Pass, found), Some(config))
        }
        Err(error) => {
            let check = Check::new(NAME, Verdict::Fail, error.to_string())
                .meaning(format!("read from {source}; farheap refuses to start with it"))
                .repair_when("example:", "export FARHEAP_CONF=far_limit:1GiB");
            (check, None)
        }
    }
}
