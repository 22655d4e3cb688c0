//! Eviction policies: which resident page goes next.
//!
//! The pager tells an [`EvictionPolicy`] what becomes resident and what is discarded, and asks
//! it for victims. Userfaultfd shows no accessed bits, so hits on resident pages are invisible:
//! instead a victim is unmapped and kept in RAM a little while ("cooling"). A touch in that time
//! costs a minor fault and comes back as [`retouched`](EvictionPolicy::retouched); otherwise the
//! page leaves and is [`evicted`](EvictionPolicy::evicted). Which policy is the default and why:
//! `docs/design/eviction.md`.
//!
//! ```text
//!              inserted                 victims                evicted
//!   (absent) ------------> resident ---------------> cooling -----------> (absent, maybe a ghost)
//!                             ^----------------------'  |
//!                                    retouched          '-- removed from any state: forgotten
//! ```
//! Uses `base` and `meta`; owned by the pager, under its policy lock.
//!
//! # Invariants
//! 1. A page is on at most one list; [`victims`](EvictionPolicy::victims) takes what it names
//!    off its list, so that no page is named twice unless it came back in between.
//! 2. After construction nothing allocates and every call is O(1) (`victims`: O(1) a victim).

mod bag;
mod clock;
mod fifo;
mod order;
mod pages;
mod s3fifo;
mod sieve;
mod tenure;
#[cfg(test)]
mod tests;

use crate::base::error::{Error, Result};
use crate::base::units::{PageCount, PageId};
use order::Ordered;
use std::fmt;
use std::fmt::Debug;
use std::str::FromStr;

/// Turns a page can earn, at most, by being touched while it cools.
///
/// Without turns every lap of the hand unmaps every hot page once more; with them it is tried
/// again only after 1, 2, then always 3 laps. Measured: `docs/design/eviction.md`.
const TURNS_MAX: u8 = 3;

/// Pages with turns left that a policy passes over, at most, for each victim it is asked for;
/// then it takes one in spite of its turns.
const SKIPS_MAX: u32 = 32;

/// How a page became resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insert {
    /// First touch: zero-filled, never on the store.
    Fresh,
    /// A fault read it from the store.
    Filled,
    /// Read ahead of a touch that may never come.
    Prefetched,
}

/// What the program says about a resident page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Not needed soon: make it the next victim.
    Cold,
    /// Needed soon: keep it as if it had just been brought in.
    WillNeed,
}

/// Decides which resident page goes next.
///
/// A safe trait: a policy that names a wrong page costs time, never soundness, because the pager
/// checks each victim's state. In turn a call that does not fit the page's state (such as
/// `evicted` of a page that was no victim) does nothing.
///
/// # Panics
/// Every method that takes a page may panic when it lies outside of the region that the policy
/// was built for.
///
/// # Examples
/// ```
/// use farheap::tier::policy::{Insert, PolicyKind};
/// use farheap::{PageCount, PageId};
///
/// let mut policy = PolicyKind::Fifo.build(PageCount(1_000), PageCount(2))?;
/// policy.inserted(PageId(7), Insert::Fresh);
/// policy.inserted(PageId(3), Insert::Filled);
/// let mut victims = Vec::new();
/// policy.victims(PageCount(1), &mut |page| victims.push(page));
/// assert_eq!(victims, [PageId(7)]);
/// policy.evicted(PageId(7));
/// # Ok::<(), farheap::Error>(())
/// ```
pub trait EvictionPolicy: Send + Debug {
    /// Which policy this is.
    fn kind(&self) -> PolicyKind;

    /// Pages on the lists: inserted, and neither removed nor named as victims.
    fn resident(&self) -> PageCount;

    /// Notes that an absent page became resident.
    fn inserted(&mut self, page: PageId, how: Insert);

    /// Notes that a victim was touched before it left: it is resident again, and known hot.
    fn retouched(&mut self, page: PageId);

    /// Notes that a victim left RAM. The policy may remember it as a ghost.
    fn evicted(&mut self, page: PageId);

    /// Notes that a page which was never on the lists is on its way out, as if it had come in and
    /// been named at once. A page on the lists stays there.
    fn bypassed(&mut self, page: PageId);

    /// Forgets a page whose contents were dropped, wherever it is.
    fn removed(&mut self, page: PageId);

    /// Names up to `want` victims and returns how many. It names fewer only when no page is
    /// resident any more. A page named is not resident in the policy's eyes from then on.
    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount;

    /// Takes a hint about a resident page; about any other page it does nothing.
    fn advise(&mut self, page: PageId, hint: Hint);

    /// Notes that about `resident` pages fit into RAM from now on.
    fn resize(&mut self, resident: PageCount);
}

/// The policies to choose from.
///
/// # Examples
/// ```
/// use farheap::tier::policy::PolicyKind;
/// assert_eq!("s3fifo".parse::<PolicyKind>()?, PolicyKind::S3Fifo);
/// assert_eq!(PolicyKind::Sieve.to_string(), "sieve");
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// `fifo`: first in, first out, as in UMap; a page touched while it cools starts anew.
    Fifo,
    /// `clock`: second chance; a page touched while it cools earns turns.
    Clock,
    /// `s3fifo`: probation, main and ghost queues; resists scans.
    S3Fifo,
    /// `sieve`: survivors keep their place, and the hand moves on to newer pages.
    Sieve,
    /// `tenure`: probation, then a main set that only short refault distances open and that
    /// gives up pages at random; keeps a part of a scan larger than RAM. The default.
    #[default]
    Tenure,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [PolicyKind; 5] = [
        PolicyKind::Fifo,
        PolicyKind::Clock,
        PolicyKind::S3Fifo,
        PolicyKind::Sieve,
        PolicyKind::Tenure,
    ];

    /// The name, as in `FARHEAP_CONF`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            PolicyKind::Fifo => "fifo",
            PolicyKind::Clock => "clock",
            PolicyKind::S3Fifo => "s3fifo",
            PolicyKind::Sieve => "sieve",
            PolicyKind::Tenure => "tenure",
        }
    }

    /// Builds a policy for a region of `pages` pages of which about `resident` fit into RAM.
    ///
    /// Its memory is mappings of up to 13 bytes a page that take RAM only for pages ever inserted.
    ///
    /// # Errors
    /// [`Error::BadRange`] for 2^32 pages or more, [`Error::Os`] when the kernel refuses the
    /// mapping.
    pub fn build(self, pages: PageCount, resident: PageCount) -> Result<Box<dyn EvictionPolicy>> {
        let count = pages;
        let pages = pages::Pages::new(count)?;
        Ok(match self {
            PolicyKind::Fifo => Box::new(Ordered(fifo::Fifo::new(pages))),
            PolicyKind::Clock => Box::new(Ordered(clock::Clock::new(pages))),
            PolicyKind::S3Fifo => Box::new(Ordered(s3fifo::S3Fifo::new(pages, resident))),
            PolicyKind::Sieve => Box::new(Ordered(sieve::Sieve::new(pages))),
            PolicyKind::Tenure => Box::new(Ordered(tenure::Tenure::new(pages, count, resident)?)),
        })
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<PolicyKind> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| Error::Config {
            key: "policy".to_owned(),
            reason: format!(
                "`{text}` is no policy; choose one of {}",
                PolicyKind::ALL.map(PolicyKind::name).join(", ")
            ),
        })
    }
}
